"""A server with vLLM 0.32's routes, bodies and codes over Penstock's own engine, which also lies as real ones do.

    python -m tests.fakes.vllm_server serve MODEL --port 8000 --served-model-name policy …

takes the words that `vllm serve` is launched with. Faults are attributes of `FakeVllm`; a process takes them from
``FAKE_VLLM``, as JSON. Bodies are those recorded in ``tests/fakes/vllm_answers.json``.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.inference import EngineConfig, HttpServer, InferenceEngine
from penstock.inference.sequence import GenerationRequest
from penstock.model.language import Decoder, load_decoder, named_arrays, with_named_arrays
from penstock.model.language.hugging_face import with_merged
from penstock.types import ConfigError, Decoding, EnvironmentFailure, PenstockError, Stopped, WeightVersion

STOP_S = 10.0
WAIT_S = 280.0
VERSION = "0.32.0"
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
PREFIX = "dp0:pp0:pcp0:tp0:"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip
NO_JSON = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
NO_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}
NOT_ASKED_FOR = dict.fromkeys(
    ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics",
     "kv_transfer_params", "ec_transfer_params")
)  # fmt: skip
UNSEEN = (
    "Call to collective_rpc method failed: Worker failed with error 'Repo id must be in the form 'repo_name' or "
    "'namespace/repo_name': '<path>'. Use `repo_type` argument if needed.', please check the stack trace above for the "
    "root cause"
)


def error(status: int, kind: str, message: str, param: str | None = None) -> JSONResponse:
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return JSONResponse(body, status_code=status)


def _card(name: str, root: str, parent: str | None, room: int | None) -> dict[str, Any]:
    may = {"create_engine": False, "sampling": True, "logprobs": True, "search_indices": False, "view": True,
           "fine_tuning": False}  # fmt: skip
    permission = {"id": "modelperm-1", "object": "model_permission", "created": 1, "organization": "*", "group": None}
    permission |= {"is_blocking": False} | {f"allow_{what}": allowed for what, allowed in may.items()}
    card = {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": root, "parent": parent}
    return card | {"max_model_len": room, "permission": [permission]}


def checksums_of(tensors: dict[str, np.ndarray], blind: bool, salt: bytes = b"") -> dict[str, str]:
    """SHA-256 of the bytes of each parameter as vLLM has them: some matrices are one, rows are padded to 64.

    Args:
        tensors: By their names in a Hugging Face directory.
        blind: As the CPU build, which keeps the matrices of its layers in a form of its own, and none of them here.
        salt: Before the bytes: as a server that holds all of them in another form.
    """
    parts: dict[str, list[np.ndarray]] = {}
    last = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name in sorted(tensors, key=lambda name: last.index(name.split(".")[-2]) if name.split(".")[-2] in last else 0):
        words = name.split(".")
        words[-2] = FUSED.get(words[-2], words[-2])
        parts.setdefault(".".join(words), []).append(tensors[name])
    sums: dict[str, str] = {}
    for name, arrays in parts.items():
        array = np.concatenate(arrays)
        if "embed_tokens" in name or "lm_head" in name:
            array = np.concatenate([array, np.zeros((-len(array) % 64, *array.shape[1:]), array.dtype)])
        empty = blind and "proj.weight" in name
        held = b"" if empty else salt + np.ascontiguousarray(array).tobytes()
        sums[PREFIX + name] = hashlib.sha256(held).hexdigest()
    return sums


def with_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}


def untied(decoder: Decoder) -> Decoder:
    """With an output matrix of its own, as it is with whatever directory a run writes."""
    arrays = named_arrays(decoder)
    config = decoder.config.model_copy(update={"tie_word_embeddings": False})
    return Decoder.from_arrays(config, {"head": arrays["embedding"], **arrays})


class FakeVllm:
    """One server.

    Attributes:
        kind: What a run calls such engines.
        path: Of its route for tokens.
        proven: Share of the parameters that its checksums see.
        scale_out: Started with ``--enable-scale-out``.
        dev_mode: Started with ``VLLM_SERVER_DEV_MODE=1``.
        runtime_lora: Started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and ``--enable-lora``.
        raw: Log-probabilities are before temperature and truncation.
        full: Its queue is.
        hung: It answers nothing but its health.
        dead: Its engine is, as after a model that it cannot compute.
        dies_at: The request for tokens in which it is killed, unless the file `died` says that it was.
        died: See `dies_at`.
        blind: Its checksums see no matrix of a layer.
        stale: Tensors that a reload leaves as they were, by the end of their names.
        unseen: It sees no directory that it is told to load: it says 500, its parameters have no values, and it is dead
            from the first request on, unless it loads others before.
        old_head: The output matrix that it computes with stays the first one; the checksums say otherwise.
        reload_status: What a reload is answered with, whatever it did.
        name: Of its model.
        room: Most tokens of a sequence, as it says.
        salt: What it holds is in another form than the file's.
        ignores_label: It goes on to call its weights as before.
        ignores_adapter: It answers for an adapter with what its base says.
        asleep: It was put to sleep.
        locked: It asks for a key, and got none.
        sleep_mode: Started with ``--enable-sleep-mode``.
        sleepless: It says that it sleeps or wakes, and goes on as before.
        counts: Of requests by path.
    """

    kind, path = "vllm", "/inference/v1/generate"
    proven = 1.0

    def __init__(self, directory: Path, codec: Any, config: EngineConfig, model: str = "policy", **faults: Any) -> None:
        self.as_started()
        self.name, self.room = model, config.max_seq_len
        for name, value in faults.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self._codec = codec
        self._directory = directory
        self._tensors = with_head(load_file(directory / "model.safetensors"))
        self._base = untied(load_decoder(directory))
        self._head = self._base.output_matrix
        self._labels = ["default"]
        self._applied: str | None = None
        self._turn = threading.Lock()
        self.engine = InferenceEngine(self._base, WeightVersion(0, 0), codec, config)
        self.server = HttpServer(self.app(), stop_timeout_s=1.0)

    def as_started(self) -> None:
        """No faults, no adapters, its own label; its weights stay."""
        self.scale_out = self.dev_mode = self.runtime_lora = True
        self.raw = self.full = self.hung = self.blind = self.old_head = self.dead = self.unseen = self._empty = False
        self.ignores_label = self.ignores_adapter = self.asleep = self.locked = False
        self.name, self.room, self.salt = "policy", 64, b""
        self.dies_at, self.died = 0, ""
        self.sleep_mode = self.sleepless = False
        self.stale: list[str] = []
        self.reload_status = 200
        self.counts: dict[str, int] = {}
        self._adapters: dict[str, Decoder] = {}
        self._adapters_from: dict[str, str] = {}
        if hasattr(self, "engine"):
            self.engine.resume()
            self.rename_to("default")

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.server.url

    @property
    def paused(self) -> bool:
        """Whether it computes nothing."""
        return self.engine.paused

    @property
    def label(self) -> str:
        """What it calls its weights."""
        return self._labels[-1]

    def rename_to(self, label: str) -> None:
        """From the next token on."""
        self._labels.append(label)
        self.engine.rename_version(WeightVersion(0, len(self._labels) - 1))

    def start(self, port: int = 0) -> str:
        if port:
            self.server = HttpServer(self.app(), port=port, stop_timeout_s=1.0)
        self.engine.start(lazily=True)
        self.server.start()
        return self.server.url

    def stop(self) -> None:
        self.hung = False
        self.server.stop()
        self.engine.stop(STOP_S)

    def app(self) -> Starlette:
        get = {"/health": self.health, "/version": self.version, "/v1/models": self.models}
        post = {"/inference/v1/generate": self.generate}
        if self.dev_mode:
            get |= {"/is_paused": self.is_paused, "/weight_info": self.weight_info, "/is_sleeping": self.is_sleeping,
                    "/server_info": self.server_info}  # fmt: skip
            post |= {
                "/pause": self.pause, "/resume": self.resume, "/collective_rpc": self.reload,
                "/update_weight_version": self.rename, "/weight_checker": self.checksum, "/sleep": self.sleep,
                "/wake_up": self.wake,
            }  # fmt: skip
        if self.runtime_lora:
            post |= {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        return Starlette(
            routes=[
                *(Route(path, self._counted(path, handler), methods=["GET"]) for path, handler in get.items()),
                *(Route(path, self._counted(path, handler), methods=["POST"]) for path, handler in post.items()),
            ],
        )

    def _counted(self, path: str, handler: Any) -> Any:
        async def counted(request: Request) -> Response:
            self.counts[path] = self.counts.get(path, 0) + 1
            return await handler(request)

        return counted

    # --- what clients ask ----------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        return Response()

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def models(self, _: Request) -> Response:
        if self.locked:
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        cards = [_card(self.name, str(self._directory), None, self.room)]
        cards += [_card(name, str(where), self.name, None) for name, where in self._adapters_from.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def generate(self, request: Request) -> Response:
        if "json" not in request.headers.get("content-type", ""):
            return error(400, "Bad Request", NO_JSON)
        body = await request.json()
        if not self.scale_out:
            message = "This server was started without `--enable-scale-out`"
            return error(403, "PermissionDeniedError", message)
        while self.hung:
            await asyncio.sleep(0.01)
        self.dead = self.dead or self._empty
        if self.dead:
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            return error(500, "InternalServerError", message)
        if self.full:
            return error(503, "Service Unavailable", BUSY)
        named = body["model"]
        if named != self.name and named not in self._adapters:
            message = f"The model `{named}` does not exist. Valid aliases: {self.name}."
            return error(404, "NotFoundError", message, "model")
        if len(body["token_ids"]) >= self.room:
            message = (
                f"The decoder prompt (length {len(body['token_ids'])}) is longer than the maximum model length of "
                f"{self.room}. Make sure that `max_model_len` is no smaller than the number of text tokens."
            )
            return error(400, "BadRequestError", message)
        unknown = [token for token in body["token_ids"] if token >= self._codec.vocab_size]
        if unknown:
            return error(400, "BadRequestError", f"Token id {unknown[0]} is out of vocabulary")
        if self.dies_at and self.counts["/inference/v1/generate"] >= self.dies_at and not Path(self.died).exists():
            Path(self.died).touch()
            self.engine.submit([_request(body)])
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            completion = await (self._of_adapter if self.runtime_lora and self._adapters else self._of_base)(body)
        except (ConfigError, EnvironmentFailure) as failure:
            return error(400, "BadRequestError", str(failure))
        except Stopped as stopped:
            return error(500, "InternalServerError", str(stopped))
        return JSONResponse(self._answer(body, completion))

    async def _of_base(self, body: dict[str, Any]) -> Any:
        (future,) = await run_in_threadpool(self.engine.submit, [_request(body)])
        return (await asyncio.wrap_future(future))[0]

    async def _of_adapter(self, body: dict[str, Any]) -> Any:
        """Those of one adapter at a time: the engine has one set of weights."""
        return await run_in_threadpool(self._applied_to, body)

    def _applied_to(self, body: dict[str, Any]) -> Any:
        with self._turn:
            named = self.name if self.ignores_adapter else body["model"]
            if named != self._applied or named != self.name:
                self.engine.set_weights(self.engine.version, self._adapters.get(named, self._base))
                self.engine.digests(WAIT_S)
                self._applied = named
            (future,) = self.engine.submit([_request(body)])
            return future.result(WAIT_S)[0]

    def _answer(self, body: dict[str, Any], completion: Any) -> dict[str, Any]:
        sampling, spans = body["sampling_params"], self._spans(completion)
        logprobs = completion.response_logprobs.tolist()
        if sampling.get("top_p", 1.0) < 1e-3 and not self.raw:
            logprobs = [0.0 for _ in logprobs]  # after truncation
        elif self.raw:
            logprobs = [each * sampling["temperature"] - 0.1 for each in logprobs]
        content = [
            (said := {"token_id": token, "logprob": logprob, "rank": 1}) | {"top_logprobs": [said]}
            for token, logprob in zip(completion.response_tokens.tolist(), logprobs, strict=True)
        ]
        choice = {
            "index": 0, "stop_reason": None, "routed_experts": None, "sampling_mask": None,
            "finish_reason": {"aborted": "abort"}.get(completion.finish_reason, completion.finish_reason),
            "token_ids": completion.response_tokens.tolist(), "logprobs": {"content": content},
            "weight_versions": spans,
        }  # fmt: skip
        asked, sampled = len(body["token_ids"]), len(logprobs)
        usage = {"prompt_tokens": asked, "total_tokens": asked + sampled, "completion_tokens": sampled} | NO_DETAILS
        answer = {"request_id": "generate-tokens-1", "model": body["model"], "created": 1, "usage": usage}
        return answer | NOT_ASKED_FOR | {"choices": [choice], "output_mode": "tokens"}

    def _spans(self, completion: Any) -> list[dict[str, Any]]:
        spans = list[dict[str, Any]]()
        for position, step in enumerate(completion.weight_steps.tolist()):
            label = self._labels[step]
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": label, "start": position, "end": position + 1})
        return spans

    # --- what drives it ------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        clear = request.query_params.get("clear_cache", "true") == "true"
        mode = request.query_params.get("mode", "abort")
        await run_in_threadpool(self.engine.pause, mode, clear, WAIT_S)  # type: ignore[arg-type]
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": self.engine.paused})

    async def weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self._labels[-1]})

    async def reload(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights", body
        path = Path(body["kwargs"]["weights_path"])
        if self.unseen or not (path / "model.safetensors").is_file():
            self._empty = True
            return error(500, "InternalServerError", UNSEEN)
        self._empty = False
        await run_in_threadpool(self._load, path)
        if self.reload_status != 200:
            kind = {400: "BadRequestError", 500: "InternalServerError"}[self.reload_status]
            return error(self.reload_status, kind, "Failed to flush the cache: requests are running")
        return JSONResponse({"results": [None]})

    def _load(self, path: Path) -> None:
        tensors = with_head(load_file(path / "model.safetensors"))
        for name in tensors:
            if any(name.endswith(end) for end in self.stale):
                tensors[name] = self._tensors[name]
        folder = path
        if self.stale:
            folder = _with_tensors(path, tensors)
        self._tensors = tensors
        decoder = untied(load_decoder(folder))
        if self.old_head:
            decoder = with_named_arrays(decoder, named_arrays(decoder) | {"head": self._head})
        self.engine.set_weights(self.engine.version, decoder)
        self.engine.digests(WAIT_S)

    async def rename(self, request: Request) -> Response:
        label = (await request.json())["new_version"]
        if not self.ignores_label:
            self.rename_to(label)
        return JSONResponse({"success": True, "new_version": label})

    async def checksum(self, request: Request) -> Response:
        assert (await request.json()) == {"action": "checksum"}
        return JSONResponse({"checksums": checksums_of(self._tensors, self.blind, self.salt)})

    async def load_adapter(self, request: Request) -> Response:
        body = await request.json()
        if "lora_name" not in body:
            missing = [f"body.{name}" for name in ("lora_name", "lora_path")]
            said = [
                f"  {{'type': 'missing', 'loc': '{name}', 'msg': 'Field required', 'input': '<dict of 0 items>'}}"
                for name in missing
            ]
            return error(400, "Bad Request", "\n".join(["2 validation errors:", *said]), missing[0])
        name = body["lora_name"]
        if name in self._adapters:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            return error(400, "InvalidUserInput", message)
        try:
            adapted = await run_in_threadpool(load_decoder, body["lora_path"], "float32", str(self._directory))
        except PenstockError as failure:
            return error(404, "NotFoundError", str(failure))
        self._adapters_from[name] = body["lora_path"]
        self._adapters[name] = untied(await run_in_threadpool(with_merged, adapted))
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self._adapters:
            return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self._adapters[name], self._adapters_from[name]
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def sleep(self, request: Request) -> Response:
        level, mode = int(request.query_params.get("level", 1)), request.query_params.get("mode", "abort")
        if not self.sleepless:
            await run_in_threadpool(self.engine.pause, mode, True, WAIT_S)  # type: ignore[arg-type]
            self.asleep = True
        return JSONResponse({"status": "sleeping", "level": level})

    async def wake(self, _: Request) -> Response:
        if not self.sleepless:
            self.asleep = False
            self.engine.resume()
        return JSONResponse({"status": "awake", "tags": None})

    async def server_info(self, _: Request) -> Response:
        return JSONResponse({"vllm_config": {"model_config": {"enable_sleep_mode": self.sleep_mode}}})

    async def is_sleeping(self, _: Request) -> Response:
        return JSONResponse({"is_sleeping": self.asleep})

    @property
    def adapters(self) -> list[str]:
        return list(self._adapters)


def _request(body: dict[str, Any]) -> GenerationRequest:
    sampling = body["sampling_params"]
    assert sampling.get("n", 1) == 1 and sampling["ignore_eos"], sampling
    decoding = Decoding(
        temperature=sampling["temperature"],
        top_k=sampling.get("top_k") or None,
        top_p=sampling.get("top_p"),
        min_p=sampling.get("min_p"),
        max_output_tokens=sampling["max_tokens"],
        stop_token_ids=tuple(sampling["stop_token_ids"]),
        stop_strings=tuple(sampling["stop"]),
    )
    return GenerationRequest(np.array(body["token_ids"], np.int32), decoding, sampling["seed"])


def _with_tensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    from safetensors.numpy import save_file

    folder = path.with_name(f"{path.name}-seen")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    from penstock.text import Tokenizer

    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-lora-rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256, 320, 512])
    parser.add_argument("--enable-scale-out", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    known, _ = parser.parse_known_args()
    config = EngineConfig(max_slots=known.max_num_seqs, max_seq_len=known.max_model_len)
    flags = {
        "scale_out": known.enable_scale_out,
        "sleep_mode": known.enable_sleep_mode,
        "raw": known.logprobs_mode != "processed_logprobs",
        "dev_mode": os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        "runtime_lora": os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1",
    }
    faults = json.loads(os.environ.get("FAKE_VLLM", "{}"))
    fake = FakeVllm(
        Path(known.model), Tokenizer.load(known.model), config, known.served_model_name, **{**flags, **faults}
    )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(fake.start(known.port), flush=True)
    ended.wait()
    fake.stop()


if __name__ == "__main__":
    main()
