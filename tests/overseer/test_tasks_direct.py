"""Components of one process without a run around them: what phases get, how failures end all, and what is left."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.overseer.component import Settings, ThreadedComponent
from penstock.overseer.kind import RunStart
from penstock.overseer.progress import Progress
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.overseer.tasks import DirectTasks
from penstock.rundir import RunDirectory, read_events
from penstock.types import ConfigError, RunFailed, Stopped, UnreachableError
from tests.overseer.conftest import tiny


class Worker(ThreadedComponent):
    """Waits in a thread until it is told to finish, as one that waits for the others does."""

    def __init__(self, ctx: Any, settings: Settings) -> None:
        super().__init__(ctx, settings)
        self.told = threading.Event()
        self.calls: list[str] = []
        self.work: Callable[[], None] = self.wait
        self.deaf, self.heard = False, threading.Event()

    def start(self) -> None:
        self.state, self.doing = "running", f"work of {self.name}"
        self.crew.start(f"{self.name}.work", lambda: self.work())

    def wait(self) -> None:
        self.told.wait(30.0)
        if self.deaf:
            self.heard.wait(60.0)
        raise Stopped(f"{self.name} was ended")

    def look(self, view: Any) -> None:
        self.calls.append(f"look {len(view.peers)}")

    def greet(self, word: str) -> str:
        self.calls.append(word)
        self.ctx.event("greeted", word=word)
        return f"{self.name} says {word}"

    def finish(self) -> None:
        self.told.set()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        return ComponentStatus(self.state, self.doing, 1.0, address={"step": 3}, metrics={"rollout/answers": 2.0})


class Kind:
    """Stands for a policy kind: two workers, and phases that the test gives."""

    def __init__(self, phases: Callable[[Any], Any]) -> None:
        self.phases = phases
        self.workers: dict[str, Worker] = {}

    def local_components(self, settings: Settings, start: RunStart, context: Any, log: RunLog) -> dict[str, Worker]:
        self.workers = {name: Worker(context(name), settings) for name in ("rollout-0", "replay-0")}
        return self.workers


class Phases:
    """Stands for a run."""

    def __init__(self, tasks: DirectTasks, phases: Callable[[DirectTasks], Any]) -> None:
        self.tasks = tasks
        self.stopping = False
        self.training_may_end = False
        self.events: list[str] = []
        self._phases = phases

    def phases(self) -> Any:
        return self._phases(self.tasks)

    def on_event(self, kind: str, step: int, fields: Any) -> None:
        self.events.append(kind)


@pytest.fixture
def made(run_dir: Path):
    config = tiny({"overseer": {"stop_timeout_s": 0.5}})
    directory = RunDirectory.create(run_dir, config.dump())
    log, crew = RunLog(directory, config, Progress("test", 3, 1)), ThreadGroup()

    def make(phases: Callable[[DirectTasks], Any]) -> tuple[Kind, DirectTasks, Any]:
        kind: Any = Kind(phases)
        tasks = DirectTasks(kind, Settings(config, directory, ""), RunStart(None), crew, log)
        return kind, tasks, Phases(tasks, phases)

    yield make, crew
    log.close()


def test_phases_call_components_and_see_how_they_are_now(made):
    make, _ = made
    answers: list[str] = []

    def phases(tasks: DirectTasks) -> Any:
        answers.append((yield from tasks.call("replay-0", "greet", "hello")))
        yield

    kind, tasks, run = make(phases)
    tasks.drive(run)
    assert answers == ["replay-0 says hello"] and run.events == ["greeted"]
    assert kind.workers["rollout-0"].calls == ["look 2"]
    assert [peer.identity.name for peer in tasks.view.of("rollout")] == ["rollout-0"]
    assert tasks.seen.numbers() == {"rollout/answers": 4.0} and tasks.seen.counters == {
        "rollout-0": 1.0,
        "replay-0": 1.0,
    }
    assert "replay-0 is at «work of replay-0»" in tasks.seen.owes
    assert (tasks.names("rollout"), tasks.any_left("rollout"), tasks.leaving) == (["rollout-0"], True, "")
    kind.workers["rollout-0"].state = "drained"
    assert not tasks.any_left("rollout")
    with pytest.raises(UnreachableError, match="evaluator-0 is no component"):
        tasks.find("evaluator-0")
    with pytest.raises(ConfigError, match="rollout cannot be scaled to 3 in one process"):
        tasks.scale("rollout", 3)
    with pytest.raises(RunFailed, match="its machine goes"):
        next(tasks.learner_lost("its machine goes"))
    tasks.shut_down()


def test_what_ended_a_phase_ends_the_run_and_not_what_others_raise_when_they_are_ended(made):
    make, crew = made

    def phases(tasks: DirectTasks) -> Any:
        yield
        raise OSError("no space left")

    _, tasks, run = make(phases)
    with pytest.raises(OSError, match="no space left"):
        tasks.drive(run)
    tasks.shut_down()
    with pytest.raises(OSError, match="no space left"):
        crew.raise_if_failed()


def test_the_first_failure_of_any_thread_is_that_of_the_run(made):
    make, crew = made
    failed = threading.Event()

    def phases(tasks: DirectTasks) -> Any:
        while not failed.is_set():
            yield

    kind, tasks, run = make(phases)

    def broken() -> None:
        failed.set()
        raise ValueError("the verifier broke")

    local_components = kind.local_components

    def with_a_broken_one(*args: Any) -> dict[str, Worker]:
        workers = local_components(*args)
        workers["rollout-0"].work = broken
        return workers

    kind.local_components = with_a_broken_one
    tasks.drive(run)
    assert crew.wake.wait(5.0)
    with pytest.raises(ValueError, match="the verifier broke"):
        crew.raise_if_failed()
    tasks.shut_down()
    assert kind.workers["rollout-0"].condition().state == "failed"


def test_the_end_has_a_limit_and_names_what_is_left(made, run_dir: Path):
    make, _ = made

    def phases(tasks: DirectTasks) -> Any:
        yield

    kind, tasks, run = make(phases)
    tasks.drive(run)
    kind.workers["replay-0"].deaf = True
    began = time.monotonic()
    tasks.shut_down()
    assert time.monotonic() - began < 30.0
    kind.workers["replay-0"].heard.set()
    (left,) = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "still_running"]
    assert left["threads"] == ["replay-0.work"]
