"""The OpenAI-compatible API over an engine, as a Starlette application.

``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, ``/tokenize``, ``/detokenize``, ``/health``, ``/ready``
and ``/version``. Handlers never block the event loop: bodies are read, texts encoded and answers made in a thread, one
at a time, and the engine's futures are awaited. `penstock.inference.access` bounds what may be asked before any handler
runs. A client that goes away frees its slots, in the middle of a stream, too. Routes that pause the engine or change
its weights exist only where a token is asked for (`_Control`), and never on the servers of a run. Not covered:
penalties (refused by name).
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.inference.access import AccessRules
from penstock.inference.answers import (
    CONTENT_TYPE,
    AnswerForm,
    AnswerStream,
    PromptForm,
    Sampled,
    encoded,
    event,
    exposition,
)
from penstock.inference.codec import largest_body_bytes
from penstock.inference.config import EngineConfig
from penstock.inference.engine import InferenceEngine
from penstock.inference.external import version_of_label
from penstock.inference.schema import (
    ApiError,
    ChatBody,
    CompletionBody,
    ControlBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
    folded_seeds,
    prompt_error,
    read_body,
    read_pause,
    respond,
)
from penstock.inference.sequence import GenerationRequest
from penstock.inference.server_pool import MODEL_NAME
from penstock.model.language import Decoder
from penstock.text.tokenizer import TemplateArgumentError
from penstock.types import (
    Alternatives,
    CheckpointError,
    Completion,
    ConfigError,
    EnvironmentFailure,
    Message,
    NoProgressError,
    PromptScores,
    RunFailed,
    Stopped,
    TextCodec,
    WeightsError,
    WeightVersion,
)

SMALL_WORK_BYTES = 4096
"""A body of this size is read on the event loop, where it takes less than a change of threads."""

LONGEST_PAUSE_S = 0.05
"""After each piece of work in a thread, before the next one begins."""

_Body = TypeVar("_Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_Result = TypeVar("_Result")

LoadWeights = Callable[[Path], Decoder]
"""Reads a policy directory; raises `ConfigError` or `CheckpointError`."""


def create_app(
    engine: InferenceEngine,
    tokenizer: TextCodec,
    model_name: str,
    access: AccessRules | None = None,
    load_weights: LoadWeights | None = None,
) -> Starlette:
    """Makes the application.

    Args:
        engine: Already started; requests are submitted to it.
        tokenizer: The policy's; renders conversations and decodes texts.
        model_name: The only model that it knows.
        access: Who may ask, and how much at once; None asks for no token, and answers to this machine's names only.
        load_weights: With it, and only with a token, there are routes that pause the engine and give it other weights.
    """
    rules = access or AccessRules()
    api = Api(engine, tokenizer, model_name)
    status = _Status(engine, api)
    control = [] if load_weights is None or rules.token is None else _Control(engine, load_weights).routes()
    routes = [
        *(Route(path, status.health, methods=["GET"]) for path in ("/health", "/ready")),
        Route("/version", status.version, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
        *api.routes(),
        *control,
    ]
    middleware = rules.middleware(largest_body_bytes(engine.config.max_seq_len, tokenizer.vocab_size))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS)


_HANDLERS: Mapping[Any, Any] = {ApiError: respond, HTTPException: respond, Exception: respond}


def generation_app(answering: "Answering", tokenizer: TextCodec) -> Starlette:
    """The routes that generate alone, by whatever name the model is called; who may ask is not checked here."""
    return Starlette(routes=Api(answering, tokenizer, None).routes(), exception_handlers=_HANDLERS)


class _Status:
    """How an engine is."""

    def __init__(self, engine: InferenceEngine, api: "Api") -> None:
        self._engine, self._api = engine, api

    async def health(self, request: Request) -> JSONResponse:
        """200 while the engine can answer, 503 with the reason when it cannot; one that is paused is not ready."""
        try:
            self._engine.wait_until_ready(0.0)
        except Exception as error:  # whatever the reason: the answer to "healthy?" is no
            return JSONResponse({"status": "unavailable", "reason": str(error)}, status_code=503)
        if self._engine.paused and request.url.path.endswith("/ready"):
            return JSONResponse({"status": "paused"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def version(self, _: Request) -> JSONResponse:
        """Of Penstock."""
        return JSONResponse({"version": version("penstock")})

    async def metrics(self, _: Request) -> Response:
        """All numbers in Prometheus' text form."""
        content = await self._api.work(lambda: exposition(self._engine.stats(), self._engine.latencies()))
        return Response(content, media_type=CONTENT_TYPE)


