"""Keys that cannot act are refused in what is written now, and left out of what an earlier version wrote down."""

import ast
import json
from pathlib import Path

import pytest
import yaml

import penstock
from penstock.inference.config import ServeConfig
from penstock.learner import KlConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.config_loading.keys import all_keys
from penstock.overseer.control_config import FleetRunConfig
from penstock.types import ConfigError

IDLE = [
    ("cats", [], "curriculum.when_complete", "stop", "continue"),
    ("cats", [], "replay.batch_maker.alpha", 9.0, 3.0),
    ("cats", [], "replay.batch_maker.balance", "even", "size"),
    ("cats", [], "replay.batch_maker.unit", "rollout", "group"),
    ("cats", [], "replay.batch_maker.retention", "all", "newest"),
    ("cats", ["replay.batch_maker.name=recency"], "replay.batch_maker.retention", "all", "newest"),
    ("cats", ["replay.batch_maker.name=grpo"], "replay.batch_maker.unit", "rollout", "group"),
    ("cats", ["replay.batch_makers.cats.name=grpo"], "replay.batch_makers.cats.alpha", 9.0, 3.0),
    ("cats", ["replay.batch_makers.cats.name=grpo"], "replay.batch_makers.cats.filter_zero_variance", True, False),
    ("cats", ["async=false"], "replay.max_samples", 2, 1),
    ("cats", [], "replay.max_waiting", 64, None),
    ("cats", [], "replay.max_waiting_s", 1.0, 300.0),
    ("cats", [], "replay.store.observations", False, True),
    ("cats", [], "replay.store.retention_s", 60.0, 0.0),
    ("cats", ["replay.store.compact_parts=0"], "replay.store.compact_after_s", 60.0, 600.0),
    ("cats", ["replay.store.compact_parts=0"], "replay.store.compact_rollouts", 64, 4096),
    ("cats", [], "rollout.storage.path", "/files", None),
    ("cats", [], "rollout.storage.poll_s", 1.0, 0.2),
    ("cats", ["learner.loss.surrogate=reinforce"], "learner.loss.clip_epsilon_high", 0.3, 0.2),
    ("cats", ["learner.loss.surrogate=cispo"], "learner.loss.clip_epsilon_low", 0.3, 0.2),
    ("cats", ["learner.loss.surrogate=cispo"], "learner.loss.dual_clip", 3.0, None),
    ("cats", ["learner.loss.surrogate=reinforce"], "learner.loss.ratio", "sequence", "token"),
    ("cats", ["learner.minibatches=1"], "learner.loss.clip_epsilon_high", 0.3, 0.2),
    ("cats", ["learner.minibatches=1", "learner.loss.preset=dapo"], "learner.loss.clip_epsilon_low", 0.1, 0.2),
    ("cats", ["learner.minibatches=1", "learner.proximal=recompute"], "learner.loss.dual_clip", 3.0, None),
    ("cats", ["learner.proximal=behaviour"], "learner.loss.correction.cap", 3.0, 2.0),
    ("cats", ["learner.loss.correction.kind=none"], "learner.loss.correction.scope", "sequence", "token"),
    ("cats", [], "learner.loss.max_tokens", 64, None),
    ("cats", [], "learner.loss.correction.low", 0.1, 0.5),
    ("cats", ["learner.loss.correction.kind=mask"], "learner.loss.correction.cap", 3.0, 2.0),
    ("named_animal", [], "learner.optimizer.final_fraction", 0.5, 0.1),
    ("cats", [], "weights.url", "/weights", None),
    ("cats", ["weights.transport=shared_memory"], "weights.streams", 8, 4),
    ("cartpole", ["learner.optimizer.schedule=constant"], "learner.optimizer.final_fraction", 0.5, 0.1),
    ("cartpole", [], "learner.value_arrays", ["value_head.*"], ("value_head.*", "value_encoder.*")),
    ("cartpole", [], "learner.correction.scope", "sequence", "token"),
    ("cartpole", [], "learner.correction.veto", 1e-4, None),
    ("cartpole", ["learner.epochs=1"], "learner.target_kl", 0.1, None),
    ("cartpole", ["learner.value_coefficient=0"], "learner.value_clip", 0.1, None),
    ("cartpole", ["learner.vtrace.beyond_staleness=null"], "learner.vtrace.rho_clip", 2.0, 1.0),
    ("cartpole", ["replay.max_waiting=-1"], "replay.max_waiting_s", 1.0, 300.0),
    ("cartpole", [], "model.memory_size", 64, 128),
    ("memory", [], "model.memory_window", 8, 32),
    ("cartpole", ["model.network=impala_cnn"], "model.pooled_size", 8, 16),
    ("cartpole", [], "model.image_features", 8, 512),
    ("cartpole", [], "tracking.samples_per_log", 1, 4),
]
REST = {"cartpole": ["learner.optimizer.final_fraction=0.1"]}
"""So that what a recipe sets does not become idle by a case."""


@pytest.fixture
def record(tmp_path):
    """Writes the config.yaml of a run as an earlier version would have: with a value that no longer passes."""

    def write(recipe, words, key, value):
        values = load_config(recipe, [*REST.get(recipe, []), *words]).dump()
        *section, name = key.split(".")
        node = values
        for each in section:
            node = node[each]
        assert name in node
        node[name] = value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def value_at(config, key):
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


