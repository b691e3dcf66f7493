"""The inference servers of a run as one thing to ask: requests find a server, wait for capacity, and survive its death.

A thread of its own runs an event loop with all connections; any number of other threads ask and wait. What a reply
means is decided in `penstock.inference.connection`; where there is none, because a connection failed or the server is
gone from the list, the request is asked again, whole, elsewhere.

Whatever happens, a request ends within its time. Asking again is harmless: the seeds are the request's own, and an
answer that nobody waits for any more is dropped. Imports no JAX: rollout workers have none.
"""

import asyncio
import itertools
import secrets
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from penstock.inference.codec import ServerRequest
from penstock.inference.connection import (
    HEALTH_S,
    QUIET_S,
    ConnectionFailed,
    RetryableFailure,
    RetryState,
    ServerBusy,
    ServerConnection,
    result_of,
)
from penstock.inference.routing import RequestQueue, Routing, Server
from penstock.types import ConfigError, EnvironmentFailure, NoProgressError, Stopped

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
        model: Their model's name.
        request_timeout_s: Longest wait of one blocking call for all its answers (``inference.request_timeout_s``).
        most_outstanding_tokens: Most tokens of ours at one server, prompts and longest responses together; requests
            beyond wait here.
        certificate_authority: File with the certificates that servers' own must be signed by (PEM; a self-signed one
            signs itself); None takes the system's.
        quiet_s: A server that sent nothing for so long, with requests outstanding, is asked for its health.
        health_s: It then has so long to answer.

    Raises:
        ConfigError: the certificates cannot be read.
    """

    def __init__(
        self,
        token: str | None = None,
        *,
        model: str = MODEL_NAME,
        request_timeout_s: float = 600.0,
        most_outstanding_tokens: int = MOST_OUTSTANDING_TOKENS,
        certificate_authority: str | None = None,
        quiet_s: float = QUIET_S,
        health_s: float = HEALTH_S,
    ) -> None:
        self._model, self._timeout_s = model, request_timeout_s
        tls, clock = _tls(certificate_authority), time.monotonic
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
    def model(self) -> str:
        """The servers' model's name."""
        return self._model

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

    def ask(self, requests: Sequence[ServerRequest[_T]]) -> list[_T | EnvironmentFailure]:
        """Sends requests, all at the same time, and waits for all answers.

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
        answers = self._thread.submit(self._ask_all(requests))
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

    async def _ask_all(self, requests: Sequence[ServerRequest[_T]]) -> list[_T | EnvironmentFailure]:
        asked = [asyncio.ensure_future(self._ask(request)) for request in requests]
        try:
            return list(await asyncio.gather(*asked))
        finally:
            for one in asked:
                one.cancel()

    async def _ask(self, request: ServerRequest[_T]) -> _T | EnvironmentFailure:
        number, attempts = next(self._numbers), RetryState()
        self._counts["requests"] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    server = await self._queue.admit(number, request.tokens, request.session, request.target)
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
        try:
            result = result_of(await self._connection(server).post("/v1/completions", request.body), request)
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


def _tls(certificate_authority: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificate_authority)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"certificates in {certificate_authority} cannot be read: {error}") from error
