"""What connections and requests must pass before any handler sees them: who asks, under which name, how much, how long.

What holds for requests is ASGI middleware, for every route alike; no handler sees what did not pass. Bodies must be
declared as JSON: a web page of another origin cannot post one without the browser asking first, which is refused. A
page whose own name points at this machine (DNS rebinding) is of the same origin: its `Host` gives it away, and where
there is no token only names of this machine are answered.

Connections cost memory and descriptors before anybody has shown a token, so each phase of one has its time and their
number its bounds; where a new one is too many, the oldest that no request keeps busy is closed.
"""

import asyncio
import hmac
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.inference.schema import ApiError
from penstock.types.addresses import bracketed

SMALL_BODY_BYTES = 256 * 1024
"""Whatever JSON a body of this size holds, it is parsed within some 15 ms."""

MOST_CONTAINERS = 65_536
MOST_COMMAS = 262_144
"""Of a larger body: as much as a parser gets through within some 20 ms, during which nothing else runs."""

HEADER_S = 10.0
"""From the opening of a connection, or the first byte of a later request, to the end of the headers."""

BODY_S = 30.0
"""From there to the end of the body."""

KEEP_ALIVE_S = 75
"""Idle connections stay open so long, longer than `connection.KEEP_ALIVE_S`: the client is the one to close them."""

WRITE_S = 30.0
"""The connection of a client that reads nothing of its answer for so long is closed."""

MOST_CONNECTIONS_OF_ONE_PEER = 256
"""Of one address, as far as they have shown no token. Where none is asked for, all of this machine are one peer."""

FEWEST_CONNECTIONS = 16
"""Of the whole server, however few descriptors it may open."""

MOST_ACCEPTED_AT_ONCE = 32
"""In one turn of the event loop, before any of them is read and other tasks have their turn."""

DESCRIPTORS_KEPT = 128
"""Of those that the process may open, for everything but connections."""

MOST_HEADER_BYTES = 16 * 1024
DISCARD_S = 2.0
MOST_DISCARDED_BYTES = 16 * 1024 * 1024
"""Of the body of a request that is refused, within `DISCARD_S`."""

MOST_CHUNKS = 1024
"""Of one body that is sent in chunks: each costs the event loop some 15 µs, however small it is."""