@runtime_checkable
class Answering(Protocol):
    """What the API asks: an engine, or the policy of a run on behalf of one rollout."""

    @property
    def config(self) -> EngineConfig:
        """Limits."""
        ...

    @property
    def version(self) -> WeightVersion:
        """Of the weights that it serves."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> "list[Future[list[Completion]]]":
        """A future for each, with its n completions."""
        ...

    def score(
        self, texts: Sequence[np.ndarray], temperature: float = 1.0, alternatives: int = 0, kept: bool = False
    ) -> "list[Future[PromptScores]]":
        """A future for each, with what the weights make of it."""
        ...


class Api:
    """The routes that generate, and what goes with them.

    Args:
        engine: What is asked for tokens.
        tokenizer: Renders conversations and decodes texts.
        model_name: The only model that it knows; None: it answers to every name.
    """

    def __init__(self, engine: Answering, tokenizer: TextCodec, model_name: str | None) -> None:
        self._engine, self._tokenizer, self._model_name = engine, tokenizer, model_name
        self._max_seq_len = engine.config.max_seq_len
        self._at_work = asyncio.Semaphore(1)

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, _: Request) -> JSONResponse:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._card(self._model_name or MODEL_NAME)]})

    async def model(self, request: Request) -> JSONResponse:
        """The one model by its name."""
        return JSONResponse(self._card(self._known(request.path_params["name"])))

    async def completions(self, request: Request) -> Response:
        """Continues prompts."""
        body = await self._read(request, CompletionBody)
        if body.is_ahead_of(self._engine.version):
            message = f"this server has weights of {self._engine.version}, and {body.least_weights} were asked for"
            raise ApiError(503, message, param="least_weights", code="weights_behind")
        decoding = body.decoding(1 if body.only_scores else body.max_tokens)
        prompts = await self.work(lambda: [self._render(p, special=body.add_special_tokens) for p in body.prompts])
        seeds = body.prompt_seeds(len(prompts))
        requests = [
            GenerationRequest(p, decoding, seed, body.n, alternatives=body.logprobs or 0, named=body.named)
            for p, seed in zip(prompts, seeds, strict=True)
        ]
        form = AnswerForm(
            self._tokenizer, body.model, False, decoding.stop_strings, body.logprobs,
            body.return_token_ids, body.return_tokens_as_token_ids,
        )  # fmt: skip
        told = await self._scored(request, requests, body.scored, body.prompt_logprobs, kept=not body.only_scores)
        if body.echo:
            texts = await self.work(lambda: [self._text(prompt) for prompt in body.prompts])
            told = [replace(each, echo=text) for each, text in zip(told, texts, strict=True)]
        futures = self._unanswered(requests, told) if body.only_scores else None
        return await self._answered(request, requests, form, told, body, futures)

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        body = await self._read(request, ChatBody)
        decoding = body.decoding(body.most_tokens or self._max_seq_len)
        prompt = await self.work(lambda: self._conversation(body))
        beside = (body.top_logprobs or 0) if body.logprobs else None
        form = AnswerForm(
            self._tokenizer, body.model, True, decoding.stop_strings, beside,
            body.return_token_ids, body.return_tokens_as_token_ids, body.most_calls,
        )  # fmt: skip
        seed = folded_seeds(body.seed, 1)[0]
        asked = [GenerationRequest(prompt, decoding, seed, body.n, alternatives=beside or 0, named=body.named)]
        told = await self._scored(request, asked, body.prompt_logprobs, body.prompt_logprobs, kept=True)
        return await self._answered(request, asked, form, told, body)

    async def _scored(
        self,
        request: Request,
        requests: list[GenerationRequest],
        alternatives: int | None,
        told: int | None,
        kept: bool,
    ) -> list[PromptForm]:
        """What the weights make of the prompts, by the temperature of what is sampled; None: nobody asks for it.

        What is sampled next goes on from what was cached then: the prompts are computed once.
        """
        if alternatives is None:
            return [PromptForm(tokens=each.prompt) for each in requests]
        prompts, temperature = [each.prompt for each in requests], requests[0].decoding.temperature
        with _engines_errors():
            futures = await run_in_threadpool(self._engine.score, prompts, temperature, alternatives, kept)
        scores = await _wait(request, futures, self._engine.config.request_timeout_s)
        return [PromptForm(None, each, told, prompt) for each, prompt in zip(scores, prompts, strict=True)]

    def _unanswered(
        self, requests: list[GenerationRequest], prompts: list[PromptForm]
    ) -> "list[Future[list[Completion]]]":
        """Of requests that ask for no tokens, only for what is told of their prompts."""
        futures: list[Future[list[Completion]]] = []
        for request, prompt in zip(requests, prompts, strict=True):
            version = self._engine.version if prompt.scores is None else prompt.scores.version
            nothing = Completion.empty(request.prompt, version)
            futures.append(Future())
            futures[-1].set_result([nothing] * request.n)
        return futures

    async def _answered(
        self,
        request: Request,
        requests: list[GenerationRequest],
        form: AnswerForm,
        prompts: list[PromptForm],
        body: CompletionBody | ChatBody,
        futures: "list[Future[list[Completion]]] | None" = None,
    ) -> Response:
        if body.stream:
            return await self._streamed(requests, form, prompts, body.stream_options or StreamOptions(), futures)
        if futures is None:
            futures = await self._submit(requests, form)
        groups = _complete(await _wait(request, futures, self._engine.config.request_timeout_s, form.prompts_at))
        return await self.work(lambda: _response(form.answer(groups, prompts)))

    async def _streamed(
        self,
        requests: list[GenerationRequest],
        form: AnswerForm,
        prompts: list[PromptForm],
        options: StreamOptions,
        futures: "list[Future[list[Completion]]] | None",
    ) -> Response:
        """Begins once the engine has taken the requests: what it refuses is answered as ever."""
        dispatches: asyncio.Queue[tuple[int, Sampled] | None] = asyncio.Queue()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, dispatches.put_nowait)
        watched = [
            replace(each, on_tokens=partial(_tell, tell, number * each.n)) for number, each in enumerate(requests)
        ]
        if futures is None:
            futures = await self._submit(watched, form)
        n, counts = requests[0].n, (options.include_usage, options.continuous_usage_stats)
        stream = AnswerStream(form, prompts, n, *counts)
        events = _events(stream, futures, dispatches, self._engine.config.request_timeout_s, form.prompts_at)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def tokenize(self, request: Request) -> Response:
        """The token ids that a prompt, or a conversation with its template, becomes."""
        body = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
        return await self.work(lambda: self._tokenized(body))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await self._read(request, DetokenizeBody)
        beyond = [token for token in body.tokens if not 0 <= token < self._tokenizer.vocab_size]
        if beyond:
            message = f"tokens holds {beyond[0]}, but token ids are 0 to {self._tokenizer.vocab_size - 1}"
            raise ApiError(400, message, "tokens", "invalid_value")
        return await self.work(lambda: JSONResponse({"prompt": self._tokenizer.decode(body.tokens, False)}))

    def _tokenized(self, body: TokenizeBody) -> Response:
        special = body.add_special_tokens is not False
        tokens = self._conversation(body) if body.prompt is None else self._render(body.prompt, special=special)
        return JSONResponse({"count": len(tokens), "max_model_len": self._max_seq_len, "tokens": tokens.tolist()})

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        content = await request.body()
        read = partial(read_body, kind, content, self._max_seq_len)
        body = read() if len(content) <= SMALL_WORK_BYTES else await self.work(read)
        if body.model is not None:
            self._known(body.model)
        return body

    async def work(self, work: Callable[[], _Result]) -> _Result:
        """Runs in a thread what takes the processor's time; others wait for their turn.

        Work and event loop share one interpreter. While a thread works, the loop waits for it at every system call, so
        that it would hardly move if the next began at once: it has the interpreter to itself for as long in between.
        """
        await self._at_work.acquire()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await run_in_threadpool(work)
        finally:
            loop.call_later(min(loop.time() - began, LONGEST_PAUSE_S), self._at_work.release)

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}
        return card | {"max_model_len": self._max_seq_len}

    def _known(self, name: str) -> str:
        if self._model_name not in (None, name):
            message = f"model {name!r:.200} does not exist: this server has {self._model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def _conversation(self, body: ChatBody | TokenizeBody) -> np.ndarray:
        said = [message.as_mapping() for message in body.messages or ()]
        return self._render(said, body.given, body.continue_final_message)

    def _render(
        self,
        prompt: str | Sequence[Message] | np.ndarray,
        given: Mapping[str, Any] | None = None,
        continue_final: bool = False,
        special: bool = True,
    ) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return prompt
        try:
            tokens = self._tokenizer.render(prompt, self._max_seq_len, given, continue_final)  # refuses what is long
            return tokens if special or not isinstance(prompt, str) else self._tokenizer.encode(prompt)
        except EnvironmentFailure as error:
            raise prompt_error(error, "prompt" if isinstance(prompt, str) else "messages") from error
        except ConfigError as error:
            param = error.key if isinstance(error, TemplateArgumentError) else "messages"
            raise ApiError(400, str(error), param, "invalid_value") from error

    def _text(self, prompt: str | np.ndarray) -> str:
        """As it is repeated before an answer."""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, False)

    async def _submit(self, requests: list[GenerationRequest], form: AnswerForm) -> "list[Future[list[Completion]]]":
        with _engines_errors(form.prompts_at):
            return await run_in_threadpool(self._engine.submit, requests)


@contextmanager
def _engines_errors(prompts_at: str | None = None) -> Iterator[None]:
    """What the engine raises, as the API says it."""
    try:
        yield
    except EnvironmentFailure as error:
        raise prompt_error(error, prompts_at) from error
    except ConfigError as error:
        raise ApiError(400, str(error), code="invalid_value") from error
    except (NoProgressError, RunFailed, Stopped) as error:
        raise ApiError(503, str(error), code="engine_unavailable") from error


class _Control:
    """Routes by which a trainer drives a server, as vLLM names them. All of them need the token."""

    def __init__(self, engine: InferenceEngine, load_weights: LoadWeights) -> None:
        self._engine, self._load_weights = engine, load_weights

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused, methods=["GET"]),
            Route("/weight_info", self.weight_info, methods=["GET"]),
            Route("/collective_rpc", self.reload_weights, methods=["POST"]),
            Route("/update_weight_version", self.rename_version, methods=["POST"]),
            Route("/weight_checker", self.checksum, methods=["POST"]),
        ]

    async def pause(self, request: Request) -> JSONResponse:
        """Computes nothing more; ``mode`` (keep, wait, abort) and ``clear_cache`` stand in the query."""
        asked, timeout_s = read_pause(request.query_params), self._engine.config.request_timeout_s
        with _engines_errors():
            await run_in_threadpool(self._engine.pause, *asked, timeout_s)
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> JSONResponse:
        """Goes on."""
        self._engine.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, _: Request) -> JSONResponse:
        """Whether it is."""
        return JSONResponse({"is_paused": self._engine.paused})

    async def weight_info(self, _: Request) -> JSONResponse:
        """The version that is served."""
        served = self._engine.version
        return JSONResponse({"weight_version": f"{served.lineage}-{served.step}"})

    async def reload_weights(self, request: Request) -> JSONResponse:
        """Serves the policy of a directory of this machine; its version follows by ``/update_weight_version``."""
        body = read_body(ControlBody, await request.body(), 0)
        path = (body.kwargs or {}).get("weights_path")
        if body.method != "reload_weights" or not path:
            message = "method must be reload_weights, with kwargs.weights_path: nothing else can be called"
            raise ApiError(400, message, "method", "unsupported_parameter")
        await run_in_threadpool(self._reload, Path(path))
        return JSONResponse({"results": [None]})

    def _reload(self, path: Path) -> None:
        with _engines_errors():
            try:
                self._engine.set_weights(self._engine.version, self._load_weights(path))
                self._engine.digests(self._engine.config.request_timeout_s)  # until they are swapped in
            except (ConfigError, CheckpointError, WeightsError) as error:
                raise ApiError(400, str(error), "weights_path", "invalid_value") from error

    async def rename_version(self, request: Request) -> JSONResponse:
        """What is served is called ``new_version``, ``<lineage>-<step>``, from the next token on."""
        name = read_body(ControlBody, await request.body(), 0).new_version or ""
        version = version_of_label(name)
        if version is None:
            raise ApiError(400, f"new_version is {name!r:.100}: it must be <lineage>-<step>, below 2^31", "new_version")
        with _engines_errors():
            self._engine.rename_version(version)
        return JSONResponse({"success": True, "weight_version": name})

    async def checksum(self, request: Request) -> JSONResponse:
        """The digest of every array, as the device holds it."""
        if read_body(ControlBody, await request.body(), 0).action != "checksum":
            raise ApiError(400, "action must be checksum", "action", "unsupported_parameter")
        with _engines_errors():
            _, digests = await run_in_threadpool(self._engine.digests, self._engine.config.request_timeout_s)
        return JSONResponse({"checksums": digests})


def _tell(
    tell: Callable[[tuple[int, Sampled]], object],
    first: int,
    index: int,
    tokens: list[int],
    logprobs: list[float],
    beside: Alternatives | None,
) -> None:
    """Tells what a dispatch gave a choice; called by the engine's thread."""
    with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
        tell((first + index, (tokens, logprobs, beside)))


