"""The supervisor: keeps the components of a run alive, and knows which of them live.

`tick` never waits: it looks at the answers that have come, notices death and silence, ends what is dead or hangs,
starts what is due, and asks on. It is the only restarter of a run. A component is started again only after its old
process is gone for certain, and under an incarnation that nobody had before, so that a late message can be told from a
living one's. Time in which the overseer itself was suspended is held against nobody.

One thread calls everything but `view`, `reports` and `call`, which any thread may use.
Not covered: what a loss of the learner or the replay buffer means for the run; that is `penstock.overseer.run`'s.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.overseer.config import OverseerConfig
from penstock.overseer.launch.launcher import Handle, Launcher
from penstock.overseer.supervisor.heartbeat import Heartbeat
from penstock.overseer.supervisor.member import ComponentSpec, Lifecycle, Member, RestartBudget, SupervisorOwner
from penstock.overseer.supervisor.messages import Identity, Membership, Report
from penstock.overseer.supervisor.scaling import SpecMaker, size_changes
from penstock.overseer.supervisor.stopping import Background, stop_all
from penstock.overseer.supervisor.stragglers import Stragglers
from penstock.types import ConfigError, RunFailed, UnreachableError
from penstock.types.calls import in_background

MOST_NAMED = 6
"""Of those who owe progress, so many are named."""


def _some(sentences: list[str]) -> str:
    more = len(sentences) - MOST_NAMED
    return "; ".join(sentences[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


class SuspendAwareClock:
    """A clock that only runs while it is looked at.

    When the overseer itself stood still, stopped by a signal or suspended with its machine, everybody seems to have
    been silent for as long; so a single tick adds `most_s` at most.

    Args:
        clock: Monotonic seconds.
        most_s: Longest time between two ticks that counts.
    """

    def __init__(self, clock: Callable[[], float], most_s: float) -> None:
        self._clock = clock
        self._most_s = most_s
        self._read_at = clock()
        self.now_s = 0.0

    def tick(self) -> None:
        """Brings `now_s` up to date."""
        read = self._clock()
        self.now_s += min(max(0.0, read - self._read_at), self._most_s)
        self._read_at = read


STRAGGLERS_S = 5.0
"""Seconds between two comparisons of peers."""


class Supervisor:
    """Starts, watches, ends and restarts components.

    Args:
        launcher: Starts their processes.
        config: Limits and intervals.
        owner: Hears of messages, events and losses.
        clock: Monotonic seconds.
        background: Where calls that wait are made.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: OverseerConfig,
        owner: SupervisorOwner,
        *,
        clock: Callable[[], float] = time.monotonic,
        background: Background = in_background,
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._on_event = owner.on_event
        self._background = background
        self._patience = SuspendAwareClock(clock, config.heartbeat_timeout_s / 4)
        self._members: dict[str, Member] = {}
        self._incarnations: dict[str, int] = {}
        self._scalable: dict[str, tuple[SpecMaker, int]] = {}
        self._stragglers = Stragglers(config.straggler_factor)
        self._stragglers_due = 0.0
        self._lives = Lifecycle(config, owner, self._stragglers, background)
        self._started = 0
        self._view = Membership()
        self._reports: Mapping[str, Report] = {}
        self._handles: Mapping[str, Handle] = {}

    # --- what the conductor asks for -----------------------------------------------------------------------------

    def add(self, spec: ComponentSpec) -> None:
        """Keeps a component alive from the next tick on.

        Raises:
            ValueError: there is one of that name.
        """
        if spec.name in self._members:
            raise ValueError(f"{spec.name} was added before: each component has an index of its own")
        member = Member(spec, RestartBudget(self._config))
        member.enter("waiting", self._now)
        self._members[spec.name] = member

    def scalable(self, role: str, make: SpecMaker, least: int = 1) -> None:
        """Lets the number of a role's components change while the run goes on.

        Args:
            role: Which.
            make: Index → component.
            least: So many there must be.
        """
        self._scalable[role] = make, least

    def scale(self, role: str, count: int, *, where_there_is_room: bool = False) -> None:
        """Adds components of a role, or drains and removes those of the highest indexes; returns at once.

        Args:
            role: One that is `scalable`.
            count: How many there shall be, not counting those that are leaving already.
            where_there_is_room: Refuses what there is no room for now. Otherwise as many are added as find room.

        Raises:
            ConfigError: the role cannot be scaled, or not to that number; then nothing changes.
        """
        staying = {m.spec.index for m in self._members.values() if m.spec.role == role and not m.leaving}
        taken = {m.spec.index for m in self._members.values() if m.spec.role == role}
        more, fewer = size_changes(self._scalable, role, count, staying, taken)
        if where_there_is_room and more:
            waiting = [m.spec.resources for m in self._members.values() if m.phase == "waiting"]
            self._launcher.check_room([(Identity(role, spec.index, 0), spec.resources) for spec in more], waiting)
        self._on_event("scale", role=role, before=len(staying), after=count)
        for spec in more:
            self.add(spec)
            self._members[spec.name].added_later = True
        for index in fewer:
            self.drain(f"{role}-{index}", f"scaled to {count}")

    def drain(self, name: str, reason: str = "asked to") -> None:
        """Lets a component finish what it began, within `no_progress_s`; then it is ended and taken out.

        One that is starting is ended at once, one that waits for its restart is taken out at once.

        Raises:
            ValueError: there is none of that name.
        """
        member = self._member(name)
        if member.leaving:
            return
        member.leaving, member.leave_by = True, self._now + self._config.no_progress_s
        self._on_event("draining", component=name, reason=reason)
        if member.phase == "starting":
            self._lives.end(member, reason, self._now)
        elif member.phase in ("waiting", "lost"):
            member.enter("removed", self._now)

    def end(self, name: str, reason: str) -> None:
        """Ends a living component, which costs it none of its restarts.

        Then the owner is told of an essential one, and any other is started again. Nothing happens where it does not
        live.

        Raises:
            ValueError: there is none of that name.
        """
        member = self._member(name)
        if member.alive:
            self._lives.end(member, reason, self._now)

    def respawn(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """Starts a new incarnation as soon as the old process is gone and the wait after a death is over.

        One that lives is ended first; the owner is not told of a loss.

        Args:
            name: Which.
            settings: New ones; None keeps the old.

        Raises:
            ValueError: there is none of that name.
        """
        member = self._member(name)
        if settings is not None:
            member.spec = replace(member.spec, settings=settings)
        member.wanted, member.given_up = True, False
        if member.alive:
            self._lives.end(member, "to be started anew", self._now)
        elif member.phase == "lost":
            member.enter("waiting", self._now)

    def set_lineage(self, lineage: int) -> None:
        """Of all views from now on."""
        self._view = replace(self._view, number=self._view.number + 1, lineage=lineage)

    def tick(self) -> None:
        """Looks once; never waits.

        Raises:
            RunFailed: a component died more often than its budget allows, or cannot be shown to be dead. Raised once;
                ticks after it go on with the others, so that the run can end in good order.
            ConfigError: a component refused what it was given before any of its role ran; likewise.
            PenstockError: whatever the launcher, or the owner raised.
        """
        self._patience.tick()
        self._lives.late.poll()
        failure: RunFailed | ConfigError | None = None
        for member in list(self._members.values()):
            try:
                self._lives.look(member, self._now)
            except (RunFailed, ConfigError) as error:  # the others are looked at first
                failure = failure or error
        self._take_out()
        self._start_due()
        self._publish()
        for member in self._members.values():
            if member.heartbeat is not None:
                member.heartbeat.ask(self._view, self._now)
        self._look_for_stragglers()
        if failure is not None:
            raise failure

    def stop(self, timeout_s: float) -> list[str]:
        """Stops, hears out and ends every component, within the limit; nothing is started again.

        Returns:
            The incarnations whose end could not be established.
        """
        members = self._members
        handles = [(m.heartbeat.handle, m.heartbeat.acknowledged) for m in members.values() if m.heartbeat is not None]
        left = stop_all(
            handles,
            self._view,
            self._hear_last,
            lambda who, reason: self._on_event("stop_failed", component=who, reason=reason),
            self._background,
            timeout_s,
        )
        left += [str(m.identity) for m in members.values() if m.ending is not None and not m.ending.gone]
        members.clear()
        self._publish()
        return sorted(left)

    # --- what anybody may read -----------------------------------------------------------------------------------

    @property
    def view(self) -> Membership:
        """Who lives."""
        return self._view

    @property
    def reports(self) -> Mapping[str, Report]:
        """Name → the newest report of its living incarnation, where that has answered."""
        return self._reports

    def call(self, name: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method of the living incarnation of a component.

        Raises:
            UnreachableError: none lives, it died, or it did not answer within the limit.
            PenstockError: what the method raised.
        """
        handle = self._handles.get(name)
        if handle is None:
            raise UnreachableError(f"{name} is not running at present: {method} was not called")
        return handle.call(method, *args, timeout_s=timeout_s)

    # --- what the supervising thread may ask ---------------------------------------------------------------------

    def names(self, role: str) -> list[str]:
        """The components of a role that are there and not leaving, whether they live at present or not."""
        return [m.name for m in self._members.values() if m.spec.role == role and not m.leaving]

    def is_gone(self, name: str) -> bool:
        """Whether it has no process at present, for certain: nobody writes its files."""
        return self._member(name).phase in ("lost", "waiting")

    def stalled_components(self) -> str:
        """In words: those who work and get nowhere, the longest silent first, then those who do not live."""
        members, now_s = self._members.values(), self._now
        owing = sorted((m for m in members if m.stuck_s(now_s) > 0), key=lambda m: -m.stuck_s(now_s))
        said = [f"{m.in_words(now_s)} without progress for {m.stuck_s(now_s):.0f} s" for m in owing]
        said += [m.in_words(now_s) for m in members if m.phase != "living"]
        if said:
            return _some(said)
        return "nobody owes progress, all wait for one another: " + _some([m.in_words(now_s) for m in members])

    def counters(self) -> dict[str, float]:
        """For the watchdog: changes while any component moves, starts or dies.

        Incarnation → its progress, of all that ever owed some, or the seconds that it has been starting for: a start is
        movement, since it has a limit of its own.
        """
        members = self._members.values()
        starting = {str(m.identity): self._now - m.started_at for m in members if m.is_starting}
        moving = {str(m.identity): m.progress for m in members if m.progress is not None}
        return moving | starting | {"starts": float(self._started), "deaths": float(self._lives.deaths)}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Name → how it is, as JSON values, in the order of roles and indexes."""
        ordered = sorted(self._members.values(), key=lambda member: (member.spec.role, member.spec.index))
        return {member.name: member.describe(self._now) for member in ordered}

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl; all but the first only grow."""
        return {
            "overseer/components": float(sum(member.alive for member in self._members.values())),
            "overseer/starts_total": float(self._started),
            "overseer/deaths_total": float(self._lives.deaths),
            "overseer/late_messages_total": float(self._lives.late.count),
        }

    # --- all members ---------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._patience.now_s

    def _member(self, name: str) -> Member:
        if name not in self._members:
            raise ValueError(f"{name} is no component of this run; there are {', '.join(sorted(self._members))}")
        return self._members[name]

    def _hear_last(self, report: Report) -> None:
        self._lives.hear(self._members[report.identity.name], report, self._now)

    def _take_out(self) -> None:
        for member in [m for m in self._members.values() if m.phase == "removed"]:
            del self._members[member.name]
            self._on_event("component_removed", component=member.name, reason=member.reason)

    def _start_due(self) -> None:
        due = [m for m in self._members.values() if m.phase == "waiting" and self._now >= m.not_before]
        for member in due:
            incarnation = self._incarnations.get(member.name, -1) + 1
            self._incarnations[member.name] = incarnation
            member.begin(Identity(member.spec.role, member.spec.index, incarnation), self._now)
        if due:
            self._publish()
        for member in due:
            identity, spec = member.identity, member.spec
            assert identity is not None
            self._started += 1
            self._on_event("component_start", component=member.name, incarnation=identity.incarnation)
            try:
                handle = self._launcher.spawn(identity, spec.factory, spec.settings, spec.resources, self._view)
            except ConfigError as error:
                self._refuse(member, error)
                continue
            member.heartbeat = Heartbeat(handle, self._config, self._now)

    def _refuse(self, member: Member, error: ConfigError) -> None:
        """One that was asked for while the run goes on, and that fits nowhere, does not end the run."""
        if not member.added_later:
            raise error
        self._on_event("scale_refused", component=member.name, reason=str(error))
        member.reason = str(error)
        member.enter("removed", self._now)

    def _publish(self) -> None:
        """Renews the view where somebody came, went or moved, and what other threads read."""
        living = [member for member in self._members.values() if member.alive]
        peers = tuple(member.peer() for member in living)
        if peers != self._view.peers:
            self._view = replace(self._view, number=self._view.number + 1, peers=peers)
        self._reports = {member.name: member.report for member in living if member.report is not None}
        self._handles = {member.name: m.handle for member in living if (m := member.heartbeat) is not None}

    def _look_for_stragglers(self) -> None:
        if self._now < self._stragglers_due:
            return
        self._stragglers_due = self._now + STRAGGLERS_S
        for slow in self._stragglers.newly_slow(self._now):
            name = slow.identity.name
            factor = slow.median / slow.rate if slow.rate > 0 else None
            self._on_event(
                "straggler",
                component=name,
                incarnation=slow.identity.incarnation,
                rate=slow.rate,
                median=slow.median,
                factor=factor,
                replaced=self._config.replace_stragglers,
            )
            if self._config.replace_stragglers and self._members[name].alive:
                self._lives.end(self._members[name], "slower than its peers", self._now)
