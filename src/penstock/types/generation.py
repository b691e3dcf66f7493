"""Records of one request for text: how to decode, what came back, and under which weights."""

from collections.abc import Sequence
from dataclasses import dataclass
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
class Decoding:
    """How tokens are sampled.

    Attributes:
        temperature: Divides the logits; 0 is greedy (never trained on).
        top_k: Keep the k most probable tokens; None keeps all.
        top_p: Keep the smallest set of tokens with this probability mass; None keeps all.
        max_output_tokens: Most tokens of one response (not of prompt and response together).
        stop_token_ids: Sampling any of these ends the response; the token is kept, with its log-probability.
        stop_strings: The response ends at the token that completes any of these; it is kept too.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    max_output_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether the sampled distribution is not the one whose log-probabilities are recorded."""
        return self.temperature == 0 or self.top_k is not None or self.top_p is not None


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
    """

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    response_logprobs: np.ndarray
    weight_steps: np.ndarray
    oldest_weight_step: int
    lineage: int
    text: str
    finish_reason: FinishReason
