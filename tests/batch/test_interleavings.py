"""What every built-in batch maker promises, under random orders of adding, discarding, time passing and batches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.batch.conftest import groups_of, ids_of, small_group

from penstock.batch import DeadlineBatchMaker, GrpoBatchMaker, PacedBatchMaker, RecencyBatchMaker, group_pool

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "discard", "nearer", "step", "batch", "batch"]), st.integers(0, 999)),
    min_size=10,
    max_size=50,
)
MAKERS = {
    "deadline": DeadlineBatchMaker,
    "ordered": lambda **fields: DeadlineBatchMaker(ordered=True, **fields),
    "recency": lambda **fields: RecencyBatchMaker(seed=1, **fields),
    "recency of rollouts": lambda **fields: RecencyBatchMaker(seed=1, unit="rollout", balance="even", **fields),
    "grpo": lambda **fields: GrpoBatchMaker(seed=1, **fields),
    "grpo with all versions": lambda **fields: GrpoBatchMaker(seed=1, retention="all", **fields),
}


class Model:
    """What a batch maker holds, in a dictionary: rollout to uses, and group to deadline until its first use."""

    def __init__(self, maker: PacedBatchMaker, max_samples: int) -> None:
        self.maker, self.max_samples = maker, max_samples
        self.uses: dict[str, int] = {}
        self.deadlines: dict[str, int] = {}
        self.used: set[str] = set()
        self.step = self.groups = 0

    def members(self, group_id: str) -> set[str]:
        return {name for name in self.uses if name.startswith(f"{group_id}/")}

    def units(self) -> int:
        return len({name.partition("/")[0] for name in self.uses} if self.maker.unit == "group" else self.uses)

    def due(self) -> set[str]:
        """Rollouts that the next batch must have."""
        groups = [group_id for group_id, deadline in self.deadlines.items() if deadline <= self.step]
        return {name for group_id in groups for name in self.members(group_id) if not self.uses[name]}

    def add(self, number: int) -> None:
        group_id, self.groups = f"a-0-{self.groups}", self.groups + 1
        rewards = [float((number >> bit) & 1) for bit in range(1 + number % 4)]
        env, example = ("cats", "dogs")[number % 2], str(number % 3)
        for rollout in small_group(group_id, rewards, env=env, example=example, step=number % 5 // 4):
            self.maker.add_rollout(rollout)
            self.uses[rollout.rollout_id] = 0
        if number % 3:
            self.maker.set_deadline(group_id, self.step + number % 4)
            self.deadlines[group_id] = self.step + number % 4

    def nearer(self, number: int) -> None:
        """Any group that was not used may get a deadline, or an earlier one."""
        if fresh := sorted({name.partition("/")[0] for name in self.uses} - self.used):
            group_id, step = fresh[number % len(fresh)], self.step + number % 2
            self.maker.set_deadline(group_id, step)
            self.deadlines[group_id] = min(step, self.deadlines.get(group_id, step))

    def discard(self, number: int) -> None:
        some = sorted(self.uses)[number % 5 :: 1 + number % 3]
        self.maker.discard([*some, "unknown/0"])
        self.forget(some)

    def forget(self, ids: list[str]) -> None:
        for rollout_id in ids:
            del self.uses[rollout_id]
        self.deadlines = {group_id: step for group_id, step in self.deadlines.items() if self.members(group_id)}

    def advance(self, number: int) -> None:
        self.step += number % 3
        self.maker.set_step(self.step)

    def batch(self, number: int) -> None:
        size = number % 7 + 1
        batch = self.maker.create_batch(size)
        self.forget([rollout_id for rollout_id, _, _ in self.maker.dropped()])
        if batch is None:
            assert self.units() < size
        else:
            self.check(ids_of(batch), groups_of(batch), size)
            facts = self.maker.get_batch_metadata(batch)
            assert facts["rollout_ids"] == tuple(ids_of(batch)) and facts["group_ids"] == tuple(groups_of(batch))
        assert len(self.maker) == self.units()

    def check(self, ids: list[str], groups: list[str], size: int) -> None:
        assert len(set(ids)) == len(ids), "twice in one batch"
        assert set(ids) <= set(self.uses), "it was discarded, used up, or never there"
        assert self.due() <= set(ids), "what is due must be in the batch"
        if self.maker.unit == "group":
            assert set(ids) == {name for group_id in groups for name in self.members(group_id)}, "groups go whole"
            assert len(groups) == max(size, len({name.partition("/")[0] for name in self.due()}))
        elif isinstance(self.maker, GrpoBatchMaker):
            assert len(ids) == max(size, len(self.due()))
        else:
            assert size <= len(ids) < size + 4 or set(ids) == self.due()
        self.used |= set(groups)
        for rollout_id in ids:
            self.uses[rollout_id] += 1
        if not isinstance(self.maker, GrpoBatchMaker):
            self.deadlines = {group_id: step for group_id, step in self.deadlines.items() if group_id not in groups}
        self.deadlines = {group_id: step for group_id, step in self.deadlines.items() if step > self.step}
        self.forget([name for name in ids if self.uses[name] == self.max_samples])


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=60)
@given(OPERATIONS, st.sampled_from([1, 2, -1]))
def test_promises_hold_in_any_order(name, operations, max_samples):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_pool, "SLACK", 0)  # so that whatever left is swept out all the time
        play(name, operations, max_samples)


def play(name, operations, max_samples):
    model = Model(MAKERS[name](max_samples=max_samples), max_samples)
    for operation, number in operations:
        {"add": model.add, "discard": model.discard, "nearer": model.nearer,
         "step": model.advance, "batch": model.batch}[operation](number)  # fmt: skip
