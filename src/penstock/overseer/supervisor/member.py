"""One component through all its incarnations: what it is, how far it got, when it is given up, when it starts again.

Given up is whoever is dead or silent, says that it failed, owes progress for too long, or does not get through its
start. A budget limits how often, and after what wait, a component is restarted, and how many may die while no new
version of the policy is learned.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.overseer.config import OverseerConfig, RoleConfig
from penstock.overseer.launch.launcher import Factory
from penstock.overseer.supervisor.heartbeat import Heartbeat, StaleMessages
from penstock.overseer.supervisor.messages import ComponentMessage, Identity, Peer, Report
from penstock.overseer.supervisor.stopping import Background, Termination
from penstock.overseer.supervisor.stragglers import Stragglers
from penstock.types import ConfigError, RunFailed, UnreachableError

MOST_DEATHS = 5
"""Times ``overseer.max_restarts``: so many components may die without one new version of the policy."""


class RestartBudget:
    """Counts the deaths of one component within a sliding window.

    Args:
        config: `max_restarts` within `restart_window_s`; waits from `backoff_s`, doubling up to `max_backoff_s`.
    """

    def __init__(self, config: OverseerConfig) -> None:
        self._config = config
        self._deaths: deque[float] = deque()

    def charge(self, now_s: float) -> float | None:
        """Counts a death.

        Args:
            now_s: Of any monotonic clock; never less than before.

        Returns:
            Seconds to wait before the restart; None where no further restart is allowed.
        """
        self._deaths.append(now_s)
        count = self.used(now_s)
        if count > self._config.max_restarts:
            return None
        doublings = min(count - 1, 64)  # beyond that every wait is the longest
        return min(self._config.backoff_s * 2.0**doublings, self._config.max_backoff_s)

    def used(self, now_s: float) -> int:
        """Deaths within the window that ends now."""
        while self._deaths and now_s - self._deaths[0] > self._config.restart_window_s:
            self._deaths.popleft()
        return len(self._deaths)


class RunRestartBudget:
    """Counts the deaths of all components since the last new version of the policy.

    Args:
        max_restarts: See `OverseerConfig`.
    """

    def __init__(self, max_restarts: int) -> None:
        self._limit = MOST_DEATHS * max(1, max_restarts)
        self._deaths = 0

    def count(self, reason: str) -> None:
        """A run in which things die and nothing is learned ends, however slowly they die.

        Raises:
            RunFailed: too many died since the last new version.
        """
        self._deaths += 1
        if self._deaths > self._limit:
            self._deaths = 0  # the end of the run takes a few more
            raise RunFailed(
                f"{self._limit + 1} components died or were ended without one new version of the policy; the last: "
                f"{reason} ({MOST_DEATHS} × overseer.max_restarts)"
            )

    def forget(self) -> None:
        """There is a new version."""
        self._deaths = 0


Phase = Literal["waiting", "starting", "living", "ending", "lost", "removed"]
"""`waiting` for its (re)start; `starting` until its first answer; `ending` until its process is gone; `lost`: gone,
and started again only when asked for; `removed`: gone for good."""

STUCK_SHARE = 0.9
"""A component is given up after this share of `no_progress_s`, so that the run that it holds up is not."""


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """A component to be kept alive.

    Attributes:
        role: One of `penstock.overseer.config.ROLES`.
        index: Which of the role's components.
        factory: Makes it, in its process.
        settings: Plain values for the factory.
        resources: Where it may run.
        essential: Its loss is told, and it is started again only when asked for; others are restarted at once.
        peer_group: Components of one role and one group do the same work, and should do it at the same pace.
    """

    role: str
    index: int
    factory: Factory
    settings: Mapping[str, Any] = field(repr=False)  # the run's token is among them
    resources: RoleConfig = field(default_factory=RoleConfig)
    essential: bool = False
    peer_group: str = ""

    @property
    def name(self) -> str:
        """Such as ``rollout-2``."""
        return f"{self.role}-{self.index}"


@dataclass(slots=True, eq=False)
class Member:
    """One component through all its incarnations. Times are the supervisor's.

    Attributes:
        spec: What it is.
        budget: Of its restarts.
        phase: See `Phase`.
        phase_since: When that began.
        started_at: When its newest incarnation was started.
        compiled_at: When that last had more to show for its start, in a counter; when it was started, before.
        identity: Its newest incarnation; None before the first.
        heartbeat: Of that incarnation, while it is thought to live.
        ending: While its process is being ended.
        report: The newest of the present incarnation.
        progress: The last counter that it gave; None before the first.
        progress_at: When that last grew, or none was owed: while it waits for others, or starts.
        not_before: When it may be started again.
        wanted: A new incarnation was asked for, whatever became of the old one.
        given_up: Not to be started again.
        added_later: By `Supervisor.scale`, while the run went on.
        leaving: It is drained and then taken out.
        leave_by: When it is ended although it has not drained.
        draining: The call that asks it to drain.
        reason: Why it last died or was ended.
        deaths: So many times it died or was ended before it had drained.
    """

    spec: ComponentSpec
    budget: RestartBudget
    phase: Phase = "waiting"
    phase_since: float = 0.0
    started_at: float = 0.0
    compiled_at: float = 0.0
    identity: Identity | None = None
    heartbeat: Heartbeat | None = None
    ending: Termination | None = None
    report: Report | None = None
    progress: float | None = None
    progress_at: float = 0.0
    not_before: float = 0.0
    wanted: bool = False
    given_up: bool = False
    added_later: bool = False
    leaving: bool = False
    leave_by: float = 0.0
    draining: Future[None] | None = None
    reason: str = ""
    deaths: int = 0

    @property
    def name(self) -> str:
        """Such as ``rollout-2``."""
        return self.spec.name

    @property
    def alive(self) -> bool:
        """Whether it was started and is not known to be dead."""
        return self.phase in ("starting", "living")

    @property
    def incarnation(self) -> int:
        """The newest; -1 before the first."""
        return self.identity.incarnation if self.identity is not None else -1

    def peer(self) -> Peer:
        """As others see it. It was started."""
        assert self.identity is not None
        return Peer(self.identity, self.report.condition.address if self.report is not None else {})

    def begin(self, identity: Identity, now_s: float) -> None:
        """A new incarnation is about to be started."""
        self.identity, self.report, self.progress = identity, None, None
        self.wanted, self.started_at, self.compiled_at, self.progress_at = False, now_s, now_s, now_s
        self.enter("starting", now_s)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Moves on to another phase."""
        self.phase, self.phase_since = phase, now_s

    def note_progress(self, progress: float | None, now_s: float) -> None:
        """Takes a counter; None says that it waits for others."""
        if progress != self.progress or self.is_starting:  # None never equals what is kept
            self.progress_at = now_s
        if self.is_starting and progress is not None and progress > (self.progress or 0.0):
            self.compiled_at = now_s
        if progress is not None:
            self.progress = progress

    def stuck_s(self, now_s: float) -> float:
        """Seconds for which it has owed progress; 0 where it owes none, as one that is starting."""
        owes = self.report is not None and self.report.condition.progress is not None and not self.is_starting
        return now_s - self.progress_at if owes and self.phase == "living" else 0.0

    def is_stuck(self, config: OverseerConfig, now_s: float) -> bool:
        """Whether it has owed progress for too long."""
        return self.stuck_s(now_s) > config.no_progress_s * STUCK_SHARE

    @property
    def is_starting(self) -> bool:
        """Whether it has a process that does not work yet, as far as it has said."""
        return self.alive and (self.report is None or self.report.condition.state == "starting")

    def is_late_to_start(self, config: OverseerConfig, now_s: float) -> bool:
        """Whether it answers, but has been starting for too long: since its start, or the last program it compiled."""
        return self.report is not None and self.is_starting and now_s - self.compiled_at > config.start_limit_s

    def in_words(self, now_s: float) -> str:
        """What it is at, for people."""
        waited = f"{now_s - self.phase_since:.0f} s"
        match self.phase:
            case "waiting":
                return f"{self.name} starts in {max(0.0, self.not_before - now_s):.0f} s"
            case "starting":
                return f"{self.identity} has not answered since its start {waited} ago"
            case "ending":
                return f"{self.identity} is being ended since {waited}: {self.reason}"
            case "lost":
                return f"{self.name} is lost since {waited}: {self.reason}"
            case "removed":
                return f"{self.name} is gone"
            case "living":
                doing = self.report.condition.doing if self.report is not None else "nothing yet"
                return f"{self.identity} is at «{doing}»"

    def describe(self, now_s: float) -> dict[str, Any]:
        """For status.json."""
        told: dict[str, Any] = {"phase": self.phase, "incarnation": self.incarnation, "deaths": self.deaths}
        if self.leaving:
            told["leaving"] = True
        if self.reason:
            told["last_death"] = self.reason
        if self.report is None:
            return told | {"doing": self.in_words(now_s)}
        condition = self.report.condition
        if "version" in condition.facts:
            told["version"] = condition.facts["version"]
        return told | {
            "state": condition.state,
            "doing": condition.doing,
            "pid": self.report.pid,
            "host": self.report.host,
            "busy_s": round(condition.busy_s, 1),
            "idle_s": round(condition.idle_s, 1),
            "stuck_s": round(self.stuck_s(now_s), 1),
        }


