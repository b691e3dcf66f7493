"""A server with SGLang 0.5.23's routes, bodies and codes over Penstock's own engine, which also lies as real ones do.

It was written by what the released package does, which was read and not run. What it has in common with vLLM's, the
engine, its faults and its weights, is `tests.fakes.vllm_server`'s.
"""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.fakes.vllm_server import PREFIX, WAIT_S, FakeVllm, checksums_of

from penstock.inference.sequence import GenerationRequest
from penstock.types import ConfigError, Decoding, EnvironmentFailure, Stopped

VERSION = "0.5.23"
PAUSES = {"abort": ("abort", True), "retract": ("keep", True), "in_place": ("keep", False)}


class FakeSglang(FakeVllm):
    """One server, with the faults of `FakeVllm`; `scale_out`, `dev_mode`, adapters and sleep are vLLM's alone.

    Attributes:
        ends: Tokens that end every answer, whatever the request says: those of the model's own.
        admin: Its control routes want another key.
        spanless: It does not say which weights sampled a token, as before 0.5.23.
    """

    kind, path = "sglang", "/generate"

    def as_started(self) -> None:
        self.ends: set[int] = set()
        self.admin = self.spanless = False
        self._mode = ""
        super().as_started()

    def app(self) -> Starlette:
        get = {"/model_info": self.model_info, "/server_info": self.server_info, "/v1/models": self.models}
        post = {
            "/generate": self.generate, "/pause_generation": self.pause, "/continue_generation": self.resume,
            "/update_weights_from_disk": self.reload, "/update_weight_version": self.rename,
            "/weights_checker": self.checksum,
        }  # fmt: skip
        return Starlette(
            routes=[
                *(Route(path, self._counted(path, handler), methods=["GET"]) for path, handler in get.items()),
                *(Route(path, self._counted(path, handler), methods=["POST"]) for path, handler in post.items()),
            ],
        )

    async def model_info(self, _: Request) -> Response:
        info = {"model_path": str(self._directory), "served_model_name": self.name, "weight_version": self.label}
        return JSONResponse(info | {"is_generation": True, "load_format": "auto"})

    async def server_info(self, _: Request) -> Response:
        return JSONResponse({"version": VERSION, "internal_states": [{}]})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        while self.hung:
            await asyncio.sleep(0.01)
        if self.full:
            return _error(503, "The request queue is full.")
        ((prompt,), sampling) = body["input_ids"], body["sampling_params"]
        assert sampling["n"] == 1 and body["return_logprob"], body
        if len(prompt) >= self.room:
            return _error(400, f"The input ({len(prompt)} tokens) is longer than the model's context length")
        cold = sampling["temperature"] < 1e-4
        stops = set() if sampling.get("ignore_eos") else {*sampling.get("stop_token_ids", ()), *self.ends}
        decoding = Decoding(
            temperature=1.0 if cold else sampling["temperature"],
            top_k=sampling.get("top_k") or (1 if cold else None),
            top_p=sampling.get("top_p"),
            min_p=sampling.get("min_p"),
            max_output_tokens=sampling["max_new_tokens"],
            stop_token_ids=tuple(sorted(stops)),
            stop_strings=tuple(sampling.get("stop", ())),
        )
        asked = GenerationRequest(np.array(prompt, np.int32), decoding, sampling["sampling_seed"])
        try:
            (future,) = await run_in_threadpool(self.engine.submit, [asked])
            completion = (await asyncio.wrap_future(future))[0]
        except (ConfigError, EnvironmentFailure) as failure:
            return _error(400, str(failure))
        except Stopped as stopped:
            return _error(500, str(stopped))
        return JSONResponse([self._said(completion, len(prompt), cold)])

    def _said(self, completion: Any, prompt_tokens: int, cold: bool) -> dict[str, Any]:
        tokens, logprobs = completion.response_tokens.tolist(), completion.response_logprobs.tolist()
        if cold and not self.raw:
            logprobs = [0.0 for _ in logprobs]  # at that temperature nothing else is left
        ended = {
            "length": {"type": "length", "length": len(tokens)},
            "stop": {"type": "stop", "matched": tokens[-1] if tokens else None},
            "aborted": {"type": "abort", "message": "Abort in waiting queue"},
        }[completion.finish_reason]
        spans = self._spans(completion)
        meta = {
            "id": "1f0a", "finish_reason": ended, "prompt_tokens": prompt_tokens, "completion_tokens": len(tokens),
            "weight_version": self.label, "num_retractions": 0, "cached_tokens": 0,
            "output_token_logprobs": [[p, token, None] for token, p in zip(tokens, logprobs, strict=True)],
            "output_token_logprobs_length": len(tokens),
        }  # fmt: skip
        meta |= {} if self.spanless else {"weight_versions": spans}
        return {"text": completion.text, "output_ids": tokens, "meta_info": meta}

    # --- what drives it ------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        self._mode = (await request.json())["mode"]
        how, clears = PAUSES[self._mode]
        await run_in_threadpool(self.engine.pause, how, clears, WAIT_S)  # type: ignore[arg-type]
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: Request) -> Response:
        self.engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def reload(self, request: Request) -> Response:
        """With requests in its batch it cannot forget its cache: then it says 400, and has the new weights."""
        body = await request.json()
        path = Path(body["model_path"])
        if not (path / "model.safetensors").is_file():
            return _updated(False, f"Failed to get weights iterator: {path}.")
        running = bool(self.engine.stats()["inference/running"])
        await run_in_threadpool(self._load, path)
        unflushed = body["flush_cache"] and (self._mode == "in_place" or not self.engine.paused) and running
        if unflushed or self.reload_status != 200:
            return _updated(False, "Weights were updated, but the cache was not flushed because requests are running")
        return _updated(True, "Succeeded to update model weights.")

    async def rename(self, request: Request) -> Response:
        body = await request.json()
        assert body.get("abort_all_requests") is False, "it would abort what runs"
        if not self.ignores_label:
            self.rename_to(body["new_version"])
        said = f"Weight version updated to {body['new_version']}"
        return JSONResponse({"success": True, "message": said, "new_version": body["new_version"]})

    async def checksum(self, request: Request) -> Response:
        assert (await request.json()) == {"action": "checksum"}
        if self.admin:
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        sums = {name.removeprefix(PREFIX): each[:16] for name, each in self._sums().items()}
        total = hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()
        place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        rank = {"checksums": sums, "per_gpu_checksum": total, "parallelism_info": place | {"rank": 0, "size": 1}}
        return JSONResponse({"success": True, "message": "Success", "ranks": [rank], "per_engine_checksum": total})

    def _sums(self) -> dict[str, str]:
        return checksums_of(self._tensors, self.blind, self.salt)


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status == 400 else "internal_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status_code=status)


def _updated(success: bool, message: str) -> JSONResponse:
    said = {"success": success, "message": message, "num_paused_requests": 0}
    return JSONResponse(said, status_code=200 if success else 400)
