"""An open buffer under any interleaving, against the rules of docs/replay.md and nothing else."""

from collections import Counter, deque
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.replay.open_buffers import Hoarder, Open, ids

from penstock.batch import DeadlineBatchMaker, RecencyBatchMaker
from penstock.types import RolloutGroup


class Model:
    """What should be live, by the rules of docs/replay.md and nothing else."""

    def __init__(self, capacity, uses, delay, limit_s):
        self.capacity, self.cap, self.delay, self.limit_s = capacity, uses, delay, limit_s
        self.step, self.now = 0, 1000.0
        self.stamps: dict[str, tuple[str, int, float]] = {}
        self.order: dict[str, deque[list[str]]] = {}
        self.uses: Counter[str] = Counter()

    def fresh(self, step, timestamp):
        return self.step - self.delay <= step <= self.step and timestamp > self.now - self.limit_s

    def add(self, env_name, members):
        live = [i for i, step, timestamp in members if self.fresh(step, timestamp)]
        self.stamps |= {i: (env_name, step, timestamp) for i, step, timestamp in members if i in live}
        if live:
            self.order.setdefault(env_name, deque()).append(live)
        while sum(map(len, self.order.get(env_name, ()))) > self.capacity:
            for i in self.order[env_name].popleft():
                del self.stamps[i]

    def expire(self):
        self.drop([i for i, (_, step, timestamp) in self.stamps.items() if not self.fresh(step, timestamp)])

    def use(self, taken):
        self.uses.update(taken)
        self.drop([i for i in taken if self.uses[i] >= self.cap])

    def drop(self, gone):
        for i in gone:
            env_name, _, _ = self.stamps.pop(i)
            for group in self.order[env_name]:
                if i in group:
                    group.remove(i)
            self.order[env_name] = deque(group for group in self.order[env_name] if group)


MAKERS = {
    "recency": lambda uses: RecencyBatchMaker(max_tokens=16, max_samples=uses, seed=1),
    "rollouts": lambda uses: RecencyBatchMaker(max_tokens=16, max_samples=uses, unit="rollout", seed=1),
    "deadline": lambda uses: DeadlineBatchMaker(max_tokens=16, max_samples=uses),
    "plain": lambda uses: Hoarder(),
}


MEMBERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=3)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("ab"), MEMBERS),
        st.tuples(st.just("step"), st.integers(0, 2), st.integers(0, 20)),
        st.tuples(st.just("sample"), st.integers(1, 3), st.none()),
        st.tuples(st.just("crash"), st.none(), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=OPERATIONS,
    kind=st.sampled_from(sorted(MAKERS)),
    capacity=st.integers(1, 6),
    uses=st.sampled_from([1, 2, -1]),
    delay=st.integers(1, 2),
    limit_s=st.sampled_from([15.0, 1e6]),
)
def test_under_any_interleaving_the_books_close_and_the_rules_hold(
    sim, tmp_path_factory, operations, kind, capacity, uses, delay, limit_s
):
    """Adds, steps, samples and crashes in any order: live is what the model says, and everything has one state."""
    config = dict(
        capacity=capacity, max_samples=uses, max_rollout_step_delay=delay, max_rollout_timestamp_delay=limit_s
    )
    disk = sim.MemoryStore(tmp_path_factory.mktemp("run") / "lineages.jsonl")
    run = Open(sim, MAKERS[kind](uses), disk, **config)
    model = Model(capacity, float("inf") if uses < 0 else uses, delay, limit_s)

    def live():
        return {r.rollout_id for group in run.buffer.pool.waiting for r in group.rollouts}

    for name, first, second in operations:
        if name == "add":
            stamps = [(max(0, model.step - age), run.now - seconds) for age, seconds in second]
            group = run.group([float(i) for i in range(len(stamps))], env_name=first, lesson="easy")
            group = RolloutGroup(group.key, tuple(map(restamped, group.rollouts, stamps)), group.group_id)
            model.add(first, [(r.rollout_id, *stamp) for r, stamp in zip(group.rollouts, stamps, strict=True)])
            run.add(group)
        elif name == "step":
            model.step, model.now = model.step + first, model.now + second
            run.now = model.now
            run.buffer.set_current_step(model.step)
            model.expire()
        elif name == "sample":
            model.expire()
            batch = run.buffer.sample(first)
            taken = [] if batch is None else ids(batch)
            assert set(taken) <= model.stamps.keys() and len(taken) == len(set(taken))
            model.use(taken)
        else:
            with run.buffer.boundary():
                states = run.buffer.state()
            run.add(run.group())  # after the checkpoint, and so it comes back by its file
            model.add("words", [(f"easy-0-{run.made - 1}/{i}", 0, run.now) for i in range(2)])
            made = run.made
            run = Open(sim, MAKERS[kind](uses), disk, states, disk.lineages.newest + 1, **config)
            run.made, run.now = made, model.now
            run.buffer.set_current_step(model.step)
            pending = {i for i in model.uses if i not in model.stamps}
            back = live() - model.stamps.keys()
            assert back <= pending, "only what an unfinished update had used comes back"
            assert back or live() == set(model.stamps)
            run.buffer.check_ledger()
            return
        assert live() == set(model.stamps)
        run.buffer.check_ledger()
        counts = Counter(group.env_name for group in run.buffer.pool.waiting for _ in group.rollouts)
        assert all(count <= capacity for count in counts.values())
    assert uses < 0 or max(model.uses.values(), default=0) <= uses


def restamped(rollout, stamp):
    step, timestamp = stamp
    metadata = replace(rollout.metadata, weight_step=step, timestamp=timestamp)
    return replace(rollout, metadata=metadata, response_weight_steps=np.full(2, step, np.int32))
