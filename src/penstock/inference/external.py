"""How inference servers of other makes are asked, and their answers read: vLLM's, SGLang's, any with OpenAI's API.

vLLM 0.32's ``/inference/v1/generate`` and SGLang 0.5.23's ``/generate`` take token ids and give token ids,
log-probabilities and the weight versions behind them; n responses are n requests with a seed each, and the server's
prefix cache makes the others cheap. A version is named ``<lineage>-<step>``; an answer under any other label is
refused, so that nothing is trained of which nobody knows what sampled it. Log-probabilities are Penstock's own: vLLM's
after temperature and truncation (``--logprobs-mode processed_logprobs``), since training forbids truncation, SGLang's
after temperature. OpenAI's API gives text, which is encoded anew; no log-probabilities, and no versions: nothing to
train on. Imports no JAX.

Not covered: how servers are given weights (`penstock.inference.server_control`).
"""

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from penstock.inference.codec import (
    Dialect,
    InterruptedAnswer,
    MalformedAnswer,
    PenstockDialect,
    ServerRequest,
    check_call,
    integers,
    json_body,
    logprobs_of,
)
from penstock.inference.config import ExternalConfig, InferenceConfig
from penstock.inference.routing import Server
from penstock.inference.sequence import StopStrings, text_of
from penstock.types import (
    SAMPLING_FIELDS,
    Completion,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    FinishReason,
    GenerationCall,
    PromptTooLong,
    TextCodec,
    WeightVersion,
    fold,
)

BUSY, _BEHIND = frozenset({429, 503}), frozenset({502, 504})
"""vLLM says 503 where its queue is full, and 404 of an adapter that it does not have."""

NO_LOGPROB = -9999.0
"""What vLLM writes in place of a log-probability that is not finite."""

FIXED = WeightVersion(0, 0)
"""The version of servers whose weights stay as they are."""


def dialect_of(config: InferenceConfig) -> Dialect:
    """How the servers of a run are asked."""
    if config.external is None:
        return PenstockDialect()
    if config.engine == "openai":
        return OpenAiDialect(config.max_seq_len)
    return (SglangDialect if config.engine == "sglang" else VllmDialect)(config.external, config.max_seq_len)


def key_of(config: ExternalConfig | None, token: str) -> str | None:
    """What the servers of a run ask for: the run's own token, or the key of those that it was given.

    Raises:
        ConfigError: the file that holds the key cannot be read, or is empty.
    """
    if config is None or config.launch:
        return token
    if config.api_key_file is None:
        return None
    try:
        key = config.api_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"inference.external.api_key_file is {config.api_key_file}: {error}") from error
    if not key:
        raise ConfigError(f"inference.external.api_key_file is {config.api_key_file}: it is empty; write the key there")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"inference.external.api_key_file is {config.api_key_file}: a key is one line of ASCII text")
    return key


def label_of(version: WeightVersion) -> str:
    """What servers are told that a version is called."""
    return f"{version.lineage}-{version.step}"


def version_of_label(label: Any) -> WeightVersion | None:
    """The version that a label, ``<lineage>-<step>``, names; None for what no run called so."""
    lineage, _, step = label.partition("-") if isinstance(label, str) and len(label) <= 21 else ("", "", "")
    if not (lineage.isdecimal() and step.isdecimal() and max(int(lineage), int(step)) < 1 << 31):
        return None
    return WeightVersion(int(lineage), int(step))


