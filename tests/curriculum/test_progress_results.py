"""Training groups in numbers."""

from dataclasses import replace

from penstock.curriculum.progress import group_results, success_rate

from .conftest import results


def test_several_groups_are_taken_apart():
    stats = results("a", [1.0, 0.0, 0.6, 0.6], groups=2)
    assert group_results(stats, 0.5) == [(0.5, 0.5, 2), (1.0, 0.6, 2)]
    assert group_results(stats, 0.7) == [(0.5, 0.5, 2), (0.0, 0.6, 2)]


def test_a_lesson_s_own_threshold_counts_rather_than_the_recorded_share():
    assert success_rate(results("a", [0.4, 0.9]), 0.3) == 1.0


def test_without_rewards_the_recorded_shares_count():
    stats = replace(results("a", [1.0, 0.0, 0.6, 0.6], groups=2), rewards=())
    assert success_rate(stats, 0.9) == 0.75
    assert group_results(stats, 0.9) == [(0.75, 0.55, 2)] * 2


def test_groups_of_unequal_size_count_alike():
    stats = results("a", [1.0, 0.0, 0.0], groups=2)
    assert group_results(stats, 0.5) == [(1 / 3, 1 / 3, 1)] * 2
