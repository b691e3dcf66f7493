"""Evaluation: whole episodes, a fixed number of each slot, whatever their lengths."""

import itertools
import time

import numpy as np
import pytest
from tests.fleet.fake_pool import FakePool, FakeRunner, Script

from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.fleet.evaluation import MOST_FAULTY, evaluate_policy
from penstock.types import ConfigError, NoProgressError, RunFailed

CONFIG = FleetConfig(tasks={"fake": SimulatorConfig(id="Fake-v0")}, envs_per_worker=4, max_wait_ms=1)


def evaluate(script, episodes, **more):
    pool = FakePool(4, script=script)
    pool.start(1)
    return pool, evaluate_policy(pool, FakeRunner(4), episodes, CONFIG, **more)


def length_of(slot, episode):
    return (2, 3, 5, 40)[slot] + episode


def test_long_episodes_count_as_often_as_short_ones():
    pool, played = evaluate(
        Script(ends=lambda slot, episode, step: "terminated" if step + 1 == length_of(slot, episode) else None), 10
    )
    assert played.slots.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert played.lengths.tolist() == [2, 3, 4, 3, 4, 5, 5, 6, 40, 41]
    expected = [pool.returns[slot][i] for slot, n in enumerate((3, 3, 2, 2)) for i in range(n)]
    assert played.returns.tolist() == expected and played.tasks == ("fake",) * 10
    assert len(pool.returns[0]) > 3, "short ones are played on and left out"
    assert not pool.closed and played.faulty_episodes == 0 and len(played.episodes) == 10
    assert played.discounted_returns.tolist() == [episode.discounted_reward for episode in played.episodes]
    assert (played.discounted_returns < played.returns).all() and 0 < played.seconds < 30


def test_fewer_episodes_than_slots_are_those_of_the_first_slots():
    _, played = evaluate(Script(), 2)
    assert played.slots.tolist() == [0, 1] and played.lengths.dtype == np.int64


def test_an_episode_that_a_fault_cut_is_played_again():
    faults = lambda slot, episode, step: (slot, episode, step) == (1, 0, 9)  # noqa: E731
    pool, played = evaluate(Script(faults=faults), 8)
    assert played.faulty_episodes == 1 and played.slots.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert played.returns[2:4].tolist() == pool.returns[1][:2] and played.episodes[2].number == 1


def test_an_episode_that_a_restart_cut_is_played_again():
    def ends(slot, episode, step):
        if step < 4:
            return None
        return "cut" if (slot, episode) == (2, 0) else "terminated"

    pool, played = evaluate(Script(ends=ends), 8)
    assert (played.cut_episodes, played.faulty_episodes) == (1, 0)
    assert played.returns[4:6].tolist() == pool.returns[2][1:3] and played.slots.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_each_task_plays_its_own_number_however_its_simulators_are_mixed():
    pool = FakePool(5, tasks=("a", "b", "a", "a", "b"))
    pool.start(1)
    played = evaluate_policy(pool, FakeRunner(5), 4, CONFIG)
    assert played.slots.tolist() == [0, 0, 1, 1, 2, 3, 4, 4]
    assert played.tasks == ("a", "a", "b", "b", "a", "a", "b", "b")


class Losing(FakePool):
    """Gives processes up when a slot has ended so many episodes."""

    def __init__(self, *args, when, lost, **more):
        super().__init__(*args, **more)
        self._when, self._lost = when, lost

    def poll(self, timeout_s):
        slot, episodes = self._when
        if len(self.returns[slot]) >= episodes:
            for process in self._lost:
                self.quarantine(process)
        return super().poll(timeout_s)


def test_what_a_lost_simulator_owes_is_played_by_the_others_of_its_task_at_once():
    lengths = (2, 2, 9, 3, 3)  # slot 2 never ends an episode before it is lost
    script = Script(ends=lambda slot, episode, step: "terminated" if step + 1 == lengths[slot] and slot != 2 else None)
    pool = Losing(5, script=script, tasks=("a", "b", "a", "a", "a"), when=(0, 8), lost=[2])
    pool.start(1)
    began = time.monotonic()
    played = evaluate_policy(pool, FakeRunner(5), 12, CONFIG, timeout_s=30)
    assert time.monotonic() - began < 5, "it does not wait for what never comes"
    # 3 each of task a's four slots: those of slot 2 go to 0, 3 and 4, one each; their first ones count, which are over
    assert played.slots.tolist() == [0] * 4 + [1] * 12 + [3] * 4 + [4] * 4
    expected = [pool.returns[slot][i] for slot, n in ((0, 4), (1, 12), (3, 4), (4, 4)) for i in range(n)]
    assert played.returns.tolist() == expected