async def _events(
    stream: AnswerStream,
    futures: "Sequence[Future[list[Completion]]]",
    dispatches: "asyncio.Queue[tuple[int, Sampled] | None]",
    timeout_s: float,
    prompts_at: str,
) -> AsyncIterator[bytes]:
    """A streamed answer; where the client leaves, the futures are cancelled, and the slots are free."""
    whole = asyncio.wrap_future(_gathered(futures))
    whole.add_done_callback(lambda _: dispatches.put_nowait(None))
    loop = asyncio.get_running_loop()
    limit = loop.time() + timeout_s
    try:
        for begun in stream.begin():
            yield begun
        while (dispatched := await asyncio.wait_for(dispatches.get(), limit - loop.time())) is not None:
            if told := stream.add(*dispatched):
                yield told
        with _engines_errors(prompts_at):
            groups = _complete(whole.result())
        for told in stream.end(groups):
            yield told
    except TimeoutError:
        yield event(ApiError(504, f"no complete response within {timeout_s} s", code="timeout").body)
    except ApiError as error:
        yield event(error.body)
    finally:
        whole.cancel()
        for future in futures:
            future.cancel()


def _complete(groups: list[list[Completion]]) -> list[list[Completion]]:
    """The same, unless the engine was stopped meanwhile."""
    if any(completion.finish_reason == "aborted" for group in groups for completion in group):
        raise ApiError(503, "the engine was stopped, or paused, before the answer ended", code="engine_unavailable")
    return groups


