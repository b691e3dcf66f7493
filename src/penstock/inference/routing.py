"""Which inference server the next request goes to, and the queue of requests that wait for one.

`Routing`: least outstanding tokens, and a session stays where it is. Pure bookkeeping, without sockets and without
locks: whoever owns a `Routing` calls it from one thread and says what time it is (seconds of any monotonic clock). It
knows what this client has outstanding, not what others have; a server that others keep busy answers more slowly, so
more of ours stays outstanding there and it gets less.

No request goes to a server that refused or failed before its back-off ends, twice as long each time; then one request
probes it, and the others follow when it has answered. A session waits for a server that refused it, and moves when its
server failed or is gone.

`RequestQueue`: requests wait for a server to live, to have capacity, or to be worth another try, and are served in the
order in which they first came: where an earlier one waits for capacity, no later one takes it, so that large requests
are not overtaken for ever by small ones.
"""

import asyncio
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.types import UnreachableError, WeightVersion

SHORTEST_REFUSAL_S, LONGEST_REFUSAL_S = 0.05, 2.0
SHORTEST_FAILURE_S, LONGEST_FAILURE_S = 0.1, 5.0
MOST_SESSIONS = 65_536
"""Sessions that are remembered; beyond, the one that was quiet for the longest is dropped and may move."""


@dataclass(frozen=True, slots=True, order=True)
class Server:
    """One incarnation of an inference server.

    Attributes:
        name: Of the component, such as ``inference-0``.
        incarnation: How often it was started before.
        url: Where it listens, such as ``http://127.0.0.1:8000``.
        accepting: Whether it takes new requests; one that drains only finishes those that it has.
        version: What it serves, as far as it was told; None: nobody knows.
    """

    name: str
    incarnation: int
    url: str
    accepting: bool = True
    version: WeightVersion | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    @property
    def identity(self) -> tuple[str, int, str]:
        """Name, incarnation and URL: another server if any of them changes."""
        return self.name, self.incarnation, self.url


@dataclass(frozen=True, slots=True)
class PinnedServer:
    """The only server that a request may go to.

    Attributes:
        name: Of the component.
        incarnation: Which one; None means whichever is alive.
    """

    name: str
    incarnation: int | None = None

    def admits(self, server: Server) -> bool:
        """Whether it is that server."""
        return server.name == self.name and self.incarnation in (None, server.incarnation)


@dataclass(slots=True)
class _State:
    server: Server
    tokens: int = 0
    chosen: int = 0
    refusals: int = 0
    failures: int = 0
    backoff_until: float = -math.inf
    probing: bool = False

    def back_off(self, now: float) -> None:
        """Backs off for as long as its refusals and failures in a row ask for."""
        pauses_s = (
            _pause_s(self.refusals, SHORTEST_REFUSAL_S, LONGEST_REFUSAL_S),
            _pause_s(self.failures, SHORTEST_FAILURE_S, LONGEST_FAILURE_S),
        )
        self.backoff_until = now + max(pauses_s)


