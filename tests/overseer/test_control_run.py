"""Whole distributed fleet runs in threads: real simulators, every component hosted as in a process of its own."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from penstock.learner import read_states
from penstock.overseer import FleetRunConfig, train
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import build_config
from penstock.overseer.control.kind import ControlKind
from penstock.overseer.progress import CONTROL_LABELS, Progress
from penstock.overseer.run import Run as TrainingRun
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.scaling import ask_to_scale
from penstock.overseer.tasks import SupervisedTasks
from penstock.overseer.training import resume_point
from penstock.rundir import RunDirectory, read_events, read_json_lines, read_metrics, read_status
from penstock.types import RunFailed
from tests.overseer.conftest import merged
from tests.overseer.thread_launcher import ThreadLauncher

LIMIT_S = 280.0
TINY: dict[str, Any] = {
    "seed": 3,
    "steps": 4,
    "runtime": "ray",
    "model": {"hidden_sizes": [8]},
    "fleet": {
        "tasks": {"guess": {"id": "tests.overseer.simulators:Guess"}},
        "workers": 2,
        "envs_per_worker": 2,
        "envs_per_process": 2,
        "fragment_length": 8,
        "queue_fragments": 2,
    },
    "replay": {"fragments_per_batch": 4, "max_waiting": 4},
    "learner": {"epochs": 1, "minibatches": 2, "optimizer": {"learning_rate": 0.01}},
    "evaluation": {"episodes": 4, "simulators": 2, "before": False},
    "overseer": {"heartbeat_s": 0.05, "heartbeat_timeout_s": 30.0, "backoff_s": 0.05, "checkpoint_every": 2},
}


def tiny(changes: dict[str, Any]) -> FleetRunConfig:
    return build_config(FleetRunConfig, merged(TINY, changes))


def closes(counts: dict[str, int]) -> bool:
    return counts["started"] == sum(count for state, count in counts.items() if state != "started") > 0


class Run:
    """A run in the making, or resumed where there is one: its conductor in a thread, its launcher at hand."""

    def __init__(self, path: Path, changes: dict[str, Any]) -> None:
        config = tiny(changes)
        lineage, checkpoint, states = 0, None, None
        if path.exists():
            self.directory = RunDirectory.open_existing(path)
            lineage, checkpoint, _ = resume_point(self.directory)
            states = read_states(checkpoint)
        else:
            self.directory = RunDirectory.create(path, config.dump())
        self.launcher = ThreadLauncher()
        self.log = RunLog(self.directory, config, Progress("test", config.steps, 8, wording=CONTROL_LABELS))
        settings = Settings(config, self.directory, "a token for this test", lineage, checkpoint)
        kind = ControlKind.of(config)
        self.tasks = SupervisedTasks(kind, settings, states, self.launcher, self.log)
        self.conductor = TrainingRun(kind, self.tasks, self.log)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="conductor")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.conductor.run()
        except BaseException as error:  # the test looks at it
            self.failure = error

    def until(self, reached: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < limit, f"no {what}: {self.conductor.stalled_components()}"
            assert self._thread.is_alive(), f"ended before {what}: {self.failure!r}"
            time.sleep(0.01)

    def end(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), self.conductor.stalled_components()
        self.log.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.conductor.stop()
        self._thread.join(LIMIT_S)
        self.launcher.close(5.0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.directory.events_path) if event["event"] == kind]

    def updates(self) -> list[dict[str, Any]]:
        return [row for row in read_metrics(self.directory.metrics_path) if "train/loss" in row]

    def trained(self) -> list[str]:
        """Ids of all fragments of all batches that count, update by update."""
        steps: dict[int, list[str]] = {}
        for path in sorted(self.directory.batches.glob("*.parquet"), key=lambda p: p.stat().st_mtime_ns):
            table = pq.read_table(path, columns=["step", "rollout_id"])
            steps[table["step"][0].as_py()] = table["rollout_id"].to_pylist()  # a later life's batch replaces it
        return [rollout_id for step in sorted(steps) for rollout_id in steps[step]]

    def fragments(self) -> dict[str, dict[str, Any]]:
        """Rows of all stored fragments, by group id."""
        columns = ["group_id", "timestamp", "observations"]
        tables = [pq.read_table(path, columns=columns) for path in self.directory.path.glob("fragments/*.parquet")]
        rows = [row for table in tables for row in table.to_pylist()]
        return {row["group_id"]: row for row in rows}

    def worker_step(self, name: str) -> int:
        """Steps of its newest incarnation, as last heard."""
        report = self.tasks.supervisor.reports.get(name)
        newest = self.launcher.incarnations(name)[-1]
        return report.condition.facts.get("steps", 0) if report and report.identity.incarnation == newest else 0


def model_bytes(run_dir: Path) -> int:
    """Of all weights of a policy."""
    (path, *_) = (run_dir / "checkpoints").glob("step-*/model/model.safetensors")
    return sum(array.nbytes for array in safetensors.numpy.load_file(path).values())


@contextmanager
def running(path: Path, changes: dict[str, Any]) -> Iterator[Run]:
    run = Run(path, changes)
    try:
        yield run
    finally:
        run.close()


@pytest.mark.slow
def test_a_fleet_run_of_many_components_leaves_a_complete_run_directory(run_dir: Path):
    with running(run_dir, {"evaluation": {"before": True, "every": 2}}) as run:
        run.end()
    conductor = run.conductor
    assert conductor.complete and conductor.step == 4
    assert conductor.results["untrained"]["guess"].groups == conductor.results["after"]["guess"].groups == 4
    status = conductor.status()
    assert status["ledger"]["trained"] == 16 and closes(status["ledger"])
    account = status["account"]
    assert closes(account) and account["acting"] == account["buffered"] == account["waiting"] == 0
    assert account["sent"] + account["sent_faults"] == status["ledger"]["started"] * 8
    assert not run.events("component_death") and len(run.events("component_drained")) == 2
    rows = run.updates()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    trained = run.trained()
    assert len(set(trained)) == len(trained) == 16
    assert {name.split("-")[1].split(".")[0] for name in trained} <= {"0", "1"}
    (training,) = [event["time"] for event in run.events("phase") if event["phase"] == "training"]
    assert min(row["timestamp"] for row in run.fragments().values()) >= training
    (last,) = [event["time"] for event in run.events("phase") if event["phase"] == "evaluating the trained policy"]
    assert all(event["time"] < last + 10 for event in run.events("component_drained"))  # nobody waits for the learner
    texts = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert not any(b"a token for this test" in text for text in texts)


@pytest.mark.slow
def test_a_rollout_worker_that_dies_is_replaced_with_new_seeds_and_its_steps_are_counted(run_dir: Path):
    with running(run_dir, {"steps": 24}) as run:
        # four fragments of each slot, of which two wait and one is being sent at most
        run.until(lambda: run.conductor.step >= 2 and run.worker_step("rollout-1") >= 64, "second update")
        run.launcher.die("rollout-1")
        run.until(lambda: run.launcher.incarnations("rollout-1") == [0, 1], "replacement")
        run.until(lambda: run.worker_step("rollout-1") > 0, "steps of the replacement")
        run.end()
    assert run.conductor.complete and run.conductor.lineage == 0 and not run.events("rewind")
    status = run.conductor.status()
    assert closes(status["ledger"]) and closes(status["account"])
    account = status["account"]
    assert account["abandoned"] > 0 and status["ledger"]["trained"] == 96
    assert account["sent"] + account["sent_faults"] == status["ledger"]["started"] * 8, "whatever its last report said"
    trained = run.trained()
    assert len(set(trained)) == len(trained) == 96
    assert status["numbers"]["fleet/worker_restarts"] == 1 and status["numbers"]["fleet/workers"] == 0
    assert status["account"]["acting"] == status["account"]["buffered"] == status["account"]["waiting"] == 0
    made = run.fragments()
    first, second = (made[f"rollout-1.0-{incarnation}-0-0"]["observations"] for incarnation in (0, 1))
    assert first != second


@pytest.mark.slow
def test_each_worker_films_into_the_run_directory_and_leaves_no_draft_of_an_earlier_life(run_dir: Path):
    films = {"tasks": {"guess": {"id": "tests.overseer.simulators:Shown"}}, "video": {"every_episodes": 3, "fps": 10}}
    changes = {"steps": 100_000, "fleet": films, "overseer": {"checkpoint_every": 1000}}
    with running(run_dir, changes) as run:
        drafts = [run.directory.videos / f".rollout-{index}.0-0.mp4.tmp" for index in (0, 1)]
        run.until(lambda: all(any(run.directory.videos.glob(f"rollout-{i}.0-0_*")) for i in (0, 1)), "film of each")
        run.launcher.die("rollout-1")
        run.until(lambda: any(run.directory.videos.glob("rollout-1.0-1_*")), "film of the replacement")
        run.until(
            lambda: any(update.get("fleet/films", 0) >= 1 for update in run.updates()), "update that counts films"
        )
    assert not any(draft.exists() for draft in drafts)
    written = run.events("film_written")
    assert {event["component"] for event in written} == {"rollout-0", "rollout-1"}
    films_there = {str(path) for path in run.directory.videos.glob("*.mp4")}
    assert {event["path"] for event in written} <= films_there
    assert all(name.endswith("_return5.mp4") for name in films_there), "whole episodes"


@pytest.mark.slow
def test_a_worker_waits_for_room_no_longer_than_it_is_told_to(run_dir: Path):
    with running(run_dir, {"steps": 100_000, "replay": {"max_waiting_s": 0.5}}) as run:
        run.until(lambda: run.conductor.step >= 1, "first update")
        run.launcher.freeze("learner-0")
        run.until(lambda: bool(run.events("component_death")), "worker that waited too long")
        run.launcher.thaw("learner-0")
    death = run.events("component_death")[0]
    assert death["component"].startswith("rollout-") and "replay.max_waiting_s" in death["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learner-0", "replay-0"])
def test_the_loss_of_learner_or_replay_goes_back_to_the_newest_checkpoint(run_dir: Path, name: str):
    with running(run_dir, {"steps": 10}) as run:
        run.until(lambda: run.conductor.step >= 5, "fifth update")
        run.launcher.die(name)
        run.end()
    assert run.conductor.complete and run.conductor.step == 10
    (rewind,) = run.events("rewind")
    assert rewind["lineage"] == run.conductor.lineage == 1
    assert rewind["checkpoint"] in ("step-4", "step-6", "step-8")
    trained = run.trained()
    assert len(trained) == len(set(trained)) == 40
    fates = {row["rollout_id"]: row["fate"] for row in read_json_lines(run_dir / "fates.jsonl")}
    assert all(fates[rollout_id] == "trained" for rollout_id in trained)
    ledger = run.conductor.status()["ledger"]
    assert closes(ledger) and ledger["trained"] == 40
    assert run.launcher.incarnations("rollout-0") == [0]  # workers go on


@pytest.mark.slow
def test_a_run_is_scaled_while_it_goes_on(run_dir: Path):
    with running(run_dir, {"steps": 100_000}) as run:
        run.until(lambda: run.conductor.step >= 1, "first update")
        run.until(lambda: run.updates()[-1].get("fleet/weight_loads", 0) >= 4, "weights that the workers took")
        row = run.updates()[-1]
        assert row["weights/bytes_served"] >= row["fleet/weight_loads"] * model_bytes(run_dir) > 0
        assert 0 < row["weights/swap_s"] < LIMIT_S
        assert row["replay/received_bytes"] > 0 and row["fleet/workers"] == 2
        ask_to_scale(run_dir, "rollout", 3, LIMIT_S)
        run.until(lambda: run.conductor.status()["numbers"].get("fleet/workers") == 3, "third worker")
        ask_to_scale(run_dir, "rollout", 1, LIMIT_S)
        run.until(lambda: len(run.events("component_removed")) == 2, "two workers less")
        run.until(lambda: run.conductor.status()["numbers"].get("fleet/workers") == 1, "one worker")
        reached = run.conductor.step
        run.until(lambda: run.conductor.step > reached + 1, "updates with one worker")
        run.conductor.stop()
        run.end()
    assert not run.conductor.complete
    assert closes(run.conductor.status()["ledger"]) and closes(run.conductor.status()["account"])


@pytest.mark.slow
def test_a_stopped_run_is_resumed_in_a_new_lineage(run_dir: Path):
    with running(run_dir, {"steps": 1000, "overseer": {"checkpoint_every": 500}}) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        run.conductor.stop()
        run.end()
    reached = run.conductor.step
    states = json.loads((run_dir / "checkpoints" / f"step-{reached}" / "state.json").read_text())["states"]
    assert {"replay", "statistics", "evaluator", "run"} <= states.keys()
    with running(run_dir, {"steps": reached + 2}) as run:
        run.end()
    assert run.conductor.complete and run.conductor.step == reached + 2 and run.conductor.lineage == 1
    ledger = run.conductor.status()["ledger"]
    assert ledger["trained"] == 4 * (reached + 2) and closes(ledger)
    trained = run.trained()
    assert len(set(trained)) == len(trained)


@pytest.mark.slow
def test_a_run_of_many_processes_goes_on_in_one(run_dir: Path):
    with running(run_dir, {"steps": 2}) as run:
        run.end()
    summary = train(tiny({"steps": 4, "runtime": "local"}), run_dir, resume=True, quiet=True)
    assert summary.complete and summary.step == 4
    status = read_status(run_dir / "status.json")
    assert status["lineage"] == 1 and status["ledger"]["trained"] == 16 and closes(status["ledger"])


@pytest.mark.slow
def test_a_simulator_that_dies_is_told_and_a_worker_without_simulators_ends_the_run_with_a_checkpoint(run_dir: Path):
    tasks = {"guess": {"id": "tests.overseer.simulators:Guess", "kwargs": {"die_at": 60}}}
    limits = {"backoff_s": 0.01, "max_restarts": 1}
    changes = {"fleet": {"tasks": tasks, "limits": limits}, "overseer": {"max_restarts": 1, "checkpoint_every": 500}}
    with running(run_dir, {"steps": 5000, **changes}) as run, pytest.raises(RunFailed, match="rollout-.*given up"):
        run.end()
    assert run.events("simulator_failed") and any("SIGKILL" in note for note in run.log.progress.notes)
    newest = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert newest == run.conductor.step >= 1


@pytest.mark.slow
@pytest.mark.parametrize("weights", [{"transport": "shared_memory"}, {"transport": "checkpoint"}])
def test_weights_travel_by_other_ways_as_deltas_in_bfloat16_and_only_what_trains(run_dir: Path, weights: Any):
    frozen = {"optimizer": {"frozen": ["value_head.bias"]}}
    changes = {"weights": {**weights, "encoding": "delta", "bfloat16": True}, "learner": frozen}
    with running(run_dir, {"steps": 100_000, **changes}) as run:
        run.until(lambda: run.conductor.status()["numbers"].get("fleet/weight_step_min", 0) >= 2, "second version")
        run.conductor.stop()
        run.end()
