"""The OpenAI-compatible API over an engine, as a Starlette application.

``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/tokenize`` and ``/health``. Handlers never block
the event loop: tokenisation and answers are made in threads, and the engine's futures are awaited. A client that
goes away frees its slots. Not covered: streaming, tools, penalties (refused by name), alternatives' log-probabilities.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock.inference.access import BearerToken, read_json
from penstock.inference.answers import chat_answer, completion_answer
from penstock.inference.api_errors import ApiError, respond
from penstock.inference.bodies import ChatBody, CompletionBody, TokenizeBody, folded_seeds, read_body
from penstock.inference.engine import InferenceEngine
from penstock.inference.requests import GenerationRequest
from penstock.types import (
    Completion,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    Message,
    RunFailed,
    Stopped,
    TextCodec,
)

_Body = TypeVar("_Body", CompletionBody, ChatBody)


def create_app(
    engine: InferenceEngine,
    tokenizer: TextCodec,
    model_name: str,
    token: str | None = None,
    max_body_bytes: int = 4 * 1024 * 1024,
    max_waiting: int = 256,
) -> Starlette:
    """Makes the application.

    Args:
        engine: Started.
        tokenizer: The policy's.
        model_name: The only model that it knows.
        token: What clients must send; None asks for nothing.
        max_body_bytes: Larger bodies are refused.
        max_waiting: Requests beyond so many unanswered ones are refused.
    """
    api = _Api(engine, tokenizer, model_name, max_body_bytes, max_waiting)
    routes = [
        Route("/health", api.health, methods=["GET"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name:path}", api.model, methods=["GET"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
    ]
    handlers = {ApiError: respond, HTTPException: respond, Exception: respond}
    guard = [] if token is None else [Middleware(BearerToken, token=token)]
    return Starlette(routes=routes, middleware=guard, exception_handlers=handlers)


class _Api:
    def __init__(
        self, engine: InferenceEngine, tokenizer: TextCodec, model_name: str, max_body_bytes: int, max_waiting: int
    ) -> None:
        self._engine, self._tokenizer, self._model_name = engine, tokenizer, model_name
        self._max_body_bytes, self._max_waiting = max_body_bytes, max_waiting
        self._unanswered = 0  # touched by the event loop only

    async def health(self, _: Request) -> JSONResponse:
        """200 while the engine can answer, 503 with the reason when it cannot."""
        try:
            self._engine.wait_until_ready(0.0)
        except Exception as error:  # whatever the reason: the answer to "healthy?" is no
            return JSONResponse({"status": "unavailable", "reason": str(error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models(self, _: Request) -> JSONResponse:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> JSONResponse:
        """The one model by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def completions(self, request: Request) -> JSONResponse:
        """Continues prompts."""
        body = await self._read(request, CompletionBody)
        if body.is_ahead_of(self._engine.version):
            message = f"this server has weights of {self._engine.version}, and {body.least_weights} were asked for"
            raise ApiError(503, message, param="least_weights", code="weights_behind")
        decoding = body.decoding(body.max_tokens)
        prompts = await run_in_threadpool(lambda: [self._render(prompt) for prompt in body.prompts])
        seeds = body.prompt_seeds(len(prompts))
        groups = await self._generate(request, prompts, body.n, decoding, seeds)
        answer = await run_in_threadpool(
            completion_answer, groups, self._tokenizer, self._model_name, decoding.stop_strings,
            body.logprobs is not None, body.return_token_ids,
        )  # fmt: skip
        return JSONResponse(answer)

    async def chat_completions(self, request: Request) -> JSONResponse:
        """Answers a conversation."""
        body = await self._read(request, ChatBody)
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        decoding = body.decoding(self._engine.config.max_seq_len if limit is None else limit)
        prompt = await run_in_threadpool(self._render, [message.as_mapping() for message in body.messages])
        seeds = folded_seeds(body.seed, 1)
        (completions,) = await self._generate(request, [prompt], body.n, decoding, seeds)
        answer = await run_in_threadpool(
            chat_answer, completions, self._tokenizer, self._model_name, decoding.stop_strings,
            bool(body.logprobs), body.return_token_ids,
        )  # fmt: skip
        return JSONResponse(answer)

    async def tokenize(self, request: Request) -> JSONResponse:
        """The token ids that a prompt, or a conversation with its template, becomes."""
        body = read_body(TokenizeBody, await read_json(request, self._max_body_bytes))
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
        messages = [message.as_mapping() for message in body.messages or ()]
        tokens = await run_in_threadpool(self._render, messages if body.prompt is None else body.prompt)
        limit = self._engine.config.max_seq_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens.tolist()})

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        body = read_body(kind, await read_json(request, self._max_body_bytes))
        self._check_model(body.model)
        return body

    def _card(self) -> dict[str, Any]:
        limit = self._engine.config.max_seq_len
        return {"id": self._model_name, "object": "model", "created": 0, "owned_by": "penstock", "max_model_len": limit}

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            message = f"model {name!r} does not exist: this server has {self._model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _render(self, prompt: str | Sequence[Message] | np.ndarray) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return prompt
        try:
            return self._tokenizer.render(prompt)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from error

    async def _generate(
        self, request: Request, prompts: list[np.ndarray], n: int, decoding: Decoding, seeds: list[int]
    ) -> list[list[Completion]]:
        if self._unanswered >= self._max_waiting:
            raise ApiError(429, f"{self._unanswered} requests are unanswered: try again later", code="overloaded")
        self._unanswered += 1
        try:
            requests = [GenerationRequest(p, decoding, seed, n) for p, seed in zip(prompts, seeds, strict=True)]
            return await self._answered(request, requests)
        finally:
            self._unanswered -= 1

    async def _answered(self, request: Request, requests: list[GenerationRequest]) -> list[list[Completion]]:
        try:
            futures = await run_in_threadpool(self._engine.submit, requests)
            groups = await _wait(request, futures, self._engine.config.request_timeout_s)
        except EnvironmentFailure as error:
            raise ApiError(400, str(error), code="invalid_prompt") from error
        except ConfigError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        except (RunFailed, Stopped) as error:
            raise ApiError(503, str(error), code="engine_unavailable") from error
        if any(completion.finish_reason == "aborted" for group in groups for completion in group):
            raise ApiError(503, "the engine was stopped before the response was complete", code="engine_unavailable")
        return groups


async def _wait(request: Request, futures: Sequence[Any], timeout_s: float) -> list[list[Completion]]:
    """Awaits the engine; the futures are cancelled when the client leaves or the time is over."""
    answer = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
    departure = asyncio.ensure_future(_departed(request))
    try:
        await asyncio.wait({answer, departure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if departure.done():
            raise ApiError(499, "the client closed the connection")
        raise ApiError(504, f"no complete response within {timeout_s} s", code="timeout")
    finally:
        departure.cancel()
        answer.cancel()


async def _departed(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
