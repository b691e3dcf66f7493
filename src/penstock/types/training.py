"""Records on the way to the learner: tickets, training examples, and the batch of one update."""

from dataclasses import dataclass
from typing import Generic, Literal

import numpy as np

from penstock.types.errors import InvalidRolloutError
from penstock.types.fragments import SampleFragment
from penstock.types.rollouts import AnyExample


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to generate one group.

    It names the problem and the sampling noise, so it means the same group whoever runs it.

    Attributes:
        ticket_id: Unique in the run's surviving and dead lineages; the group's id.
        lesson_id: Which lesson.
        index: Counts the lesson's tickets from 0.
        seed: ``fold(run_seed, lesson_id, index)``.
        deadline_step: The last update that may train the group.
        admitted_step: The version the serving engine held when the ticket was admitted.
        epoch: Which pass over the lesson's problems; None where the seed selects the problem too, as for generators
            without an end.
        position: The problem's place in the order of that epoch, from 0; None as `epoch`.
        problem: Its number among the environment's training problems, from 0; None as `epoch`.
    """

    ticket_id: str
    lesson_id: str
    index: int
    seed: int
    deadline_step: int
    admitted_step: int
    epoch: int | None = None
    position: int | None = None
    problem: int | None = None


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The training problems of an environment that has a fixed number of them.

    Attributes:
        size: How many there are; they are numbered from 0.
        digest: Of all of them in their order, so that a resumed run sees that they were changed.
    """

    size: int
    digest: str


Fate = Literal["trained", "stale_step", "stale_time", "evicted", "filtered", "invalid", "aborted", "rolled_back"]
"""A rollout's terminal state; see docs/replay.md. Before it, a rollout is `in_flight` or `waiting`."""


_DTYPES = {
    "tokens": np.dtype(np.int32), "loss_mask": np.dtype(np.bool_), "segment_ids": np.dtype(np.int32),
    "position_ids": np.dtype(np.int32), "advantage": np.dtype(np.float32), "generator_log_probs": np.dtype(np.float32),
    "temperature": np.dtype(np.float32), "weight_steps": np.dtype(np.int32),
}  # fmt: skip
"""Of an example's arrays."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RLExample:
    """One rollout to learn from, or samples of several packed into one row; `pos` positions.

    Attributes:
        tokens: int32 [pos], prompt and response.
        loss_mask: bool [pos], true where the policy sampled the token at that position.
        segment_ids: int32 [pos], 1, 2, … per sample of a rollout, one after the other; 0 for padding.
        position_ids: int32 [pos], position within its own sample.
        advantage: float32 [pos], 0 outside the loss mask.
        generator_log_probs: float32 [pos], behaviour log-probability of the token there, 0 outside.
        reference_log_probs: float32 [pos], or None where no reference model is used.
        temperature: float32 [pos], the rollout's own.
        weight_steps: int32 [pos], the version that sampled the token; −1 outside the loss mask. Where a
            sequence's prompt cache is older than its first token, the older version stands for all of it.
        rollout_ids: Of a rollout, its own. Of a row, whose sample each segment is, in their order.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray
    position_ids: np.ndarray
    advantage: np.ndarray
    generator_log_probs: np.ndarray
    reference_log_probs: np.ndarray | None
    temperature: np.ndarray
    weight_steps: np.ndarray
    rollout_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        for name, dtype in _DTYPES.items():
            array: np.ndarray = getattr(self, name)
            if array.dtype != dtype or array.shape != shape or array.ndim != 1:
                raise InvalidRolloutError(
                    f"RLExample.{name} is {array.dtype}{list(array.shape)}: it must be {dtype}{list(shape)}"
                )

    @property
    def first_sampled(self) -> int | None:
        """Position of the first token that the policy sampled; None where there is none."""
        # NumPy's argmax lets other threads go on, and would be waited for: bytes are searched at once.
        first = self.loss_mask.tobytes().find(1)
        return None if first < 0 else first

    def __repr__(self) -> str:
        trained = self.advantage[self.loss_mask]
        named = self.rollout_ids[0] if len(self.rollout_ids) == 1 else f"{len(self.rollout_ids)} rollouts"
        shown = [named, f"{len(self.tokens)} tokens", f"{trained.size} trained"]
        if trained.size:
            ends = sorted({f"{value:.3g}" for value in (trained.min(), trained.max())}, key=float)
            shown.append(f"advantage {' to '.join(ends)}")
        return f"RLExample({', '.join(shown)})"


@dataclass(frozen=True, slots=True, eq=False)
class FragmentExample:
    """One fragment to learn from; advantages are the learner's, which has the values that they need.

    Attributes:
        fragment: All T steps; those with a fault are not to be trained on.
    """

    fragment: SampleFragment

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The fragment's own id alone."""
        return (self.fragment.rollout_id,)


@dataclass(frozen=True, slots=True, repr=False)
class TrainingBatch(Generic[AnyExample]):
    """What one update trains on, durable before the learner sees it.

    Attributes:
        batch_id: Name of the batch file without its suffix.
        step: Update number u; it turns version u into u + 1.
        examples: One per rollout, unpacked; for control policies `FragmentExample`, one per fragment.
        group_ids: The groups behind them, in order.
        metrics: ``replay/…`` numbers: staleness, waits, what was filtered.
    """

    batch_id: str
    step: int
    examples: tuple[AnyExample, ...]
    group_ids: tuple[str, ...]
    metrics: dict[str, float]

    def __repr__(self) -> str:
        shown = f"{len(self.examples)} examples of {len(self.group_ids)} groups"
        return f"TrainingBatch({self.batch_id}, update {self.step}, {shown})"
