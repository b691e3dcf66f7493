"""Inference servers without engines, which do what a test tells them: answer, refuse, hang, hang up, lie."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.inference.routing import Server

HANG_LIMIT_S = 30.0

Reply = tuple[int, Any]
HANG_UP = (0, None)


def answer(body: dict[str, Any], step: int = 5) -> Reply:
    """What a server would say: each response is its prompt's seed and its own index as two tokens."""
    choices: list[dict[str, Any]] = []
    for seed in body["seeds"]:
        for sample in range(body["n"]):
            choices.append(
                {
                    "index": len(choices), "text": "", "finish_reason": "stop", "token_ids": [seed % 256, sample],
                    "token_logprobs": [-0.1, -0.2], "weight_steps": [step, step], "oldest_weight_step": step,
                    "lineage": 1,
                }
            )  # fmt: skip
    return 200, {"choices": choices}


def refusal(status: int, message: str = "no", code: str = "some_code") -> Reply:
    return status, {"error": {"message": message, "type": "t", "param": None, "code": code}}


class FakeServer:
    """Listens on loopback; `behave` is called for each request with its body, in a thread of its own.

    Attributes:
        bodies: The requests so far.
        arrived: Released once for each of them.
        healthy: When cleared, requests for its health are not answered.
    """

    def __init__(self, behave: Callable[[dict[str, Any]], Reply] = answer) -> None:
        self.behave = behave
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[Any] = set()
        self.arrived = threading.Semaphore(0)
        self.healthy = threading.Event()
        self.healthy.set()
        self.over = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads, self._http.block_on_close = True, False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def known_as(self, name: str, incarnation: int = 0, accepting: bool = True) -> Server:
        return Server(name, incarnation, self.url, accepting)

    def hang(self, body: dict[str, Any]) -> Reply:
        """A behaviour: no answer until the end of the test."""
        self.over.wait(HANG_LIMIT_S)
        return HANG_UP

    def wait_for_requests(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=HANG_LIMIT_S)

    def close(self) -> None:
        self.over.set()
        self.healthy.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(HANG_LIMIT_S)


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            while not fake.healthy.wait(HANG_LIMIT_S):
                return
            self._send(200, {"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.bodies.append(body)
            fake.headers.append({name.lower(): value for name, value in self.headers.items()})
            fake.connections.add(self.client_address)
            fake.arrived.release()
            status, content = fake.behave(body)
            if status:
                self._send(status, content)
            else:
                self.close_connection = True

        def _send(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:
                self.close_connection = True  # the client has left

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def serving() -> Iterator[Callable[..., FakeServer]]:
    """A fixture's body: makes servers and closes them."""
    servers: list[FakeServer] = []

    def start(behave: Callable[[dict[str, Any]], Reply] = answer) -> FakeServer:
        servers.append(FakeServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
