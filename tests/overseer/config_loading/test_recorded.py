"""What a recorded config has imported is said, key by key; tests/cli/test_trust.py has the commands."""

import os
import re
from pathlib import Path

import pytest

import penstock
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import (
    EVALUATED,
    apply_overrides,
    build_config,
    load_config,
    load_recorded_config,
    named_code,
    recipe_summaries,
)
from penstock.overseer.control_config import FleetRunConfig
from penstock.rundir import RunDirectory

CATS = "curriculum.lessons.cats.environment"


def said(values, sections=None) -> dict[str, str]:
    return {code.key: code.value for code in named_code(values, sections)}


def test_the_recipes_that_ship_name_no_other_code():
    for name in recipe_summaries():
        assert named_code(load_config(name).dump()) == [], name


@pytest.mark.attack
def test_every_key_of_a_language_run_that_names_code_is_said():
    words = [
        f"{CATS}.env_class=json.decoder.JSONDecoder", f"{CATS}.env_args={{reward: 'rewards.py:exact', path: x}}",
        "replay.batch_maker.name=mine:Maker", "replay.batch_makers={cats: {name: 'theirs.py:Maker'}}", "runtime=ray",
        "ray.address=10.0.0.7:6379", "ray.runtime_env={working_dir: /x}", "roles={learner: {env: {LD_PRELOAD: /x.so}}}",
    ]  # fmt: skip
    values = load_config("cats", words).dump()
    assert said(values) == {
        f"{CATS}.env_class": "json.decoder.JSONDecoder",
        f"{CATS}.env_args.reward": "rewards.py:exact",
        "replay.batch_maker.name": "mine:Maker",
        "replay.batch_makers.cats.name": "theirs.py:Maker",
        "ray.address": "10.0.0.7:6379",
        "ray.runtime_env": "{'working_dir': '/x'}",
        "roles.learner.env": "{'LD_PRELOAD': '/x.so'}",
    }
    assert said(values, EVALUATED).keys() == {f"{CATS}.env_class", f"{CATS}.env_args.reward"}
    assert not [key for key in said({**values, "runtime": "local"}) if key.startswith(("ray", "roles"))]
    first, second, *_ = named_code(values)
    assert first.place.endswith("/json/decoder.py") and str(second).endswith(": rewards.py:exact (not found)")


@pytest.mark.attack
def test_each_of_several_reward_functions_is_said():
    own, mine = "penstock.environments.rewards.final_answer", f"{os.path.abspath('rewards.py')}:brief"
    values = load_config("cats", [f"{CATS}.env_args={{reward: ['{own}', '{mine}'], path: x}}"]).dump()
    assert said(values) == {f"{CATS}.env_args.reward.1": mine}


@pytest.mark.attack
def test_every_key_of_a_fleet_run_that_names_code_is_said():
    ids = {"a": "CartPole-v1", "b": "atari:pong", "c": "worlds:make", "d": "my/worlds.py:make", "e": "worlds:Name-v0",
           "f": "penstock.py:make"}  # fmt: skip
    tasks = {name: {"id": id} for name, id in ids.items()}
    tasks["g"] = {"id": "minecraft", "kwargs": {"callbacks": ["mine.rewards.Log", {"path": "mine.tasks.Dig"}]}}
    values = build_config(FleetRunConfig, {"steps": 1, "fleet": {"tasks": tasks, "envs_per_worker": 16}}).dump()
    assert said(values) == {
        "fleet.tasks.c.id": "worlds:make", "fleet.tasks.d.id": "my/worlds.py:make",
        "fleet.tasks.e.id": "worlds:Name-v0", "fleet.tasks.f.id": "penstock.py:make",
        "fleet.tasks.g.kwargs.callbacks.0": "mine.rewards.Log",
        "fleet.tasks.g.kwargs.callbacks.1.path": "mine.tasks.Dig",
    }  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize(
    ("env_id", "file"), [("json-tool", None), ("primeintellect/textwrap", "textwrap.py"), ("own.py:load", None)]
)
def test_an_environment_of_verifiers_is_said(env_id, file):
    word = f"{CATS}={{env_class: penstock.environments.VerifiersEnvironment, env_args: {{env_id: '{env_id}'}}}}"
    (code,) = named_code(load_config("cats", [word]).dump())
    assert code.key == f"{CATS}.env_args.env_id" and code.value.endswith(env_id)
    assert code.place == "not found" if file is None else code.place.endswith(f"/{file}")