def test_what_a_lost_simulator_has_played_counts():
    pool = Losing(2, tasks=("a", "a"), when=(1, 2), lost=[1])
    pool.start(1)
    played = evaluate_policy(pool, FakeRunner(2), 10, CONFIG, timeout_s=30)
    own = played.slots.tolist().count(1)
    assert own in (1, 2) and played.slots.tolist() == [0] * (10 - own) + [1] * own  # its last one may be on its way


def test_a_task_without_a_simulator_left_is_an_error_that_names_it():
    pool = Losing(3, tasks=("a", "b", "b"), when=(0, 1), lost=[1, 2])
    pool.start(1)
    message = "task 'b': all its simulators were given up before its 40 episodes were over; the last one: told to"
    with pytest.raises(RunFailed, match=message):
        evaluate_policy(pool, FakeRunner(3), 40, CONFIG, timeout_s=30)


def test_simulators_that_are_lost_and_owe_nothing_more_are_no_error():
    script = Script(ends=lambda slot, episode, step: "terminated" if slot == 1 or step > 8 else None)
    pool = Losing(2, tasks=("a", "b"), script=script, when=(1, 9), lost=[1])
    pool.start(1)
    played = evaluate_policy(pool, FakeRunner(2), 4, CONFIG, timeout_s=30)
    assert played.slots.tolist() == [0] * 4 + [1] * 4


def test_handlers_see_every_batch():
    seen = []
    pool, _ = evaluate(Script(), 4, on_batch=[lambda batch: seen.append(len(batch.slots))])
    assert sum(seen) == pool.steps_taken


def test_episodes_that_do_not_end_are_named():
    script = Script(ends=lambda slot, episode, step: None if slot == 2 else "terminated")
    late = r"3 of 4 episodes were over after 0.1 s; slots that owe some: \[2\]. .* needs kwargs.max_episode_steps"
    with pytest.raises(NoProgressError, match=late):
        evaluate(script, 4, timeout_s=0.1)


def test_a_task_of_which_faults_cut_every_episode_ends_it_and_is_named():
    pool = FakePool(2, script=Script(faults=lambda slot, episode, step: slot == 1), tasks=("a", "b"))
    pool.start(1)
    with pytest.raises(RunFailed, match=f"task 'b': faults cut its first {MOST_FAULTY} episodes.* mend its simulator"):
        evaluate_policy(pool, FakeRunner(2), 4, CONFIG, timeout_s=30)


def test_faults_that_leave_some_episode_whole_end_nothing_and_are_told():
    faults = lambda slot, episode, step: slot == 1 and 0 < episode < 2 * MOST_FAULTY  # noqa: E731
    _, played = evaluate(Script(faults=faults), 8, timeout_s=30)
    assert played.slots.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and played.faulty_episodes == 2 * MOST_FAULTY - 1
    with pytest.raises(NoProgressError, match=r"7 of 8 episodes .* 0.5 s \(\d+ more were cut by faults\); "):
        evaluate(Script(faults=lambda slot, episode, step: slot == 1 and episode > 0), 8, timeout_s=0.5)


def test_no_episodes_are_refused():
    with pytest.raises(ConfigError, match="episodes = 0"):
        evaluate(Script(), 0)


def test_one_that_takes_long_says_how_far_it_is_each_time_twice_as_late():
    now = itertools.count(step=10.0)
    pool, told = FakePool(2, script=Script(ends=lambda slot, episode, step: None)), []
    pool.start(1)
    with pytest.raises(NoProgressError):
        evaluate_policy(
            pool, FakeRunner(2), 3, CONFIG, timeout_s=300.0, on_slow=told.append, clock=lambda: next(now)
        )  # fmt: skip
    assert [words.partition(" s and ")[0] for words in told] == [
        f"0 of 3 episodes of the evaluation are over after {seconds}" for seconds in (60, 120, 240)
    ]
    assert all(words.endswith("a task whose episodes may never end needs kwargs.max_episode_steps") for words in told)
