"""Answers that come after their sender was given up: what they hold is dropped, and counted."""

from concurrent.futures import Future

from penstock.overseer.distributed.records import Report

MOST_AWAITED = 256
"""Older answers than so many are no longer looked for."""


class LateMessages:
    """Counts the messages of incarnations that were given up. `count` and `reports` only grow."""

    def __init__(self) -> None:
        self.count = 0
        self.reports = 0
        self._awaited: list[Future[Report]] = []

    def expect(self, answer: "Future[Report] | None") -> None:
        """Takes an answer that is still to come, of somebody who was given up."""
        if answer is not None:
            self._awaited = [*self._awaited, answer][-MOST_AWAITED:]

    def drop(self, report: Report) -> None:
        """Counts one that came."""
        self.reports += 1
        self.count += len(report.messages)

    def poll(self) -> None:
        """Looks which have come."""
        waiting: list[Future[Report]] = []
        for answer in self._awaited:
            if not answer.done():
                waiting.append(answer)
            elif not answer.cancelled() and answer.exception() is None:
                self.drop(answer.result())
        self._awaited = waiting
