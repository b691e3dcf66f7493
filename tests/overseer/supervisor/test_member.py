import pytest

from penstock.overseer import OverseerConfig
from penstock.overseer.supervisor.member import RestartBudget, RunRestartBudget
from penstock.types import RunFailed


def test_waits_double_up_to_the_longest_and_then_there_are_no_more():
    budget = RestartBudget(OverseerConfig(max_restarts=5, backoff_s=0.5, max_backoff_s=3.0, restart_window_s=100.0))
    assert [budget.charge(float(second)) for second in range(6)] == [0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_only_deaths_within_the_window_count():
    budget = RestartBudget(OverseerConfig(max_restarts=1, backoff_s=0.5, restart_window_s=100.0))
    assert budget.charge(0.0) == 0.5
    assert budget.used(100.0) == 1
    assert budget.charge(100.1) == 0.5
    assert budget.charge(101.0) is None


def test_no_restarts_at_all_may_be_asked_for():
    assert RestartBudget(OverseerConfig(max_restarts=0)).charge(0.0) is None


def test_a_large_budget_does_not_overflow():
    budget = RestartBudget(OverseerConfig(max_restarts=5000, restart_window_s=1e9, max_backoff_s=7.0))
    assert [budget.charge(0.0) for _ in range(2000)][-1] == 7.0


def test_many_deaths_without_a_new_version_end_the_run():
    toll = RunRestartBudget(1)
    for _ in range(5):
        toll.count("gone")
    toll.forget()
    for _ in range(5):
        toll.count("gone")
    with pytest.raises(RunFailed, match="6 components died .* the last: killed"):
        toll.count("killed")
