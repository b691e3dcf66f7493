"""The batch makers of one buffer: who gets which rollouts, and what each is asked for.

A maker that is bound to an environment gets that one's rollouts; one that is not bound gets the rest. Makers with the
two small contracts of `penstock.batch` look alike from here: what a plain `BatchMaker` is not told (deadlines, what is
gone), the buffer makes up for when it looks at its batches.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.batch import BatchMaker, Dropped, PacedBatchMaker
from penstock.replay.waiting import WaitingGroup
from penstock.types import (
    ConfigError,
    Experience,
    FragmentExample,
    InvalidRolloutError,
    PenstockError,
    RLExample,
    RunFailed,
    TrainingExample,
)

AnyMaker = BatchMaker[Any, Any]
"""A maker of whatever the buffer holds."""


class BatchMakers:
    """Routes rollouts to makers by environment.

    Args:
        makers: At least one; no two for one environment.

    Raises:
        ConfigError: two makers would take the same rollouts, or there is none.
    """

    def __init__(self, makers: AnyMaker | Sequence[AnyMaker]) -> None:
        self._makers: dict[str | None, AnyMaker] = {}
        for maker in [makers] if isinstance(makers, BatchMaker) else makers:
            name = _environment_name(maker)
            if name in self._makers:
                bound = "any environment" if name is None else f"environment {name!r}"
                raise ConfigError(
                    f"two batch makers take rollouts of {bound}: give each an environment_name of its own"
                )
            self._makers[name] = maker
        if not self._makers:
            raise ConfigError("a replay buffer needs at least one batch maker")

    def __iter__(self) -> Iterator[AnyMaker]:
        """Every maker."""
        return iter(self._makers.values())

    def of(self, env_name: str) -> AnyMaker | None:
        """Who takes rollouts of an environment; None where nobody does."""
        return self._makers.get(env_name, self._makers.get(None))

    def shares_of(self, groups: Iterable[WaitingGroup]) -> Counter[AnyMaker]:
        """What each maker is to be asked for, in its units, so that its batches amount to these groups."""
        shares: Counter[AnyMaker] = Counter()
        for group in groups:
            maker = self.of(group.env_name)
            assert maker is not None  # it was offered
            shares[maker] += 1 if takes_whole_groups(maker) else len(group.rollouts)
        return shares

    def even_shares(self, batch_size: int, env_name: str | None = None) -> Counter[AnyMaker]:
        """`batch_size` shared evenly, the first makers taking what is left over; or all of it of one environment's."""
        makers = list(self) if env_name is None else [maker for maker in [self.of(env_name)] if maker is not None]
        each, over = divmod(batch_size, max(len(makers), 1))
        return Counter({m: each + (i < over) for i, m in enumerate(makers) if each or i < over})

    def add(self, group: WaitingGroup) -> list[Dropped]:
        """Adds a group, with its deadline where it has one; returns what the maker did not take, or gave up for it."""
        maker = self.of(group.env_name)
        if maker is None:
            return [
                _refused(rollout, f"no batch maker takes environment {group.env_name!r}") for rollout in group.rollouts
            ]
        refused: list[Dropped] = []
        for rollout in group.rollouts:
            try:
                _guarded(maker, "add_rollout", rollout)
            except InvalidRolloutError as error:
                refused.append(_refused(rollout, str(error)))
        if isinstance(maker, PacedBatchMaker):
            if group.deadline_step is not None and group.first_use is None and len(refused) < len(group.rollouts):
                maker.set_deadline(group.group_id, group.deadline_step)
            refused += maker.dropped()
        return refused

    def judge_arrivals(self) -> list[Dropped]:
        """Lets the makers decide about what arrived; returns what they gave up."""
        dropped: list[Dropped] = []
        for maker in self:
            if isinstance(maker, PacedBatchMaker):
                maker.judge_arrivals()
                dropped += maker.dropped()
        return dropped

    def add_restored(self, group: WaitingGroup, spent: Sequence[Experience]) -> list[Dropped]:
        """Adds a group of which some members are gone, so that the others keep the baseline that they had."""
        maker = self.of(group.env_name)
        if not spent or not isinstance(maker, PacedBatchMaker):
            return self.add(group)
        for rollout in spent:
            maker.add_rollout(rollout)
        dropped = self.add(group)
        maker.judge_arrivals()
        maker.discard([rollout.rollout_id for rollout in spent])
        return dropped + maker.dropped()

    def set_deadline(self, group: WaitingGroup, step: int) -> None:
        """Update `step` must take the group, although its own deadline is later."""
        maker = self.of(group.env_name)
        if isinstance(maker, PacedBatchMaker):
            maker.set_deadline(group.group_id, step)

    def remove(self, group: WaitingGroup, rollout: Experience) -> None:
        """A rollout is gone."""
        maker = self.of(group.env_name)
        if isinstance(maker, PacedBatchMaker):
            maker.discard([rollout.rollout_id])

    def draw(
        self, maker: AnyMaker, step: int, batch_size: int, at_least: int
    ) -> tuple[list[TrainingExample], list[Dropped]]:
        """A batch, empty where the maker has too little for one, and what it gave up while making it.

        Args:
            maker: Whom to ask.
            step: The update.
            batch_size: How much of it, in the maker's units.
            at_least: How little will do; a plain maker, which may have ignored some rollouts, is asked for less and
                less down to that.
        """
        if not isinstance(maker, PacedBatchMaker):
            while batch_size >= max(at_least, 1):
                if examples := _guarded(maker, "create_batch", batch_size):
                    return _checked(maker, examples), []
                batch_size //= 2
            return [], []
        maker.set_step(step)
        examples = maker.create_batch(batch_size) or []
        return examples, maker.dropped()