DRAIN_CALL_S = 10.0
"""Longest call that asks a component to drain; it is repeated."""
DRAINED = "drained"
"""Why one ends that the run asked to, and that has finished what it began: no death."""
NOTICED = "it was told to end, and drained"
"""Why one ends that its machine gave notice, and that has finished what it began: no death either."""


class SupervisorOwner(Protocol):
    """Whose components a supervisor keeps."""

    def on_message(self, identity: Identity, message: ComponentMessage) -> None:
        """Is given each message once; what this returned from is acknowledged to the sender."""
        ...

    def on_event(self, kind: str, **fields: Any) -> None:
        """Is given what happened."""
        ...

    def on_loss(self, identity: Identity, reason: str) -> None:
        """Is told, within `Supervisor.tick`, of an essential component whose process is gone, and why."""
        ...


class Lifecycle:
    """Moves members from one phase to the next; `Supervisor` says what the arguments are.

    Attributes:
        deaths: So many incarnations died or were ended before they had drained.
        late: What came from those afterwards.
    """

    def __init__(
        self,
        config: OverseerConfig,
        owner: SupervisorOwner,
        stragglers: Stragglers,
        background: Background,
    ) -> None:
        self.deaths = 0
        self.late = StaleMessages()
        self._config = config
        self._owner = owner
        self._stragglers = stragglers
        self._background = background
        self._ran: set[str] = set()

    def look(self, member: Member, now_s: float) -> None:
        """Looks at one member, without waiting.

        Raises:
            RunFailed: it died once too often, or cannot be shown to be dead.
            ConfigError: it refused what it was given, and none of its role has run yet.
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
            self._owner.on_event(
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
                self._owner.on_message(report.identity, message)
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
        self._owner.on_event(kind, component=member.name, incarnation=identity.incarnation, reason=reason)
        self.late.expect(heartbeat.abandon())
        self._stragglers.forget(identity)
        member.heartbeat = member.report = member.draining = None
        member.ending = Termination(heartbeat.handle, self._config.stop_timeout_s, self._background, now_s)
        member.enter("ending", now_s)

    def _judge(self, member: Member, report: Report, now_s: float) -> None:
        """Acts on what a report says."""
        condition, config = report.condition, self._config
        if condition.state == "running" and condition.worked:
            self._ran.add(member.spec.role)
        if condition.refused and member.spec.role not in self._ran:
            self.end(member, condition.error, now_s)
            member.given_up = True
            raise ConfigError(condition.error)
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
            since = "its start" if member.compiled_at == member.started_at else "the last program that it compiled"
            self._died(member, f"still at «{condition.doing}» {now_s - member.compiled_at:.0f} s after {since}", now_s)
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
        self._owner.on_event("restart_budget_exhausted", component=member.name, deaths=deaths, reason=reason)
        raise RunFailed(
            f"{member.name} died {deaths} times within {config.restart_window_s:g} s (overseer.restart_window_s), and "
            f"overseer.max_restarts allows {config.max_restarts} restarts; the last time: {reason}"
        )

    def _look_at_ending(self, member: Member, ending: Termination, now_s: float) -> None:
        def on_failure(reason: str) -> None:
            self._owner.on_event("kill_failed", component=member.name, incarnation=member.incarnation, reason=reason)

        if not ending.poll(now_s, on_failure):
            return
        member.ending = None
        if member.leaving:
            member.enter("removed", now_s)
        elif member.given_up or (member.spec.essential and not member.wanted):
            member.enter("lost", now_s)
            if not member.given_up and member.identity is not None:
                self._owner.on_loss(member.identity, member.reason)
        else:
            member.enter("waiting", now_s)
