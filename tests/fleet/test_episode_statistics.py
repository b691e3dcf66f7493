"""Episodes: numbers by hand, once each whatever is delivered again."""

import json

import numpy as np
import pytest
from tests.fleet.fake_pool import rows_of

from penstock.fleet.episode_statistics import Episode, EpisodeStatistics, EpisodeTracker
from penstock.fleet.steps import ActionBatch, StepBatch
from penstock.types import WeightVersion


def batch_of(slots, rewards, first, acted, *, returns=None, lengths=None, faults=None, cut=None) -> StepBatch:
    no = np.zeros(len(slots), np.float32)
    fields = {"returns": returns, "lengths": lengths, "faults": faults, "cut": cut}
    rows = rows_of(
        slots=slots, rewards=rewards, first=first, acted=acted,
        **{name: values for name, values in fields.items() if values is not None},
    )  # fmt: skip
    return StepBatch(rows, {}, {}, ActionBatch({}, no, no, WeightVersion(0, 0)))


def test_a_tracker_reads_batches_in_any_order_of_slots():
    tracker = EpisodeTracker(("a", "b"), 0.5)
    tracker.add(batch_of([0, 1], [0, 0], [1, 1], [0, 0]))
    tracker.add(batch_of([1, 0], [4, 1], [0, 0], [1, 1]))
    tracker.add(batch_of([0], [1], [0], [1]))
    tracker.add(batch_of([1, 0], [2, 1], [1, 1], [1, 1], returns=[60, 30], lengths=[2, 3]))
    tracker.add(batch_of([0], [8], [1], [1], returns=[80], lengths=[1]))
    assert tracker.since(0) == (3, [
        Episode(1, 0, "b", 60.0, 4 + 2 / 2, 2),
        Episode(0, 0, "a", 30.0, 1 + 1 / 2 + 1 / 4, 3),
        Episode(0, 1, "a", 80.0, 8.0, 1),
    ])  # fmt: skip


def test_what_was_acknowledged_is_forgotten_and_the_rest_is_kept():
    tracker = EpisodeTracker(("a",), 1.0, most_kept=3)
    tracker.add(batch_of([0], [0], [1], [0]))
    for number in range(5):
        tracker.add(batch_of([0], [number], [1], [1], returns=[number], lengths=[1]))
    assert [episode.number for episode in tracker.since(0)[1]] == [2, 3, 4], "older ones were given up"
    number, episodes = tracker.since(4)
    assert number == 5 and [episode.number for episode in episodes] == [4]
    assert tracker.since(0)[1] == episodes and tracker.since(5) == (5, [])


def test_an_episode_that_a_fault_cut_is_counted_as_that_only():
    tracker, statistics = EpisodeTracker(("a",), 1.0), EpisodeStatistics(10)
    tracker.add(batch_of([0], [0], [1], [0]))
    tracker.add(batch_of([0], [5], [1], [1], faults=[True]))
    tracker.add(batch_of([0], [7], [1], [1], returns=[7], lengths=[1]))
    statistics.add("w", 0, tracker.since(0)[1])
    metrics = statistics.metrics()
    assert metrics["fleet/a/episodes"] == 1 and metrics["fleet/a/faulty_episodes"] == 1
    assert metrics["fleet/a/reward_mean"] == metrics["fleet/a/discounted_reward_mean"] == 7


def test_an_episode_that_a_restart_cut_is_counted_as_that_only_and_outlives_a_checkpoint():
    tracker, statistics = EpisodeTracker(("a",), 0.5), EpisodeStatistics(10)
    tracker.add(batch_of([0], [0], [1], [0]))
    tracker.add(batch_of([0], [5], [1], [1], returns=[5], lengths=[1], cut=[True]))
    tracker.add(batch_of([0], [9], [1], [1], cut=[True], faults=[True]))
    tracker.add(batch_of([0], [7], [1], [1], returns=[7], lengths=[1]))
    ended = tracker.since(0)[1]
    assert [one.whole for one in ended] == [False, False, True] and ended[2].discounted_reward == 7
    statistics.add("w", 0, ended)
    resumed = EpisodeStatistics(10)
    resumed.restore(json.loads(json.dumps(statistics.state())))
    for metrics in (statistics.metrics(), resumed.metrics()):
        assert metrics["fleet/a/episodes"] == metrics["fleet/a/cut_episodes"] == metrics["fleet/a/faulty_episodes"] == 1
        assert metrics["fleet/a/reward_mean"] == 7 and metrics["fleet/a/length_mean"] == 1
    resumed.restore([["train", *entry[:-1]] for entry in statistics.state()])
    assert resumed.metrics()["fleet/a/cut_episodes"] == 0, "an older checkpoint did not count them"
    assert resumed.count("a") == 1


def episode(slot=0, number=0, task="a", reward=1.0, length=4):
    return Episode(slot, number, task, reward, reward / 2, length)


def test_each_episode_is_counted_once_over_deliveries_and_lives():
    statistics = EpisodeStatistics(10)
    assert statistics.add("w", 0, [episode(0, 0), episode(1, 0), episode(0, 1)]) == 3
    assert statistics.add("w", 0, [episode(0, 0), episode(0, 1), episode(0, 2)]) == 1
    assert statistics.add("w", 1, [episode(0, 0)]) == 1, "another life"
    assert statistics.add("v", 0, [episode(0, 0)]) == 1, "another worker"
    assert statistics.count("a") == 6


def test_means_are_over_the_latest():
    now = [0.0]
    statistics = EpisodeStatistics(2, clock=lambda: now[0])
    for number, reward in enumerate((100.0, 2.0, 4.0)):
        now[0] += 1.0
        statistics.add("w", 0, [episode(0, number, reward=reward, length=number + 1)])
    now[0] = 4.0
    metrics = statistics.metrics()
    assert metrics["fleet/a/reward_mean"] == 3 and metrics["fleet/a/reward_std"] == 1
    assert (metrics["fleet/a/reward_min"], metrics["fleet/a/reward_max"]) == (2, 4)
    assert metrics["fleet/a/discounted_reward_mean"] == 1.5 and metrics["fleet/a/length_mean"] == 2.5
    assert metrics["fleet/a/episodes"] == 3 and metrics["fleet/a/episodes_per_s"] == pytest.approx(2 / 2.0)