@pytest.mark.parametrize(("recipe", "words", "key", "value", "usual"), IDLE)
def test_a_key_that_cannot_act_is_refused_with_its_value_and_the_remedy(recipe, words, key, value, usual):
    before = [*REST.get(recipe, []), *words]
    assert value_at(load_config(recipe, before), key) == usual
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, [*before, f"{key}={json.dumps(value)}"])
    message = str(caught.value)
    assert (
        "which has no effect: " in message and key.rpartition(".")[2] in message and "leave it out (or at " in message
    )
    assert value_at(load_config(recipe, [*before, f"{key}={json.dumps(usual)}"]), key) == usual


@pytest.mark.parametrize(("recipe", "words", "key", "value", "usual"), IDLE)
def test_what_an_earlier_version_recorded_is_left_out_with_a_note(recipe, words, key, value, usual, record, caplog):
    path = record(recipe, words, key, value)
    config = load_config(path, ["steps=7"], recorded=True)
    assert value_at(config, key) == usual and config.steps == 7
    [note] = caplog.messages
    assert note.startswith(f"{key} ({value!r}) is left out: ")
    with pytest.raises(ConfigError, match="which has no effect"):
        load_config(path)  # as a recipe it is refused


def test_what_is_set_now_is_not_left_out(record):
    path = record("cats", [], "replay.batch_maker.unit", "rollout")
    with pytest.raises(ConfigError, match="replay.batch_maker: alpha is 9.0, which has no effect"):
        load_config(path, ["replay.batch_maker.alpha=9"], recorded=True)


def test_what_an_override_switches_off_takes_along_what_the_recipe_says_of_it(caplog):
    config = load_config("memory", ["model.memory=none"])
    assert (value_at(config, "model.memory"), value_at(config, "model.memory_size")) == ("none", 128)
    [note] = caplog.messages
    assert note == "model.memory_size (64) is left out: model.memory is 'none'"
    caplog.clear()
    own = load_config("cartpole", {"model": {"module": "nets:Mine"}})
    assert value_at(own, "model.value_network") == "shared" and len(caplog.messages) == 1
    with pytest.raises(ConfigError, match="memory_size is 32, which has no effect"):
        load_config("memory", ["model.memory=none", "model.memory_size=32"])
    with pytest.raises(ConfigError, match="memory_size is 32, which has no effect"):
        load_config("memory", ["model={memory: none, memory_size: 32}"])


def test_a_section_of_which_a_key_is_set_now_is_not_left_out():
    with pytest.raises(ConfigError, match='correction is {"cap": 3.0}, which .* of its own; leave it out$'):
        load_config("cats", ["learner.loss.module=json:dumps", "learner.loss.correction.cap=3"])


def test_what_is_idle_in_a_recipe_by_itself_is_refused_whatever_is_overridden(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**load_config("cartpole").dump(), "model": {"memory_size": 32}}))
    for words in ([], ["steps=3"]):
        with pytest.raises(ConfigError, match="memory_size is 32, which has no effect"):
            load_config(path, words)


def test_several_are_left_out_and_other_mistakes_are_told(record, caplog):
    path = record("cats", [], "replay.batch_maker.alpha", 9.0)
    path.write_text(path.read_text().replace("poll_s: 0.2", "poll_s: 3.0"))
    assert load_config(path, [], recorded=True).rollout.storage.poll_s == 0.2
    assert [message.split()[0] for message in caplog.messages] == [
        "rollout.storage.poll_s", "replay.batch_maker.alpha"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"steps is -1: it must be at least 0"):
        load_config(path, ["steps=-1"], recorded=True)


def test_what_is_switched_off_takes_along_what_it_filled_in(record, caplog):
    """With a KL in the reward the estimator is filled in, and would be so again when it is left out."""
    words = ["learner.kl.coefficient=0.1", "learner.kl.reference=initial", "learner.kl.place=reward"]
    path = record("cats", words, "learner.kl.estimator", "k1")
    config = load_config(path, ["learner.kl.coefficient=0"], recorded=True)
    assert isinstance(config, RunConfig) and config.learner.kl == KlConfig()
    assert [message.split()[0] for message in caplog.messages] == [
        "learner.kl.place", "learner.kl.estimator", "learner.kl.reference"
    ]  # fmt: skip


def test_a_preset_s_own_value_is_no_value_of_its_own():
    config = load_config("cats", ["learner.loss.preset=dapo", "learner.loss.surrogate=reinforce"])
    assert config.learner.loss.clip_epsilon_high == 0.28
    with pytest.raises(ConfigError, match="clip_epsilon_high is 0.2[59], which has no effect"):
        load_config(
            "cats",
            ["learner.loss.preset=dapo", "learner.loss.surrogate=reinforce", "learner.loss.clip_epsilon_high=0.25"],
        )


READ_BY_NAME = {
    "async": "as `asynchronous`, before anything else is validated",
    "top_k": "SAMPLING_FIELDS", "top_p": "SAMPLING_FIELDS", "min_p": "SAMPLING_FIELDS",
    **dict.fromkeys(("mlflow", "tensorboard", "trackio", "wandb"), "TrackingConfig.services"),
}  # fmt: skip
"""Keys that are read by other means than an attribute's name, and by which."""


def test_every_key_is_read_somewhere():
    """A key that no line of the package reads cannot act in any configuration."""
    source = Path(penstock.__file__).parent
    read = {
        node.attr
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    for model in (RunConfig, FleetRunConfig, ServeConfig):
        names = {key.path.rpartition(".")[2] for key in all_keys(model)} - {"*"}
        assert names - read - set(READ_BY_NAME) == set()
