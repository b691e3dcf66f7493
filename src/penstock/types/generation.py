"""Records of one request for text: how to decode, what came back, and under which weights.

A sampling parameter is declared once, as a field of `Decoding` with a `SamplingField`. Request bodies, the engine's
columns, their checks, stored rows and what counts as truncated follow from `SAMPLING_FIELDS`; by hand are written only
its key in `penstock.curriculum.SamplingParams` and its arithmetic in `penstock.inference.sampling.sample`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "aborted"]
"""`stop`: a stop token or string was sampled; `length`: a limit cut it; `aborted`: the engine stopped."""


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """Names one set of policy weights.

    Attributes:
        lineage: Which life of the run; every resume from a checkpoint starts the next one.
        step: The number of updates behind these weights; update u turns step u into u + 1.
    """

    lineage: int
    step: int


@dataclass(frozen=True, slots=True)
class SamplingField:
    """What every layer must know of one sampling parameter. None, where `Decoding` allows it, means `neutral`.

    Attributes:
        dtype: Of its column on the device, one entry per slot.
        neutral: The value that asks for nothing.
        least: The least value allowed.
        most: The greatest value allowed.
        truncates: Whether any other value keeps tokens from being drawn, so that what is sampled does not follow the
            recorded log-probabilities.
        zero_means: What 0 asks for, which is allowed beside the range; empty where it is as any other value.
        off: Values by which request bodies of other servers ask for nothing, beside null and `neutral`.
    """

    dtype: type[np.float32 | np.int32]
    neutral: float
    least: float
    most: float
    truncates: bool = True
    zero_means: str = ""
    off: tuple[float, ...] = ()

    @property
    def kind(self) -> type[int | float]:
        """Python's type of a value."""
        return int if self.dtype is np.int32 else float

    def allows(self, value: float | None) -> bool:
        """Whether a value, which may be no finite number, is in range."""
        if value is None or (self.zero_means and value == 0):
            return True
        return self.least <= value <= self.most

    def asks_nothing(self, value: float | None) -> bool:
        """Whether a value of a request body is as good as none."""
        return value is None or value == self.neutral or value in self.off

    @property
    def expected(self) -> str:
        """What must stand there, to follow "it must be"."""
        zero = f"0 ({self.zero_means}), or " if self.zero_means else ""
        absent = ", or absent to keep all" if self.truncates else ""
        least, most = (f"{bound:g}" if self.kind is float else f"{bound}" for bound in (self.least, self.most))
        return f"{zero}from {least} to {most}{absent}"


_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are sampled. Ranges are checked where requests and configurations are read, not here.

    Attributes:
        temperature: Divides the logits; 0 is greedy (never trained on).
        top_k: Keep the k most probable tokens; None keeps all.
        top_p: Keep the smallest set of tokens with this probability mass; None keeps all.
        max_output_tokens: Most tokens of one response (not of prompt and response together).
        stop_token_ids: Sampling any of these ends the response; the token is kept, with its log-probability.
        stop_strings: The response ends at the token that completes any of these; it is kept too.
        min_p: Keep the tokens at least this many times as probable as the most probable one; None keeps all.
    """

    # Below, logits / temperature can overflow float32; all tokens are as probable as one another long before the upper
    # bound, and beyond it float32 would overflow.
    temperature: float = field(
        default=1.0,
        metadata={"sampling": SamplingField(np.float32, 1.0, 1e-3, 1e6, truncates=False, zero_means="greedy")},
    )
    top_k: int | None = field(
        default=None,
        metadata={"sampling": SamplingField(np.int32, neutral=_INT32_MAX, least=1, most=_INT32_MAX, off=(-1, 0))},
    )
    # Below, only the most probable token is left anyway; far below, float32 would make it zero.
    top_p: float | None = field(
        default=None, metadata={"sampling": SamplingField(np.float32, neutral=1.0, least=1e-6, most=1.0)}
    )
    max_output_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_p: float | None = field(
        default=None, metadata={"sampling": SamplingField(np.float32, neutral=0.0, least=0.0, most=1.0)}
    )

    @property
    def truncation(self) -> dict[str, float]:
        """The sampling parameters by which tokens cannot be drawn though they have a probability, with their values."""
        given = ((name, getattr(self, name), neutral) for name, neutral in _TRUNCATING)
        return {name: value for name, value, neutral in given if value is not None and value != neutral}

    @property
    def truncated(self) -> bool:
        """Whether the sampled distribution is not the one whose log-probabilities are recorded."""
        return self.temperature == 0 or bool(self.truncation)


SAMPLING_FIELDS: Mapping[str, SamplingField] = {
    each.name: each.metadata["sampling"] for each in fields(Decoding) if "sampling" in each.metadata
}
"""The sampling parameters by name, in the order of `Decoding`."""

_TRUNCATING = [(name, each.neutral) for name, each in SAMPLING_FIELDS.items() if each.truncates]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationCall:
    """One caller's request: n responses to each prompt.

    Attributes:
        prompts: int32 [p] each.
        n: Responses per prompt.
        decoding: How to sample.
        seeds: One per prompt.
    """

    prompts: Sequence[np.ndarray]
    n: int
    decoding: Decoding
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """The most probable tokens at each of r positions, the most probable first.

    Attributes:
        tokens: int32 [r, k].
        logprobs: float32 [r, k], under the distribution of the log-probabilities that they stand beside.
    """

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """What a policy makes of p given tokens, each after those before it; nothing is said of the first.

    Attributes:
        tokens: int32 [p].
        logprobs: float32 [p − 1], under softmax(logits / temperature), or softmax(logits) where that is 0.
        ranks: int32 [p − 1]; the most probable token has rank 1.
        alternatives: Of the same positions; None where none were asked for.
        version: The weights, of which there is one for all tokens.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    alternatives: Alternatives | None
    version: WeightVersion


STAGES = ("wait_s", "prefill_s", "decode_s")
"""Seconds of a response with the engine: until it has a slot, until its prompt is cached, until its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled response. Produced by the inference engine; p prompt and r response tokens.

    Attributes:
        prompt_tokens: int32 [p], exactly as given.
        response_tokens: int32 [r], as sampled, the stop token included.
        response_logprobs: float32 [r], of the sampled token under softmax(logits / temperature), before
            any truncation; under softmax(logits) where the temperature is 0.
        weight_steps: int32 [r], the version that sampled each token.
        oldest_weight_step: The oldest version that touched the response: the prompt's cache included.
        lineage: Lineage of the weights.
        text: The response decoded, without special tokens and without what follows a stop string.
        finish_reason: Why it ended.
        engine: Name and incarnation of the engine that sampled it, such as ``inference-0#2``; empty where it has none.
        finished_s: When it was finished, in seconds of this process's monotonic clock; None where nobody said.
        alternatives: Of the response's positions, before truncation too; None where none were asked for.
        timings: Seconds by the names of `STAGES`; those that nobody said are left out.
    """

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    response_logprobs: np.ndarray
    weight_steps: np.ndarray
    oldest_weight_step: int
    lineage: int
    text: str
    finish_reason: FinishReason
    engine: str = ""
    finished_s: float | None = None
    alternatives: Alternatives | None = None
    timings: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def empty(cls, prompt: np.ndarray, version: WeightVersion) -> "Completion":
        """No token after that prompt, where none was asked for; of the version that serves."""
        nothing, none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return cls(prompt, nothing, none, nothing, version.step, version.lineage, "", "length")
