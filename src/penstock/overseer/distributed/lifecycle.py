"""One component's life between its start and the end of its process: it is heard, judged, and ended.

Given up is whoever is dead or silent, says that it failed, owes progress for too long, or does not get through its
start.
"""

from collections.abc import Callable

from penstock.overseer.config import OverseerConfig
from penstock.overseer.distributed.ending import Background, Ending
from penstock.overseer.distributed.late import LateMessages
from penstock.overseer.distributed.members import Member
from penstock.overseer.distributed.records import Identity, Message, Report
from penstock.overseer.distributed.stragglers import Stragglers
from penstock.types import RunFailed, UnreachableError

DRAIN_CALL_S = 10.0
"""Longest call that asks a component to drain; it is repeated."""
DRAINED = "drained"
"""Why one ends that the run asked to, and that has finished what it began: no death."""
NOTICED = "it was told to end, and drained"
"""Why one ends that its machine gave notice, and that has finished what it began: no death either."""


class Lifecycle:
    """Moves members from one phase to the next; see `Supervisor` for the arguments.

    Attributes:
        deaths: So many incarnations died or were ended before they had drained.
        late: What came from those afterwards.
    """

    def __init__(
        self,
        config: OverseerConfig,
        on_message: Callable[[Identity, Message], None],
        on_event: Callable[..., None],
        on_loss: Callable[[Identity, str], None],
        stragglers: Stragglers,
        background: Background,
    ) -> None:
        self.deaths = 0
        self.late = LateMessages()
        self._config = config
        self._on_message = on_message
        self._on_event = on_event
        self._on_loss = on_loss
        self._stragglers = stragglers
        self._background = background

    def look(self, member: Member, now_s: float) -> None:
        """Looks at one member, without waiting.

        Raises:
            RunFailed: it died once too often, or cannot be shown to be dead.
        """
        if member.ending is not None:
            self._look_at_ending(member, member.ending, now_s)
        if member.heartbeat is None:
            return
        try:
            report = member.heartbeat.collect(now_s)
        except Exception as error:  # whatever it is, it is the reason of this death
            told = str(error) if isinstance(error, UnreachableError) else f"{type(error).__name__}: {error}"
            self._died(member, told, now_s)
            return
        if report is not None and self.hear(member, report, now_s):
            self._judge(member, report, now_s)

    def hear(self, member: Member, report: Report, now_s: float) -> bool:
        """Takes a report and logs what is new in it; false where it comes from an incarnation that was given up."""
        heartbeat = member.heartbeat
        if report.identity != member.identity or heartbeat is None:
            self.late.drop(report)
            return False
        if member.phase == "starting":
            self._on_event(
                "component_up",
                component=member.name,
                incarnation=member.incarnation,
                pid=report.pid,
                host=report.host,
                after_s=round(now_s - member.started_at, 3),
            )
            member.enter("living", now_s)
        for message in report.messages:
            if message.number > heartbeat.acknowledged:
                self._on_message(report.identity, message)
                heartbeat.acknowledged = message.number
        member.report = report
        member.note_progress(report.condition.progress, now_s)
        self._stragglers.observe(report.identity, member.spec.peer_group, report.condition, now_s)
        return True

    def end(self, member: Member, reason: str, now_s: float) -> None:
        """Begins to end the process of a member that is alive."""
        heartbeat, identity = member.heartbeat, member.identity
        assert heartbeat is not None and identity is not None  # it is alive
        orderly = reason in (DRAINED, NOTICED)
        if not orderly:
            self.deaths += 1
            member.deaths += 1
        member.reason = reason
        kind = "component_drained" if orderly else "component_death"
        self._on_event(kind, component=member.name, incarnation=identity.incarnation, reason=reason)
        self.late.expect(heartbeat.abandon())
        self._stragglers.forget(identity)
        member.heartbeat = member.report = member.draining = None
        member.ending = Ending(heartbeat.handle, self._config.stop_timeout_s, self._background, now_s)
        member.enter("ending", now_s)

    def _judge(self, member: Member, report: Report, now_s: float) -> None:
        """Acts on what a report says."""
        condition, config = report.condition, self._config
        if condition.state == "failed":
            self._died(member, condition.error or "failed without saying why", now_s)
        elif member.leaving and condition.state in ("drained", "finished"):
            self.end(member, DRAINED, now_s)
        elif member.leaving and now_s > member.leave_by:
            self.end(member, f"not drained within {config.no_progress_s:g} s (overseer.no_progress_s)", now_s)
        elif condition.state == "drained":
            self.end(member, NOTICED, now_s)
            member.not_before = now_s + self._config.backoff_s
        elif member.is_stuck(config, now_s):
            self._died(member, f"no progress for {member.stuck_s(now_s):.0f} s at «{condition.doing}»", now_s)
        elif member.is_late_to_start(config, now_s):
            self._died(member, f"still at «{condition.doing}» {now_s - member.started_at:.0f} s after its start", now_s)
        elif member.leaving:
            self._ask_to_drain(member)

    def _ask_to_drain(self, member: Member) -> None:
        """Again with each report where the last time failed."""
        handle = member.heartbeat.handle if member.heartbeat is not None else None
        if handle is None or (member.draining is not None and not member.draining.done()):
            return
        if member.draining is None or member.draining.exception() is not None:
            member.draining = self._background(lambda: handle.call("drain", timeout_s=DRAIN_CALL_S))

    def _died(self, member: Member, reason: str, now_s: float) -> None:
        """Counts a death, and ends the process for certain."""
        self.end(member, reason, now_s)
        if member.leaving:
            return
        delay_s = member.budget.charge(now_s)
        if delay_s is not None:
            member.not_before = now_s + delay_s
            return
        member.given_up = True
        deaths, config = member.budget.used(now_s), self._config
        self._on_event("restart_budget_exhausted", component=member.name, deaths=deaths, reason=reason)
        raise RunFailed(
            f"{member.name} died {deaths} times within {config.restart_window_s:g} s (overseer.restart_window_s), and "
            f"overseer.max_restarts allows {config.max_restarts} restarts; the last time: {reason}"
        )

    def _look_at_ending(self, member: Member, ending: Ending, now_s: float) -> None:
        def on_failure(reason: str) -> None:
            self._on_event("kill_failed", component=member.name, incarnation=member.incarnation, reason=reason)

        if not ending.poll(now_s, on_failure):
            return
        member.ending = None
        if member.leaving:
            member.enter("removed", now_s)
        elif member.given_up or (member.spec.essential and not member.wanted):
            member.enter("lost", now_s)
            if not member.given_up and member.identity is not None:
                self._on_loss(member.identity, member.reason)
        else:
            member.enter("waiting", now_s)
