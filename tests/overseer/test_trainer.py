"""The learner's broadcaster may be restarted at any time, while versions are published too."""

import errno
import threading
from typing import Any

import numpy as np
import pytest

from penstock.learner import OptimizerConfig
from penstock.model.arrays import digests_of
from penstock.overseer import load_config, trainer
from penstock.overseer.component import Settings
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.trainer import LearnerComponent
from penstock.rundir import RunDirectory
from penstock.types import (
    CheckpointError,
    CompiledProgram,
    NoProgressError,
    RunFailed,
    Stopped,
    UnreachableError,
    WeightVersion,
)
from penstock.weights import open_client
from tests.overseer.lonely import Lonely
from tests.waiting import wait_until

LIMIT_S = 280.0


class Step:
    """Stands for the learner, whose weights are given by the test."""

    step, optimizer = 0, OptimizerConfig()

    def snapshot(self) -> "Step":
        return self

    def named_arrays(self) -> dict[str, np.ndarray]:
        return weights(self.step)


class Replay(Lonely):
    """Replay alone is there, from some moment on, and hears of digests."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.there, self.heard = True, []

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method != "expect_digests" or not self.there:
            raise UnreachableError(f"{method}: nobody is there")
        self.heard.append(args)


def weights(step: int) -> dict[str, np.ndarray]:
    return {"embedding": np.full((8, 4), step, np.float32)}


@pytest.fixture
def role(tmp_path):
    config = load_config("cats", ["runtime=ray"])
    settings = Settings(config, RunDirectory.create(tmp_path / "run", {}), "0" * 64)
    role = LearnerComponent(Replay("learner"), settings, LanguageKind())
    yield role
    role.stop(LIMIT_S)


def begin(role: LearnerComponent) -> None:
    role._learner = Step()  # pyright: ignore[reportAttributeAccessIssue]
    with role._publishing:
        role._open_broadcaster()


def publish(role: LearnerComponent, step: int) -> None:
    role.learner.step = step  # pyright: ignore[reportAttributeAccessIssue]
    role.publish()


def endpoint(role: LearnerComponent) -> dict[str, Any]:
    return dict(role.condition().address["weights"])


def test_the_progress_of_a_learner_that_starts_is_its_programs(role):
    begin(role)
    for number in (1, 2):
        role.note_compiled(CompiledProgram("gradient", number, 4, 0.5))
        assert role.condition().doing == f"compiling ({number} of 4 programs, the last gradient)"
        assert (role.condition().state, role.condition().progress) == ("starting", float(number))
    role.state, role.doing = "running", "update 3"
    role.note_compiled(CompiledProgram("optimiser step", 3, 4, 0.5))
    assert (role.condition().doing, role.condition().progress) == ("update 3", 3.0)


@pytest.fixture
def gate(role, monkeypatch):
    """Holds the update's one program back, which the role compiles already."""
    gate = threading.Event()
    monkeypatch.setattr(LanguageKind, "update_programs", lambda *_: {"gradient": lambda: gate.wait(LIMIT_S)})
    begin(role)
    role.state = "running"
    role.crew.start("compile", role._compile_update)
    yield gate
    gate.set()


@pytest.mark.parametrize("ending", ["compiled", "finished"])
def test_training_waits_for_its_programs_and_a_request_to_finish_does_not(role, gate, ending):
    waiting = threading.Thread(target=role.wait_until_compiled)
    waiting.start()
    wait_until(lambda: role.condition().doing == "waiting for the programs of an update")
    assert role.condition().progress is None, "nothing is owed"
    role._training = True
    assert role.condition().address["training"], "others generate the first batch meanwhile"
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.set() if ending == "compiled" else role.finish()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and role.compiled == (ending == "compiled")


def test_programs_that_are_never_compiled_end_the_wait_by_name(role, gate):
    role.config = load_config("cats", ["overseer={start_timeout_s: 0.05, no_progress_s: 0.05}"])
    with pytest.raises(NoProgressError, match="learner-0#0 compiled no further program of an update within 0.05 s: if"):
        role.wait_until_compiled()


