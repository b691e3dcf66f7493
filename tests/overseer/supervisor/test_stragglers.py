import pytest

from penstock.overseer.supervisor.messages import ComponentStatus, Identity
from penstock.overseer.supervisor.stragglers import Straggler, Stragglers


def rollout(index: int) -> Identity:
    return Identity("rollout", index, 0)


def watch(stragglers: Stragglers, paces: list[float], seconds: range, idle: list[float] | None = None, **groups: str):
    """Each component makes `pace` progress a second of work, and is idle for that share of the time."""
    for second in seconds:
        for index, pace in enumerate(paces):
            share = idle[index] if idle is not None else 0.0
            condition = ComponentStatus("running", "", second * pace * (1 - share), idle_s=second * share)
            stragglers.observe(rollout(index), groups.get(f"of_{index}", ""), condition, float(second))
    return stragglers.newly_slow(float(seconds[-1]))


def test_who_is_slower_than_the_median_of_its_peers_by_the_factor_is_named_once():
    stragglers = Stragglers(3.0)
    assert watch(stragglers, [1.0, 2.0, 3.0, 0.5], range(31)) == [Straggler(rollout(3), pytest.approx(0.5), 2.0)]
    assert watch(stragglers, [1.0, 2.0, 3.0, 0.5], range(31, 60)) == []


def test_who_recovered_may_be_named_again():
    stragglers = Stragglers(3.0)
    assert len(watch(stragglers, [1.0, 0.1], range(31))) == 1
    assert watch(stragglers, [1.0, 1.0], range(31, 131)) == []
    assert len(watch(stragglers, [1.0, 0.1], range(131, 231))) == 1


def test_waiting_for_others_is_not_slowness():
    assert watch(Stragglers(3.0, least_work_s=5.0), [1.0, 1.0, 1.0], range(60), [0.0, 0.0, 0.8]) == []
    slow = watch(Stragglers(3.0, least_work_s=5.0), [1.0, 1.0, 0.1], range(60), [0.0, 0.0, 0.3])
    assert [verdict.identity for verdict in slow] == [rollout(2)]


def test_time_in_which_no_progress_was_owed_is_no_work():
    stragglers = Stragglers(3.0, least_work_s=5.0)
    for second in range(60):
        stragglers.observe(rollout(0), "", ComponentStatus("running", "", float(second)), float(second))
        owed = float(min(second, 10)) if second < 11 or second > 55 else None
        stragglers.observe(rollout(1), "", ComponentStatus("running", "", owed), float(second))
    assert stragglers.rates(59.0)[rollout(1)] == pytest.approx(10 / 13)
    assert stragglers.newly_slow(59.0) == []


def test_who_owed_nothing_or_worked_little_is_not_judged():
    stragglers = Stragglers(3.0)
    for second in range(60):
        stragglers.observe(rollout(0), "", ComponentStatus("running", "", float(second)), float(second))
        stragglers.observe(rollout(1), "", ComponentStatus("running", "", None), float(second))
    assert stragglers.newly_slow(59.0) == []
    assert watch(Stragglers(3.0), [1.0, 0.0], range(15)) == []


def test_one_that_works_without_progress_has_the_rate_zero():
    (slow,) = watch(Stragglers(3.0), [1.0, 0.0], range(31))
    assert slow.rate == 0.0


def test_only_components_of_one_group_are_compared():
    assert watch(Stragglers(3.0), [1.0, 0.1], range(31), of_0="easy", of_1="hard") == []
    assert watch(Stragglers(3.0), [1.0], range(31)) == []


def test_the_dead_are_forgotten():
    stragglers = Stragglers(3.0)
    watch(stragglers, [1.0, 0.1], range(25))
    stragglers.forget(rollout(1))
    assert stragglers.newly_slow(25.0) == [] and list(stragglers.rates(25.0)) == [rollout(0)]


def test_a_group_that_is_finished_when_nothing_is_owed_any_more_counts():
    """One group at a time: work that owes progress, then an answer and a wait for tokens that owes none."""
    stragglers = Stragglers(3.0)
    for second in range(60):
        for index, work in enumerate((4, 4, 20)):
            groups, moment = divmod(second, work + 2)
            condition = ComponentStatus("running", "", float(groups) if moment < work else None)
            stragglers.observe(rollout(index), "", condition, float(second))
    (slow,) = stragglers.newly_slow(59.0)
    assert slow.identity == rollout(2) and 0 < slow.rate < 0.1 < slow.median
