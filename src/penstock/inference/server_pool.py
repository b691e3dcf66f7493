"""The inference servers of a run as one thing to ask: requests find a server, wait for capacity, and survive its death.

A thread of its own runs an event loop with all connections; any number of other threads ask and wait. A server that
answers nothing while something of ours is outstanding is asked for its health; when that is not answered either, all
that waits for it fails at once, as it does when the server is known to be dead. So a stopped process or a machine that
vanished costs seconds, not the whole limit of a request. What a reply means:

- *none*, because a connection failed or the server is gone from the list: asked again, whole, elsewhere;
- *status 429*, or what else its dialect says: the server is overloaded; asked again after a pause, elsewhere where the
  request may;
- *status 502 to 504*, or what else its dialect says: it cannot answer; asked again, elsewhere;
- *status 400 or 413*: the request itself is at fault, and asking again is useless;
- *any other status, or an answer that cannot be read*: asked again, but `MOST_SERVER_FAULTS` are the end of it.

Whatever happens, a request ends within its time. Asking again is harmless: the seeds are the request's own, and an
answer that nobody waits for any more is dropped. Imports no JAX: rollout workers have none.
"""

import asyncio
import itertools
import json
import secrets
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from penstock.inference.codec import Dialect, InterruptedAnswer, MalformedAnswer, PenstockDialect, ServerRequest
from penstock.inference.routing import PinnedServer, RequestQueue, Routing, Server
from penstock.inference.sequence import TOO_LONG
from penstock.types import ConfigError, EnvironmentFailure, NoProgressError, PromptTooLong, RunFailed, Stopped

