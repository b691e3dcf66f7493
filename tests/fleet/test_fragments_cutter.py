"""Fragments: against a plain per-slot reference under random ends, faults, batch orders and versions."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.fake_pool import FakePool, FakeRunner, Script

from penstock.fleet.fragments import FragmentCutter, UnsentFragment
from penstock.fleet.rollout_loop import BatchFiller
from penstock.fleet.steps import ActionBatch, StepArrival, StepBatch
from penstock.types import RunFailed, SampleFragment, WeightVersion

pytestmark = pytest.mark.timeout(60)


def copied(arrays, row):
    return {leaf: array[row].copy() for leaf, array in arrays.items()}


@dataclass
class Reference:
    """One slot: a list of steps, read off in stretches of L."""

    length: int
    steps: list[dict] = field(default_factory=list)
    episode: int = 0

    def add(self, batch: StepBatch, row: int) -> None:
        if self.steps:
            self.steps[-1] |= {
                "reward": batch.rewards[row], "terminated": batch.terminated[row], "truncated": batch.truncated[row],
                "fault": batch.faults[row],
                "final": copied(batch.final_observations, row) if batch.has_final[row] else None,
            }  # fmt: skip
            self.episode += int(batch.first[row])
        decision = batch.decision
        self.steps.append({
            "observation": copied(batch.observations, row),
            "action": copied(decision.actions, row),
            "first": batch.first[row], "logprob": decision.logprobs[row], "value": decision.values[row],
            "weight_step": decision.version.step, "episode": self.episode,
            "state": copied(decision.states, row),
        })  # fmt: skip

    def fragment(self, number: int) -> tuple[list[dict], dict]:
        begin = number * self.length
        return self.steps[begin : begin + self.length], self.steps[begin + self.length]


def check(fragment: SampleFragment, steps: list[dict], after: dict) -> None:
    for name, key in (
        ("rewards", "reward"), ("terminated", "terminated"), ("truncated", "truncated"), ("faults", "fault"),
        ("logprobs", "logprob"), ("weight_steps", "weight_step"), ("episodes", "episode"),
    ):  # fmt: skip
        np.testing.assert_array_equal(getattr(fragment, name), [step[key] for step in steps], name)
    for name, key in (("first", "first"), ("values", "value")):
        np.testing.assert_array_equal(getattr(fragment, name), [step[key] for step in [*steps, after]], name)
    for leaf, array in fragment.observations.items():
        np.testing.assert_array_equal(array, [step["observation"][leaf] for step in [*steps, after]])
    for leaf, array in fragment.actions.items():
        np.testing.assert_array_equal(array, [step["action"][leaf] for step in steps])
    finals = [(i, step["final"]) for i, step in enumerate(steps) if step["final"] is not None]
    assert fragment.final_steps.tolist() == [i for i, _ in finals]
    for leaf, array in fragment.final_observations.items():
        assert len(array) == len(finals)
        for row, (_, final) in zip(array, finals, strict=True):
            np.testing.assert_array_equal(row, final[leaf])
    for leaf, array in steps[0]["state"].items():
        np.testing.assert_array_equal(fragment.initial_state[leaf], array)
    assert fragment.metadata.weight_step == min(step["weight_step"] for step in steps)


def join(pool: FakePool, arrivals: list[StepArrival], runner: FakeRunner) -> StepBatch:
    filler = BatchFiller(pool.spaces, sum(len(arrival.slots) for arrival in arrivals))
    for arrival in arrivals:
        filler.add(arrival, 0.0)
    filler.join()
    decision = runner.decide(filler.slots, filler.room, filler.first).result()
    for arrival, actions in filler.shares(decision.actions):
        pool.act(arrival.process, actions, arrival.part)
    return filler.reported(decision)


def drive(pool, runner, cutter, turns, publish=lambda turn: None):
    """Plays in the pool's own order; returns fragments and references by slot."""
    references = [Reference(cutter._length) for _ in range(pool.num_slots)]
    cut: list[list[UnsentFragment]] = [[] for _ in range(pool.num_slots)]
    pool.start(1)
    for turn in range(turns):
        publish(turn)
        batch = join(pool, pool.poll(0), runner)
        for row, slot in enumerate(batch.slots):
            references[slot].add(batch, row)
        for unsent in cutter.add(batch):
            cut[unsent.fragment.slot].append(unsent)
    return cut, references