@pytest.mark.attack
@pytest.mark.parametrize(
    ("agent", "place"), [("my_agents.py:solve", "not found"), ("[python, harness.py]", "started as a program")]
)
def test_an_agent_is_said(agent, place):
    word = f"{CATS}={{env_class: penstock.environments.AgentEnvironment, env_args: {{agent: {agent}}}}}"
    (code,) = named_code(load_config("cats", [word]).dump())
    assert (code.key, code.place) == (f"{CATS}.env_args.agent", place)


def test_a_value_of_megabytes_is_cut():
    values = apply_overrides(load_config("cats").dump(), ["runtime=ray", f"ray.runtime_env={{a: {'x' * 9999}}}"])
    assert len(said(values)["ray.runtime_env"]) == 300


def test_whoever_imports_what_a_config_names_is_known():
    """Another place that imports by name has a key of its own, which `CODE_KEYS` must hold."""
    root = Path(penstock.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.name != "lazy_exports.py"
        and re.search(r"\b(load_attribute|import_module|spec_from_file_location|__import__|runpy)\(", path.read_text())
    }
    assert found == {
        "batch/factory.py", "environments/agents.py", "environments/loading.py", "environments/reward_process.py",
        "environments/reward_worker.py", "environments/simulators/minecraft.py", "environments/simulators/registry.py",
        "environments/verifiers.py", "learner/config.py", "model/control/policy.py", "overseer/doctor.py",
        "types/importing.py",
    }  # fmt: skip


PRESET_CHANGES = [("rloo", "ppo"), ("ppo", "grpo"), ("gspo", "dapo"), ("dapo", "ppo"), ("dapo", "cispo")]


def loss_of(config):
    return config.learner.loss, config.replay.batch_maker


@pytest.mark.parametrize(("before", "after"), PRESET_CHANGES)
@pytest.mark.parametrize("as_mapping", [False, True])
def test_another_preset_takes_the_place_of_all_that_the_recorded_one_filled_in(before, after, as_mapping, tmp_path):
    preset, beside = "learner.loss.preset", "learner.loss.entropy_coefficient=0.01"
    directory = RunDirectory(tmp_path)
    directory.write_config({**load_config("cats", [f"{preset}={before}", beside]).dump(), "versions": {"jax": "1"}})
    changes = {preset: after} if as_mapping else [f"{preset}={after}"]
    config, _ = load_recorded_config(directory, changes, trust=True)
    assert loss_of(config) == loss_of(load_config("cats", [f"{preset}={after}", beside]))
    own, _ = load_recorded_config(directory, [f"{preset}={after}", "learner.loss.aggregation=constant"], trust=True)
    assert isinstance(own, RunConfig) and own.learner.loss.aggregation == "constant"


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_synchronous_run_that_is_resumed_as_an_asynchronous_one_has_a_budget(as_mapping, tmp_path):
    directory = RunDirectory(tmp_path)
    directory.write_config({**load_config("cats", ["async=false"]).dump(), "versions": {"jax": "1"}})

    def budgets(**changes):
        given = changes if as_mapping else [f"{key}={value}".lower() for key, value in changes.items()]
        config, _ = load_recorded_config(directory, given, trust=True)
        assert isinstance(config, RunConfig)
        return config.replay.staleness_budget, config.replay.max_rollout_step_delay

    assert budgets(steps=2) == (0, 0) and budgets(**{"async": True}) == budgets(asynchronous=True) == (1, 1)
    assert budgets(**{"async": True, "replay.staleness_budget": 0}) == (0, 1)


@pytest.mark.parametrize(("before", "after"), PRESET_CHANGES)
def test_a_changed_copy_of_a_config_is_as_one_that_was_written_so(before, after):
    preset = "learner.loss.preset"
    config = load_config(load_config("cats", {preset: before}), {preset: after})
    assert loss_of(config) == loss_of(load_config("cats", {preset: after}))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"replay.staleness_budget": 3}, {"replay.staleness_budget": 1}),
        ({"async": False}, {"async": True}),
        (
            {"learner.kl": {"coefficient": 0.1, "reference": "initial", "place": "reward"}},
            {"learner.kl.place": "loss", "learner.kl.coefficient": 0.2},
        ),
    ],
)
def test_what_followed_from_a_value_follows_from_its_new_one(first, then):
    assert load_config(load_config("cats", first), then).dump() == load_config("cats", {**first, **then}).dump()
