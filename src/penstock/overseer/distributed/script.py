"""The phases of a distributed run, as generators: each ``yield`` gives the overseer's loop a turn.

Nothing here waits by itself, and nothing here restarts anything: a phase that depends on a component which died is told
so by the component's next incarnation, and asks it again. Where the learner or the replay buffer was lost, the loop
throws the whole script away and begins a new one from the checkpoint.
"""

import itertools
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.overseer.distributed.ending import in_background
from penstock.overseer.distributed.records import Identity, Report
from penstock.overseer.distributed.supervisor import Supervisor
from penstock.types import PenstockError, RunFailed, UnreachableError, errors

Turns = Generator[None, None, Any]
_Found = TypeVar("_Found")
CALL_S = 10.0
"""Longest wait for a component's answer to a short call."""
STATES = frozenset({"running", "finished", "drained"})


class Stage:
    """What phases are made of: waiting, calling, and having tasks done.

    Args:
        supervisor: Knows who lives.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._tasks = itertools.count(1)

    def until(self, found: Callable[[], _Found | None]) -> Generator[None, None, _Found]:
        """Looks at every turn, until there is something."""
        while (result := found()) is None:
            yield
        return result

    def running(self, name: str) -> Generator[None, None, Identity]:
        """Waits until the living incarnation of a component runs."""
        return self.until(lambda: self._running(name))

    def _running(self, name: str) -> Identity | None:
        report = self.report(name)
        return report.identity if report is not None and report.condition.state in STATES else None

    def report(self, name: str) -> Report | None:
        """The newest of the living incarnation."""
        peer, report = self._supervisor.view.peer(name), self._supervisor.reports.get(name)
        return report if peer is not None and report is not None and report.identity == peer.identity else None

    def call(self, name: str, method: str, *args: Any) -> Generator[None, None, Any]:
        """A short call, repeated until a living incarnation has answered it."""
        while True:
            yield from self.running(name)
            answer: Future[Any] = in_background(lambda: self._supervisor.call(name, method, *args, timeout_s=CALL_S))
            while not answer.done():
                yield
            try:
                return answer.result()
            except UnreachableError:
                yield  # the next incarnation, or a moment later

    def task(self, name: str, method: str, *args: Any) -> Generator[None, None, Any]:
        """Has a long method run to its end, again if the component dies meanwhile; returns its result.

        Raises:
            PenstockError: what it raised.
        """
        task_id = f"{method}-{next(self._tasks)}"
        while True:
            identity = yield from self.running(name)
            yield from self.call(name, "begin", task_id, method, *args)
            while (report := self.report(name)) is not None and report.identity == identity:
                outcome: Mapping[str, Any] = report.condition.facts.get("tasks", {}).get(task_id, {})
                if outcome.get("state") == "done":
                    return outcome["result"]
                if outcome.get("state") == "failed":
                    raise raised(outcome)
                yield


def raised(outcome: Mapping[str, Any]) -> PenstockError:
    """The error that ended a task, of its own type."""
    kind = getattr(errors, str(outcome["error"]), RunFailed)
    return kind(str(outcome["message"]))
