"""The connections to one incarnation of an inference server, and what its replies mean for a request.

A server that answers nothing while something of ours is outstanding is asked for its health; when that is not answered
either, all that waits for it fails at once, as it does when the server is known to be dead. So a stopped process or a
machine that vanished costs seconds, not the whole limit of a request.

- *status 429*: the server is overloaded; asked again after a pause, elsewhere where the request may;
- *status 502 to 504*: it cannot answer; asked again, elsewhere;
- *status 400 or 413*: the request itself is at fault, and asking again is useless;
- *any other status, or an answer that cannot be read*: asked again, but `MOST_BAD_ANSWERS` are the end of it.
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
"""A server from which nothing was heard for so long is asked for its health."""

HEALTH_S = 15.0
"""It then has so long to answer; one that compiles or shares its cores may take seconds."""

KEEP_ALIVE_S = 30.0
"""Idle connections are closed after this, before the server would do it (`access.KEEP_ALIVE_S`)."""

MOST_ANSWER_BYTES = 256 * 1024 * 1024


class LinkFailed(Exception):
    """The server cannot be reached, or went away before it answered."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A response, whatever its status."""

    status: int
    content: bytes


class Link:
    """Connections to one server, kept open between requests. Used by one event loop.

    Args:
        server: Which.
        token: Sent with each request; None sends none.
        tls: How its certificate is checked.
        clock: Seconds that only grow.
        quiet_s: See `QUIET_S`.
        health_s: See `HEALTH_S`.
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
        self._open, self._heard_at = 0, clock()
        self._exchanges: set[asyncio.Task[Answer]] = set()
        self._cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._examination: asyncio.Task[None] | None = None

    async def post(self, path: str, body: bytes) -> Answer:
        """Sends a JSON body and waits for the answer; how long is the caller's to limit.

        Raises:
            LinkFailed: there will be none.
        """
        if not self._open:
            self._heard_at = self._clock()  # that nothing was asked before is not silence
        exchange, cut = asyncio.ensure_future(self._exchange(path, body)), self._cut
        exchange.add_done_callback(_look_at)
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        self._open += 1
        try:
            while not (exchange.done() or cut.done()):
                await asyncio.wait({exchange, cut}, timeout=self._quiet_s / 2, return_when=asyncio.FIRST_COMPLETED)
                self._examine_if_quiet()
            if cut.done() and not _succeeded(exchange):  # closing its connections fails it in ways of its own
                raise LinkFailed(cut.result())
            return exchange.result()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LinkFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._open -= 1
            exchange.cancel()

    def cut(self, reason: str) -> None:
        """Fails all that waits for an answer now; what comes later is tried anew."""
        self._cut.set_result(reason)
        self._cut = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Ends what is under way, then closes the connections: one that is being made would be left open."""
        tasks = [*self._exchanges] if self._examination is None else [*self._exchanges, self._examination]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _exchange(self, path: str, body: bytes) -> Answer:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url + path, content=body, headers=headers) as response:
            self._heard_at = self._clock()
            content = bytearray()
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > MOST_ANSWER_BYTES:
                    raise LinkFailed(f"the answer is larger than {MOST_ANSWER_BYTES} bytes")
        self._heard_at = self._clock()
        return Answer(response.status_code, bytes(content))

    def _examine_if_quiet(self) -> None:
        running = self._examination is not None and not self._examination.done()
        if not running and self._clock() - self._heard_at >= self._quiet_s:
            self._examination = asyncio.ensure_future(self._examine())

    async def _examine(self) -> None:
        try:
            await self._client.get(f"{self._url}/health", timeout=self._health_s)
            self._heard_at = self._clock()
        except httpx.HTTPError as error:
            quiet_s = self._clock() - self._heard_at
            self.cut(f"silent for {quiet_s:.0f} s and not to be asked for its health ({type(error).__name__})")


def _succeeded(exchange: "asyncio.Task[Answer]") -> bool:
    return exchange.done() and not exchange.cancelled() and exchange.exception() is None


def _look_at(exchange: "asyncio.Task[Answer]") -> None:
    """Keeps the loop from complaining of errors that nobody waits for any more."""
    if not exchange.cancelled():
        exchange.exception()


MOST_BAD_ANSWERS = 8
"""Of one request; with the pauses between them they take about ten seconds."""

LONGEST_MESSAGE = 1000

_T = TypeVar("_T")


class Unanswered(Exception):
    """A request that should be asked again."""


class Refused(Unanswered):
    """By a server that has too much to do."""


class BadAnswer(Unanswered):
    """By a server that seems to be broken, or none of ours."""


class Trials:
    """What became of one request so far."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._bad_answers = 0

    def begin(self, server: Server) -> None:
        """It is asked once more."""
        self._times[str(server)] += 1
        self._last[str(server)] = "no answer yet"

    def add(self, server: Server, failure: Unanswered) -> None:
        """It did not answer.

        Raises:
            RunFailed: the answers were bad too often.
        """
        self._last[str(server)] = str(failure)
        self._bad_answers += isinstance(failure, BadAnswer)
        if self._bad_answers >= MOST_BAD_ANSWERS:
            raise RunFailed(f"the answers of inference servers cannot be used: {self}") from failure

    def __str__(self) -> str:
        told = [f"{name} (times: {self._times[name]}, at last: {what})" for name, what in self._last.items()]
        return "asked " + ", ".join(told) if told else "none that may be asked was there and had room"


def judged(answer: Answer, request: ServerRequest[_T]) -> _T | EnvironmentFailure:
    """The result that an answer holds.

    Raises:
        Unanswered: there is none; the request should be asked again.
        ConfigError: it asks for what no server can do.
    """
    if answer.status == 200:
        try:
            return request.read(answer.content)
        except MalformedAnswer as error:
            raise BadAnswer(str(error)) from error
    message, code = _error(answer.content)
    if answer.status == 413 or (answer.status == 400 and code == "invalid_prompt"):
        return EnvironmentFailure(message)
    if answer.status == 400:
        raise ConfigError(f"an inference server refused the request: {message}")
    if answer.status == 429:
        raise Refused(f"status 429, {message}")
    if answer.status in (502, 503, 504):
        raise Unanswered(f"status {answer.status}, {message}")
    raise BadAnswer(f"status {answer.status}, {message}")


def _error(content: bytes) -> tuple[str, str]:
    """Message and code of an error object; something for whatever else it is."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"])[:LONGEST_MESSAGE], str(error["code"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"with a body of {len(content)} bytes that is no error object", ""
