"""A network between the learner's weight server and its clients, which can be made slow: a TCP proxy.

It runs in threads of the benchmark's process, two for each connection. Fast, it only copies.
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

BLOCK = 16 * 1024
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Weather:
    """How the network is.

    Attributes:
        latency_s: Added to every block, in each direction.
        bytes_per_s: Of one connection and direction; None for no limit.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None


CLEAR = Weather()


class Proxy:
    """Listens on the loopback address and passes everything on to a port there. A context manager.

    Attributes:
        port: Where it listens.
        weather: Of now; may be set at any time.
        delayed_bytes: Passed on while the network was slow.
    """

    def __init__(self, target_port: int) -> None:
        self.weather = CLEAR
        self.delayed_bytes = 0
        self._target = ("127.0.0.1", target_port)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)

    def __enter__(self) -> "Proxy":
        self._listener.settimeout(POLL_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(10 * POLL_S)
        self._listener.close()
        with self._lock:
            left = list(self._sockets)
        for end in left:
            _hang_up(end)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._connect, args=(client,), name="proxy.connection", daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=10 * POLL_S)
        except OSError:  # nobody listens: the client is told as much by the end of its connection
            client.close()
            return
        ends = (client, server)
        with self._lock:
            self._sockets.update(ends)
        for end in ends:
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._copy, args=(server, client), name="proxy.back", daemon=True)
        back.start()
        self._copy(client, server)
        back.join()
        with self._lock:
            self._sockets.difference_update(ends)
        for end in ends:
            end.close()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while block := source.recv(BLOCK):
                self._delay(len(block))
                sink.sendall(block)
        except OSError:  # either end is gone: so is the connection
            pass
        finally:
            _hang_up(source)
            _hang_up(sink)

    def _delay(self, size: int) -> None:
        weather = self.weather
        if weather == CLEAR:
            return
        with self._lock:
            self.delayed_bytes += size
        until = time.monotonic() + weather.latency_s
        if weather.bytes_per_s is not None:
            until += size / weather.bytes_per_s
        while self.weather is weather and (left := until - time.monotonic()) > 0:
            self._closing.wait(min(left, POLL_S / 10))


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):  # closed already
        end.shutdown(socket.SHUT_RDWR)


def free_port() -> int:
    """A port that nobody listens on at present."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
