"""The batch maker of simulator fleets: whole fragments, in the order in which they came.

Costs nothing per fragment that is kept, and the batch per batch. Without deadlines: what becomes of fragments that
grow old is the buffer's affair, which discards them here. Not covered: advantages, which need values of the present
policy and are the learner's (`penstock.learner`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal, final

import numpy as np
from typing_extensions import override

from penstock.batch.maker import Dropped, PacedBatchMaker, check_choice, uses_limit
from penstock.types import ConfigError, FragmentExample, InvalidRolloutError, SampleFragment

FragmentOrder = Literal["oldest", "newest"]


@final
class FragmentBatchMaker(PacedBatchMaker[SampleFragment, FragmentExample]):
    """Takes whole fragments, first those that were used least often.

    Args:
        order: Among these the ``oldest`` arrivals first, so that none is passed over; or the ``newest``, so that those
            that no batch had room for grow stale.
        max_samples: Batches that a fragment may be in; −1 means any number.
        environment_name: Take fragments of this environment only; None means any.

    Raises:
        ConfigError: `order` is unknown, or `max_samples` is neither −1 nor at least 1.
    """

    unit = "group"  # a fragment is a group of one

    def __init__(
        self, order: FragmentOrder = "oldest", max_samples: int = 1, environment_name: str | None = None
    ) -> None:
        check_choice("order", order, FragmentOrder)
        self._newest_first = order == "newest"
        self._most_uses = uses_limit(max_samples)
        self.environment_name = environment_name
        self._by_uses: dict[int, dict[str, SampleFragment]] = {0: {}}
        self._uses: dict[str, int] = {}
        self._step = 0

    def __len__(self) -> int:
        """How many fragments are held."""
        return len(self._uses)

    def add_rollout(self, rollout: SampleFragment) -> None:
        """See `BatchMaker`.

        Raises:
            InvalidRolloutError: it cannot be trained on, is of another environment, or is here already.
        """
        problem = self._problem(rollout)
        if problem is not None:
            raise InvalidRolloutError(f"fragment {rollout.rollout_id} {problem}")
        self._uses[rollout.rollout_id] = 0
        self._by_uses[0][rollout.rollout_id] = rollout

    def create_batch(self, batch_size: int) -> list[FragmentExample] | None:
        """`batch_size` fragments; None while there are fewer."""
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}: a batch has at least 1 fragment")
        if len(self._uses) < batch_size:
            return None
        chosen = list(islice(self._in_order(), batch_size))
        for fragment in chosen:
            self._count_use(fragment)
        return [FragmentExample(fragment) for fragment in chosen]

    def get_batch_metadata(self, batch: Sequence[FragmentExample]) -> dict[str, Any]:
        """``group_ids``, ``rollout_ids`` and ``metrics``, which docs/batch.md lists."""
        fragments = [example.fragment for example in batch]
        return {
            "group_ids": tuple(fragment.group_id for fragment in fragments),
            "rollout_ids": tuple(rollout_id for example in batch for rollout_id in example.rollout_ids),
            "metrics": _numbers(fragments, self._step),
        }

    def set_step(self, step: int) -> None:
        """See `PacedBatchMaker`; ages are counted from it."""
        self._step = step

    def set_deadline(self, group_id: str, deadline_step: int) -> None:
        """Fragments have none."""

    def judge_arrivals(self) -> None:
        """There is nothing to decide."""

    @override
    def discard(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            uses = self._uses.pop(rollout_id, None)
            if uses is not None:
                del self._by_uses[uses][rollout_id]

    def dropped(self) -> list[Dropped]:
        """Nothing is given up here."""
        return []

    def _problem(self, fragment: SampleFragment) -> str | None:
        if fragment.metadata is None:
            return "has no metadata: attach it with SampleFragment.with_metadata"
        if self.environment_name not in (None, fragment.env_name):
            return f"is of environment {fragment.env_name!r}, but this batch maker takes {self.environment_name!r}"
        if fragment.rollout_id in self._uses:
            return "was added before"
        defect = fragment.defect
        return None if defect is None else f"cannot be trained on: {defect}"

    def _in_order(self) -> Iterator[SampleFragment]:
        """Everything, in the order in which batches take it; nothing may change meanwhile."""
        queues = (queue.values() for queue in self._by_uses.values())  # a count follows the one below it
        return chain.from_iterable(reversed(queue) if self._newest_first else queue for queue in queues)

    def _count_use(self, fragment: SampleFragment) -> None:
        rollout_id = fragment.rollout_id
        uses = self._uses[rollout_id] + 1
        self.discard([rollout_id])
        if uses < self._most_uses:
            self._uses[rollout_id] = uses
            self._by_uses.setdefault(uses, {})[rollout_id] = fragment


def _numbers(fragments: Sequence[SampleFragment], step: int) -> dict[str, float]:
    """What a batch for update `step` consists of; ages are of steps, not of fragments, and in versions."""
    faults = np.concatenate([fragment.faults for fragment in fragments])
    ages = step - np.concatenate([fragment.weight_steps for fragment in fragments])[~faults]
    tasks = sorted({fragment.task for fragment in fragments})
    return {
        "train/steps": float(ages.size),
        "train/faulty_steps": float(np.count_nonzero(faults)),
        "train/step_staleness_mean": float(ages.mean()),
        "train/step_staleness_max": float(ages.max()),
        "train/fragment_reward_mean": float(np.mean([fragment.episode_reward for fragment in fragments])),
        **{f"train/fragments/{task}": float(sum(each.task == task for each in fragments)) for task in tasks},
    }