LAST_TURNS = 3
"""Turns of the loop after which transports that were closed have let go of their sockets."""

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines until closed.

    Args:
        name: Of the thread, as `threading` and errors show it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._finishing: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Starts a coroutine; its future is cancelled when the thread is closed.

        Raises:
            Stopped: it is closed.
        """
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise Stopped(f"the {self._name} was closed")

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine that is never cancelled: closing waits for it. For the loop's own thread."""
        task = self._loop.create_task(coroutine)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def call(self, function: Callable[[], object]) -> None:
        """Has the loop call a function soon; does nothing once closed."""
        with self._closing:
            if not self._closed:
                self._loop.call_soon_threadsafe(function)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Cancels what runs, runs a last coroutine, waits for what is to be finished, and ends the thread.

        May be called again.

        Raises:
            NoProgressError: it did not end in time.
        """
        with self._closing:
            if not self._closed:
                self._closed = True
                asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise NoProgressError(f"the {self._name} did not end within {timeout_s:g} s")

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            others = asyncio.all_tasks() - {asyncio.current_task()} - self._finishing
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last()
            await asyncio.gather(*self._finishing)
            await self._loop.shutdown_asyncgens()
            for _ in range(LAST_TURNS):
                await asyncio.sleep(0)
        finally:
            self._loop.stop()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


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
        self._last.setdefault(str(server), "no answer yet")

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
        except InterruptedAnswer as error:
            raise RetryableFailure(str(error)) from error
    message, code = _error(answer.content)
    if answer.status == 400 and code == TOO_LONG:
        return PromptTooLong(message)
    if answer.status == 413 or (answer.status == 400 and code == "invalid_prompt"):
        return EnvironmentFailure(message)
    if answer.status == 400:
        raise ConfigError(f"an inference server refused the request: {message}")
    if answer.status in request.busy:
        raise ServerBusy(f"status {answer.status}, {message}")
    if answer.status in request.behind:
        raise RetryableFailure(f"status {answer.status}, {message}")
    raise ServerFault(f"status {answer.status}, {message}")


def _error(content: bytes) -> tuple[str, str]:
    """Message and code of an error object; something for whatever else it is."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"])[:LONGEST_MESSAGE], str(error["code"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"with a body of {len(content)} bytes that is no error object", ""


MODEL_NAME = "policy"
"""What a run's servers call their model."""

MOST_OUTSTANDING_TOKENS = 262_144
"""Of one client at one server: more would only wait there, out of reach of a server that has less to do."""

GRACE_S = 30.0
"""A caller waits so much longer than its requests may: only a hung event loop makes it do so."""


class ServerPool:
    """Sends requests to inference servers. Thread-safe.

    Args:
        token: What the servers ask for; None sends none.
        request_timeout_s: Longest wait of one blocking call for all its answers (``inference.request_timeout_s``).
        most_outstanding_tokens: Most tokens of ours at one server, prompts and longest responses together; requests
            beyond wait here.
        certificate_authority: File with the certificates that servers' own must be signed by (PEM; a self-signed one
            signs itself); None takes the system's.
        quiet_s: A server that sent nothing for so long, with requests outstanding, is asked for its health.
        health_s: It then has so long to answer.

    Attributes:
        model_name: What the servers call their model.
        dialect: How they are asked; at first as Penstock's own.

    Raises:
        ConfigError: the certificates cannot be read.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        request_timeout_s: float = 600.0,
        most_outstanding_tokens: int = MOST_OUTSTANDING_TOKENS,
        certificate_authority: str | None = None,
        quiet_s: float = QUIET_S,
        health_s: float = HEALTH_S,
    ) -> None:
        self.model_name = MODEL_NAME
        self.dialect: Dialect = PenstockDialect()
        self._timeout_s = request_timeout_s
        tls, clock = trusting(certificate_authority), time.monotonic
        self._make_connection: Callable[[Server], ServerConnection] = lambda server: ServerConnection(
            server, token, tls, clock, quiet_s, health_s
        )
        self._clock = clock
        self._routing = Routing(most_outstanding_tokens, secrets.randbits(32))
        self._queue = RequestQueue(self._routing, clock)
        self._connections: dict[tuple[str, int, str], ServerConnection] = {}
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter({"requests": 0, "answers": 0, "retries": 0, "refusals": 0})
        self._thread = LoopThread("pool of inference servers")

    @property
    def servers(self) -> tuple[Server, ...]:
        """The live servers, as last set, by name."""
        return self._routing.servers

    @property
    def answers(self) -> int:
        """Requests that were answered so far."""
        return self._counts["answers"]

    def set_servers(self, servers: Sequence[Server]) -> None:
        """Replaces the list of live servers; returns at once, and may be called as often as one likes.

        What waits for a server that is not among them, or that another incarnation has replaced, is asked elsewhere.
        One that does not accept any more answers what it was asked before.
        """
        given = tuple(servers)
        self._thread.call(lambda: self._take(given))

    def ask(
        self, requests: Sequence[ServerRequest[_T]], session: str | None = None, target: PinnedServer | None = None
    ) -> list[_T | EnvironmentFailure]:
        """Sends requests, all at the same time, and waits for all answers.

        Args:
            requests: What is asked.
            session: Their conversation, which stays with one server; None goes anywhere.
            target: The only server that will do; None for any.

        Returns:
            In order; an unusable prompt has its failure in its place.

        Raises:
            ConfigError: a server refused what a request asks for, such as a temperature out of range.
            NoProgressError: one had no answer in time.
            RunFailed: the answers to one cannot be used.
            UnreachableError: the one incarnation that may be asked is not alive.
            Stopped: the pool was closed.
        """
        if not requests:
            return []
        answers = self._thread.submit(self._ask_all(requests, session, target))
        try:
            return answers.result(self._timeout_s + GRACE_S)
        except CancelledError as error:
            raise Stopped("the pool of inference servers was closed") from error
        except TimeoutError as error:
            raise NoProgressError(f"the pool of inference servers hung for {GRACE_S:g} s") from error
        finally:
            answers.cancel()

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics log, named ``inference_client/…``; never waits."""
        numbers = {f"{name}_total": float(count) for name, count in self._counts.items()}
        numbers |= {"wait_s_total": self._queue.waited_s, "waiting": float(self._queue.length)}
        numbers |= {"servers": float(len(self.servers))}
        numbers |= {f"outstanding_tokens/{name}": float(n) for name, n in self._routing.outstanding.items()}
        return {f"inference_client/{name}": value for name, value in numbers.items()}

    def waiting_for(self) -> str | None:
        """What requests wait for before they are even sent; None where none does."""
        if not self._queue.length:
            return None
        accepting = any(server.accepting for server in self.servers)
        return "room at the inference servers" if accepting else "an inference server"

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the thread; whoever waits for an answer gets `Stopped`. May be called again.

        Raises:
            NoProgressError: the thread did not end in time.
        """
        self._thread.close(self._close_connections, timeout_s)

    # The loop's thread.

    def _take(self, servers: tuple[Server, ...]) -> None:
        for server in self._routing.set_servers(servers):
            connection = self._connections.pop(server.identity, None)
            if connection is not None:
                connection.abort("it was reported dead, or replaced")
                self._thread.finish(connection.close())  # a close that is cut short would leave sockets open
        self._queue.servers_changed()

    async def _close_connections(self) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def _ask_all(
        self, requests: Sequence[ServerRequest[_T]], session: str | None, target: PinnedServer | None
    ) -> list[_T | EnvironmentFailure]:
        asked = [asyncio.ensure_future(self._ask(request, session, target)) for request in requests]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()

    async def _ask(
        self, request: ServerRequest[_T], session: str | None, target: PinnedServer | None
    ) -> _T | EnvironmentFailure:
        number, attempts = next(self._numbers), RetryState()
        self._counts["requests"] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    server = await self._queue.admit(number, request.tokens, session, target)
                    attempts.begin(server)
                    try:
                        result = await self._attempt(server, request)
                        self._counts["answers"] += 1
                        return result
                    except RetryableFailure as failure:
                        attempts.add(server, failure)
                        self._counts["retries"] += 1
                    finally:
                        self._queue.release(server, request.tokens)
        except TimeoutError as error:
            raise NoProgressError(
                f"no inference server answered within inference.request_timeout_s = {self._timeout_s:g}: {attempts}"
            ) from error

    async def _attempt(self, server: Server, request: ServerRequest[_T]) -> _T | EnvironmentFailure:
        """The answer of one server; what it did is noted for the routing.

        Raises:
            RetryableFailure: it should be asked again.
        """
        bound = request.bound_to(server)
        if bound is None:
            self._routing.refused(server, self._clock())  # else it is chosen again before the loop hears of a newer one
            raise RetryableFailure(f"it serves {server.version}, and a newer version was asked for")
        try:
            result = result_of(await self._connection(server).post(bound.path, bound.body), bound)
        except ServerBusy:
            self._counts["refusals"] += 1
            self._routing.refused(server, self._clock())
            raise
        except RetryableFailure:
            self._routing.failed(server, self._clock())
            raise
        except ConnectionFailed as failure:
            self._routing.failed(server, self._clock())
            raise RetryableFailure(str(failure)) from failure
        self._routing.served(server)
        return result

    def _connection(self, server: Server) -> ServerConnection:
        if server.identity not in {known.identity for known in self.servers}:
            raise ConnectionFailed("it went before it was asked")
        if server.identity not in self._connections:
            self._connections[server.identity] = self._make_connection(server)
        return self._connections[server.identity]


def trusting(certificate_authority: Path | str | None) -> ssl.SSLContext:
    """What checks servers' certificates.

    Args:
        certificate_authority: File with those that theirs must be signed by (PEM); None trusts those of the system.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=certificate_authority)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"inference.tls_ca is {certificate_authority}: its certificates cannot be read ({error}); give a file "
            "that holds them as PEM"
        ) from error
