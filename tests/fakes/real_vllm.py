"""The real vLLM behind a proxy on loopback, with the face and the faults of `tests.fakes.vllm_server.FakeVllm`.

The proxy counts, passes on what is asked and answered, and changes it where a fault is set that a real server does not
have when it is wanted. Which faults are the server's own is said at each. Not covered: flags that it lacks, and death:
those need a server started otherwise (`tests/overseer/language/test_vllm.py`, `test_external_launched.py`).
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.external import descendants, server_of
from safetensors.numpy import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.waiting import wait_until

from penstock.inference import HttpServer
from penstock.inference.checksums import NO_BYTES
from penstock.overseer.launch.process import GuardedProcess

VLLM = os.environ.get("PENSTOCK_VLLM", "")
"""Its executable."""

START_S = 300.0
ASK_S = 60.0
MOST_QUEUED = 8
FLAGS = ["--enforce-eager", "--max-num-queued-reqs", str(MOST_QUEUED)]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


class RealVllm:
    """One server of vLLM's CPU build.

    Args:
        directory: Of the weights that it is started with.
        command: The words that start it, by its port.
        folder: For its log, and for directories that are passed on in place of those asked for.

    Attributes:
        kind: What a run calls such engines.
        path: Of its route for tokens.
        proven: Share of the parameters that its checksums see: no matrix of a layer is among them.
        blind: See `proven`.
        room: Most tokens of a sequence: the longest take longer than a pause takes to begin.
        server: The proxy.
        stale: Tensors, by the end of their names, that the directory lacks which a reload is passed on with. The rest
            is the server's own: it says 200 and goes on with what it had.
        unseen: A reload is passed on with a directory that is not there. The rest is the server's own: it says 500, and
            dies of the first request, unless it loads others before.
        old_head: As `stale`, of the output matrix.
        reload_status: What a reload is answered with, whatever the server said, which had it: the proxy's.
        ignores_label: A new label is not passed on, and said to be taken: the proxy's.
        ignores_adapter: An adapter is passed on with zeros, so that the server answers as its base: the proxy's.
        salt: Checksums are said to be of another form: the proxy's.
        counts: Of requests by path.
    """

    kind, path = "vllm", "/inference/v1/generate"
    proven, room, blind = 5 / 9, 512, True

    def __init__(self, directory: Path, command: Callable[[int], list[str]], folder: Path) -> None:
        self._directory, self._folder = directory, folder
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self._port: int = listener.getsockname()[1]
        self._process = GuardedProcess(command(self._port), ENVIRONMENT, folder / "vllm.out")
        self._direct = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=ASK_S, trust_env=False)
        self._passing = httpx.AsyncClient(
            base_url=self._direct.base_url, timeout=None, trust_env=False, headers={"connection": "close"}
        )
        self._waiting: list[threading.Thread] = []
        self._stopped: int | None = None
        self.server = HttpServer(
            Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])]), stop_timeout_s=1.0
        )

    def start(self) -> str:
        """Returns when it answers that it is healthy; where it listens, for clients."""
        wait_until(lambda: not self._process.alive or self._healthy(), "vllm serve", START_S)
        assert self._process.alive, self._process.last_words()
        self.server.start()
        self.as_started()
        return self.url

    def stop(self) -> None:
        self.hung = False
        self.server.stop()
        self._process.end(ASK_S)
        self._direct.close()

    def as_started(self) -> None:
        """No faults, no adapters, its own label and weights: adapters go with those."""
        self.hung = self.full = self.unseen = self.old_head = self.ignores_label = self.ignores_adapter = False
        self.stale: list[str] = []
        self.reload_status, self.salt = 200, b""
        self.counts: dict[str, int] = {}
        for name in self.adapters:
            self._post("/v1/unload_lora_adapter", {"lora_name": name})
        self._post("/resume")
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._directory)}})
        self.rename_to("default")

    # --- as it is ------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Of the proxy."""
        return self.server.url

    @property
    def label(self) -> str:
        """What it calls its weights."""
        return self._get("/weight_info")["weight_version"]

    def rename_to(self, label: str) -> None:
        """From the next token on."""
        self._post("/update_weight_version", {"new_version": label})

    @property
    def paused(self) -> bool:
        """Whether it computes nothing."""
        return self._get("/is_paused")["is_paused"]

    @property
    def adapters(self) -> list[str]:
        """Those that it has, by name."""
        return [card["id"] for card in self._get("/v1/models")["data"] if card["parent"] is not None]

    def _healthy(self) -> bool:
        try:
            return self._direct.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _get(self, path: str) -> Any:
        return self._direct.get(path).raise_for_status().json()

    def _post(self, path: str, body: Any = None) -> None:
        self._direct.post(path, json=body).raise_for_status()

    # --- faults of its own ---------------------------------------------------------------------------------------

    @property
    def hung(self) -> bool:
        """Its engine's process is stopped (SIGSTOP) until this is False; its server goes on to say that it is healthy.

        The server's own.
        """
        return self._stopped is not None

    @hung.setter
    def hung(self, value: bool) -> None:
        if value and self._stopped is None:
            server = server_of(os.getpid(), str(self._port))
            assert server is not None
            self._stopped = next(each for each in descendants(server) if b"EngineCore" in _command(each))
            os.kill(self._stopped, signal.SIGSTOP)
        elif not value and self._stopped is not None:
            os.kill(self._stopped, signal.SIGCONT)
            self._stopped = None

    @property
    def full(self) -> bool:
        """It is paused, with as many requests as it takes: the server's own."""
        return bool(self._waiting)

    @full.setter
    def full(self, value: bool) -> None:
        if value and not self._waiting:
            self._post("/pause?mode=keep&clear_cache=false")
            answers = list[int]()
            self._waiting = [threading.Thread(target=self._ask, args=(answers,)) for _ in range(MOST_QUEUED + 1)]
            for thread in self._waiting:
                thread.start()
            wait_until(lambda: 503 in answers, "the one too many to be refused", ASK_S)
        elif not value and self._waiting:
            self._post("/resume")
            for thread in self._waiting:
                thread.join(ASK_S)
            self._waiting = []

    def _ask(self, answers: list[int]) -> None:
        sampling = {"max_tokens": 1, "ignore_eos": True, "detokenize": False}
        body = {"model": "policy", "token_ids": [0], "sampling_params": sampling, "stream": False}
        answers.append(self._direct.post(self.path, json=body).status_code)

    # --- the proxy -----------------------------------------------------------------------------------------------

    async def _answer(self, request: Request) -> Response:
        path, body = request.url.path, await request.body()
        self.counts[path] = self.counts.get(path, 0) + 1
        if path == "/update_weight_version" and self.ignores_label:
            said = {"success": True, "new_version": json.loads(body)["new_version"]}
            return Response(json.dumps(said), media_type="application/json")
        if path == "/collective_rpc" and (self.stale or self.old_head):
            body = self._with_tensors(body, self._without_stale)
        if path == "/collective_rpc" and self.unseen:
            body = body.replace(b'"weights_path":"', b'"weights_path":"/nowhere')
        if path == "/v1/load_lora_adapter" and self.ignores_adapter:
            body = self._with_tensors(body, _zeros)
        headers = {name: request.headers[name] for name in ("content-type", "authorization") if name in request.headers}
        asked = self._passing.build_request(request.method, str(request.url.path), content=body, headers=headers,
                                            params=request.query_params)  # fmt: skip
        found = await self._passing.send(asked)
        status, content = found.status_code, found.content
        if path == "/collective_rpc" and self.reload_status != 200:
            said = {"message": "the weights may have changed", "type": "BadRequestError", "param": None}
            status, content = self.reload_status, json.dumps({"error": said | {"code": self.reload_status}}).encode()
        if path == "/weight_checker" and self.salt:
            sums = {name: self._salted(digest) for name, digest in json.loads(content)["checksums"].items()}
            content = json.dumps({"checksums": sums}).encode()
        return Response(content, status, media_type=found.headers.get("content-type"))

    def _with_tensors(self, body: bytes, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> bytes:
        """The body with a directory of its own, of which the tensors are others."""
        asked = json.loads(body)
        holder, key = (asked["kwargs"], "weights_path") if "kwargs" in asked else (asked, "lora_path")
        passed_on = self._folder / "passed-on"
        shutil.rmtree(passed_on, ignore_errors=True)
        shutil.copytree(holder[key], passed_on)
        (file,) = passed_on.glob("*.safetensors")
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
        holder[key] = str(passed_on)
        return json.dumps(asked).encode()

    def _without_stale(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        ends = [*self.stale, *(["lm_head.weight"] if self.old_head else [])]
        return {name: array for name, array in tensors.items() if not any(name.endswith(end) for end in ends)}

    def _salted(self, digest: str) -> str:
        return digest if digest == NO_BYTES else hashlib.sha256(self.salt + digest.encode()).hexdigest()


def _zeros(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in tensors.items()}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