def adapter_name(version: WeightVersion) -> str:
    """Under which name a version's adapter is loaded."""
    return f"policy-{label_of(version)}"


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """One response to one prompt, as it is asked for.

    Attributes:
        prompt: int32 [p].
        decoding: How to sample.
        seed: Of this response.
        stop_token_ids: The call's, or the tokenizer's.
        tokenizer: Decodes the text.
        model: The servers' name for the model.
        max_tokens: Most of the response, as far as the sequence length leaves room.
        least: What must be served.
    """

    prompt: np.ndarray
    decoding: Decoding
    seed: int
    stop_token_ids: tuple[int, ...]
    tokenizer: TextCodec
    model: str
    max_tokens: int
    least: WeightVersion | None

    @property
    def tokens(self) -> int:
        """Of prompt and longest response."""
        return len(self.prompt) + self.max_tokens

    def is_ahead_of(self, served: WeightVersion | None) -> bool:
        """Whether a server's weights are older than they may be."""
        least = self.least
        return least is not None and served is not None and served.lineage == least.lineage and served < least

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, under names that vLLM has in common with OpenAI where that has any."""
        decoding = self.decoding
        given = {name: getattr(decoding, name) for name in SAMPLING_FIELDS if getattr(decoding, name) is not None}
        return given | {"max_tokens": self.max_tokens, "seed": self.seed, "stop": list(decoding.stop_strings)}

    def ended(self, tokens: np.ndarray, reason: FinishReason) -> tuple[int, FinishReason]:
        """How many of the tokens belong to the response, and why it ended: what completes a stop string ends it."""
        if self.decoding.stop_strings:
            kept = StopStrings(self.tokenizer, self.decoding.stop_strings).completed_by(tokens.tolist())
            if kept is not None:
                return kept, "stop"
        return len(tokens), reason

    def text(self, tokens: np.ndarray) -> str:
        """Of the response."""
        return text_of(self.tokenizer, tokens.tolist(), self.decoding.stop_strings)


def _asked(
    call: GenerationCall, tokenizer: TextCodec, model: str, max_seq_len: int, least: WeightVersion | None
) -> list[_Asked]:
    """Each response of a call, in order.

    Raises:
        EnvironmentFailure: a prompt is empty, has unknown tokens, or leaves no room for a response.
        ValueError: there are not as many seeds as prompts.
    """
    check_call(call)
    decoding, asked = call.decoding, list[_Asked]()
    stops = decoding.stop_token_ids or tokenizer.stop_token_ids
    for prompt, seed in zip(call.prompts, call.seeds, strict=True):
        room = max_seq_len - len(prompt)
        if not len(prompt):
            raise EnvironmentFailure("prompt is empty: a policy needs at least one token to condition on")
        if room < 1:
            raise PromptTooLong(
                f"prompt is too long: it has {len(prompt)} tokens, which leaves no room for a response within "
                f"inference.max_seq_len = {max_seq_len}"
            )
        if prompt.min() < 0 or prompt.max() >= tokenizer.vocab_size:
            outside = prompt[(prompt < 0) | (prompt >= tokenizer.vocab_size)]
            raise EnvironmentFailure(
                f"prompt holds token id {int(outside[0])}, but the tokenizer has {tokenizer.vocab_size}"
            )
        most = min(decoding.max_output_tokens, room)
        asked += [
            _Asked(prompt, decoding, fold(seed, index), stops, tokenizer, model, most, least) for index in range(call.n)
        ]
    return asked


def _choice(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer, and its only choice."""
    answer = json.loads(content)
    choices = answer["choices"]
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("it does not hold one choice, as was asked for")
    return answer, choices[0]


def _reason(reason: Any) -> FinishReason:
    if reason == "abort":
        raise InterruptedAnswer("the server aborted the request")
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason is {reason!r:.100}")
    return reason


