"""The default batch maker: nothing waits without bound, and nothing is chosen.

Costs O(log n) per group that comes or goes. Not covered: weighing newer groups against older ones (`recency`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

from typing_extensions import override

from penstock.batch.advantages import AdvantageName, GroupAdvantage, compute_advantages, has_signal
from penstock.batch.examples import assemble_examples, batch_metadata
from penstock.batch.group_pool import FirstUseQueue, GroupTable, OrderedGroups, PooledGroup
from penstock.batch.maker import Dropped, PacedBatchMaker, check_choice, uses_limit
from penstock.types import AnyRollout, RLExample, RolloutGroup


@final
class DeadlineBatchMaker(PacedBatchMaker):
    """Groups due at the current step first, then the oldest finished ones; the default for language policies.

    A batch has `batch_size` groups, or all that are due where those are more. Those that are not due follow in this
    order: with a deadline, oldest first; never used and without a deadline, oldest first; used before, by their last
    use, longest ago first. Nothing overtakes without bound: whatever waits long enough becomes due (docs/batch.md).
    Advantages are of the rollouts of a group that are here when it is used.

    Args:
        advantage: Name of the advantage; `penstock.batch.ADVANTAGES`, reinforce_pp, reinforce_pp_baseline or turn; or
            one's own function of a group.
        max_tokens: Longest trainable sequence, prompt and response together: the learner's row length.
        ordered: Order by ticket, not by arrival, so that staleness zero does not depend on thread timing.
        allow_truncated_sampling: Take rollouts of truncated sampling, such as top-k.
        max_samples: Batches that a group may be in; −1 means any number.
        environment_name: Take rollouts of this environment only; None means any.

    Raises:
        ConfigError: `max_samples` is neither −1 nor at least 1.
    """

    unit = "group"

    def __init__(
        self,
        advantage: AdvantageName | GroupAdvantage = "rloo",
        max_tokens: int = 2048,
        ordered: bool = False,
        allow_truncated_sampling: bool = False,
        max_samples: int = 1,
        environment_name: str | None = None,
    ) -> None:
        if not callable(advantage):
            check_choice("advantage", advantage, AdvantageName)
        self._advantage: AdvantageName | GroupAdvantage = advantage
        self._uses = uses_limit(max_samples)
        self.environment_name = environment_name
        self._held = GroupTable(max_tokens, allow_truncated_sampling, environment_name, ordered)
        self._step = 0
        self._batches = 0
        self._paced = FirstUseQueue()
        self._open = OrderedGroups()
        self._used = OrderedGroups()
        self._last: list[RolloutGroup] = []

    def __len__(self) -> int:
        """How many groups wait."""
        return len(self._held)

    @override
    def add_rollout(self, rollout: AnyRollout) -> None:
        self._held.add(rollout)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """See `BatchMaker.create_batch`; `batch_size` counts groups."""
        if len(self._held) < max(batch_size, 1):
            return None
        chosen = self._choose(batch_size)
        self._last = [group.as_group() for group in chosen]
        self._count_use(chosen)
        return assemble_examples(self._last, compute_advantages(self._advantage, self._last))

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """See `BatchMaker.get_batch_metadata`; what is in it says `penstock.batch.examples.batch_metadata`."""
        return batch_metadata(self._last, [not has_signal(group) for group in self._last], batch)

    @override
    def set_step(self, step: int) -> None:
        self._step = step

    def set_deadline(self, group_id: str, deadline_step: int) -> None:
        """See `PacedBatchMaker.set_deadline`; ignored for groups that are not here or were used."""
        group = self._held.get(group_id)
        if group is None or group.uses:
            return
        if group.line is self._open:
            self._open.leave(group)
        self._paced.set_deadline(group, deadline_step)

    def judge_arrivals(self) -> None:
        """Nothing is decided before a batch."""

    def discard(self, rollout_ids: Iterable[str]) -> None:
        """See `PacedBatchMaker.discard`; a group without rollouts is gone."""
        for rollout_id in rollout_ids:
            gone = self._held.discard(rollout_id)
            if gone is None:
                continue
            self._paced.leave(gone)
            if gone.line is not None:
                gone.line.leave(gone)

    def dropped(self) -> list[Dropped]:
        """Nothing: what is here leaves by its uses, or by `discard`."""
        return []

    def _choose(self, batch_size: int) -> list[PooledGroup]:
        for group in self._held.arrived():
            if group.line is None:
                self._open.join(group, group.order)
        chosen = self._paced.pop_due(self._step)
        for queue in (self._paced, self._open, self._used):
            while len(chosen) < batch_size and len(queue):
                chosen.append(queue.pop())
        return chosen

    def _count_use(self, chosen: list[PooledGroup]) -> None:
        self._batches += 1
        for place, group in enumerate(chosen):
            group.uses += 1
            if group.uses < self._uses:
                self._used.join(group, (self._batches, place))
            else:
                self._held.forget(group)
