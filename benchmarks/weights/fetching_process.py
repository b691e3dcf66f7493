"""A process that fetches weights when it is told to, and says how long that took.

    python -m benchmarks.weights.fetching_process

Commands and answers are lines of JSON. `Fetcher` is the other end.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.weights.raw_flight import RawClient
from benchmarks.weights.slow_link import SlowLink
from penstock.types import WeightVersion
from penstock.weights import WeightClient, WeightsConfig, open_client
from penstock.weights.flight_client import PeerRelay
from penstock.weights.manifest import array_digest

TOKEN = "benchmark"
_ANSWER_S, _END_S = 120.0, 20.0


class Fetcher:
    """The process, as seen by who starts it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.weights.fetching_process"]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, bufsize=1
        )

    def __call__(self, **command: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fetching process ended during {command}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Commands:
    """What the process can do. Clients keep their arrays until their next fetch, as an engine does."""

    def __init__(self) -> None:
        self._clients: dict[str, WeightClient] = {}
        self._raw: dict[int, RawClient] = {}
        self._held: dict[str, Any] = {}
        self._links: dict[int, SlowLink] = {}

    def open(
        self, name: str, endpoint: dict[str, Any], config: dict[str, Any], number: int = 0,
        bits_per_s: float | None = None,
    ) -> None:  # fmt: skip
        """Opens a client; with `bits_per_s`, other clients that fetch from it get no more than that in all."""
        if bits_per_s is not None and not self._links:
            self._limit_relays(bits_per_s)
        self._clients[name] = open_client(endpoint, WeightsConfig(**config), TOKEN, f"{name}-{number}")

    def fetch(self, name: str, step: int) -> dict[str, float]:
        """Seconds of `wait_for` and `fetch`, and the client's own numbers."""
        client = self._clients[name]
        began = time.perf_counter()
        version = client.wait_for(None if step == 0 else WeightVersion(0, step - 1), _ANSWER_S)
        assert version == WeightVersion(0, step), version
        self._held[name] = client.fetch(version)
        return client.metrics() | {"seconds": time.perf_counter() - began}

    def digests(self, name: str) -> dict[str, str]:
        """Of the arrays that were fetched last."""
        return {key: array_digest(np.ascontiguousarray(array)) for key, array in self._held[name].items()}

    def drop(self, name: str) -> None:
        self._held.pop(name, None)

    def close(self, name: str) -> None:
        self.drop(name)
        self._clients.pop(name).close()

    def raw(self, port: int, streams: int, chunk_bytes: int, how: str, nbytes: int) -> dict[str, float]:
        """Seconds of a raw fetch, and its bytes."""
        if port not in self._raw:
            self._raw[port] = RawClient(port, streams)
        client = self._raw[port]
        began = time.perf_counter()
        read = client.read(chunk_bytes, how, nbytes)
        return {"seconds": time.perf_counter() - began, "bytes": read}

    def end(self) -> None:
        """Closes what is open."""
        for client in self._clients.values():
            client.close()
        for link in self._links.values():
            link.close()

    def _limit_relays(self, bits_per_s: float) -> None:
        keep = PeerRelay.keep

        def keep_behind_link(relay: PeerRelay, *what: Any) -> int | None:
            port = keep(relay, *what)
            if port is None:
                return None
            if port not in self._links:
                self._links[port] = SlowLink(f"127.0.0.1:{port}", bits_per_s)
            return int(self._links[port].address.rpartition(":")[2])

        PeerRelay.keep = keep_behind_link  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    commands = Commands()
    try:
        for line in sys.stdin:
            arguments = json.loads(line)
            print(json.dumps(getattr(commands, arguments.pop("do"))(**arguments)), flush=True)
    finally:
        commands.end()


if __name__ == "__main__":
    main()