_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class _Answer(NamedTuple):
    """What a server said, by whatever names.

    Attributes:
        tokens: int32 [r].
        logprobs: float32 [r].
        reason: Why it ended.
        spans: Its weight versions, each with ``version``, ``start`` and ``end``.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    reason: FinishReason
    spans: Any


class TokenDialect(ABC):
    """Tokens in, tokens out.

    Args:
        config: How the servers get weights, and so where an answer's version stands.
        max_seq_len: Most tokens of a prompt and its response together.

    Attributes:
        path: Of the route that is asked.
    """

    path: ClassVar[str]

    def __init__(self, config: ExternalConfig, max_seq_len: int) -> None:
        self._weights, self._keeps_cache = config.weights, config.kv == "keep"
        self._behind = _BEHIND | {404} if config.weights == "lora" else _BEHIND
        self._max_seq_len = max_seq_len

    @abstractmethod
    def _fields(self, asked: _Asked, named: str) -> dict[str, Any]:
        """The body that asks a model of that name for a response."""

    @abstractmethod
    def _said(self, asked: _Asked, named: str, content: bytes) -> _Answer:
        """Reads an answer of a model of that name; raises what a body of another form makes it raise."""

    @final
    def requests(
        self, call: GenerationCall, tokenizer: TextCodec, model: str, least: WeightVersion | None = None
    ) -> list[ServerRequest[list[list[Completion]]]]:
        """One per response, bound to the server that it goes to: its version is asked for by name, or noted."""
        return [
            ServerRequest(b"", asked.tokens, _unbound, self.path, BUSY, self._behind, bind=partial(self._bound, asked))
            for asked in _asked(call, tokenizer, model, self._max_seq_len, least)
        ]

    @final
    def _bound(self, asked: _Asked, server: Server) -> ServerRequest[list[list[Completion]]] | None:
        served = FIXED if self._weights == "none" else server.version
        if served is None or (self._weights != "none" and asked.is_ahead_of(served)):
            return None
        named = adapter_name(served) if self._weights == "lora" else asked.model
        body = self._fields(asked, named)
        if self._keeps_cache:
            body["cache_salt"] = label_of(served)  # a prefix of earlier weights is not to be found
        return ServerRequest(
            json_body(body),
            asked.tokens,
            partial(self._read, asked, server, served, named, time.monotonic()),
            path=self.path,
            busy=BUSY,
            behind=self._behind,
        )

    @final
    def _read(
        self, asked: _Asked, server: Server, served: WeightVersion, named: str, sent_s: float, content: bytes
    ) -> list[list[Completion]]:
        try:
            tokens, logprobs, reason, spans = self._said(asked, named, content)
            by_span = self._weights == "directory"
            versions = _versions(spans, len(tokens)) if by_span else [served] * len(tokens)
        except _UNREADABLE as error:
            raise MalformedAnswer(f"its answer cannot be read ({type(error).__name__}: {error})") from error
        count, reason = asked.ended(tokens, reason)
        touched = [*versions, served] if self._keeps_cache or not versions else versions
        oldest: WeightVersion = min(touched)
        if asked.is_ahead_of(oldest):
            raise MalformedAnswer(f"weights of {oldest} answered, and {asked.least} at least was asked for")
        completion = Completion(
            prompt_tokens=asked.prompt,
            response_tokens=tokens[:count],
            response_logprobs=logprobs[:count],
            weight_steps=np.array([version.step for version in versions[:count]], np.int32),
            oldest_weight_step=oldest.step,
            lineage=oldest.lineage,
            text=asked.text(tokens[:count]),
            finish_reason=reason,
            engine=str(server),
            finished_s=(now := time.monotonic()),
            timings={"decode_s": now - sent_s},
        )
        return [[completion]]


@final
class VllmDialect(TokenDialect):
    """vLLM's."""

    path = "/inference/v1/generate"

    def _fields(self, asked: _Asked, named: str) -> dict[str, Any]:
        sampling = asked.sampling() | {
            "stop_token_ids": list(asked.stop_token_ids),
            "ignore_eos": True,  # the stop tokens are said
            "logprobs": 0,
            "detokenize": bool(asked.decoding.stop_strings),
        }
        return {"model": named, "token_ids": asked.prompt.tolist(), "sampling_params": sampling, "stream": False}

    def _said(self, asked: _Asked, named: str, content: bytes) -> _Answer:
        answer, choice = _choice(content)
        reason, tokens = _reason(choice["finish_reason"]), integers(choice, "token_ids")
        entries = choice["logprobs"]["content"] or []
        numbers = [None if entry["logprob"] == NO_LOGPROB else entry["logprob"] for entry in entries]
        logprobs = _logprobs(tokens, [entry["token_id"] for entry in entries], numbers)
        if self._weights != "directory" and answer["model"] != named:
            raise ValueError(f"it is of model {answer['model']!r:.100}, and {named!r} was asked for")
        return _Answer(tokens, logprobs, reason, choice["weight_versions"])


@final
class SglangDialect(TokenDialect):
    """SGLang's.

    Its ``ignore_eos`` ignores the stop tokens of a request, too, so that it is not asked for: an answer ends at every
    end token of the model's own, and one that did so without being asked to is refused.
    """

    path = "/generate"

    def _fields(self, asked: _Asked, named: str) -> dict[str, Any]:
        sampling = asked.sampling() | {"stop_token_ids": list(asked.stop_token_ids), "n": 1, "no_stop_trim": True}
        sampling |= {"max_new_tokens": sampling.pop("max_tokens"), "sampling_seed": sampling.pop("seed")}
        return {"input_ids": [asked.prompt.tolist()], "sampling_params": sampling, "return_logprob": True}

    def _said(self, asked: _Asked, named: str, content: bytes) -> _Answer:
        answers = json.loads(content)
        if not isinstance(answers, list) or len(answers) != 1:
            raise ValueError("it does not hold one response, as was asked for")
        answer, meta = answers[0], answers[0]["meta_info"]
        ended = meta["finish_reason"]
        reason, tokens = _reason(ended["type"]), integers(answer, "output_ids")
        matched = ended.get("matched")
        if isinstance(matched, int) and matched not in asked.stop_token_ids:
            raise ValueError(
                f"it ended at token {matched}, an end of the model's own, which is none of the stop tokens asked for "
                f"({list(asked.stop_token_ids)}): name it in sampling_params.stop_token_ids, too"
            )
        entries = meta["output_token_logprobs"]
        logprobs = _logprobs(tokens, [entry[1] for entry in entries], [entry[0] for entry in entries])
        return _Answer(tokens, logprobs, reason, meta.get("weight_versions"))