class Routing:
    """The servers and what is outstanding at each.

    Args:
        most_tokens: Most tokens outstanding at one server; a larger request goes to one that has none of ours.
        salt: Breaks ties, so that many clients do not all begin with the same server.
    """

    def __init__(self, most_tokens: int, salt: int = 0) -> None:
        self._most_tokens, self._salt = most_tokens, salt
        self._states: dict[str, _State] = {}  # replaced, never changed, so that other threads may read it
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._choices = 0

    def set_servers(self, servers: Sequence[Server]) -> list[Server]:
        """Replaces the list of live servers.

        Returns:
            Those that are not alive any more, replaced ones included.
        """
        given = {server.name: server for server in servers}
        gone = [s.server for s in self._states.values() if not _is_unchanged(s.server, given)]
        kept = {name: s for name, s in self._states.items() if _is_unchanged(s.server, given)}
        for name, server in given.items():
            state = kept.setdefault(name, _State(server))
            if state.server.version != server.version and not state.failures:  # it may have been behind
                state.refusals, state.backoff_until, state.probing = 0, -math.inf, False
            state.server = server
        self._states = kept
        return gone

    @property
    def servers(self) -> tuple[Server, ...]:
        """The live servers, by name. Any thread may ask."""
        return tuple(state.server for _, state in sorted(self._states.items()))

    @property
    def outstanding(self) -> dict[str, int]:
        """Tokens by server. Any thread may ask."""
        return {name: state.tokens for name, state in sorted(self._states.items())}

    def choose(
        self,
        tokens: int,
        session: str | None,
        target: PinnedServer | None,
        now: float,
        full: frozenset[str] = frozenset(),
    ) -> Server | frozenset[str]:
        """The server for a request, which now counts as outstanding there.

        Args:
            tokens: Of its prompts and longest responses.
            session: Name of its conversation, which stays with one server; None goes anywhere.
            target: The only server that will do.
            now: Seconds, of the clock of every other call.
            full: Names of servers whose free capacity an earlier request waits for.

        Returns:
            The server; or, where there is none at present, the names of those whose capacity it waits for.
        """
        candidates = self._candidates(session, target, now)
        with_capacity = [s for s in candidates if s.server.name not in full and self._has_capacity(s, tokens)]
        if not with_capacity:
            return frozenset(s.server.name for s in candidates)
        best = min(
            with_capacity, key=lambda s: (s.tokens, s.chosen, zlib.crc32(f"{self._salt}{s.server.name}".encode()))
        )
        self._choices += 1
        best.tokens, best.chosen = best.tokens + tokens, self._choices
        if best.refusals or best.failures:
            best.probing = True
            best.back_off(now)
        if session is not None and target is None:
            self._pin(session, best.server.name)
        return best.server

    def release(self, server: Server, tokens: int) -> None:
        """The request is over, whatever became of it."""
        if state := self._state_of(server):
            state.tokens -= tokens

    def served(self, server: Server) -> None:
        """The server answered: its back-off ends."""
        if state := self._state_of(server):
            state.refusals = state.failures = 0
            state.backoff_until, state.probing = -math.inf, False

    def refused(self, server: Server, now: float) -> None:
        """The server is overloaded: no request goes there for a while."""
        state = self._state_of(server)
        if state and self._is_first_report(state, now):
            state.refusals += 1
            state.back_off(now)

    def failed(self, server: Server, now: float) -> None:
        """The server cannot be reached or cannot answer: it backs off for a while, and its sessions may move."""
        state = self._state_of(server)
        if state and (self._is_first_report(state, now) or not state.failures):
            state.failures += 1
            state.back_off(now)

    def next_chance(self, now: float) -> float | None:
        """When the next back-off ends; None where no server backs off."""
        return min((s.backoff_until for s in self._states.values() if s.backoff_until > now), default=None)

    def is_alive(self, target: PinnedServer) -> bool:
        """Whether the pinned server is among the live ones."""
        return any(target.admits(state.server) for state in self._states.values())

    def _candidates(self, session: str | None, target: PinnedServer | None, now: float) -> list[_State]:
        if target is not None:
            return [s for s in self._states.values() if target.admits(s.server) and now >= s.backoff_until]
        pinned = self._states.get(self._sessions.get(session, "")) if session is not None else None
        usable = [s for s in self._states.values() if s.server.accepting]
        if pinned is not None and pinned.server.accepting and not (pinned.failures and now < pinned.backoff_until):
            usable = [pinned]
        return [s for s in usable if now >= s.backoff_until]

    def _is_first_report(self, state: _State, now: float) -> bool:
        """Whether it does not back off yet: what several requests meet at once counts once."""
        is_first = state.probing or now >= state.backoff_until
        state.probing = False
        return is_first

    def _has_capacity(self, state: _State, tokens: int) -> bool:
        return state.tokens == 0 or state.tokens + tokens <= self._most_tokens

    def _pin(self, session: str, name: str) -> None:
        self._sessions[session] = name
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def _state_of(self, server: Server) -> _State | None:
        """None for a server that is gone meanwhile, or was replaced."""
        state = self._states.get(server.name)
        return state if state is not None and state.server.identity == server.identity else None


def _is_unchanged(server: Server, given: dict[str, Server]) -> bool:
    return server.name in given and given[server.name].identity == server.identity


def _pause_s(times: int, shortest_s: float, longest_s: float) -> float:
    return min(longest_s, shortest_s * 2 ** min(times - 1, 30)) if times else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    tokens: int
    session: str | None
    target: PinnedServer | None
    since: float
    found: "asyncio.Future[Server]"


class RequestQueue:
    """Admits requests to servers. Used by one event loop; `waited_s` and `length` may be read by any thread.

    Args:
        routing: Chooses the server; only this queue and its owner use it.
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

    async def admit(self, number: int, tokens: int, session: str | None, target: PinnedServer | None) -> Server:
        """Waits for a server; the request then counts as outstanding there until it is released.

        Args:
            number: Of the request; smaller ones go first.
            tokens: Of its prompts and longest responses.
            session: Name of its conversation, which stays with one server; None goes anywhere.
            target: The only server that will do.

        Raises:
            UnreachableError: the one incarnation that will do is not alive.
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
        """A request is over: others may have its capacity."""
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
        self._schedule_dispatch(now)

    def _schedule_dispatch(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        chance = self._routing.next_chance(now)
        if self._waiting and chance is not None:
            self._timer = asyncio.get_running_loop().call_later(chance - now, self.dispatch)

    def _fail_if_gone(self, waiter: _Waiter) -> None:
        target = waiter.target
        if target is None or target.incarnation is None or self._routing.is_alive(target) or waiter.found.done():
            return
        message = f"inference server {target.name}#{target.incarnation} does not live: ask another"
        waiter.found.set_exception(UnreachableError(message))
