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
from penstock.types import WeightVersion
from penstock.weights import WeightClient, WeightsConfig, open_client
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

    def open(self, name: str, endpoint: dict[str, Any], config: dict[str, Any]) -> None:
        self._clients[name] = open_client(endpoint, WeightsConfig(**config), TOKEN, name)

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


def main() -> None:
    commands = Commands()
    for line in sys.stdin:
        arguments = json.loads(line)
        print(json.dumps(getattr(commands, arguments.pop("do"))(**arguments)), flush=True)


if __name__ == "__main__":
    main()
