"""The connections to one incarnation of an inference server, and what its replies mean for a request.

A server that answers nothing while something of ours is outstanding is asked for its health; when that is not answered
either, all that waits for it fails at once, as it does when the server is known to be dead. So a stopped process or a
machine that vanished costs seconds, not the whole limit of a request.

- *status 429*: the server is overloaded; asked again after a pause, elsewhere where the request may;
- *status 502 to 504*: it cannot answer; asked again, elsewhere;
- *status 400 or 413*: the request itself is at fault, and asking again is useless;
- *any other status, or an answer that cannot be read*: asked again, but `MOST_SERVER_FAULTS` are the end of it.
"""

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx

from penstock.inference.codec import MalformedAnswer, ServerRequest
from penstock.inference.routing import Server
from penstock.types import ConfigError, EnvironmentFailure, RunFailed

CONNECT_S = 5.0
WRITE_S = 30.0
QUIET_S = 15.0
"""A server that sent nothing for so long, with requests outstanding, is asked for its health."""

HEALTH_S = 15.0
"""It then has so long to answer; one that compiles or shares its cores may take seconds."""

KEEP_ALIVE_S = 30.0
"""Idle connections are closed after this, before the server would do it (`access.KEEP_ALIVE_S`)."""

MOST_ANSWER_BYTES = 256 * 1024 * 1024


class ConnectionFailed(Exception):
    """The server cannot be reached, or went away before it answered."""


@dataclass(frozen=True, slots=True, eq=False)
class HttpReply:
    """A response, whatever its status."""

    status: int
    content: bytes


