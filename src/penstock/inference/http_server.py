"""An ASGI application over HTTP, served by a thread with a proper beginning and end. Imports no JAX."""

import asyncio
import socket
import ssl
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from penstock.inference.access import (
    HEADER_S,
    KEEP_ALIVE_S,
    MOST_ACCEPTED_AT_ONCE,
    MOST_HEADER_BYTES,
    BoundedConnection,
)
from penstock.types import ConfigError, NoProgressError, RunFailed
from penstock.types.addresses import bracketed

MOST_PENDING = 1024
"""Connections that wait to be accepted."""

CLOSE_S = 5.0
"""The thread may take so long to end after open requests were cancelled."""

CHECK_EVERY = 5
"""Ticks of uvicorn, 0.1 s each, between two checks of all connections' limits."""


class HttpServer:
    """An ASGI application served by a thread.

    Args:
        app: The ASGI application, such as that of `create_app`.
        host: Address to listen on.
        port: 0 takes a free one.
        stop_timeout_s: Open requests may take so long at shutdown.
        tls_cert: File with the certificate chain (PEM); None speaks plain HTTP.
        tls_key: File with its key, not encrypted.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        port: int = 0,
        stop_timeout_s: float = 10.0,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        _check_certificate(tls_cert, tls_key)
        self._socket = _listen(host, port)
        self._port: int = self._socket.getsockname()[1]
        self._host, self._scheme = host, "http" if tls_cert is None else "https"
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._server = _AnnouncingServer(
            uvicorn.Config(
                app,
                loop="asyncio",  # where uvloop is installed uvicorn takes that, whose transports have no bounded reads
                http=BoundedConnection,
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, int(stop_timeout_s)),
                ssl_certfile=tls_cert,
                ssl_keyfile=tls_key,
            ),
            self._settled.set,
        )
        self._stop_timeout_s = stop_timeout_s
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens, for example ``http://127.0.0.1:8000``."""
        return f"{self._scheme}://{bracketed(self._host)}:{self._port}"

    def start(self, timeout_s: float = 10.0) -> None:
        """Starts the thread and returns when it accepts connections.

        Raises:
            NoProgressError: it does not in time.
            RunFailed: it could not start.
        """
        self._thread.start()
        settled = self._settled.wait(timeout_s)
        self.raise_if_failed()
        if not settled:
            raise NoProgressError(f"the HTTP server did not accept connections within {timeout_s} s")

    def raise_if_failed(self) -> None:
        """Raises RunFailed if the thread died."""
        if self._failure is not None:
            raise RunFailed(f"the HTTP server failed: {self._failure!r}") from self._failure

    def stop(self) -> None:
        """Ends open connections and the thread.

        Raises:
            NoProgressError: it did not end in time; the message says where its thread stands.
        """
        self._server.should_exit = True
        self._server.wake()
        if self._thread.ident is not None:
            limit_s = self._stop_timeout_s + CLOSE_S  # uvicorn cancels requests at the limit, then closes
            self._thread.join(limit_s)
            if self._thread.is_alive():
                stands = traceback.extract_stack(sys._current_frames().get(self._thread.ident))[-1]
                raise NoProgressError(
                    f"the HTTP server did not stop within {limit_s:g} s: its thread is in {stands.name} "
                    f"({stands.filename}, line {stands.lineno})"
                )
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:  # surfaces in raise_if_failed
            self._failure = error
        finally:
            self._settled.set()


class _AnnouncingServer(uvicorn.Server):
    """Calls back once it accepts connections, and enforces their limits."""

    def __init__(self, config: uvicorn.Config, accepting: Callable[[], None]) -> None:
        super().__init__(config)
        self._accepting = accepting
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        """Has the event loop look at the clock again: it may have gone to sleep by one that was set back meanwhile."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed already
                self._loop.call_soon_threadsafe(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, which would give a TLS handshake a minute."""
        self._loop = loop = asyncio.get_running_loop()
        config = self.config
        self.servers = [
            await loop.create_server(
                lambda: BoundedConnection(config, self.server_state, {}),
                sock=each,
                ssl=config.ssl,
                backlog=MOST_ACCEPTED_AT_ONCE,
                ssl_handshake_timeout=HEADER_S if config.ssl else None,
            )
            for each in sockets or ()
        ]
        for each in sockets or ():
            each.listen(MOST_PENDING)  # more than asyncio, which knows one number for both, is to accept at once
        self.started = True
        self._accepting()

    async def on_tick(self, counter: int) -> bool:
        if counter % CHECK_EVERY == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedConnection):
                    connection.enforce_limits(now)
        return await super().on_tick(counter)


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise ConfigError("tls_cert and tls_key go together: give both, or neither")
    try:
        # Without a password of our own, OpenSSL would ask the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"tls_cert {certificate} and tls_key {key} cannot be used ({error}): give a certificate chain and its "
            "unencrypted key, both in PEM"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, which `create_server`'s does not,
    # and then a body waits for the acknowledgement of its head, which Linux puts off by 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
