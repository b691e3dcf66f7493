"""A request to the engine from its validation to its completions; host-side only.

A `GenerationRequest` that cannot be served is refused at submission, so that nothing invalid reaches the engine's
thread. A `PendingRequest` holds the future that waits for all n samples; a `Response` is one sample, owned by the
engine's thread from submission to completion.

`StopStrings` finds the token at which a growing response first contains one of its stop strings. Several stop strings
stay separate. A stop string may span tokens and end inside one; the token that completes it belongs to the response,
and nothing after it does. Only the response's tail is decoded each time, so the cost of a long response stays linear.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from penstock.inference.config import EngineConfig
from penstock.model.language.config import ModelConfig
from penstock.types import (
    SAMPLING_FIELDS,
    Alternatives,
    Completion,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    FinishReason,
    PromptScores,
    PromptTooLong,
    TextCodec,
    WeightVersion,
    fold,
)
from penstock.types.generation import STAGES

MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 1024
"""Every sampled token is compared with all of them."""

MOST_ALTERNATIVES = 20
"""Tokens told beside each one of a text; the programs that tell any tell so many."""

TOO_LONG = "context_length_exceeded"
"""What the API calls `PromptTooLong`, as OpenAI does: agents cut a conversation short when they read it."""

TOKEN_ID_LIMIT = 2**31
"""One past the largest int32."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt and how often to answer it.

    Attributes:
        prompt: int32 [p], at least one token.
        decoding: How to sample; no `stop_token_ids` means the tokenizer's.
        seed: Sample j draws from ``fold(seed, j)``, and from nothing else.
        n: Responses; they share the prompt's prefill.
        on_tokens: Told of the tokens, log-probabilities and alternatives that each dispatch gave sample j: called by
            the engine's thread, so it returns at once and raises nothing.
        alternatives: How many of the most probable tokens are recorded at each position; not for training.
        named: Sampling parameters that whoever asks named, whatever their values; the engine reads `decoding` alone.
    """

    prompt: np.ndarray
    decoding: Decoding
    seed: int
    n: int = 1
    on_tokens: Callable[[int, list[int], list[float], Alternatives | None], None] | None = None
    alternatives: int = 0
    named: frozenset[str] = frozenset()


def check_request(request: GenerationRequest, config: EngineConfig, vocab_size: int) -> None:
    """Refuses what the engine cannot serve.

    Raises:
        EnvironmentFailure: the prompt is empty, has unknown tokens, or (PromptTooLong) leaves no room for a response.
        ConfigError: the decoding parameters are out of range.
    """
    _check_prompt(request.prompt, vocab_size)
    _check_decoding(request.decoding, config)
    if request.n < 1:
        raise ConfigError(f"n is {request.n}: ask for at least one response")
    _check_alternatives(request.alternatives)
    max_seq_len, prompt = config.max_seq_len, request.prompt
    if len(prompt) >= max_seq_len:
        raise PromptTooLong(
            f"prompt is too long: it has {len(prompt)} tokens, which leaves no room for a response within "
            f"max_seq_len = {max_seq_len}: shorten the prompt or raise {config.section}.max_seq_len"
        )


def check_scoring(scoring: "Scoring", config: EngineConfig, vocab_size: int) -> None:
    """Refuses a text that the engine cannot score.

    Raises:
        EnvironmentFailure: it is empty, too long, or has unknown tokens.
        ConfigError: temperature or alternatives are out of range.
    """
    _check_prompt(scoring.tokens, vocab_size)
    _check_alternatives(scoring.alternatives)
    temperature = SAMPLING_FIELDS["temperature"]
    if not temperature.allows(scoring.temperature):
        raise ConfigError(f"temperature is {scoring.temperature}: it must be {temperature.expected}")
    if len(scoring.tokens) > config.max_seq_len:
        raise PromptTooLong(
            f"prompt is too long: it has {len(scoring.tokens)} tokens, and max_seq_len is {config.max_seq_len}: "
            f"shorten the prompt or raise {config.section}.max_seq_len"
        )


def _check_alternatives(count: int) -> None:
    if not 0 <= count <= MOST_ALTERNATIVES:
        raise ConfigError(f"alternatives is {count}: it must be from 0 to {MOST_ALTERNATIVES}")


def _check_prompt(prompt: np.ndarray, vocab_size: int) -> None:
    if prompt.dtype != np.int32 or prompt.ndim != 1:
        raise EnvironmentFailure(f"prompt is {prompt.dtype}{list(prompt.shape)}: it must be int32 [p]")
    if len(prompt) == 0:
        raise EnvironmentFailure("prompt is empty: a policy needs at least one token to condition on")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise EnvironmentFailure(
            f"prompt holds token id {_outside(prompt, vocab_size)}, but the model's vocabulary has {vocab_size}"
        )


def _outside(prompt: np.ndarray, vocab_size: int) -> int:
    return int(prompt[(prompt < 0) | (prompt >= vocab_size)][0])


def _check_decoding(decoding: Decoding, config: EngineConfig) -> None:
    """Ranges of the sampling parameters, named as in `Decoding`."""
    stops = decoding.stop_strings
    if len(stops) > MOST_STOP_STRINGS or any(len(each) > LONGEST_STOP_STRING for each in stops):
        raise ConfigError(
            f"stop has {len(stops)} strings, the longest of {max(map(len, stops))} characters: give at most "
            f"{MOST_STOP_STRINGS} of at most {LONGEST_STOP_STRING}"
        )
    for name, parameter in SAMPLING_FIELDS.items():
        if not parameter.allows(value := getattr(decoding, name)):
            raise ConfigError(f"{name} is {value}: it must be {parameter.expected}")
    if decoding.max_output_tokens < 1:
        raise ConfigError(f"max_output_tokens is {decoding.max_output_tokens}: it must be at least 1")
    if len(decoding.stop_token_ids) > config.max_stop_token_ids:
        raise ConfigError(
            f"stop_token_ids has {len(decoding.stop_token_ids)} entries: at most {config.max_stop_token_ids} fit; "
            f"raise {config.section}.max_stop_token_ids"
        )
    if any(not 0 <= token < TOKEN_ID_LIMIT for token in decoding.stop_token_ids):
        raise ConfigError(f"stop_token_ids holds {max(decoding.stop_token_ids, key=abs)}: a token id is an int32")
    if any(not stop for stop in decoding.stop_strings):
        raise ConfigError("stop_strings holds an empty string, which would stop every response at once")


class StopStrings:
    """Watches one response.

    Args:
        tokenizer: Turns tokens into the text that is searched, without special tokens.
        strings: Any of these ends the response.
    """

    def __init__(self, tokenizer: TextCodec, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(map(len, strings)) - 1
        self._tail: list[int] = []

    def completed_by(self, tokens: Sequence[int]) -> int | None:
        """How many of the newly sampled tokens belong to the response; None if none completes a stop string."""
        old = len(self._tail)
        self._tail.extend(tokens)
        if self._found(self._tail):
            return next(n for n in range(1, len(tokens) + 1) if self._found(self._tail[: old + n]))
        self._shorten()
        return None

    def _found(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens)
        return any(string in text for string in self._strings)

    def _shorten(self) -> None:
        """Keeps the fewest last tokens whose text can still begin a stop string, found by doubling.

        Characters at a cut may be wrong (half of a multi-byte character); they are counted as not there.
        """
        keep = 1
        while keep < len(self._tail):
            whole = self._tokenizer.decode(self._tail[-keep:]).lstrip("\ufffd")
            if len(whole) > self._overlap:
                break
            keep *= 2
        self._tail = self._tail[-keep:]


def text_of(tokenizer: TextCodec, tokens: Sequence[int], stop_strings: Sequence[str]) -> str:
    """A response's text, without what follows its first stop string (the string itself is kept)."""
    text = tokenizer.decode(tokens)
    ends = [text.find(string) + len(string) for string in stop_strings if string in text]
    return text[: min(ends)] if ends else text


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A submitted request; its future is resolved when all its responses have ended.

    Attributes:
        request: What was asked.
        stop_token_ids: The request's, or the tokenizer's.
        max_tokens: Most per response: what was asked for, or what the sequence length leaves.
        submitted_s: When, in seconds of this process's monotonic clock.
        future: Resolved with n completions in order.
        completions: Those that have ended, by sample.
    """

    request: GenerationRequest
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    submitted_s: float = field(default_factory=time.monotonic)
    future: Future[list[Completion]] = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict[int, Completion])

    @classmethod
    def of(cls, request: GenerationRequest, tokenizer: TextCodec, config: EngineConfig) -> "PendingRequest":
        """A request that was checked, with the limits that hold for it."""
        stops = request.decoding.stop_token_ids or tokenizer.stop_token_ids
        return cls(request, stops, min(request.decoding.max_output_tokens, config.max_seq_len - len(request.prompt)))

    def complete(self, index: int, completion: Completion) -> None:
        """Takes one sample's completion; the last one resolves the future."""
        self.completions[index] = completion
        if len(self.completions) == self.request.n and self.future.set_running_or_notify_cancel():
            self.future.set_result([self.completions[i] for i in range(self.request.n)])

    def fail(self, error: BaseException) -> None:
        """Gives the error to whoever waits."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


_IN_ORDER = attrgetter("lineage", "step")
"""Of versions; sooner compared than they are."""


@dataclass(slots=True, eq=False)
class Response:
    """One sample on its way.

    Attributes:
        pending: The request it belongs to.
        index: Which of the request's n samples.
        seed: ``fold(request.seed, index)``.
        tokens: Sampled so far.
        logprobs: Of those tokens.
        versions: The weights that sampled each of them.
        alternatives: Pieces of what was asked for beside the tokens, one after the other.
        prefilled_by: The weights behind the prompt's cache; None for a prompt that needed none.
        finish_reason: None while it runs.
        placed_s: When it had its slot, in seconds of this process's monotonic clock; None before.
        begun_s: When its prompt was cached; None before.
        told_s: When it had its newest tokens; None before the first.
    """

    pending: PendingRequest
    index: int
    seed: int = 0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[WeightVersion] = field(default_factory=list[WeightVersion])
    alternatives: list[Alternatives] = field(default_factory=list[Alternatives])
    prefilled_by: WeightVersion | None = None
    finish_reason: FinishReason | None = None
    placed_s: float | None = None
    begun_s: float | None = None
    told_s: float | None = None
    _stop_strings: StopStrings | None = None

    @classmethod
    def of(cls, pending: PendingRequest, index: int, tokenizer: TextCodec) -> "Response":
        """A sample that has not begun."""
        response = cls(pending, index, fold(pending.request.seed, index))
        if pending.request.decoding.stop_strings:
            response._stop_strings = StopStrings(tokenizer, pending.request.decoding.stop_strings)
        return response

    @property
    def prompt(self) -> np.ndarray:
        """int32 [p]."""
        return self.pending.request.prompt

    @property
    def remaining_tokens(self) -> int:
        """How many tokens it may still sample."""
        return self.pending.max_tokens - len(self.tokens)

    def extend(
        self, tokens: list[int], logprobs: list[float], version: WeightVersion, found: Alternatives | None = None
    ) -> None:
        """Takes one dispatch's tokens, drops those past the end, and notes why it ended if it did."""
        kept = self._stop_strings.completed_by(tokens) if self._stop_strings is not None else None
        count = len(tokens) if kept is None else kept
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += [version] * count
        wanted = self.pending.request.alternatives
        best = None if found is None or not wanted else cut(found, count, wanted)
        if best is not None:
            self.alternatives.append(best)
        if kept is not None or (self.tokens and self.tokens[-1] in self.pending.stop_token_ids):
            self.finish_reason = "stop"
        elif self.remaining_tokens == 0:
            self.finish_reason = "length"
        if self.pending.request.on_tokens is not None:
            self.pending.request.on_tokens(self.index, tokens[:count], logprobs[:count], best)

    def finish(self, tokenizer: TextCodec, current: WeightVersion, engine: str) -> None:
        """Hands the completion to its request.

        Args:
            tokenizer: Decodes the text.
            current: Stands for the weights where no token was sampled.
            engine: Name and incarnation of the engine that sampled it.
        """
        touched = [*self.versions, *([self.prefilled_by] if self.prefilled_by else [])]
        oldest, now = min(touched, default=current, key=_IN_ORDER), time.monotonic()
        reached = [each for each in (self.placed_s, self.begun_s) if each is not None]
        moments = [self.pending.submitted_s, *reached, now]
        completion = Completion(
            prompt_tokens=self.prompt,
            response_tokens=np.array(self.tokens, np.int32),
            response_logprobs=np.array(self.logprobs, np.float32),
            weight_steps=np.array([version.step for version in self.versions], np.int32),
            oldest_weight_step=oldest.step,
            lineage=oldest.lineage,
            text=text_of(tokenizer, self.tokens, self.pending.request.decoding.stop_strings),
            finish_reason=self.finish_reason or "aborted",
            engine=engine,
            finished_s=now,
            alternatives=joined(self.alternatives) if self.pending.request.alternatives else None,
            timings=dict(zip(STAGES, (after - before for before, after in pairwise(moments)), strict=False)),
        )
        self.pending.complete(self.index, completion)


