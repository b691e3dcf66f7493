"""A rollout worker as a coroutine: the protocol of the real one, with an engine that only takes time.

It says to the replay buffer what `penstock.replay.RemoteTickets` and `RemoteSink` say, numbers its requests as they do,
and repeats what was not answered. It asks for the run's clock as often as a real one.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.scale.latencies import Latencies
from benchmarks.scale.making import GroupMaker
from penstock.overseer.component import ASK_S
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus, Membership
from penstock.replay import batch_to_buffer
from penstock.types import PenstockError, Stopped, Ticket, UnreachableError

ASK_FOR_TICKETS_S = 2.0
"""Longest wait for tickets in one call."""
CALL_S = 60.0
PAUSE_S = 0.5

AsyncCall = Callable[..., Awaitable[Any]]
"""(method, *arguments) → result, of the living replay buffer."""


class SimulatedWorker:
    """Implements `Component`; all workers of a process share its event loop.

    Args:
        around: What its host gives it.
        call: Reaches the replay buffer.
        loop: Where it runs.
        pace: Latencies at present, the same for all.
        hurry: Once it is set, engines answer at once; what was begun is delivered, and nothing new is asked for.
        note_group: Told of each group that was taken.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        call: AsyncCall,
        loop: asyncio.AbstractEventLoop,
        pace: Callable[[], Latencies],
        hurry: asyncio.Event,
        note_group: Callable[[str], None],
    ) -> None:
        self._around, self._loop, self._pace, self._note_group = ctx, loop, pace, note_group
        self._call_replay = call
        identity = ctx.identity
        self._me = (identity.name, identity.incarnation)
        self._rng = random.Random(identity.index)
        self._make = GroupMaker(identity.name)
        self._hurry = hurry
        self._numbers = {"acquire": 1, "deliver": 1}
        self._clock_offset, self._clock_due = 0.0, 0.0
        self._groups, self._running, self._full = 0, 0, 0
        self._state: Any = "starting"
        self._draining = self._done = False
        self._error = ""
        self._view = ctx.view

    def start(self) -> None:
        """See `Component.start`."""
        asyncio.run_coroutine_threadsafe(self._live(), self._loop)

    def look(self, view: Membership) -> None:
        """See `Component.look`."""
        self._view = view

    def drain(self) -> None:
        """See `Component.drain`."""
        self._draining = True

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        self.drain()

    def condition(self) -> ComponentStatus:
        """See `Component.condition`: as many numbers as a real worker gives."""
        counts = {"finished": self._groups, "failed": 0, "running": self._running}
        return ComponentStatus(
            self._state,
            "generating" if self._running else "waiting for tickets",
            float(self._groups) if self._running else None,
            metrics={f"rollout/groups_{name}": float(count) for name, count in counts.items()},
            facts={"tasks": {}, "groups": counts, "last_failure": "", "full": self._full, "done": self._done},
            error=self._error,
        )

    # --- the coroutine ---------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        self._state = "running"
        try:
            share = self._rng.random()  # of the first answer is there already: nobody begins in step with the others
            while not (self._hurry.is_set() or self._draining):
                for ticket in await self._acquire():
                    self._running = 1
                    await self._generate(share)
                    share = 1.0
                    await self._deliver(ticket)
                    self._running = 0
            self._state, self._done = "drained" if self._draining else "running", True
        except Stopped:
            self._state = "drained"
        except PenstockError as error:  # its condition, as of a real one
            self._state, self._error = "failed", f"{type(error).__name__}: {error}"

    async def _generate(self, share: float) -> None:
        try:
            await asyncio.wait_for(self._hurry.wait(), share * self._pace().at(self._rng.random()))
        except TimeoutError:
            return

    async def _acquire(self) -> list[Ticket]:
        asked = (*self._me, self._view.lineage, self._numbers["acquire"], 1, ASK_FOR_TICKETS_S, None)
        try:
            tickets = await self._call_replay("acquire", *asked)
        except UnreachableError:
            await asyncio.sleep(PAUSE_S)
            return []
        self._numbers["acquire"] += 1
        return tickets

    async def _deliver(self, ticket: Ticket) -> None:
        batch = self._make(ticket, self._view.lineage, await self._now())
        message = bytes(memoryview(batch_to_buffer(batch)))
        while True:
            try:
                sender = (*self._me, self._view.lineage, self._numbers["deliver"])
                answer = await self._call_replay("deliver", *sender, message)
            except UnreachableError:
                answer = "unanswered"
            if answer in ("taken", "refused"):
                break
            self._full += answer == "full"
            await asyncio.sleep(PAUSE_S)
        self._numbers["deliver"] += 1
        if answer == "taken":
            self._groups += 1
            self._note_group(ticket.ticket_id)

    async def _now(self) -> float:
        """The run's clock, asked for now and then."""
        if time.monotonic() >= self._clock_due:
            self._clock_due = time.monotonic() + ASK_S
            try:
                self._clock_offset = await self._call_replay("now") - time.monotonic()
            except UnreachableError:
                self._clock_due = 0.0
        return self._clock_offset + time.monotonic()
