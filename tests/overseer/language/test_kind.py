import re
import threading
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from penstock.environments import CatsEnvironment
from penstock.inference import InferenceEngine
from penstock.model.language import save_decoder
from penstock.model.language.decoder import decoder_digests
from penstock.model.programs import LazyPrograms, compile_programs, processors_of_process
from penstock.overseer.component import Settings
from penstock.overseer.config import lesson_of_worker, rollout_workers
from penstock.overseer.config_loading import load_config
from penstock.overseer.kind import REWOUND
from penstock.overseer.language import kind
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.rundir import RunDirectory
from penstock.types import ConfigError, WeightVersion
from tests.overseer.conftest import tiny
from tests.waiting import WAIT_S

LESSON = {
    "environment": {"env_class": "penstock.environments.cats.CatsEnvironment"},
    "sampling_params": {"n_generations_per_prompt": 3, "max_output_tokens": 8},
}


def settings_of(changes: dict) -> Settings:
    return Settings(tiny({"runtime": "ray", **changes}), RunDirectory("runs/x"), "a secret")


def components(changes: dict) -> list[ComponentSpec]:
    return LanguageKind().components(settings_of(changes), None)


def test_a_run_has_one_of_each_and_as_many_servers_and_workers_as_asked_for():
    specs = components({"rollout": {"workers": 3}, "inference": {"servers": 2}})
    assert sorted(spec.name for spec in specs) == [
        "curriculum-0", "evaluator-0", "inference-0", "inference-1", "learner-0", "replay-0", "rollout-0", "rollout-1",
        "rollout-2",
    ]  # fmt: skip
    assert {spec.name for spec in specs if spec.essential} == {"learner-0", "replay-0"}


def test_workers_of_lessons_generate_those_only():
    changes = {"curriculum": {"lessons": {"dogs": LESSON}}, "rollout": {"workers": {"cats": 1, "dogs": 2}}}
    workers = [spec for spec in components(changes) if spec.role == "rollout"]
    assert [spec.settings["lessons"] for spec in workers] == [["cats"], ["dogs"], ["dogs"]]
    assert [spec.peer_group for spec in workers] == ["cats", "dogs", "dogs"]
    sizes = {role: (make, least) for role, make, least in LanguageKind().scalable(settings_of(changes))}
    assert sizes["rollout"][0](3).settings["lessons"] is None  # added while the run goes on
    assert (sizes["rollout"][1], sizes["inference"][1]) == (3, 1)
    config = tiny({"runtime": "ray", **changes})
    assert rollout_workers(config) == 3 and lesson_of_worker(config, 3) is None


