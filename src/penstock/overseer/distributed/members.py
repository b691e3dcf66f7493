"""What the supervisor knows of one component: what it is, how far its present incarnation got, what happens next."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.overseer.config import OverseerConfig, RoleConfig
from penstock.overseer.distributed.component import Factory
from penstock.overseer.distributed.ending import Ending
from penstock.overseer.distributed.heartbeat import Heartbeat
from penstock.overseer.distributed.records import Identity, Peer, Report
from penstock.overseer.distributed.restarts import RestartBudget

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
    identity: Identity | None = None
    heartbeat: Heartbeat | None = None
    ending: Ending | None = None
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
        self.wanted, self.started_at, self.progress_at = False, now_s, now_s
        self.enter("starting", now_s)

    def enter(self, phase: Phase, now_s: float) -> None:
        """Moves on to another phase."""
        self.phase, self.phase_since = phase, now_s

    def note_progress(self, progress: float | None, now_s: float) -> None:
        """Takes a counter; None says that it waits for others."""
        if progress != self.progress or self.is_starting:  # None never equals what is kept
            self.progress_at = now_s
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
        """Whether it answers, but has been starting for too long."""
        return self.report is not None and self.is_starting and now_s - self.started_at > config.start_limit_s

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