TOKEN_SHOWN = "token_shown"
"""In a scope's ``state``: the request came with the token."""
_HEADERS_END = re.compile(rb"\n\r?\n")
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[0-9a-z._-]{1,253})(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may ask a server, and how much at once.

    Attributes:
        token: What clients must send; None asks for nothing.
        host: Without a token, requests are answered under this name and those of the loopback address only.
        max_body_bytes: Larger bodies are refused; None takes what a run's own clients send at most with a token, and
            256 KiB without.
        max_waiting: POSTs beyond so many unanswered ones are refused.
    """

    token: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    max_body_bytes: int | None = None
    max_waiting: int = 256

    def middleware(self, largest_known_body: int) -> list[Middleware]:
        """What stands before the handlers, the outermost first.

        Args:
            largest_known_body: In bytes, of a run's own clients.
        """
        if self.token is None:
            who, derived = Middleware(KnownHost, host=self.host), SMALL_BODY_BYTES
        else:
            knows = partial(hmac.compare_digest, f"Bearer {self.token}".encode())
            who, derived = Middleware(BearerToken, knows=knows), max(largest_known_body, SMALL_BODY_BYTES)
        most_bytes = derived if self.max_body_bytes is None else self.max_body_bytes
        return [who, Middleware(BoundedPosts, most_bytes=most_bytes, most_unanswered=self.max_waiting)]


class KnownHost:
    """ASGI middleware: requests to other names than those of the loopback address, or `host`, get status 421.

    Args:
        app: What is guarded.
        host: The address that the server listens on, as given to it.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._known = {"127.0.0.1", "localhost", "[::1]", bracketed(host).lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 421."""
        if scope["type"] == "http":
            named = Headers(scope=scope).getlist("host")
            if len(named) != 1 or not self._knows(named[0]):
                found = f"Host is {', '.join(named)!r:.100}" if named else "there is no Host header"
                known = ", ".join(sorted(self._known))
                message = f"{found}: without a token this server answers only as {known}; set a token to lift that"
                await _refuse(ApiError(421, message, code="unknown_host"), scope, _Incoming(receive), send)
                return
        await self._app(scope, receive, send)

    def _knows(self, host: str) -> bool:
        match = _HOST.fullmatch(host.strip().lower())
        return match is not None and match[1] in self._known and int(match[2] or 0) <= 65535


class BearerToken:
    """ASGI middleware: every path but ``/health`` needs ``Authorization: Bearer <token>``.

    Args:
        app: What is guarded.
        knows: Whether that is what the header says; it compares in constant time.
    """

    def __init__(self, app: ASGIApp, knows: Callable[[bytes], bool]) -> None:
        self._app, self._knows = app, knows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            shown = self._knows(given)
            scope.setdefault("state", {})[TOKEN_SHOWN] = shown
            if not shown and scope["path"] != "/health":
                refusal = ApiError(401, "missing or wrong token in the Authorization header", code="invalid_api_key")
                await _refuse(refusal, scope, _Incoming(receive), send)
                return
        await self._app(scope, receive, send)


class BoundedPosts:
    """ASGI middleware: bounds each POST's body and how many POSTs are unanswered, whatever their path.

    A body that is still on its way holds no place among the unanswered (slow clients would keep all others out): those
    are bounded by the connections, each of which has one.

    Args:
        app: What is guarded; it gets the whole body in one message.
        most_bytes: Of a body.
        most_unanswered: POSTs whose body is here.
    """

    def __init__(self, app: ASGIApp, most_bytes: int, most_unanswered: int) -> None:
        self._app, self._most_bytes, self._most_unanswered = app, most_bytes, most_unanswered
        self._unanswered = 0  # touched by the event loop only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 413, 415 or 429."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        incoming = _Incoming(receive)
        try:
            body = await self._read(Headers(scope=scope), incoming)
            self._refuse_if_full()
        except ApiError as refusal:
            await _refuse(refusal, scope, incoming, send)
            return
        if body is None:
            return  # the client went away
        self._unanswered += 1
        try:
            await self._app(scope, _replayed(body, receive), send)
        finally:
            self._unanswered -= 1

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        self._refuse_if_full()
        declared = headers.get("content-type", "").partition(";")[0].strip().lower()
        if declared != "application/json" and (declared or headers.get("content-length") != "0"):
            raise ApiError(415, f"content-type is {declared!r}: it must be application/json")
        too_large = ApiError(413, f"the body is larger than {self._most_bytes} bytes", code="request_too_large")
        if _declared_bytes(headers) > self._most_bytes:
            raise too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                raise too_large
            if not message.get("more_body", False):
                _refuse_if_intricate(body)
                return bytes(body)

    def _refuse_if_full(self) -> None:
        if self._unanswered >= self._most_unanswered:
            message = f"{self._unanswered} requests are unanswered: try again later"
            raise ApiError(429, message, code="rate_limit_exceeded")


class _Incoming:
    """A request's body as it comes in; `ended` says that nothing of it is left to come."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.ended = receive, False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.ended = not message.get("more_body", False)
        return message


async def _refuse(refusal: ApiError, scope: Scope, incoming: _Incoming, send: Send) -> None:
    """Answers once the rest of the body is here, and thrown away: a client that is cut off never reads why.

    One that sends slowly, in chunks or too much, or waits to be asked for its body, is answered at once.
    """
    headers = Headers(scope=scope)
    if "expect" not in headers and 0 < _declared_bytes(headers) <= MOST_DISCARDED_BYTES:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(DISCARD_S, BODY_S / 2)):
                while not incoming.ended:
                    await incoming()
    await refusal.response()(scope, incoming, send)


def _declared_bytes(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else 0


def _refuse_if_intricate(body: bytearray) -> None:
    """Counts what costs a parser time: lists, objects, names and what they hold, or signs of them within texts."""
    if len(body) <= SMALL_BODY_BYTES:
        return
    containers, names, commas = body.count(b"[") + body.count(b"{"), body.count(b":"), body.count(b",")
    if max(containers, names) > MOST_CONTAINERS or commas > MOST_COMMAS:
        raise ApiError(
            413,
            f"the body is larger than {SMALL_BODY_BYTES} bytes and holds {containers} brackets, {names} colons and "
            f"{commas} commas: at most {MOST_CONTAINERS}, as many, and {MOST_COMMAS}; send several requests",
            code="request_too_large",
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body in one message, and then whatever comes: the client's departure."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


class BoundedConnection(H11Protocol):
    """One connection: bounded in time, and in what it may send at once."""

    transport: asyncio.Transport
    connections: "set[BoundedConnection]"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.conn = self._parser = _Parser(h11.SERVER, MOST_HEADER_BYTES)
        self.peer = ""  # its address without the port
        self._seen: tuple[object, ...] = ()
        self._seen_since = self.opened_at = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Where there are too many, the oldest idle one is closed, or this one."""
        super().connection_made(transport)
        # asyncio would read 256 KiB from each connection in one turn.
        transport.max_size = MOST_HEADER_BYTES  # pyright: ignore[reportAttributeAccessIssue]
        self.peer = self.client[0] if self.client else ""
        others = [each for each in self.connections if each is not self]
        strangers = [each for each in others if each.peer == self.peer and not each.is_known]
        if len(strangers) >= MOST_CONNECTIONS_OF_ONE_PEER:
            self._evict_oldest(strangers)
        elif len(others) >= _most_connections():
            self._evict_oldest([each for each in others if not each.is_known] or others)

    def data_received(self, data: bytes) -> None:
        """In pieces: h11 checks the size of headers and trailers only after it has buffered all that it was given."""
        for start in range(0, len(data), MOST_HEADER_BYTES):
            if self.transport.is_closing():
                break
            super().data_received(data[start : start + MOST_HEADER_BYTES])

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, unless the request has its answer already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def is_known(self) -> bool:
        """Whether its last request came with the token."""
        return bool(self.scope and self.scope.get("state", {}).get(TOKEN_SHOWN))

    @property
    def is_busy(self) -> bool:
        """Whether a request is here whole, and not answered yet."""
        unanswered = self.cycle is not None and not self.cycle.response_complete
        return unanswered and self.conn.their_state is not h11.SEND_BODY

    def enforce_limits(self, now: float) -> None:
        """Closes the connection where it has been in the same state for longer than that may last."""
        limit_s, *state = self._state()
        if self._seen != (seen := (limit_s, *state)):
            self._seen, self._seen_since = seen, now
        elif limit_s is not None and now - self._seen_since > limit_s:
            if self.transport.get_write_buffer_size() or self.transport.is_closing():
                self.transport.abort()
            else:
                self._refuse(408, f"nothing more came for {limit_s:g} s")

    def _state(self) -> tuple[float | None, object, object]:
        """How long its state may last, and what tells it from a later one of that kind."""
        unsent, state = self.transport.get_write_buffer_size(), self.conn.their_state
        if unsent or self.transport.is_closing():
            return WRITE_S, "writing", unsent
        if state is h11.IDLE:
            begun = self._parser.requests == 0 or bool(self.conn.trailing_data[0])
            return (HEADER_S if begun else KEEP_ALIVE_S), begun, self._parser.requests
        return (BODY_S if state is h11.SEND_BODY else None), state, self._parser.requests

    def _evict_oldest(self, candidates: "list[BoundedConnection]") -> None:
        """Closes the oldest that is not busy; where all are, this one."""
        idle = [each for each in candidates if not each.is_busy and not each.transport.is_closing()]
        chosen = min(idle, key=lambda each: each.opened_at, default=self)
        chosen._refuse(503, "too many connections are open")

    def _refuse(self, status: int, message: str) -> None:
        answered = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        idle = self._parser.requests > 0 and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not answered and not idle:
            content = bytes(ApiError(status, message).response().body)
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nconnection: close\r\n"
            kind = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            self.transport.write(f"{head}{kind}".encode() + content)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class _Parser(h11.Connection):
    """Counts requests, and refuses what would take the event loop long although h11's own limit allows it."""

    def __init__(self, role: Any, most_bytes: int) -> None:
        super().__init__(role, most_bytes)
        self.requests, self._chunks = 0, 0

    def next_event(self) -> Any:
        """See h11.

        Raises:
            h11.RemoteProtocolError: too large a header, or a body in too many chunks.
        """
        if self.their_state is h11.IDLE and len(ahead := self.trailing_data[0]) > MOST_HEADER_BYTES:
            if not _HEADERS_END.search(ahead, 0, MOST_HEADER_BYTES):
                raise h11.RemoteProtocolError(f"headers of more than {MOST_HEADER_BYTES} bytes", 431)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.requests, self._chunks = self.requests + 1, 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError(f"a body in more than {MOST_CHUNKS} chunks", 413)
        return event


def _most_connections() -> int:
    """Of the whole server, so that descriptors are left when as many again are accepted before any is looked at."""
    return max(
        FEWEST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - MOST_ACCEPTED_AT_ONCE - DESCRIPTORS_KEPT
    )
