"""Runs the API over HTTP: a server in a thread with a proper beginning and end, and `serve` for the command line."""

import asyncio
import gc
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from penstock.inference.access import (
    HEADER_S,
    KEEP_ALIVE_S,
    MOST_ACCEPTED_AT_ONCE,
    MOST_HEADER_BYTES,
    AccessRules,
    BoundedConnection,
)
from penstock.inference.config import ServeConfig, ServedEngineConfig, is_loopback
from penstock.inference.engine import InferenceEngine
from penstock.inference.server import create_app
from penstock.model.language import Decoder, load_policy
from penstock.model.language.config import LoadingConfig
from penstock.model.language.lora import is_adapter
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError, NoProgressError, RunFailed, WeightVersion

WATCH_S = 0.5
"""`serve` checks its threads this often; it reacts to Ctrl-C at once."""

MOST_PENDING = 1024
"""Connections that wait to be accepted."""

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
        self._host, self._scheme = host, "http" if tls_cert is None else "https"
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._server = _AnnouncingServer(
            uvicorn.Config(
                app,
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
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._socket.getsockname()[1]}"

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
            NoProgressError: it did not end in time.
        """
        self._server.should_exit = True
        if self._thread.ident is not None:
            limit_s = self._stop_timeout_s + 5.0  # uvicorn cancels requests at the limit, then closes
            self._thread.join(limit_s)
            if self._thread.is_alive():
                raise NoProgressError(f"the HTTP server did not stop within {limit_s} s")
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's own, which would give a TLS handshake a minute."""
        loop, config = asyncio.get_running_loop(), self.config
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
            each.listen(
                MOST_PENDING
            )  # more may wait than asyncio is to accept at once, which knows one number for both
        self.started = True
        self._accepting()

    async def on_tick(self, counter: int) -> bool:
        if counter % CHECK_EVERY == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedConnection):
                    connection.enforce_limits(now)
        return await super().on_tick(counter)


def serve(
    checkpoint: str,
    config: ServeConfig,
    announce: Callable[[str], None] = print,
    stop: threading.Event | None = None,
) -> None:
    """Serves a checkpoint until Ctrl-C.

    Args:
        checkpoint: A Hugging Face directory, or a run's ``checkpoints/step-<n>``.
        config: Address, limits and engine.
        announce: Called with one line for each thing that happens, the URL in particular.
        stop: Ends it as Ctrl-C would, for callers that are not a terminal.

    Raises:
        CheckpointError: nothing can be loaded from there.
        ConfigError: bad limits, or an address in use.
        RunFailed: the engine or the server died.
    """
    ending = stop or threading.Event()
    path = model_directory(checkpoint)
    policy = config.model.policy(path)
    tokenizer = Tokenizer.load(policy.tokenizer_path, policy.chat_template_kwargs)
    decoder = load_policy(policy, 0, tokenizer)
    max_seq_len = min(config.engine.max_seq_len, decoder.config.max_position_embeddings)
    engine_config = ServedEngineConfig.model_validate(config.engine.model_dump() | {"max_seq_len": max_seq_len})
    engine = InferenceEngine(decoder, WeightVersion(0, 0), tokenizer, engine_config)
    name = config.model_name or Path(checkpoint).resolve().name
    access = AccessRules(config.token, config.host, config.max_body_bytes, config.max_waiting)
    app = create_app(engine, tokenizer, name, access, partial(_same_policy, config.model, tokenizer))
    server = HttpServer(app, config.host, config.port, config.stop_timeout_s, config.tls_cert, config.tls_key)
    with ExitStack() as closing:
        announce(f"compiling for {engine_config.max_slots} responses of at most {max_seq_len} tokens …")
        closing.callback(engine.stop, config.stop_timeout_s)
        engine.start()
        closing.callback(server.stop)
        _run_until(ending, engine, server, config, lambda: announce(_announcement(name, server.url, config)))


def _same_policy(config: LoadingConfig, tokenizer: Tokenizer, path: Path) -> Decoder:
    """The policy of another directory, in the dtype that is served."""
    return load_policy(config.policy(model_directory(str(path))), 0, tokenizer)


def _run_until(
    ending: threading.Event, engine: InferenceEngine, server: HttpServer, config: ServeConfig, ready: Callable[[], None]
) -> None:
    try:
        engine.wait_until_ready(config.ready_timeout_s)
        # What is here now stays. A full garbage collection takes 100 ms, with everything at a halt, and each body of
        # many lists would cause one.
        gc.freeze()
        server.start()
        ready()
        while not ending.wait(WATCH_S):
            engine.raise_if_failed()
            server.raise_if_failed()
    except KeyboardInterrupt:
        ending.set()


def model_directory(checkpoint: str) -> Path:
    """The directory of a checkpoint's model or adapter: itself, or ``model/`` inside a training checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(checkpoint)
    places = (root, root / "model")
    found = next((path for path in places if (path / "config.json").is_file() or is_adapter(path)), None)
    if found is None:
        raise CheckpointError(
            f"{checkpoint!r} holds no config.json, nor does its model/: give a checkpoint directory, or an adapter's"
        )
    if not is_adapter(found) and b'"penstock.control_policy"' in (found / "config.json").read_bytes():
        raise CheckpointError(
            f"{checkpoint!r} holds a control policy, which acts in simulators: give a language policy's checkpoint, or "
            "a recipe with a fleet to penstock eval"
        )
    return found


def _announcement(name: str, url: str, config: ServeConfig) -> str:
    exposed = config.tls_cert is None and not is_loopback(config.host)
    return f"serving {name!r} at {url}/v1" + (" (unencrypted: set tls_cert and tls_key)" if exposed else "")


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
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
