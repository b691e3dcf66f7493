"""One request to an inference server, and its answer turned back into completions.

What a server is asked, and how it answers, is its `Dialect`; the one here is that of Penstock's own servers, and
`penstock.inference.external` has those of others. The answer is the API's, with `return_token_ids`: what the engine
sampled arrives exactly, log-probabilities to the last bit. What the caller has already, prompt and tokenizer, is not
taken from the answer. An answer that does not fit the question is refused: a record with a missing or misplaced number
would be trained on.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

import numpy as np

from penstock.inference.routing import Server
from penstock.inference.sequence import LONGEST_STOP_STRING, MOST_STOP_STRINGS, text_of
from penstock.types import (
    SAMPLING_FIELDS,
    Completion,
    Decoding,
    EnvironmentFailure,
    FinishReason,
    GenerationCall,
    TextCodec,
    WeightVersion,
)
from penstock.types.generation import STAGES

REQUEST_TOKENS = 16_384
"""A call with more tokens, prompts and longest responses together, goes in several requests, to several servers."""

REQUEST_RESPONSES = 4096
"""A server takes no more in one request (`schema.MOST_RESPONSES`)."""

PROMPT_BYTES = len("[],") + len(str(2**64)) + len(",")
"""Of each prompt beside its tokens: brackets, and its seed."""

STOP_BYTES = MOST_STOP_STRINGS * (LONGEST_STOP_STRING * len("\\u0000") + len('"",'))
"""Of the stop strings, if all their characters must be escaped."""

OTHER_BYTES = 4096
"""Of everything else: names, numbers, a few stop tokens."""

LARGEST_INTEGER = 2**31 - 1
"""Of tokens and weight steps, which records keep as int32."""

LONGEST_NAME = 256
"""Of an engine, in characters."""

_T_co = TypeVar("_T_co", covariant=True)


class MalformedAnswer(Exception):
    """A server's answer that does not fit the question."""


class InterruptedAnswer(Exception):
    """A server broke off, and says so: it is to be asked again."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerRequest(Generic[_T_co]):
    """What is sent, and how the answer is read.

    Attributes:
        body: JSON.
        tokens: What it asks for: prompts and longest responses.
        read: Reads the answer's body; raises `MalformedAnswer`.
        path: Of the route that is asked.
        busy: Statuses by which the server says that it is overloaded.
        behind: Statuses by which it says that it cannot answer now, as one that lacks the version asked for.
        bind: Makes it the request of one server, where it depends on what that serves; None from a server that is
            behind.
    """

    body: bytes
    tokens: int
    read: Callable[[bytes], _T_co]
    path: str = "/v1/completions"
    busy: frozenset[int] = frozenset({429})
    behind: frozenset[int] = frozenset({502, 503, 504})
    bind: "Callable[[Server], ServerRequest[_T_co] | None] | None" = None

    def bound_to(self, server: Server) -> "ServerRequest[_T_co] | None":
        """As that server is asked; None where it is behind."""
        return self if self.bind is None else self.bind(server)


@runtime_checkable
class Dialect(Protocol):
    """How servers of one make are asked for completions, and what they answer."""

    def requests(
        self, call: GenerationCall, tokenizer: TextCodec, model: str, least: WeightVersion | None = None
    ) -> list[ServerRequest[list[list[Completion]]]]:
        """The requests that serve a call; their completions, one after the other, are those of its prompts in order.

        Args:
            call: What is asked for.
            tokenizer: The policy's; gives the stop tokens where the call names none, and decodes the texts.
            model: The servers' name for it.
            least: A server with an older version of the same lineage does not answer; None: any will do.

        Raises:
            EnvironmentFailure: a prompt cannot be answered.
            ValueError: there are not as many seeds as prompts.
        """
        ...


@final
class PenstockDialect:
    """Of Penstock's own servers: several prompts with a seed each, answered with what the engine recorded."""

    def requests(
        self, call: GenerationCall, tokenizer: TextCodec, model: str, least: WeightVersion | None = None
    ) -> list[ServerRequest[list[list[Completion]]]]:
        """In the order of the call's prompts, as many to a request as one may have."""
        check_call(call)
        decoding = call.decoding
        return [
            ServerRequest(
                _body(call.prompts[first:end], call.n, decoding, call.seeds[first:end], tokenizer, model, least),
                _tokens(call, first, end),
                _Reader(call.prompts[first:end], call.n, decoding.stop_strings, tokenizer),
            )
            for first, end in _portions(call)
        ]


def check_call(call: GenerationCall) -> None:
    """What holds for every dialect.

    Raises:
        EnvironmentFailure: a prompt is not int32 [p].
        ValueError: there are not as many seeds as prompts.
    """
    for prompt in call.prompts:
        if prompt.dtype != np.int32 or prompt.ndim != 1:
            raise EnvironmentFailure(f"prompt is {prompt.dtype}{list(prompt.shape)}: it must be int32 [p]")
    if len(call.prompts) != len(call.seeds):
        raise ValueError(f"{len(call.prompts)} prompts have {len(call.seeds)} seeds: give one for each")


def largest_body_bytes(max_seq_len: int, vocab_size: int) -> int:
    """No body of `PenstockDialect` for a server with these limits is larger, if the server can serve it at all."""
    tokens = max(REQUEST_TOKENS, max_seq_len) * len(f"{vocab_size},")
    return tokens + REQUEST_RESPONSES * PROMPT_BYTES + STOP_BYTES + OTHER_BYTES