def cut(found: Alternatives, positions: int, most: int) -> Alternatives:
    """The first positions, and of each the most probable tokens."""
    return Alternatives(found.tokens[:positions, :most], found.logprobs[:positions, :most])


def joined(pieces: Sequence[Alternatives]) -> Alternatives:
    """Of positions that follow one another."""
    if not pieces:
        return Alternatives(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))
    return Alternatives(np.concatenate([p.tokens for p in pieces]), np.concatenate([p.logprobs for p in pieces]))


@dataclass(slots=True, eq=False)
class Scoring:
    """A text whose log-probabilities are asked for, on its way; the engine's thread's own from its submission on.

    Attributes:
        tokens: int32 [p].
        temperature: Divides the logits; 0 leaves them.
        alternatives: How many of the most probable tokens are told at each position.
        kept: Whether a free slot takes the cache that it leaves.
        future: Resolved with the scores.
        begun: The weights that score all of it, their version, and the cache of what has been scored; None before.
        parts: Scores so far, one after the other: log-probabilities, ranks, and [k, length] each the most probable
            tokens and theirs.
        done: How many tokens they are of.
    """

    tokens: np.ndarray
    temperature: float
    alternatives: int
    kept: bool = False
    future: Future[PromptScores] = field(default_factory=Future)
    begun: tuple[Any, WeightVersion, Any] | None = None
    parts: list[tuple[np.ndarray, ...]] = field(default_factory=list[tuple[np.ndarray, ...]])
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that have no score yet; the first one of a text never has one."""
        return len(self.tokens) - 1 - self.done

    def add(self, part: tuple[np.ndarray, ...]) -> None:
        """Takes the scores of the next tokens, of which the last may be padding."""
        self.parts.append(part)
        self.done += min(self.left, len(part[0]))

    def finish(self, version: WeightVersion) -> None:
        """Hands the scores, of that version, to whoever waits."""
        logprobs, ranks, top_tokens, top_logprobs = (
            np.concatenate(each, axis=-1)[..., : len(self.tokens) - 1]
            for each in zip(*(self.parts or [_NO_SCORES]), strict=True)
        )
        best = Alternatives(top_tokens.T[:, : self.alternatives], top_logprobs.T[:, : self.alternatives])
        scores = PromptScores(self.tokens, logprobs, ranks, best if self.alternatives else None, version)
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(scores)

    def fail(self, error: BaseException) -> None:
        """Gives the error to whoever waits."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


_NO_SCORES = (
    np.zeros(0, np.float32),
    np.zeros(0, np.int32),
    np.zeros((MOST_ALTERNATIVES, 0), np.int32),
    np.zeros((MOST_ALTERNATIVES, 0), np.float32),
)
"""Of a text of one token."""


def check_length(model: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigError if sequences may become longer than what the model is meant for."""
    longest = model.longest_sequence
    if config.max_seq_len > longest:
        raise ConfigError(
            f"{config.section}.max_seq_len is {config.max_seq_len}, but the model is meant for {longest} tokens "
            "(max_position_embeddings): lower the one or change the model"
        )