def test_only_learner_and_engines_see_an_accelerator_and_others_compute_with_the_cpus_that_they_reserve():
    roles = {"rollout": {"env": {"A": "1"}}, "learner": {"num_gpus": 1}, "evaluator": {"num_cpus": 2.5}}
    specs = {spec.name: spec for spec in components({"roles": roles})}
    assert specs["rollout-0"].resources.env == {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1", "A": "1"}
    assert specs["replay-0"].resources.env == {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1"}
    assert specs["evaluator-0"].resources.env == {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "3"}
    assert specs["learner-0"].resources.env == {} and specs["learner-0"].resources.num_gpus == 1
    assert specs["inference-0"].resources.env == {}


def test_going_back_gives_learner_replay_and_evaluator_the_checkpoint():
    settings = replace(settings_of({}), lineage=2, checkpoint=Path("checkpoints/step-4"))
    specs = LanguageKind().components(settings, {"evaluator": {"evaluated_step": 3}, "run": {}})
    anew = {spec.name: spec.settings for spec in specs if spec.name in REWOUND}
    assert sorted(anew) == ["evaluator-0", "learner-0", "replay-0"]
    assert all(values["lineage"] == 2 for values in anew.values())
    assert anew["learner-0"]["checkpoint"].endswith("checkpoints/step-4")
    assert anew["evaluator-0"]["state"] == {"evaluated_step": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": {"trainer": {}}}, "roles names trainer"),
        ({"rollout": {"workers": {"dogs": 1}}}, "rollout.workers names dogs"),
        ({"rollout": {"storage": {"kind": "file"}}}, "rollout.storage.kind is file"),
        ({"runtime": "local", "inference": {"servers": 2}}, "inference.servers is 2"),
        ({"runtime": "local", "rollout": {"workers": 2}}, "rollout.workers is 2"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(changes: dict, message: str):
    with pytest.raises(Exception, match=message):
        tiny({"runtime": "ray", **changes})


def problems_of(changes: dict) -> dict:
    config = settings_of(changes)
    [replay] = [s for s in LanguageKind.of(config.config).components(config, None) if s.role == "replay"]
    return replay.settings["problems"]


def test_replay_is_told_how_many_problems_each_lesson_has_and_in_which_order_they_come():
    lessons = {"dogs": LESSON | {"order": "sequential", "problem_retries": 1}, "birds": LESSON | {"order": "iid"}}
    problems = problems_of({"curriculum": {"lessons": lessons}})
    found = CatsEnvironment().training_set()
    assert found is not None and found.size == 48
    assert problems == {
        "cats": {"size": 48, "digest": found.digest, "order": "shuffle", "retries": 3},
        "dogs": {"size": 48, "digest": found.digest, "order": "sequential", "retries": 1},
    }


@pytest.mark.parametrize(("key", "value"), [("order", "sequential"), ("problem_retries", 5)])
def test_what_has_no_effect_without_a_number_of_problems_is_refused(key: str, value: Any):
    endless = LESSON | {"environment": {"env_class": "tests.overseer.environments.FlakyEnvironment"}}
    assert "dogs" not in problems_of({"curriculum": {"lessons": {"dogs": endless}}})
    told = f"curriculum.lessons.dogs.{key} is {value!r}, but FlakyEnvironment has no fixed number of training problems"
    with pytest.raises(ConfigError, match=told):
        problems_of({"curriculum": {"lessons": {"dogs": endless | {key: value}}}})


@pytest.mark.parametrize(
    ("changes", "facts", "reason"),
    [
        ({}, {"ledger": {"started": 1000}, "complete": True}, ""),
        ({"rollout": {"max_rollouts": 1000}}, {"ledger": {"started": 999}}, ""),
        ({"rollout": {"max_rollouts": 1000}}, {}, ""),
        (
            {"rollout": {"max_rollouts": 1000}},
            {"ledger": {"started": 1007}},
            "1,007 rollouts were begun, and rollout.max_rollouts is 1,000",
        ),
        ({"curriculum": {"when_complete": "stop"}}, {"complete": False}, ""),
        (
            {"curriculum": {"when_complete": "stop"}},
            {"complete": True},
            "every lesson has graduated (curriculum.when_complete: stop)",
        ),
    ],
)
def test_what_ends_the_training_before_its_last_step_is_told(changes: dict, facts: dict, reason: str):
    told: list[str] = []
    run: Any = SimpleNamespace(
        config=tiny({"steps": 5, **changes}),
        seen=SimpleNamespace(facts=lambda name: facts),
        log=SimpleNamespace(event=lambda kind, step, reason: told.append(f"{kind} {step} {reason}")),
        learner_step=lambda: 2,
        tasks=SimpleNamespace(call=lambda *names: iter([0.0])),
    )
    assert LanguageKind().goal_reached(run) == bool(reason)
    next(LanguageKind().after_training(run))
    assert told == ([f"goal_reached 2 {reason}"] if reason else [])


@pytest.mark.parametrize("adapter", [None, {"rank": 2}])
def test_learners_and_engines_programs_are_compiled_while_the_policy_is_drawn_and_never_again(tmp_path, adapter):
    changes = {}
    if adapter is not None:
        base = LanguageKind().begin(tiny({}))
        save_decoder(base.policy, tmp_path, base.codec)
        changes = {"model": {"init": None, "path": str(tmp_path), "lora": adapter}}
    config = tiny(changes)
    start = LanguageKind().begin(config)
    assert start.begun is not None
    start.begun.need(*start.begun._tasks)
    compiled = list[str]()

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        learner = LanguageKind().make_learner(config, start)
        engine = InferenceEngine(start.policy, WeightVersion(0, 0), start.codec, config.inference, begun=start.begun)
        of_engine = InferenceEngine.first_programs(start.policy.config, config.inference)
        programs = {**learner.first_programs(), **of_engine, **learner.programs()}
        for compile_it in programs.values():
            compile_it()
        assert decoder_digests(learner.named_arrays()) == engine._batch.runner.weights.digests()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    made = ["layers apart", "cache", "decode", "prefill", "insert", "digests", "digests"]
    assert [name.split(",")[0] for name in of_engine] == made
    assert sorted(start.begun.tasks_of(programs)) == sorted(programs)
    assert not [event for event in compiled if "backend_compile" in event]


@pytest.mark.parametrize("wanted", [True, False])
def test_evaluations_before_training_can_be_left_out(wanted: bool):
    told: list[str] = []

    def evaluate(when: str) -> Generator[None, None, dict]:
        told.append(when)
        yield
        return {}

    warm_start = {"steps": 1, "batch_size": 1, "learning_rate": 1e-3}
    run: Any = SimpleNamespace(
        config=tiny({"learner": {"warm_start": warm_start}, "curriculum": {"eval_before": wanted}}),
        phase=told.append,
        results={},
        evaluate=evaluate,
        until_stopped=lambda steps: steps,
        tasks=SimpleNamespace(task=lambda name, what: iter([None])),
    )
    each = LanguageKind()
    each.served = lambda run: True  # type: ignore[method-assign]
    list(each.before_training(run))
    between = ["warm start", "checking that engines and learner agree"]
    before, after = ["evaluating the untrained policy", "untrained"], ["evaluating the warm start", "before"]
    assert told == ([*before, *between, *after] if wanted else between)
    assert run.results == ({"untrained": {}, "before": {}} if wanted else {})


def test_where_the_policy_cannot_be_loaded_what_is_not_begun_is_left_out(monkeypatch):
    gate, running, compiled = threading.Event(), threading.Barrier(processors_of_process() + 1), list[str]()

    def hold() -> None:
        running.wait(WAIT_S)
        assert gate.wait(WAIT_S)

    held = {f"held {i}": hold for i in range(processors_of_process())}
    programs = LazyPrograms({**held, "left out": lambda: compiled.append("left out")}, lambda told: None)

    def fail(*_: object) -> None:
        running.wait(WAIT_S)
        raise ConfigError("no policy")

    def begin(*_: object) -> LazyPrograms:
        programs.compile()
        return programs

    monkeypatch.setattr(kind, "_compiling", begin)
    monkeypatch.setattr(kind, "load_policy", fail)
    try:
        with pytest.raises(ConfigError, match="no policy"):
            LanguageKind().begin(tiny({}))
    finally:
        gate.set()
    programs.need(*held)
    list(compile_programs({"later": lambda: None}, urgent=False))  # after all that were asked for before
    assert compiled == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("replay.batch_maker.name=nope", "replay.batch_maker: name is 'nope'"),
        ("replay.batch_makers={xx: {name: recency}}", "replay.batch_makers names xx: no such environment"),
        ("learner.loss.module=nowhere_to_be_found:Loss", "learner.loss.module 'nowhere_to_be_found:Loss'"),
    ],
)
def test_what_makes_no_batches_is_refused_before_there_is_a_run(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LanguageKind.of(load_config("cats", [override]))


@pytest.mark.parametrize(("frequency", "reports", "refused"), [(0, True, True), (0, False, False), (5, True, False)])
def test_a_best_checkpoint_that_no_evaluation_could_choose_is_refused(monkeypatch, frequency, reports, refused):
    monkeypatch.setattr(CatsEnvironment, "reports_apart", reports)
    config = tiny({"curriculum": {"eval_frequency": frequency}, "overseer": {"keep_best": "eval/cats/reward_mean"}})
    with pytest.raises(ConfigError, match="keep_best is .*eval_frequency is 0") if refused else nullcontext():
        LanguageKind.of(config)