def test_a_program_that_cannot_be_compiled_fails_the_learner(role, monkeypatch):
    monkeypatch.setattr(LanguageKind, "update_programs", lambda *_: {"gradient": lambda: 1 // 0})
    begin(role)
    role.crew.start("compile", role._compile_update)
    role.wait_until_compiled()
    wait_until(lambda: role.condition().state == "failed")
    assert "ZeroDivisionError" in role.condition().error


@pytest.mark.parametrize("before", ["starting", "running"])
def test_what_does_not_fit_is_refused_while_the_learner_starts_and_a_fault_later(role, monkeypatch, before):
    def refuse(self, config, start):
        raise CheckpointError("optimiser state does not fit")

    monkeypatch.setattr(LanguageKind, "make_learner", refuse)
    role.state = before
    role.crew.start("load", role._load)
    wait_until(lambda: role.condition().state == "failed")
    assert (role.condition().error, role.condition().refused) == ("optimiser state does not fit", before == "starting")


def test_a_restarted_broadcaster_offers_the_same_version_and_weights_under_another_incarnation(role):
    begin(role)
    publish(role, 5)
    before = endpoint(role)
    role.restart_broadcaster()
    assert endpoint(role)["incarnation"] != before["incarnation"]
    client = open_client(endpoint(role), role.config.weights, role.settings.token, "inference-0")
    assert client.wait_for(None, LIMIT_S) == WeightVersion(0, 5)
    np.testing.assert_array_equal(client.fetch(WeightVersion(0, 5))["embedding"], weights(5)["embedding"])
    client.close()


def test_versions_are_published_while_the_broadcaster_is_restarted_again_and_again(role):
    begin(role)
    restarted, ended = [], threading.Event()

    def restart() -> None:
        while not ended.is_set():
            role.restart_broadcaster()
            restarted.append(endpoint(role)["incarnation"])

    restarting = threading.Thread(target=restart)
    restarting.start()
    for step in range(1, 60):
        publish(role, step)
    ended.set()
    restarting.join(LIMIT_S)
    assert len(set(restarted)) == len(restarted) > 0
    assert role._broadcaster is not None and role._broadcaster.latest() == WeightVersion(0, 59)


def test_replay_hears_what_a_version_is_before_anybody_can_fetch_it(role, monkeypatch):
    replay = role.ctx
    replay.there = False
    begin(role)  # servers may fetch, although replay is not there yet
    assert replay.heard == [] and role._broadcaster.latest() == WeightVersion(0, 0)
    replay.there = True
    order = []
    offer = type(role._broadcaster).publish
    monkeypatch.setattr(
        type(role._broadcaster), "publish",
        lambda self, version, arrays: (order.append((version.step, len(replay.heard))), offer(self, version, arrays)),
    )  # fmt: skip
    publish(role, 0)  # told again before it trains, and not published again
    publish(role, 1)
    assert replay.heard == [(0, step, digests_of(weights(step))) for step in (0, 1)] and order == [(1, 2)]
    role.restart_broadcaster()
    assert replay.heard[2:] == [(0, 1, digests_of(weights(1)))]


def test_a_learner_that_loads_has_no_broadcaster_to_restart(role):
    with pytest.raises(UnreachableError, match="learner-0#0 has no broadcaster yet"):
        role.restart_broadcaster()


def test_an_evaluation_that_the_checkpoint_counts_as_done_is_in_its_curriculum(role, monkeypatch):
    asked = []

    def call(self, method, *args, timeout_s):
        asked.append(method)
        return {}

    monkeypatch.setattr(Replay, "call", call)
    monkeypatch.setattr(trainer, "save_checkpoint", lambda *args: asked.append("save"))
    begin(role)
    asked.clear()
    role.save(0)
    role.wait_until_saved()
    assert asked == ["evaluation_state", "checkpoint_states", "save", "checkpoint_saved"]


def test_an_evaluator_that_cannot_be_found_holds_a_checkpoint_up_for_seconds_and_goes_on_from_its_older_state(
    role, monkeypatch
):
    waited, saved = [], []

    def call(self, method, *args, timeout_s):
        if method != "evaluation_state":
            return {}
        waited.append(timeout_s)
        raise UnreachableError("the cluster did not say where evaluator-0 is")

    monkeypatch.setattr(Replay, "call", call)
    monkeypatch.setattr(
        trainer, "save_checkpoint", lambda folder, step, learner, codec, states, *kept: saved.append(states)
    )
    begin(role)
    role._evaluator_state = {"evaluated_step": 3}
    role.save(0)
    role.wait_until_saved()
    assert [states["evaluator"] for states in saved] == [{"evaluated_step": 3}]
    assert len(waited) == 1 and waited[0] <= 5, "of the 20 s that a run has which lost its cluster"


class Writing:
    """A writer over a disk that the test opens and closes."""

    def __init__(self, tmp_path, monkeypatch, changes: list[str]) -> None:
        self.open, self.error, self.written, self.stopped = threading.Event(), None, [], []
        self.events: list[tuple[str, Any]] = []
        config = load_config("cats", changes)
        settings = Settings(config, RunDirectory.create(tmp_path / "run", {}), "0" * 64)
        ctx = Lonely("learner")
        ctx.event = lambda kind, step=None, **fields: self.events.append((kind, step))
        monkeypatch.setattr(trainer, "save_checkpoint", self._save)
        self.crew = ThreadGroup()
        self.stopping = threading.Event()
        stop = lambda: self.stopped.append(True)  # noqa: E731
        self.writer = trainer.CheckpointWriter(ctx, settings, self.written.append, stop, self.crew.start, self.stopping)

    def _save(self, folder, step, learner, codec, states, *kept):
        assert self.open.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return folder / f"step-{step}"


def test_a_checkpoint_is_written_beside_and_the_end_is_waited_for(tmp_path, monkeypatch):
    it = Writing(tmp_path, monkeypatch, [])
    it.writer.write_beside(4, Step(), None, {})
    assert it.written == [] and it.events == []
    waiting = threading.Thread(target=it.writer.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    it.open.set()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and it.written == [4] and it.events == [("checkpoint", 4)]


def test_a_write_that_never_ends_is_waited_for_until_the_limit(tmp_path, monkeypatch):
    it = Writing(tmp_path, monkeypatch, ["overseer.no_progress_s=0.05"])
    monkeypatch.setattr(trainer, "POLL_S", 0.01)
    it.writer.write_beside(4, Step(), None, {})
    with pytest.raises(NoProgressError, match=r"of step 4 was not written within 0.05 s \(overseer.no_progress_s"):
        it.writer.wait()

    def ended() -> bool:
        try:
            it.writer.wait()
        except NoProgressError:  # the limit is shorter than a busy machine may take
            return False
        return True

    it.open.set()
    wait_until(ended)
    assert it.written == [4]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RunFailed("the run directory is gone")])
def test_a_write_that_fails_ends_the_training_and_is_raised_to_whoever_waits(tmp_path, monkeypatch, error):
    it = Writing(tmp_path, monkeypatch, [])
    it.error = error
    it.open.set()
    it.writer.write_beside(4, Step(), None, {})
    for _ in range(2):
        with pytest.raises(type(error), match=str(error).rpartition("] ")[2]):
            it.writer.wait()
    assert it.stopped == [True] and it.written == [] and it.crew.failure is None


def test_a_full_disk_is_waited_for_by_the_writer_alone_and_a_stop_ends_that(tmp_path, monkeypatch):
    it = Writing(tmp_path, monkeypatch, ["overseer.no_progress_s=1", "replay.store.full_disk_s=60"])
    monkeypatch.setattr(trainer, "POLL_S", 0.01)
    it.error = OSError(errno.ENOSPC, "No space left on device", "step-4")
    it.open.set()
    it.writer.write_beside(4, Step(), None, {})
    wait_until(lambda: it.events.count(("disk_full", None)) >= 2)
    wait_until(lambda: "no room on the disk" in it.writer.no_room)
    freed = threading.Timer(1.5, lambda: setattr(it, "error", None))  # longer than what a silent disk is given
    freed.start()
    it.writer.wait()
    assert it.error is None
    freed.join(LIMIT_S)
    assert it.events[-1] == ("checkpoint", 4) and it.writer.no_room == ""
    it.error = OSError(errno.ENOSPC, "No space left on device", "step-8")
    it.writer.write_beside(8, Step(), None, {})
    it.stopping.set()
    with pytest.raises(Stopped, match="no room"):
        it.writer.wait()
