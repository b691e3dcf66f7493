"""Whole distributed runs in threads: every component hosted as in a process of its own, weights over real sockets."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from transformers import PreTrainedTokenizerFast

from penstock.learner import read_states
from penstock.overseer import tasks
from penstock.overseer.component import Settings
from penstock.overseer.language.evaluator import Evaluator
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.progress import Progress
from penstock.overseer.run import Run as TrainingRun
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.overseer.supervisor.scaling import ask_to_scale
from penstock.overseer.tasks import SupervisedTasks
from penstock.overseer.training import resume_point
from penstock.rundir import RunDirectory, read_events, read_json_lines, read_metrics
from penstock.types import ConfigError, RunFailed
from tests.overseer.conftest import merged, tiny
from tests.overseer.thread_launcher import ThreadLauncher

LIMIT_S = 280.0
assert PreTrainedTokenizerFast  # imported before several threads would do so at once, which that library does not bear
QUICK: dict[str, Any] = {
    "runtime": "ray",
    "rollout": {"workers": 2},
    "inference": {"servers": 2},
    "overseer": {"heartbeat_s": 0.05, "heartbeat_timeout_s": 30.0, "backoff_s": 0.05, "checkpoint_every": 2},
}


class Run:
    """A run in the making, or resumed where there is one: its conductor in a thread, its launcher at hand."""

    def __init__(self, path: Path, changes: dict[str, Any]) -> None:
        config = tiny(merged(QUICK, changes))
        lineage, checkpoint, states = 0, None, None
        if path.exists():
            self.directory = RunDirectory.open_existing(path)
            lineage, checkpoint, _ = resume_point(self.directory)
            states = read_states(checkpoint)
        else:
            self.directory = RunDirectory.create(path, config.dump())
        self.launcher = ThreadLauncher()
        self.log = RunLog(self.directory, config, Progress("test", config.steps, config.replay.staleness_budget))
        settings = Settings(config, self.directory, "a token for this test", lineage, checkpoint)
        kind = LanguageKind.of(config)
        self.tasks = SupervisedTasks(kind, settings, states, self.launcher, self.log)
        self.conductor = TrainingRun(kind, self.tasks, self.log)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="conductor")

    def start(self) -> None:
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

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.directory.events_path) if event["event"] == kind]

    def fates(self) -> dict[str, str]:
        return {row["rollout_id"]: row["fate"] for row in read_json_lines(self.directory.fates_path)}

    def trained(self) -> list[str]:
        """Ids of all rollouts of all batches that count, update by update."""
        steps: dict[int, list[str]] = {}
        for path in sorted(self.directory.batches.glob("*.parquet"), key=lambda p: p.stat().st_mtime_ns):
            table = pq.read_table(path, columns=["step", "rollout_id"])
            steps[table["step"][0].as_py()] = table["rollout_id"].to_pylist()  # a later life's batch replaces it
        return [rollout_id for step in sorted(steps) for rollout_id in steps[step]]


@contextmanager
def running(path: Path, changes: dict[str, Any]) -> Iterator[Run]:
    run = Run(path, changes)
    run.start()
    try:
        yield run
    finally:
        run.conductor.stop()
        run._thread.join(LIMIT_S)
        run.launcher.close(5.0)


@pytest.mark.slow
def test_a_run_of_many_components_without_signal_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.overseer.metrics.NO_SIGNAL_UPDATES", 3)
    lesson = {"environment": {"env_class": "tests.overseer.environments.UnmovedEnvironment"}}
    with running(run_dir, {"steps": 4, "curriculum": {"lessons": {"cats": lesson}}}) as run:
        run.end()
    (event,) = run.events("no_signal")
    assert event["step"] == 3 and "all 9 groups of 3 updates (1–3) had equal rewards: 0" in event["words"]
    progress = run.log.progress
    assert list(progress.stretches) == [progress.no_signal] and "12 groups of 4 updates" in progress.no_signal
    assert run.conductor.status()["training"]["no_signal"] == progress.no_signal
    steps = [step for step, _ in progress.held_out["cats (report)"]]
    assert (steps[0], steps[-1]) == (0, 4)
    run.conductor.refresh()
    assert progress.units_per_s is not None and progress.units_per_s > 0
    told = {metric.name for metric, _ in progress.told()}  # nothing is computed, so nothing has an entropy
    assert told >= {"rollout/truncated_fraction", "train/zero_variance_groups"} and "train/entropy" not in told


@pytest.mark.slow
def test_a_run_of_many_components_leaves_a_complete_run_directory(run_dir: Path):
    with running(run_dir, {"steps": 4}) as run:
        run.end()
    conductor = run.conductor
    assert conductor.complete and conductor.step == 4
    assert conductor.results["untrained"]["cats"].groups == conductor.results["after"]["cats"].groups == 4
    ledger = conductor.status()["ledger"]
    assert ledger["trained"] == 4 * 3 * 3
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    rows = read_metrics(run_dir / "metrics.jsonl")
    updates = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in updates] == [1, 2, 3, 4]
    assert all(row["train/parity_checked"] >= 8 and row["train/parity_kl"] <= 1e-8 for row in updates)
    assert any("rollout/cats/reward_mean" in row for row in rows)
    assert [row["step"] for row in rows if "eval_report/cats/reward_mean" in row] == [0, 4]
    (parity,) = run.events("parity")
    assert parity["kl"] <= parity["limit"] == 1e-8 and parity["tokens"] >= 8
    assert (run_dir / "checkpoints" / "step-4" / "model" / "config.json").is_file()
    assert len(set(run.trained())) == len(run.trained()) == 36
    secret = "a token for this test"
    texts = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert not any(secret.encode() in text for text in texts)


SLOW_NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("rollout-0", "curriculum-0", "evaluator-0")]


@pytest.mark.parametrize("name", ["inference-1", *SLOW_NAMES])
@pytest.mark.attack
def test_what_dies_is_replaced_and_no_group_is_lost_or_trained_twice(run_dir: Path, name: str):
    with running(run_dir, {"steps": 12}) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        run.launcher.die(name)
        run.until(lambda: run.launcher.incarnations(name) == [0, 1], "replacement")
        run.end()
    assert run.conductor.complete and run.conductor.lineage == 0
    assert not run.events("rewind")
    trained = run.trained()
    assert len(trained) == len(set(trained)) == 12 * 9
    # Nothing is skipped: the tickets of each lesson are trained without gaps, up to what was in flight at the end.
    indexes = sorted({int(rollout_id.split("/")[0].rsplit("-", 1)[-1]) for rollout_id in trained})
    assert len(indexes) == 36
    ledger = run.conductor.status()["ledger"]
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learner-0", "replay-0"])
@pytest.mark.attack
def test_the_loss_of_learner_or_replay_goes_back_to_the_newest_checkpoint(run_dir: Path, name: str):
    with running(run_dir, {"steps": 10}) as run:
        run.until(lambda: run.conductor.step >= 5, "fifth update")
        run.launcher.die(name)
        run.end()
    assert run.conductor.complete and run.conductor.step == 10
    (rewind,) = run.events("rewind")
    assert rewind["lineage"] == run.conductor.lineage == 1
    assert rewind["checkpoint"] in ("step-4", "step-6", "step-8")
    assert rewind["checkpoint"] == f"step-{rewind['step']}"
    trained = run.trained()
    assert len(trained) == len(set(trained)) == 10 * 9
    fates = run.fates()
    assert all(fates[rollout_id] == "trained" for rollout_id in trained)
    ledger = run.conductor.status()["ledger"]
    assert ledger["trained"] == 90
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


# What was seen long ago must not hide that the learner trains.
@pytest.mark.parametrize("look_s", [pytest.param(0.5, marks=pytest.mark.slow), 60.0])
@pytest.mark.attack
def test_a_component_that_keeps_dying_ends_the_run_with_a_checkpoint(
    run_dir: Path, look_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks, "LOOK_S", look_s)
    with running(run_dir, {"steps": 1000, "overseer": {"max_restarts": 1, "checkpoint_every": 500}}) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        for incarnations in ([0], [0, 1]):
            run.until(lambda n=incarnations: run.launcher.incarnations("rollout-1") == n, "incarnation")
            run.launcher.die("rollout-1")
        with pytest.raises(RunFailed, match="rollout-1"):
            run.end()
    newest = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert newest >= 2


@pytest.mark.slow
def test_a_stop_request_ends_the_run_with_a_checkpoint(run_dir: Path):
    with running(run_dir, {"steps": 1000, "overseer": {"checkpoint_every": 500}}) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        run.conductor.stop()
        run.end()
    assert not run.conductor.complete
    newest = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert newest == run.conductor.step >= 2


@pytest.mark.slow
def test_staleness_zero_trains_on_nothing_but_the_newest_version_which_every_server_fetched(run_dir: Path):
    with running(run_dir, {"steps": 4, "async": False}) as run:
        run.end()
    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in updates] == [1, 2, 3, 4]
    assert all(row["replay/staleness_max"] == 0 for row in updates)
    assert all(row["train/parity_kl"] <= 1e-8 for row in updates)
    arrays = safetensors.numpy.load_file(run_dir / "checkpoints" / "step-4" / "model" / "model.safetensors")
    size = sum(array.nbytes for array in arrays.values())
    assert updates[-1]["weights/bytes_served"] >= 2 * 4 * size  # versions 0 to 3, by two servers, over sockets
    told = {"lag/inference-0", "lag/inference-1", "slowest_lag", "swap_s", "bytes_full", "bytes_published"}
    assert {f"weights/{name}" for name in told} <= updates[-1].keys()


@pytest.mark.slow
def test_a_run_that_began_twice_can_be_resumed_and_says_at_once_how_far_it_is(run_dir: Path):
    """Its second life has no checkpoint to fork from, and yet a lineage of its own."""
    with running(run_dir, {"steps": 2}) as run:
        run.until(lambda: run.log.progress.phase == "evaluating the untrained policy", "evaluation")
        run.launcher.die("learner-0")
        run.end()
    assert run.conductor.complete and run.conductor.lineage == 1
    with running(run_dir, {"steps": 2}) as again:
        again.end()
    assert again.conductor.complete and (again.conductor.lineage, again.conductor.step) == (2, 2)
    assert len(again.events("rewind")) == 1  # the first life's


@pytest.mark.slow
def test_an_evaluation_that_is_cut_short_by_a_loss_holds_no_server_back(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    begun, cut_short = threading.Event(), threading.Event()
    evaluate = Evaluator.evaluate

    def slow(self: Evaluator, *asked: Any) -> Any:
        begun.set()
        cut_short.wait(LIMIT_S)  # the first evaluation never ends by itself
        return evaluate(self, *asked)

    monkeypatch.setattr(Evaluator, "evaluate", slow)
    with running(run_dir, {"steps": 2, "overseer": {"no_progress_s": 1000.0}}) as run:
        run.until(begun.is_set, "evaluation")
        run.launcher.die("learner-0")
        run.until(lambda: run.launcher.incarnations("evaluator-0") == [0, 1], "evaluator of the new lineage")
        cut_short.set()
        run.end()  # within far less than the lease
    assert run.conductor.complete


@pytest.mark.slow
def test_a_lesson_with_workers_of_its_own_keeps_them(run_dir: Path):
    more = {**tiny().dump()["curriculum"]["lessons"]["cats"], "lesson_id": "more"}
    changes = {"steps": 1000, "rollout": {"workers": {"cats": 1, "more": 1}}, "curriculum": {"lessons": {"more": more}}}
    with running(run_dir, changes) as run:
        run.until(lambda: "rollout-1" in components(run), "second worker")
        with pytest.raises(ConfigError, match="rollout=1 is outside of 2"):
            ask_to_scale(run_dir, "rollout", 1, LIMIT_S)
        run.launcher.room = 1
        with pytest.raises(ConfigError, match="there is no room for rollout-3"):
            ask_to_scale(run_dir, "rollout", 4, LIMIT_S)
        assert "rollout-2" not in components(run)
        assert "has begun" in ask_to_scale(run_dir, "rollout", 3, LIMIT_S)
        run.until(lambda: "rollout-2" in components(run), "third worker")


def components(run: Run) -> dict[str, Any]:
    return run.conductor.status()["components"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inference-1", "evaluator-0"])
def test_what_its_machine_tells_to_end_drains_and_is_replaced(run_dir: Path, name: str):
    with running(run_dir, {"steps": 12}) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        host = run.launcher.newest(name).host
        assert host is not None
        host.drain("SIGTERM")
        run.until(lambda: run.launcher.incarnations(name) == [0, 1], "replacement")
        run.end()
    assert run.conductor.complete and not run.events("rewind")
    (drained,) = run.events("component_drained")
    assert (drained["component"], drained["reason"]) == (name, "it was told to end, and drained")
    assert not run.events("component_death") and components(run)[name]["deaths"] == 0


def test_a_server_that_drains_is_not_waited_for(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(run_dir, {})
    conductor, held = run.conductor, {"url": "", "lineage": 0, "weights": "one"}
    monkeypatch.setattr(TrainingRun, "learner_step", lambda self: 3)

    def served(*servers: dict[str, Any]) -> bool | None:
        peers = [Peer(Identity("inference", i, 0), {**held, **server}) for i, server in enumerate(servers)]
        learner = Peer(Identity("learner", 0, 0), {"weights": {"incarnation": "one"}})
        monkeypatch.setattr(run.tasks.supervisor, "_view", Membership(1, 0, (learner, *peers)))
        return LanguageKind().served(conductor)

    assert served({"step": 3}, {"step": 2}) is None
    assert served({"step": 3}, {"step": 2, "draining": True}) is True
    assert served({"step": 3, "draining": True}) is None
    run.log.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learner-0", "replay-0"])
def test_a_machine_that_goes_has_the_newest_version_saved_first(run_dir: Path, name: str):
    with running(run_dir, {"steps": 20, "overseer": {"checkpoint_every": 500}}) as run:
        run.until(lambda: run.conductor.step >= 5, "fifth update")
        host = run.launcher.newest(name).host
        assert host is not None
        host.drain("SIGTERM")
        run.end()
    assert run.conductor.complete and run.conductor.lineage == 1
    (rewind,) = run.events("rewind")
    assert f"{name}#0 was told to end by its machine" in rewind["reason"]
    assert int(rewind["checkpoint"].removeprefix("step-")) >= 5
    updates = [row["step"] for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert updates == list(range(1, 21))  # no update was made twice


@pytest.mark.slow
@pytest.mark.attack
def test_deaths_without_a_new_version_end_the_run_however_slowly_they_come(run_dir: Path):
    limits = {"max_restarts": 1, "restart_window_s": 0.001, "checkpoint_every": 500}
    with running(run_dir, {"steps": 1000, "overseer": limits}) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        for incarnation in range(1, 10):
            run.launcher.die("learner-0")
            begun = lambda n=incarnation: run.launcher.incarnations("learner-0")[-1] == n or run.failure  # noqa: E731
            limit = time.monotonic() + LIMIT_S
            while not begun() and time.monotonic() < limit:
                time.sleep(0.01)
            if run.failure is not None:
                break
        with pytest.raises(RunFailed, match="died or were ended without one new version"):
            run.end()
