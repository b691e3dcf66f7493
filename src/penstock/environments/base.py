"""What every environment is: problems and a verifier, which turn a policy's answers into rewards.

An environment sees tokens in and sampled tokens out (`InferenceContext`); it knows nothing of workers, weights or
rollout metadata. Several threads call `sample` of one instance at once, so an instance keeps no state between calls
that a call could spoil. Most environments extend `SingleTurnEnvironment` (docs/environments.md), not this class.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsInt

import numpy as np

from penstock.types import ConfigError, Decoding, InferenceContext, Message, Mode, RolloutGroup, TextCodec

Prompt = str | Sequence[Message]
"""What `TextCodec.render` takes: plain text, or chat messages for the chat template."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One piece of a worked solution, for a supervised warm start.

    Attributes:
        prompt: As the environment asks it.
        response: What the policy should say.
        earlier: What was said between the prompt and the response, by policy and tools; each piece is encoded
            apart, as in a rollout.
        ends: Whether the policy stops after the response (a tool call does not end an answer).
    """

    prompt: Prompt
    response: str
    earlier: tuple[str, ...] = ()
    ends: bool = True

    def token_pair(self, tokenizer: TextCodec) -> tuple[np.ndarray, np.ndarray]:
        """What to condition on, int32 [p], and what to learn, int32 [r]; the stop token closes an answer."""
        before = [tokenizer.render(self.prompt), *(tokenizer.encode(piece) for piece in self.earlier)]
        stop = np.array(tokenizer.stop_token_ids[:1] if self.ends else (), np.int32)
        return np.concatenate(before), np.concatenate([tokenizer.encode(self.response), stop])


class Environment(ABC):
    """Problems with a verifier.

    Args:
        name: Stands on every rollout; replay capacity is counted by it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def sample(
        self,
        inference_ctx: InferenceContext,
        n_examples: int,
        n_generations: int,
        decoding: Decoding,
        prng_key: SupportsInt | np.ndarray,
        mode: Mode,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Draws problems, lets the policy answer, and scores the answers.

        Args:
            inference_ctx: The policy.
            n_examples: How many problems; each gives one group, drawn twice or not.
            n_generations: Answers per problem.
            decoding: How to sample; `max_output_tokens` covers the whole response, tool tokens included.
            prng_key: Alone decides which problems, and with what sampling noise.
            mode: Which of two disjoint sets of problems.

        Returns:
            At most `n_examples` groups of exactly `n_generations` rollouts, without metadata and group id, and
            metrics. A problem that failed is left out and counted.

        Raises:
            EnvironmentFailure: no group came about; the message is the first failure's.
        """

    def reference_examples(self, n: int, prng_key: SupportsInt | np.ndarray) -> list[Reference]:
        """References drawn from the training problems. To be replaced by environments that have solutions.

        Raises:
            ConfigError: the environment has none.
        """
        raise ConfigError(
            f"environment {self.name!r} ({type(self).__name__}) has no reference solutions: "
            "remove learner.warm_start, or override reference_examples"
        )

    def close(self) -> None:  # noqa: B027  (a hook: most environments hold nothing)
        """Frees what the environment holds, such as processes. To be replaced where there is something."""
