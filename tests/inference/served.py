"""`penstock serve` in a process of its own, and what an attack on it does to everybody else.

In a process of its own, because the server's memory and its `/health` are what is judged, and the attacker's own work
would hold the same interpreter.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import psutil

from penstock.model.language import Decoder, ModelConfig, save_decoder
from penstock.text import Tokenizer

START_S = 180.0
ANSWER_S = 60.0
"""No answer may take longer, on a machine with other work."""
HEALTH_S = 0.25
"""99 of 100 answers to `/health` beside an attack are there within this, and what the bystander takes meanwhile."""
REFERENCE_S = 0.06
"""What a million additions take on the machine that the limit was measured on."""
GROWTH_BYTES = 100 << 20
"""What an attack may add to the server's resident memory."""
POLL_S = 0.02
MAX_SEQ_LEN = 64
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
NORMAL = {"model": "tiny", "prompt": "Who purrs?", "max_tokens": 3}


READS_TOOLS = (
    "{%- for tool in tools or [] -%}{{- tool['function']['name'] ~ (tool | tojson) -}}{%- endfor -%}"
    "{%- for message in messages -%}{%- for call in message.tool_calls or [] -%}"
    "{{- call['function']['name'] ~ (call['function']['arguments'] | tojson) -}}{%- endfor -%}{%- endfor -%}"
)
"""Put before the packaged chat template: in the way of the templates of Qwen and Llama."""


def write_checkpoint(folder: Path) -> Path:
    """A model of a few thousand parameters with the packaged tokenizer, whose chat template reads tools."""
    tokenizer = Tokenizer.load("penstock")
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    save_decoder(Decoder.initialise(shape, jax.random.key(0)), folder, tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = READS_TOOLS + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


BYSTANDER = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    connection.close()
"""
"""A server that nobody attacks: what it takes to answer is the machine's doing."""


class Served:
    """A running server without a token on the loopback address.

    Attributes:
        process: The server's.
        address: Host and port.
        bystander: Host and port of a server that nobody attacks.
    """

    def __init__(self, checkpoint: Path, *words: str) -> None:
        engine = [f"engine.max_seq_len={MAX_SEQ_LEN}", "engine.max_slots=4", "engine.windows=[64]"]
        command = [sys.executable, "-m", "penstock", "serve", str(checkpoint), "--port", "0", "--name", "tiny"]
        self._said = checkpoint / "said.txt"
        with self._said.open("w") as said:
            self._child = subprocess.Popen(
                [*command, *engine, "engine.prefill_lengths=[16]", *words], stdout=said, stderr=said
            )
        self.process = psutil.Process(self._child.pid)
        self._bystander = subprocess.Popen([sys.executable, "-c", BYSTANDER], stdout=subprocess.PIPE, text=True)
        assert self._bystander.stdout is not None
        self.bystander = ("127.0.0.1", int(self._bystander.stdout.readline()))
        self.address = ("127.0.0.1", self._announced_port())

    def _announced_port(self) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._child.poll() is None:
            if found := re.search(r"serving 'tiny' at http://127.0.0.1:(\d+)/v1", self._said.read_text()):
                return int(found[1])
            time.sleep(POLL_S)
        self.stop()
        raise AssertionError(f"the server did not start: {self._said.read_text()}")

    def stop(self) -> None:
        for child in (self._child, self._bystander):
            child.kill()
            child.wait(ANSWER_S)
            if child.stdout is not None:
                child.stdout.close()

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to one request on a connection of its own."""
        length = b"" if body is None else b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        method = b"GET" if body is None else b"POST"
        head = b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n" % (method, path.encode(), length)
        return self.send(head + (body or b""))

    def send(self, content: bytes, address: tuple[str, int] | None = None) -> tuple[int, bytes]:
        """Sends bytes; status 0 where the connection was closed without an answer."""
        with socket.create_connection(address or self.address, timeout=ANSWER_S) as connection:
            with suppress(ConnectionError):  # it may have been refused before all of it was sent
                connection.sendall(content)
            answer = bytearray()
            with suppress(ConnectionError):
                while piece := connection.recv(1 << 16):
                    answer += piece
        head, _, rest = bytes(answer).partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0), rest

    def answers_normally(self) -> bool:
        status, content = self.ask("/v1/completions", json.dumps(NORMAL).encode())
        return status == 200 and len(json.loads(content)["choices"]) == 1


class Watch:
    """Polls `/health`, the bystander and the server's memory, each in a thread of its own."""

    def __init__(self, served: Served) -> None:
        self._served, self._stop = served, threading.Event()
        self._before = self._most = served.process.memory_info().rss
        self.waits_s: list[float] = []
        self.bystander_s: list[float] = []
        self.refused: list[int] = []
        polled = ((served.address, self.waits_s), (served.bystander, self.bystander_s))
        self._threads = [threading.Thread(target=self._poll, args=each) for each in polled]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)

    def _poll(self, address: tuple[str, int], waits_s: list[float]) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                status, _ = self._served.send(HEALTH, address)
            except OSError:
                status = 0
            waits_s.append(time.monotonic() - began)
            self._most = max(self._most, self._served.process.memory_info().rss)
            if status != 200:
                self.refused.append(status)
            self._stop.wait(POLL_S)

    @property
    def growth_bytes(self) -> int:
        return self._most - self._before


def slowness() -> float:
    """How much slower than the machine that the limits are for this one computes at this moment; 1 where it is not."""
    began = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number
    return max(1.0, (time.perf_counter() - began) / REFERENCE_S)


def p99(waits_s: list[float]) -> float:
    return sorted(waits_s)[int(0.99 * (len(waits_s) - 1))]


@contextmanager
def served(checkpoint: Path, *words: str) -> Iterator[Served]:
    """A server that has answered once by every route, so that an attack pays for nothing that happens once only."""
    server = Served(checkpoint, *words)
    try:
        assert server.answers_normally()
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
        assert server.ask("/v1/chat/completions", json.dumps(chat).encode())[0] == 200
        assert server.ask("/tokenize", b'{"prompt": "Who purrs?"}')[0] == 200
        yield server
    finally:
        server.stop()


def withstands(server: Served, attack: Callable[[], Any], at_least_s: float = 0.5) -> Any:
    """Runs an attack and judges what others see of it; up to three times where answers were too slow.

    Returns:
        What the attack returned.

    Raises:
        AssertionError: `/health` was slow or refused, memory grew, or a normal request has no answer afterwards.
    """
    for last in (False, False, True):
        began = time.monotonic()
        with Watch(server) as watch:
            result = attack()
            time.sleep(max(0.0, at_least_s - (time.monotonic() - began)))
        took_s, limit_s = p99(watch.waits_s), HEALTH_S * slowness() + p99(watch.bystander_s)
        if took_s <= limit_s or last:
            break
    assert took_s <= limit_s, f"/health took {took_s:.2f} s (p99 of {len(watch.waits_s)}), at most {limit_s:.2f} s"
    assert not watch.refused, f"/health was answered with {watch.refused}"
    assert watch.growth_bytes <= GROWTH_BYTES, f"the server grew by {watch.growth_bytes >> 20} MiB"
    assert server.answers_normally()
    return result
