"""The OpenAI-compatible API for agents of a run: programs that are trained as they are, by the requests that they send.

Each rollout has a key of its own, by which its requests find their session: the session samples with the policy that
its environment was given (an engine, servers, one pinned version), as the lesson says, and keeps what was sampled,
token by token. An agent's own temperature, top-p and the like are not followed, since log-probabilities must be of the
distribution that is trained; its limit of tokens and its stop strings are. A key is of no use before and after its
rollout.

The server listens on this machine alone. It starts with the first session of a process, which loads JAX there, and ends
with its owner. Not covered: agents on other machines.
"""

import hmac
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.inference.codec import largest_body_bytes
from penstock.inference.config import EngineConfig, InferenceConfig
from penstock.inference.sequence import GenerationRequest, check_request
from penstock.types import (
    SAMPLING_FIELDS,
    AgentSession,
    Completion,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    InferenceContext,
    NoProgressError,
    PromptScores,
    Stopped,
    TextCodec,
    WeightVersion,
    fold,
)

if TYPE_CHECKING:
    from penstock.inference.http_server import HttpServer

MOST_AT_ONCE = 256
"""Requests of all agents of a process that are sampled at the same time."""
_MOST_WAITING = 1024


class AgentEndpoint:
    """Where the agents of one process ask; any number of threads may open sessions.

    Args:
        config: Limits of the engine that is asked in the end.
        tokenizer: The policy's, which renders conversations.
    """

    def __init__(self, config: EngineConfig, tokenizer: TextCodec) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._server: HttpServer | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._sessions: dict[bytes, ASGIApp] = {}
        self._closed = False

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: TextCodec) -> "AgentEndpoint | None":
        """One, where the configuration opens it (`InferenceConfig.endpoint`)."""
        return cls(config, tokenizer) if isinstance(config, InferenceConfig) and config.endpoint else None

    def open(self, context: InferenceContext, decoding: Decoding, seed: int) -> AgentSession:
        """A session of one rollout, with a key that is valid until it is closed.

        Args:
            context: Asked for every answer.
            decoding: How to sample; `max_output_tokens` bounds each answer.
            seed: Decides the noise, with the number of a request.

        Raises:
            Stopped: the endpoint was closed.
        """
        from penstock.inference.server import generation_app  # loads JAX, which a worker without agents does not need

        with self._lock:
            if self._closed:
                raise Stopped("the endpoint of agents was closed")
            server, threads = self._started()
            session = _Session(self, context, decoding, seed, f"{server.url}/v1", threads)
            self._sessions[_authorization(session.api_key)] = generation_app(session, self._tokenizer)
        return session

    def forget(self, session: "_Session") -> None:
        """Its key is unknown from here on."""
        with self._lock:
            self._sessions.pop(_authorization(session.api_key), None)

    def close(self) -> None:
        """Ends the server; what is still asked fails."""
        with self._lock:
            server, threads, self._closed = self._server, self._threads, True
            self._server = self._threads = None
            self._sessions.clear()
        if server is not None and threads is not None:
            server.stop()
            threads.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> "tuple[HttpServer, ThreadPoolExecutor]":
        if self._server is None or self._threads is None:
            from penstock.inference.http_server import HttpServer

            server = HttpServer(self._app())
            server.start()
            self._server, self._threads = server, ThreadPoolExecutor(MOST_AT_ONCE, "agent-request")
        return self._server, self._threads

    def _app(self) -> ASGIApp:
        from penstock.inference.access import BearerToken, BoundedPosts, KnownHost

        most_bytes = largest_body_bytes(self.config.max_seq_len, self._tokenizer.vocab_size)
        bounded = BoundedPosts(self._answer, most_bytes=most_bytes, most_unanswered=_MOST_WAITING)
        return KnownHost(BearerToken(bounded, knows=self._knows), host="127.0.0.1")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request with a known key, by the session of that key."""
        from penstock.inference.schema import ApiError

        authorization = dict(scope["headers"]).get(b"authorization", b"")
        app = self._sessions.get(authorization)
        if app is None:  # closed since it was let in
            app = ApiError(401, "the rollout of this key is over", code="invalid_api_key").response()
        await app(scope, receive, send)

    def _knows(self, authorization: bytes) -> bool:
        """Compared with every key in constant time."""
        return sum([hmac.compare_digest(authorization, known) for known in list(self._sessions)]) > 0


def _authorization(key: str) -> bytes:
    return f"Bearer {key}".encode()


class _Session:
    """Implements `AgentSession` for an environment, and `Answering` for the API."""

    version = WeightVersion(-1, 0)  # of no lineage: an agent's requests wait for no version

    def __init__(
        self,
        endpoint: AgentEndpoint,
        context: InferenceContext,
        decoding: Decoding,
        seed: int,
        base_url: str,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.base_url, self.api_key = base_url, secrets.token_urlsafe(32)
        self.config = endpoint.config
        self.overridden = 0
        self._endpoint, self._context, self._threads = endpoint, context, threads
        self._decoding, self._seed = decoding, seed
        self._changed = threading.Condition()
        self._turn = threading.Lock() if context.ordered else nullcontext()
        self._asked = self._running = 0
        self._closed = False
        self._answers: dict[int, list[Completion]] = {}
        self._failure: Exception | None = None

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        """Asks the policy, as the lesson says, in threads of the endpoint's.

        Raises:
            Stopped: the rollout is over.
            EnvironmentFailure: a prompt cannot be answered, which a stream tells before it begins.
            ConfigError: log-probabilities of other tokens are asked for, which contexts do not tell.
        """
        if any(request.alternatives for request in requests):
            raise ConfigError(
                "log-probabilities of other tokens than those sampled are not told during a run: leave out "
                "top_logprobs, and give completions logprobs 0"
            )
        for request in requests:
            own = replace(request, decoding=self._decoding)
            check_request(own, self.config, self._context.tokenizer.vocab_size)
        with self._changed:
            if self._closed:
                raise Stopped("the rollout of this key is over")
            first, self._asked = self._asked, self._asked + len(requests)
            self._running += len(requests)
            self.overridden += sum(self._differs(request) for request in requests)
        futures = [Future[list[Completion]]() for _ in requests]
        for number, (request, future) in enumerate(zip(requests, futures, strict=True), start=first):
            asking = self._threads.submit(self._answer, number, request, future)
            asking.add_done_callback(partial(self._end, future))
        return futures

    def score(
        self, texts: Sequence[np.ndarray], temperature: float = 1.0, alternatives: int = 0, kept: bool = False
    ) -> list[Future[PromptScores]]:
        """Refuses: nothing is scored for agents, whose requests are what is trained.

        Raises:
            ConfigError: always.
        """
        del texts, temperature, alternatives, kept
        raise ConfigError("prompts are not scored during a run: leave out prompt_logprobs, and echo beside logprobs")

    def close(self) -> list[Completion]:
        """What was sampled so far, in the order of the requests; the key is worth nothing from here on.

        Raises:
            PenstockError: asking the policy failed for a reason that is not the agent's.
        """
        self._endpoint.forget(self)
        with self._changed:
            self._closed = True
            found = [completion for number in sorted(self._answers) for completion in self._answers[number]]
            limit_s = self.config.request_timeout_s
            if not self._changed.wait_for(lambda: not self._running, limit_s):
                raise NoProgressError(f"an agent's last request was not answered within {limit_s:g} s")
            if self._failure is not None:
                raise self._failure
        return found

    def _answer(self, number: int, request: GenerationRequest, future: "Future[list[Completion]]") -> None:
        """For a future that is cancelled once the agent waits no more, say to ask again: it is no answer then."""
        if future.cancelled():
            return
        try:
            answers = self._sampled(number, request)
        except Exception as error:  # raised where the answer is read
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        with self._changed:
            if not future.set_running_or_notify_cancel():
                return
            self._answers[number] = answers
        if request.on_tokens is not None:  # a stream: all of an answer at once, since a context tells nothing sooner
            for index, answer in enumerate(answers):
                request.on_tokens(index, answer.response_tokens.tolist(), answer.response_logprobs.tolist(), None)
        future.set_result(answers)

    def _sampled(self, number: int, request: GenerationRequest) -> list[Completion]:
        try:
            with self._turn:
                (answers,) = self._context.generate(
                    [request.prompt], request.n, self._lessons(request.decoding), [fold(self._seed, "request", number)]
                )
        except (EnvironmentFailure, ConfigError):  # such as a prompt that is too long: the agent is told
            raise
        except Exception as error:
            self._failure = self._failure or error
            raise
        return answers

    def _lessons(self, asked: Decoding) -> Decoding:
        own = self._decoding
        stops = dict.fromkeys((*(own.stop_token_ids or self._context.tokenizer.stop_token_ids), *asked.stop_token_ids))
        return replace(
            own,
            max_output_tokens=min(own.max_output_tokens, asked.max_output_tokens),
            stop_token_ids=tuple(stops),
            stop_strings=tuple(dict.fromkeys((*own.stop_strings, *asked.stop_strings))),
        )

    def _differs(self, request: GenerationRequest) -> bool:
        """Whether a request wants to be sampled otherwise than the lesson says; what it leaves out, it does not."""
        return any(_value(request.decoding, name) != _value(self._decoding, name) for name in request.named)

    def _end(self, future: Future[list[Completion]], asking: Future[None]) -> None:
        if asking.cancelled() or asking.exception() is not None:
            future.cancel()
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


def _value(decoding: Decoding, name: str) -> float:
    value = getattr(decoding, name)
    return SAMPLING_FIELDS[name].neutral if value is None else value