def make_cutter(pool, length, **more):
    return FragmentCutter(pool, length, "w", "w-0", clock=lambda: 5.0, **more)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 6), processes=st.integers(1, 4), per_process=st.integers(1, 3), seed=st.integers(0, 2**32),
    state_size=st.sampled_from([0, 2]), image=st.sampled_from([None, (20, 20, 3)]),
    often=st.sampled_from([0.0, 0.2, 0.9]),
)  # fmt: skip
def test_fragments_are_what_a_plain_loop_would_make(length, processes, per_process, seed, state_size, image, often):
    chance = np.random.default_rng(seed)
    script = Script(
        ends=lambda *_: str(chance.choice(["terminated", "truncated"])) if chance.random() < often else None,
        faults=lambda *_: bool(chance.random() < often / 2),
        kills=lambda *_: bool(chance.random() < often / 4),
    )
    pool = FakePool(processes, per_process, script, image=image, order=np.random.default_rng(seed))
    runner, step = FakeRunner(pool.num_slots, state_size=state_size), iter(range(1, 1000))

    def publish(turn: int) -> None:
        if chance.random() < 0.3:
            number = next(step)
            runner.set_weights(WeightVersion(0, number), {"w": np.array([number])})

    cutter = make_cutter(pool, length, keep_states=True)
    cut, references = drive(pool, runner, cutter, 40, publish)
    for slot, (fragments, reference) in enumerate(zip(cut, references, strict=True)):
        assert len(fragments) == max(0, (len(reference.steps) - 1) // length)
        for number, unsent in enumerate(fragments):
            steps, after = reference.fragment(number)
            check(unsent.fragment, steps, after)
            assert unsent.fragment.group_id == f"w-0-{slot}-{number}" and unsent.fragment.slot == slot
            for begin, state in unsent.states.items():
                assert steps[begin]["weight_step"] != steps[begin - 1]["weight_step"]
                np.testing.assert_array_equal(state["h"], steps[begin]["state"]["h"])
    counts = cutter.books.account()
    started = sum(len(reference.steps) for reference in references)
    assert counts.started == started == pool.steps_taken
    assert counts.waiting == length * sum(len(fragments) for fragments in cut)
    assert counts.acting == sum(bool(reference.steps) for reference in references)
    assert counts.buffered == started - counts.acting - counts.waiting


def test_the_truth_of_the_simulators_is_in_the_fragments():
    """Golden: two slots, episodes of 3 steps (the second one truncated), a fault at episode 1 step 1."""
    script = Script(
        ends=lambda slot, episode, step: ("truncated" if episode == 1 else "terminated") if step == 2 else None,
        faults=lambda slot, episode, step: (episode, step) == (1, 1),
    )
    pool = FakePool(2, 1, script)
    cut, _ = drive(pool, FakeRunner(2), make_cutter(pool, 4), 9)
    first, second = [unsent.fragment for unsent in cut[1]]
    assert first.rewards.tolist() == [1, 2, 3, 101] and second.rewards.tolist() == [102, 103, 201, 202]
    assert first.terminated.tolist() == [False, False, True, False]
    assert second.truncated.tolist() == [False, True, False, False] and not second.terminated.any()
    assert second.faults.tolist() == [True, False, False, False] and second.trainable_steps == 3
    assert first.first.tolist() == [True, False, False, True, False]
    assert first.observations[""].tolist() == [[1, 0, 0], [1, 0, 1], [1, 0, 2], [1, 1, 0], [1, 1, 1]]
    assert first.final_steps.tolist() == [2] and first.final_observations[""].tolist() == [[1, 0, 3]]
    assert second.episodes.tolist() == [1, 1, 2, 2] and second.final_observations[""].tolist() == [[1, 1, 3]]
    assert first.values.tolist() == [0, 1, 2, 0, 1] and first.task == "fake" and first.env_name == "Fake-v0"
    assert first.metadata.timestamp == 5.0 and first.metadata.worker_id == "w"


def test_fragments_do_not_change_when_the_next_ones_are_played():
    for image in (None, (20, 20, 3)):
        pool, runner = FakePool(2, image=image), FakeRunner(2)
        cutter = make_cutter(pool, 3)
        cut, references = drive(pool, runner, cutter, 20)
        for number, unsent in enumerate(cut[0]):
            check(unsent.fragment, *references[0].fragment(number))


def test_a_state_is_kept_only_where_it_is_asked_for():
    pool, runner = FakePool(1), FakeRunner(1, state_size=2)
    publish = lambda turn: runner.set_weights(WeightVersion(0, turn + 1), {"w": np.array([turn + 1])})  # noqa: E731
    cut, _ = drive(pool, runner, make_cutter(pool, 4), 9, publish)
    assert [unsent.states for unsent in cut[0]] == [{}, {}]
    assert [unsent.fragment.initial_state["h"].tolist() for unsent in cut[0]] == [[0, 0], [4, 4]]


def test_steps_of_an_older_lineage_are_discarded_and_counted():
    pool, runner = FakePool(1), FakeRunner(1, WeightVersion(0, 7))

    def publish(turn: int) -> None:
        if turn == 6:
            runner.set_weights(WeightVersion(1, 3), {"w": np.array([3])})

    cutter = make_cutter(pool, 4)
    cut, references = drive(pool, runner, cutter, 12, publish)
    first, second = [unsent.fragment for unsent in cut[0]]
    assert first.metadata.lineage == 0 and first.weight_steps.tolist() == [7] * 4
    assert second.metadata.lineage == 1 and second.weight_steps.tolist() == [3] * 4
    check(second, references[0].steps[6:10], references[0].steps[10])
    counts = cutter.books.account()
    assert (counts.started, counts.stale, counts.waiting, counts.acting, counts.buffered) == (12, 2, 8, 1, 1)


def test_a_fragment_says_what_its_seconds_went_to():
    now = [100.0]
    pool, runner = FakePool(2), FakeRunner(2)
    cutter = FragmentCutter(pool, 2, "w", "w-0", clock=lambda: now[0])
    pool.start(1)
    cut = []
    for turn in range(5):  # the first decision at 100 s, then one every ten
        batch = join(pool, pool.poll(0), runner)
        worked = np.array([0.25, 1.0]) * turn
        cut += cutter.add(replace(batch, simulate_s=worked[batch.slots], inference_s=0.5 + turn))
        now[0] += 10.0
    seconds = {slot: [u.fragment.timings for u in cut if u.fragment.slot == slot] for slot in (0, 1)}
    first, second = seconds[0]
    assert first == {"generate_s": 20.0, "policy_s": 1.5 + 2.5, "simulate_s": 0.25 + 0.5}
    assert second == {"generate_s": 20.0, "policy_s": 3.5 + 4.5, "simulate_s": 0.75 + 1.0}
    assert [timings["simulate_s"] for timings in seconds[1]] == [3.0, 7.0]
    assert [unsent.fragment.metadata.timestamp for unsent in cut] == [120.0, 120.0, 140.0, 140.0]


def test_seconds_of_discarded_steps_are_no_fragments():
    now = [100.0]
    pool, runner = FakePool(1), FakeRunner(1)
    cutter = FragmentCutter(pool, 2, "w", "w-0", clock=lambda: now[0])
    pool.start(1)
    cut = []
    for turn in range(4):
        if turn == 1:
            runner.set_weights(WeightVersion(1, 0), {"w": np.array([0])})
        cut += cutter.add(replace(join(pool, pool.poll(0), runner), simulate_s=1.0, inference_s=0.5))
        now[0] += 10.0
    assert [unsent.fragment.timings for unsent in cut] == [{"generate_s": 20.0, "policy_s": 1.0, "simulate_s": 2.0}]


def test_a_result_without_an_action_is_refused():
    pool, runner = FakePool(1), FakeRunner(1)
    pool.start(1)
    batch = join(pool, pool.poll(0), runner)
    cutter = make_cutter(pool, 4)
    cutter.add(batch)
    with pytest.raises(RunFailed, match=r"slots \[0\] have a result without an action"):
        cutter.add(batch)


def test_decisions_are_copied():
    pool, runner = FakePool(1), FakeRunner(1)
    cutter = make_cutter(pool, 1)
    pool.start(1)
    batches = []
    for _ in range(2):
        batch = join(pool, pool.poll(0), runner)
        cut = cutter.add(batch)
        batches.append(batch)
    for batch in batches:
        batch.rewards[:] = 99
        batch.decision.values[:] = 99
        batch.observations[""][:] = 99
    assert isinstance(batch.decision, ActionBatch)
    assert cut[0].fragment.rewards.tolist() == [1] and cut[0].fragment.values.tolist() == [0, 1]
    assert cut[0].fragment.observations[""].max() == 1