def is_paced(maker: AnyMaker) -> bool:
    """Whether it knows what the buffer knows."""
    return isinstance(maker, PacedBatchMaker)


def takes_whole_groups(maker: AnyMaker) -> bool:
    """Whether a group leaves the maker as a whole."""
    return isinstance(maker, PacedBatchMaker) and maker.unit == "group"


def batch_metrics(maker: AnyMaker, examples: Sequence[TrainingExample]) -> dict[str, float]:
    """The maker's own numbers about the batch that it made last."""
    facts = _guarded(maker, "get_batch_metadata", examples)
    try:
        return {str(name): float(value) for name, value in facts.get("metrics", {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RunFailed(
            f"{type(maker).__name__}.get_batch_metadata returned {facts!r}: it must be a mapping, its numbers under "
            "'metrics'"
        ) from error


def _guarded(maker: AnyMaker, method: str, *arguments: Any) -> Any:
    """Calls a maker, which may be a user's; an error in it is told with its name."""
    try:
        return getattr(maker, method)(*arguments)
    except PenstockError:
        raise
    except Exception as error:  # whatever a user's class raises
        raise RunFailed(
            f"the batch maker's {type(maker).__name__}.{method} raised {type(error).__name__}: {error}"
        ) from error


def _checked(maker: AnyMaker, examples: Any) -> list[TrainingExample]:
    wrong = next((example for example in examples if not isinstance(example, RLExample | FragmentExample)), None)
    if wrong is not None:
        raise RunFailed(
            f"{type(maker).__name__}.create_batch returned {wrong!r}: a batch is a list of RLExample; "
            "penstock.batch.example_from_rollout makes one (of fragments, of penstock.types.FragmentExample)"
        )
    return list(examples)


def _environment_name(maker: AnyMaker) -> str | None:
    return maker.environment_name if isinstance(maker, PacedBatchMaker) else getattr(maker, "environment_name", None)


def _refused(rollout: Experience, reason: str) -> Dropped:
    return Dropped(rollout.rollout_id, "invalid", reason)
