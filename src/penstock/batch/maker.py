"""The two contracts of a batch maker: which of the fresh rollouts make the next batch, and with what advantage.

In memory only. The replay buffer owns freshness, durability, capacity and fates; it adds rollouts that may be
trained now and takes batches. Whoever calls holds a lock; makers have none.

`BatchMaker` is all that one's own maker needs: the buffer leaves out of its batches whatever is no longer live, and
stops using a rollout after `max_samples` uses. `PacedBatchMaker` is for makers that want to know what the buffer
knows: deadlines, and which rollouts are gone.

Makers that draw have one random stream per batch: it depends on the seed, the step and the batch's number there, and on
no history.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, final, get_args

import numpy as np

from penstock.types import ConfigError, Fate, fold, generator

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # defaults of type variables are of Python 3.13

    from penstock.types import AnyRollout, Experience, RLExample, TrainingExample

    Given = TypeVar("Given", bound=Experience, default=AnyRollout, contravariant=True)
    Made = TypeVar("Made", bound=TrainingExample, default=RLExample)
else:
    from typing import TypeVar

    Given, Made = TypeVar("Given", contravariant=True), TypeVar("Made")

Unit = Literal["group", "rollout"]


class Dropped(NamedTuple):
    """A rollout that a maker gave up by itself.

    Attributes:
        rollout_id: Which.
        fate: What it becomes: ``filtered``, ``evicted`` or ``invalid``.
        reason: In words.
    """

    rollout_id: str
    fate: Fate
    reason: str


class BatchMaker(ABC, Generic[Given, Made]):
    """Chooses training batches: of language rollouts, unless its type arguments say otherwise."""

    @abstractmethod
    def add_rollout(self, rollout: Given) -> None:
        """Takes one rollout; its group is the part of its id before the last slash.

        All rollouts of a group are added before the next `create_batch`.

        Args:
            rollout: With metadata and id. Reads like a `penstock.types.Rollout`; a buffer gives a `PackedRollout`,
                which is small to keep.

        Raises:
            InvalidRolloutError: it cannot be trained on, and was not taken.
        """

    @abstractmethod
    def create_batch(self, batch_size: int) -> list[Made] | None:
        """The next batch; None while there is too little for one. Being in it is one use of a rollout.

        Args:
            batch_size: In the maker's units: rollouts, unless it is a `PacedBatchMaker` that says otherwise.
        """

    @abstractmethod
    def get_batch_metadata(self, batch: Sequence[Made]) -> dict[str, Any]:
        """Facts about the batch that `create_batch` returned last, its numbers for the metrics under ``metrics``."""


class PacedBatchMaker(BatchMaker[Given, Made]):
    """A batch maker that knows deadlines, counts uses itself, and forgets what the buffer drops.

    Attributes:
        unit: What `batch_size` counts.
        environment_name: The one environment that it takes rollouts of; None means any.
    """

    unit: Unit = "rollout"
    environment_name: str | None = None

    @abstractmethod
    def set_step(self, step: int) -> None:
        """The update that the next batch is for."""

    @abstractmethod
    def set_deadline(self, group_id: str, deadline_step: int) -> None:
        """The last update that may train a group for the first time; follows its rollouts, and may come nearer.

        Ignored for groups that are not here.
        """

    @abstractmethod
    def judge_arrivals(self) -> None:
        """Decides about what was added since: baselines, and what it gives up. Asked before any batch is owed."""

    @abstractmethod
    def discard(self, rollout_ids: Iterable[str]) -> None:
        """Forgets rollouts that became stale, were evicted or are used up; unknown ids are ignored."""

    @abstractmethod
    def dropped(self) -> list[Dropped]:
        """What it gave up by itself since the last call.

        Asked after `add_rollout` and `judge_arrivals`, and after every `create_batch`, also one that returned None.
        """


@final
class BatchRandomness:
    """Streams of one batch maker.

    Args:
        seed: None takes one from the operating system.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) if seed is None else seed
        self._step = 0
        self._batches = 0

    def next(self, step: int) -> np.random.Generator:
        """The stream of the next batch for an update."""
        if step != self._step:
            self._step, self._batches = step, 0
        self._batches += 1
        return generator(fold(self._seed, "batch", step, self._batches))


def uses_limit(max_samples: int) -> float:
    """How often a rollout may be used; infinity for −1.

    Raises:
        ConfigError: neither −1 nor at least 1.
    """
    if max_samples < 1 and max_samples != -1:
        raise ConfigError(f"max_samples is {max_samples}: it must be at least 1, or -1 for no limit")
    return float("inf") if max_samples == -1 else max_samples


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuses what is none of a `Literal`'s values.

    Raises:
        ConfigError: naming the argument and the choices.
    """
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(get_args(choices))}")
