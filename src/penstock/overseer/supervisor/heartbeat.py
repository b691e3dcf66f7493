"""Asking one incarnation for its condition, again and again, without ever waiting for it.

Answers that come after their sender was given up are dropped, and counted.
"""

from concurrent.futures import Future

from penstock.overseer.config import OverseerConfig
from penstock.overseer.launch.launcher import Handle
from penstock.overseer.supervisor.messages import Membership, Report
from penstock.types import UnreachableError

NEWS_SHARE = 0.25
"""Of `heartbeat_s`: so long after one question the next may be asked because of a newer view. Where many components
come, go or move, a view a moment old is cheaper than telling everybody of every change."""


class Heartbeat:
    """One question at a time; silence and death are told apart from an answer that is still to come.

    Args:
        handle: Whom to ask.
        config: Intervals and limits.
        now_s: When its process was started.
    """

    def __init__(self, handle: Handle, config: OverseerConfig, now_s: float) -> None:
        self.handle = handle
        self.acknowledged = 0
        self.answered_at: float | None = None
        self._config = config
        self._asked: Future[Report] | None = None
        self._asked_at = now_s
        self._due_at = self._news_at = now_s
        self._told = -1

    def ask(self, view: Membership, now_s: float) -> None:
        """Asks where that is due, or where the view is new to it; not while an answer is outstanding.

        Only a view that is new to it travels: with many components it is by far the largest part of the question.
        """
        is_news = self._told != view.number  # whatever was told was received: the question was answered
        if self._asked is not None or (now_s < self._due_at and not (is_news and now_s >= self._news_at)):
            return
        heartbeat_s = self._config.heartbeat_s
        self._asked_at, self._due_at, self._news_at = now_s, now_s + heartbeat_s, now_s + NEWS_SHARE * heartbeat_s
        self._told = view.number
        self._asked = self.handle.beat(view if is_news else None, self.acknowledged)

    def collect(self, now_s: float) -> Report | None:
        """The answer, once; None where there is none yet.

        Raises:
            UnreachableError: it is dead, silent for too long, or did not start in time.
            Exception: whatever else the question failed with.
        """
        if self._asked is None:
            return None
        if self._asked.done():
            asked, self._asked = self._asked, None
            report = asked.result()
            self.answered_at = now_s
            return report
        silent_s = now_s - self._asked_at
        if self.answered_at is None and silent_s > self._config.start_timeout_s:
            raise UnreachableError(
                f"no answer within {self._config.start_timeout_s:g} s of its start (overseer.start_timeout_s)"
            )
        if self.answered_at is not None and silent_s > self._config.heartbeat_timeout_s:
            raise UnreachableError(
                f"no answer for {self._config.heartbeat_timeout_s:g} s (overseer.heartbeat_timeout_s)"
            )
        return None

    def abandon(self) -> Future[Report] | None:
        """The answer that is outstanding, which nobody waits for any more."""
        asked, self._asked = self._asked, None
        return asked


MOST_AWAITED = 256
"""Older answers than so many are no longer looked for."""


class StaleMessages:
    """Counts the messages of incarnations that were given up. `count` only grows."""

    def __init__(self) -> None:
        self.count = 0
        self._awaited: list[Future[Report]] = []

    def expect(self, answer: "Future[Report] | None") -> None:
        """Takes an answer that is still to come, of somebody who was given up."""
        if answer is not None:
            self._awaited = [*self._awaited, answer][-MOST_AWAITED:]

    def drop(self, report: Report) -> None:
        """Counts one that came."""
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