def _unbound(content: bytes) -> list[list[Completion]]:
    raise MalformedAnswer("the request was sent to no server in particular")


def _logprobs(tokens: np.ndarray, of: list[Any], numbers: list[Any]) -> np.ndarray:
    """float32 [r] of the sampled tokens; None is not finite."""
    if of != tokens.tolist():
        raise ValueError("its log-probabilities are of other tokens than it sampled")
    return logprobs_of(numbers)


def _versions(spans: Any, count: int) -> list[WeightVersion]:
    """The version of each token, from spans that follow one another."""
    versions = list[WeightVersion]()
    for span in spans or []:
        version = version_of_label(span["version"])
        if version is None:
            raise ValueError(f"weights called {span['version']!r:.100} answered, and no version of a run is called so")
        if type(span["end"]) is not int or span["start"] != len(versions) or not span["start"] <= span["end"] <= count:
            raise ValueError("the spans of its weight versions do not follow one another")
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"it names the weight versions of {len(versions)} tokens, and has {count}")
    if len({version.lineage for version in versions}) > 1:
        raise ValueError("weights of several lineages answered")
    return versions


@final
class OpenAiDialect:
    """``/v1/completions`` of any server with OpenAI's API. What is not said stays as it was: nothing can be trained.

    The text that came is encoded anew: its tokens may be others than the server sampled. Log-probabilities are 0, which
    are those of no policy.

    Args:
        max_seq_len: Most tokens of a prompt and its response together.
    """

    def __init__(self, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len

    def requests(
        self, call: GenerationCall, tokenizer: TextCodec, model: str, least: WeightVersion | None = None
    ) -> list[ServerRequest[list[list[Completion]]]]:
        """One per response; the prompt goes as text."""
        return [
            ServerRequest(b"", asked.tokens, _unbound, busy=BUSY, behind=_BEHIND, bind=partial(_as_text, asked))
            for asked in _asked(call, tokenizer, model, self._max_seq_len, None)
        ]


def _as_text(asked: _Asked, server: Server) -> ServerRequest[list[list[Completion]]]:
    """Of any server, sent now."""
    body = {"model": asked.model, "prompt": asked.tokenizer.decode(asked.prompt, False), "n": 1} | _openai(asked)
    read = partial(_read_text, asked, time.monotonic())
    return ServerRequest(json_body(body), asked.tokens, read, busy=BUSY, behind=_BEHIND)


def _openai(asked: _Asked) -> dict[str, Any]:
    """Sampling parameters, those left out that ask for nothing: a server may not know their names."""
    idle = {name for name, field in SAMPLING_FIELDS.items() if field.asks_nothing(getattr(asked.decoding, name))}
    idle |= set() if asked.decoding.stop_strings else {"stop"}
    return {name: value for name, value in asked.sampling().items() if name not in idle}


def _read_text(asked: _Asked, sent_s: float, content: bytes) -> list[list[Completion]]:
    try:
        _, choice = _choice(content)
        reason, text = _reason(choice["finish_reason"]), choice["text"]
        tokens = np.asarray(asked.tokenizer.encode(text), np.int32)
    except _UNREADABLE as error:
        raise MalformedAnswer(f"its answer cannot be read ({type(error).__name__}: {error})") from error
    completion = Completion(
        prompt_tokens=asked.prompt,
        response_tokens=tokens,
        response_logprobs=np.zeros(len(tokens), np.float32),
        weight_steps=np.zeros(len(tokens), np.int32),
        oldest_weight_step=FIXED.step,
        lineage=FIXED.lineage,
        text=text,
        finish_reason=reason,
        engine="external",
        finished_s=(now := time.monotonic()),
        timings={"decode_s": now - sent_s},
    )
    return [[completion]]
