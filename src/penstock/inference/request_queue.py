"""Requests that wait for a server: for one to live, to have room, or to be worth another try.

They are served in the order in which they first came: where an earlier one waits for room, no later one takes it, so
that large requests are not overtaken for ever by small ones.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from penstock.inference.routing import Routing, Server, Target
from penstock.types import UnreachableError


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    tokens: int
    session: str | None
    target: Target | None
    since: float
    found: "asyncio.Future[Server]"


class RequestQueue:
    """Admits requests to servers. Used by one event loop; `waited_s` and `length` may be read by any thread.

    Args:
        routing: Chooses.
        clock: Seconds that only grow.
    """

    def __init__(self, routing: Routing, clock: Callable[[], float]) -> None:
        self._routing, self._clock = routing, clock
        self._waiting: dict[int, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._past_waits_s = 0.0

    @property
    def length(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def waited_s(self) -> float:
        """Seconds that requests have waited, all together, those that still wait included."""
        now = self._clock()
        return self._past_waits_s + sum(max(0.0, now - waiter.since) for waiter in list(self._waiting.values()))

    async def admit(self, number: int, tokens: int, session: str | None, target: Target | None) -> Server:
        """Waits for a server; the request then counts as outstanding there until it is released.

        Args:
            number: Of the request; smaller ones go first.
            tokens: What it asks for.
            session: Its conversation.
            target: The only server that will do.

        Raises:
            UnreachableError: the one incarnation that will do does not live.
        """
        found: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(tokens, session, target, self._clock(), found)
        self._waiting[number] = waiter
        self._fail_if_gone(waiter)
        self.dispatch()
        try:
            return await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled() and found.exception() is None:
                self.release(found.result(), tokens)  # it was found in the moment of leaving
            raise
        finally:
            self._waiting.pop(number, None)
            self._past_waits_s += max(0.0, self._clock() - waiter.since)

    def release(self, server: Server, tokens: int) -> None:
        """A request is over: others may have its room."""
        self._routing.release(server, tokens)
        self.dispatch()

    def servers_changed(self) -> None:
        """The routing has other servers now."""
        for waiter in self._waiting.values():
            self._fail_if_gone(waiter)
        self.dispatch()

    def dispatch(self) -> None:
        """Gives servers to those who wait, as far as there are any."""
        now, everywhere = self._clock(), frozenset(server.name for server in self._routing.servers)
        full: frozenset[str] = frozenset()
        for number in sorted(self._waiting):
            waiter = self._waiting[number]
            if waiter.found.done():
                continue
            choice = self._routing.choose(waiter.tokens, waiter.session, waiter.target, now, full)
            if isinstance(choice, Server):
                waiter.found.set_result(choice)
            else:
                full |= choice
            if full == everywhere:
                break
        self._look_again(now)

    def _look_again(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        chance = self._routing.next_chance(now)
        if self._waiting and chance is not None:
            self._timer = asyncio.get_running_loop().call_later(chance - now, self.dispatch)

    def _fail_if_gone(self, waiter: _Waiter) -> None:
        target = waiter.target
        if target is None or target.incarnation is None or self._routing.lives(target) or waiter.found.done():
            return
        message = f"inference server {target.name}#{target.incarnation} does not live: ask another"
        waiter.found.set_exception(UnreachableError(message))
