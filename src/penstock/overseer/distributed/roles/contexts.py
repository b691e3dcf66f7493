"""Inference contexts of components that ask servers elsewhere: waiting is told from work, and answers are counted."""

from collections.abc import Callable, Sequence

import numpy as np

from penstock.overseer.distributed.roles.activity import Activity
from penstock.types import Completion, Decoding, InferenceContext, PenstockError, TextCodec, WeightVersion


class TimedContext:
    """Tells an activity that it waits while tokens come. Implements `InferenceContext`.

    Args:
        context: Asks the servers.
        activity: Of the component.
        on_answer: Told of each answer.
    """

    def __init__(
        self, context: InferenceContext, activity: Activity, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        self._context = context
        self._activity = activity
        self._on_answer = on_answer

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's."""
        return self._context.tokenizer

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `InferenceContext.generate`."""
        with self._activity.waiting():
            answers = self._context.generate(prompts, n, decoding, seeds)
        self._on_answer()
        return answers


class InterruptedEvaluation(PenstockError):
    """The evaluated version was not held to the end."""


class PinnedContext(TimedContext):
    """Refuses completions of any version but the one that is evaluated."""

    def pin(self, context: InferenceContext, version: WeightVersion) -> None:
        """From now on `context` is asked, and every token must be of that version."""
        self._context, self._version = context, version

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `InferenceContext.generate`.

        Raises:
            InterruptedEvaluation: a token is of another version.
        """
        answers = super().generate(prompts, n, decoding, seeds)
        for completion in (completion for answer in answers for completion in answer):
            steps = {completion.oldest_weight_step, *completion.weight_steps.tolist()}
            if completion.lineage != self._version.lineage or steps != {self._version.step}:
                raise InterruptedEvaluation(f"steps {sorted(steps)} answered where {self._version} was evaluated")
        return answers