def _portions(call: GenerationCall) -> list[tuple[int, int]]:
    """Ranges of prompts that go together, each of one prompt at least."""
    portions: list[tuple[int, int]] = []
    first = 0
    for end in range(1, len(call.prompts) + 1):
        next_too = end < len(call.prompts) and (
            _tokens(call, first, end + 1) <= REQUEST_TOKENS and (end + 1 - first) * call.n <= REQUEST_RESPONSES
        )
        if not next_too:
            portions.append((first, end))
            first = end
    return portions


def _tokens(call: GenerationCall, first: int, end: int) -> int:
    responses = (end - first) * call.n
    return sum(len(prompt) for prompt in call.prompts[first:end]) + responses * call.decoding.max_output_tokens


def _body(
    prompts: Sequence[np.ndarray],
    n: int,
    decoding: Decoding,
    seeds: Sequence[int],
    tokenizer: TextCodec,
    model: str,
    least: WeightVersion | None,
) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": [prompt.tolist() for prompt in prompts],
        "n": n,
        "seeds": [int(seed) for seed in seeds],
        **{name: getattr(decoding, name) for name in SAMPLING_FIELDS},
        "max_tokens": decoding.max_output_tokens,
        "stop": list(decoding.stop_strings),
        "stop_token_ids": list(decoding.stop_token_ids or tokenizer.stop_token_ids),
        "return_token_ids": True,
    }
    if least is not None:
        body["least_weights"] = [least.lineage, least.step]
    return json_body(body)


def json_body(fields: Mapping[str, Any]) -> bytes:
    """A request's body. Half of a surrogate pair, which a stop string may hold, is read back by `json.loads`."""
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    prompts: Sequence[np.ndarray]
    n: int
    stop_strings: tuple[str, ...]
    tokenizer: TextCodec

    def __call__(self, content: bytes) -> list[list[Completion]]:
        try:
            choices = json.loads(content)["choices"]
            if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
                raise ValueError("its choices are not a list of objects")
            if len(choices) != len(self.prompts) * self.n:
                raise ValueError(f"{len(choices)} choices where {len(self.prompts)} x {self.n} were asked for")
            flat = [self._completion(index, choice) for index, choice in enumerate(choices)]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise MalformedAnswer(f"its answer cannot be read ({type(error).__name__}: {error})") from error
        return [flat[start : start + self.n] for start in range(0, len(flat), self.n)]

    def _completion(self, index: int, choice: dict[str, Any]) -> Completion:
        if choice["index"] != index:
            raise ValueError(f"choice {index} says that it is choice {choice['index']!r}")
        tokens = integers(choice, "token_ids")
        steps = integers(choice, "weight_steps")
        logprobs = logprobs_of(choice["token_logprobs"])
        if not len(tokens) == len(steps) == len(logprobs):
            raise ValueError(f"{len(tokens)} tokens, {len(steps)} weight steps and {len(logprobs)} log-probabilities")
        return Completion(
            prompt_tokens=self.prompts[index // self.n],
            response_tokens=tokens,
            response_logprobs=logprobs,
            weight_steps=steps,
            oldest_weight_step=_integer(choice, "oldest_weight_step"),
            lineage=_integer(choice, "lineage"),
            text=text_of(self.tokenizer, tokens.tolist(), self.stop_strings),
            finish_reason=_finish_reason(choice),
            engine=_engine(choice),
            finished_s=_finished_s(choice),
            timings=_timings(choice),
        )


def logprobs_of(values: Any) -> np.ndarray:
    """float32 [r] of numbers; null stands for what is not finite. Raises ValueError."""
    if not isinstance(values, list) or any(type(value) not in (int, float, type(None)) for value in values):
        raise ValueError("token_logprobs is not a list of numbers")
    exact = np.array([math.nan if value is None else float(value) for value in values])
    if np.any(np.abs(exact) > np.finfo(np.float32).max):
        raise ValueError("token_logprobs holds what is no float32")
    return exact.astype(np.float32)


def integers(choice: dict[str, Any], name: str) -> np.ndarray:
    """int32 [r] of natural numbers. Raises ValueError."""
    values = choice[name]
    if not isinstance(values, list) or any(
        type(value) is not int or not 0 <= value <= LARGEST_INTEGER for value in values
    ):
        raise ValueError(f"{name} is not a list of natural numbers below 2**31")
    return np.array(values, np.int32)


def _integer(choice: dict[str, Any], name: str) -> int:
    value = choice[name]
    if type(value) is not int or not 0 <= value <= LARGEST_INTEGER:
        raise ValueError(f"{name} is {value!r}, not a natural number below 2**31")
    return value


def _engine(choice: dict[str, Any]) -> str:
    name = choice.get("engine", "")
    if not isinstance(name, str) or len(name) > LONGEST_NAME:
        raise ValueError(f"engine is {name!r:.100}, not a name of at most {LONGEST_NAME} characters")
    return name


def _finished_s(choice: dict[str, Any]) -> float | None:
    """By this process's monotonic clock; an answer is read as soon as it is here."""
    age_s = choice.get("age_s")
    return None if age_s is None else time.monotonic() - _seconds("age_s", age_s)


def _timings(choice: dict[str, Any]) -> dict[str, float]:
    given = choice.get("timings", {})
    if not isinstance(given, dict):
        raise ValueError(f"timings is {given!r:.100}, not an object")
    return {stage: _seconds(stage, given[stage]) for stage in STAGES if stage in given}


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r:.100}, not a number of seconds")
    return float(value)


def _finish_reason(choice: dict[str, Any]) -> FinishReason:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason is {reason!r}")
    return reason