async def _wait(
    request: Request, futures: Sequence["Future[_Result]"], timeout_s: float, prompts_at: str | None = None
) -> list[_Result]:
    """Awaits the engine; the futures are cancelled when the client leaves or the time is over."""
    answer = asyncio.wrap_future(_gathered(futures))
    departure = asyncio.ensure_future(_departed(request))
    try:
        await asyncio.wait({answer, departure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            with _engines_errors(prompts_at):
                return answer.result()
        if departure.done():
            raise ApiError(499, "the client closed the connection")
        raise ApiError(504, f"no complete response within {timeout_s} s", code="timeout")
    finally:
        departure.cancel()
        answer.cancel()
        for future in futures:
            future.cancel()


def _gathered(futures: Sequence["Future[_Result]"]) -> "Future[list[_Result]]":
    """One that ends with the last of them: the event loop is woken once, however many prompts there are."""
    whole: Future[list[_Result]] = Future()
    ended = itertools.count(1)

    def note(_: "Future[_Result]") -> None:
        if next(ended) < len(futures) or not whole.set_running_or_notify_cancel():
            return
        try:
            whole.set_result([future.result() for future in futures])
        except (Exception, CancelledError) as error:  # whatever the engine failed with is for whoever waits
            whole.set_exception(error)

    for future in futures:
        future.add_done_callback(note)
    return whole


async def _departed(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(answer: dict[str, Any]) -> Response:
    """As JSON, choice by choice: the encoder holds the interpreter for the whole of what it is given."""
    choices = answer.pop("choices")
    parts = (json.dumps(choice, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for choice in choices)
    head = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    content = f'{head[:-1]},"choices":[{",".join(parts)}]}}'
    return Response(encoded(content), media_type="application/json")