class ServerConnection:
    """Connections to one server, kept open between requests. Used by one event loop.

    Args:
        server: One incarnation, with its URL.
        token: Sent with each request; None sends none.
        tls: How its certificate is checked.
        clock: Seconds that only grow.
        quiet_s: As `QUIET_S`, in seconds.
        health_s: As `HEALTH_S`, in seconds.
    """

    def __init__(
        self,
        server: Server,
        token: str | None,
        tls: ssl.SSLContext,
        clock: Callable[[], float],
        quiet_s: float = QUIET_S,
        health_s: float = HEALTH_S,
    ) -> None:
        self._url = server.url
        self._clock, self._quiet_s, self._health_s = clock, quiet_s, health_s
        authorization = {} if token is None else {"authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity"} | authorization,
            timeout=httpx.Timeout(None, connect=CONNECT_S, write=WRITE_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            verify=tls,
            trust_env=False,
        )
        self._open, self._last_received_at = 0, clock()
        self._exchanges: set[asyncio.Task[HttpReply]] = set()
        self._aborted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._health_check: asyncio.Task[None] | None = None

    async def post(self, path: str, body: bytes) -> HttpReply:
        """Sends a JSON body and waits for the answer; how long is the caller's to limit.

        Raises:
            ConnectionFailed: there will be none.
        """
        if not self._open:
            self._last_received_at = self._clock()  # that nothing was asked before is not silence
        exchange, aborted = asyncio.ensure_future(self._exchange(path, body)), self._aborted
        exchange.add_done_callback(_retrieve_exception)
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        self._open += 1
        try:
            while not (exchange.done() or aborted.done()):
                await asyncio.wait({exchange, aborted}, timeout=self._quiet_s / 2, return_when=asyncio.FIRST_COMPLETED)
                self._check_health_if_quiet()
            if aborted.done() and not _succeeded(exchange):  # closing its connections fails it in ways of its own
                raise ConnectionFailed(aborted.result())
            return exchange.result()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._open -= 1
            exchange.cancel()

    def abort(self, reason: str) -> None:
        """Fails all requests that are outstanding now; later ones are sent as usual."""
        self._aborted.set_result(reason)
        self._aborted = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Ends what is under way, then closes the connections: one that is being made would be left open."""
        tasks = [*self._exchanges] if self._health_check is None else [*self._exchanges, self._health_check]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _exchange(self, path: str, body: bytes) -> HttpReply:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url + path, content=body, headers=headers) as response:
            self._last_received_at = self._clock()
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MOST_ANSWER_BYTES:
                    raise ConnectionFailed(f"the answer is larger than {MOST_ANSWER_BYTES} bytes")
        self._last_received_at = self._clock()
        return HttpReply(response.status_code, bytes(content))

    def _check_health_if_quiet(self) -> None:
        running = self._health_check is not None and not self._health_check.done()
        if not running and self._clock() - self._last_received_at >= self._quiet_s:
            self._health_check = asyncio.ensure_future(self._check_health())

    async def _check_health(self) -> None:
        try:
            await self._client.get(f"{self._url}/health", timeout=self._health_s)
            self._last_received_at = self._clock()
        except httpx.HTTPError as error:
            quiet_s = self._clock() - self._last_received_at
            self.abort(f"silent for {quiet_s:.0f} s and not to be asked for its health ({type(error).__name__})")


def _succeeded(exchange: "asyncio.Task[HttpReply]") -> bool:
    return exchange.done() and not exchange.cancelled() and exchange.exception() is None


def _retrieve_exception(exchange: "asyncio.Task[HttpReply]") -> None:
    """Marks the error of an exchange that nobody awaits as retrieved: asyncio would log it otherwise."""
    if not exchange.cancelled():
        exchange.exception()


MOST_SERVER_FAULTS = 8
"""Of one request; with the pauses between them they take about ten seconds."""

LONGEST_MESSAGE = 1000

_T = TypeVar("_T")


class RetryableFailure(Exception):
    """A request had no usable reply and should be sent again."""


class ServerBusy(RetryableFailure):
    """The server is overloaded."""


class ServerFault(RetryableFailure):
    """The server seems to be broken, or is none of ours."""


class RetryState:
    """The attempts at one request so far, and how many of them met a faulty server."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._faults = 0

    def begin(self, server: Server) -> None:
        """Another attempt begins."""
        self._times[str(server)] += 1
        self._last[str(server)] = "no answer yet"

    def add(self, server: Server, failure: RetryableFailure) -> None:
        """The attempt failed.

        Raises:
            RunFailed: too many attempts met a faulty server.
        """
        self._last[str(server)] = str(failure)
        self._faults += isinstance(failure, ServerFault)
        if self._faults >= MOST_SERVER_FAULTS:
            raise RunFailed(f"the answers of inference servers cannot be used: {self}") from failure

    def __str__(self) -> str:
        attempts = [f"{name} (times: {self._times[name]}, at last: {what})" for name, what in self._last.items()]
        return "asked " + ", ".join(attempts) if attempts else "none that may be asked was there and had room"


def result_of(answer: HttpReply, request: ServerRequest[_T]) -> _T | EnvironmentFailure:
    """The result that a reply holds.

    Raises:
        RetryableFailure: there is none; the request should be asked again.
        ConfigError: it asks for what no server can do.
    """
    if answer.status == 200:
        try:
            return request.read(answer.content)
        except MalformedAnswer as error:
            raise ServerFault(str(error)) from error
    message, code = _error(answer.content)
    if answer.status == 413 or (answer.status == 400 and code == "invalid_prompt"):
        return EnvironmentFailure(message)
    if answer.status == 400:
        raise ConfigError(f"an inference server refused the request: {message}")
    if answer.status == 429:
        raise ServerBusy(f"status 429, {message}")
    if answer.status in (502, 503, 504):
        raise RetryableFailure(f"status {answer.status}, {message}")
    raise ServerFault(f"status {answer.status}, {message}")


def _error(content: bytes) -> tuple[str, str]:
    """Message and code of an error object; something for whatever else it is."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"])[:LONGEST_MESSAGE], str(error["code"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"with a body of {len(content)} bytes that is no error object", ""
