"""What a fleet run may not go on with: found before anything is started or written, whatever the runtime."""

from pathlib import Path
from typing import Any

import pytest

from penstock.model.control import make_control_policy, save_control_policy
from penstock.overseer import FleetRunConfig, train
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import build_config
from penstock.overseer.control.kind import ControlKind
from penstock.overseer.control.policies import make_policy
from penstock.overseer.control.simulators import probe_spaces
from penstock.overseer.kind import RunStart
from penstock.overseer.progress import CONTROL_LABELS, Progress
from penstock.overseer.run import Run
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.tasks import DirectTasks
from penstock.overseer.training import open_log
from penstock.rundir import RunDirectory, read_events
from penstock.types import CheckpointError, ConfigError, LeafSpace, Spaces
from tests.overseer.conftest import merged

TINY: dict[str, Any] = {
    "steps": 1,
    "model": {"hidden_sizes": [8]},
    "fleet": {
        "tasks": {"guess": {"id": "tests.overseer.simulators:Guess"}},
        "envs_per_worker": 2,
        "envs_per_process": 2,
        "fragment_length": 8,
    },
    "replay": {"fragments_per_batch": 4, "max_waiting": 4},
    "learner": {"epochs": 1, "minibatches": 1},
    "evaluation": {"before": False, "episodes": 2, "simulators": 1},
}
OTHER_SPACES = Spaces((LeafSpace("", "box", (5,), "float32"),), (LeafSpace("", "discrete", (), "int64", (2,)),))


def tiny(changes: dict[str, Any] | None = None) -> FleetRunConfig:
    return build_config(FleetRunConfig, merged(TINY, changes or {}))


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*.*") if path.is_file()}


@pytest.fixture(scope="module")
def guess() -> Spaces:
    return probe_spaces(tiny())


@pytest.fixture
def checkpoint(tmp_path: Path, guess: Spaces) -> Path:
    """The policy of a checkpoint; nothing else of it is looked at."""
    policy = make_control_policy(tiny().model, guess, 0)
    save_control_policy(tmp_path / "step-7" / "model", policy, policy.config, policy.spaces)
    return tmp_path / "step-7"


@pytest.fixture
def trained(run_dir: Path) -> Path:
    """A run of one update."""
    train(tiny(), run_dir, quiet=True)
    return run_dir


class Launched(Exception):
    """The run would be led from here on."""


def test_the_recorded_network_and_whatever_else_is_changed_may_go_on(checkpoint: Path, guess: Spaces):
    ControlKind(guess).check_resume(tiny(), checkpoint)
    ControlKind(guess).check_resume(
        tiny({"steps": 9, "learner": {"epochs": 3}, "fleet": {"envs_per_worker": 4}}), checkpoint
    )


def test_every_other_value_of_the_model_is_named_with_both_values_and_the_remedy(checkpoint: Path, guess: Spaces):
    with pytest.raises(ConfigError) as refused:
        ControlKind(guess).check_resume(tiny({"model": {"hidden_sizes": [8, 4], "memory": "gru"}}), checkpoint)
    assert str(refused.value) == (
        f'model.hidden_sizes is [8, 4], model.memory is "gru", but {checkpoint} was trained with '
        'model.hidden_sizes=[8] model.memory="none": a resumed run keeps its model; give these values, or begin a '
        "new run"
    )


def test_values_that_only_the_first_weights_depend_on_are_refused_too(checkpoint: Path, guess: Spaces):
    with pytest.raises(ConfigError, match=r"^model\.policy_gain is 1\.0, but .*step-7 .*model\.policy_gain=0\.01: "):
        ControlKind(guess).check_resume(tiny({"model": {"policy_gain": 1.0}}), checkpoint)


def test_other_simulators_and_other_policies_are_refused(checkpoint: Path):
    both = r"\(observations '': box float32 \[5\], the policy's box float32 \[2\]\): resume with the tasks"
    with pytest.raises(ConfigError, match=r"^fleet.tasks: .*step-7 holds a policy for other obs.* have " + both):
        ControlKind(OTHER_SPACES).check_resume(tiny(), checkpoint)
    (checkpoint / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="this is no control policy"):
        ControlKind(OTHER_SPACES).check_resume(tiny(), checkpoint)


@pytest.mark.slow
def test_a_resume_under_either_runtime_with_another_network_or_task_changes_nothing(
    trained: Path, launchers: list[object]
):
    before = contents(trained)
    for runtime in ("local", "ray"):
        for changes, words in (
            ({"model": {"hidden_sizes": [16]}}, r"model.hidden_sizes is \[16\], .*step-1 .*hidden_sizes=\[8\]"),
            ({"fleet": {"tasks": {"guess": {"id": "CartPole-v1"}}}}, r"fleet.tasks: .*step-1 holds a policy for other"),
        ):
            with pytest.raises(ConfigError, match=words):
                train(tiny({"steps": 2, "runtime": runtime, **changes}), trained, resume=True, quiet=True)
    assert contents(trained) == before and launchers == []


def test_a_run_in_many_processes_is_resumed_at_the_step_of_its_checkpoint(
    trained: Path, launchers: list[object], monkeypatch: pytest.MonkeyPatch
):
    def begin(self: object, kind: object, tasks: object, log: RunLog) -> None:
        assert (log.step, log.progress.step) == (1, 1)
        raise Launched

    monkeypatch.setattr(Run, "__init__", begin)
    with pytest.raises(Launched):
        train(tiny({"runtime": "ray", "steps": 2}), trained, resume=True, quiet=True)
    assert len(launchers) == 1
    last = list(read_events(trained / "events.jsonl"))[-1]
    assert (last["event"], last["step"]) == ("resume", 1)


@pytest.mark.slow
def test_the_first_events_of_a_resumed_run_say_the_step_that_it_stands_at(trained: Path):
    told = len(list(read_events(trained / "events.jsonl")))
    train(tiny({"steps": 2}), trained, resume=True, quiet=True)
    events = list(read_events(trained / "events.jsonl"))[told:]
    assert [event["event"] for event in events[:3]] == ["resume", "start", "phase"]
    assert all(event["step"] >= 1 for event in events), [(event["event"], event["step"]) for event in events]
    assert (events[0]["step"], events[-1]["step"]) == (1, 2)


def test_before_it_is_loaded_a_resumed_run_says_its_step(run_dir: Path, guess: Spaces):
    config, directory = tiny(), RunDirectory.create(run_dir, tiny().dump())
    checkpoint = directory.checkpoints / "step-5"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text('{"format_version": 1, "step": 5, "states": {}}')
    log = open_log(config, directory, Progress("test", 9, 8, wording=CONTROL_LABELS), [], checkpoint)
    kind, settings = ControlKind(guess), Settings(config, directory, "", 1, checkpoint)
    run = Run(kind, DirectTasks(kind, settings, RunStart(make_policy(config, guess)), ThreadGroup(), log), log)
    log.close()
    assert run.step == run.status()["step"] == 5
