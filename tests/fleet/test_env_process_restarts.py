"""Back-off, cap and rate of restarts."""

from penstock.fleet.config import SimulatorLimits
from penstock.fleet.env_process import GiveUp, RestartRecord


def _limits(**changes):
    return SimulatorLimits(**{"backoff_s": 0.5, "max_backoff_s": 3.0, "restarts_per_minute": 100, **changes})


def test_the_wait_doubles_up_to_its_limit_and_begins_again_after_an_answer():
    record = RestartRecord(_limits())
    assert [record.failed(t) for t in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    record.answered()
    assert record.failed(9.0) == 0.5
    assert record.restarts == 6


def test_the_cap_is_for_life():
    record = RestartRecord(_limits(max_restarts=2))
    for number in range(2):
        assert isinstance(record.failed(number * 1000.0), float)
        record.answered()
    verdict = record.failed(5000.0)
    assert isinstance(verdict, GiveUp) and "max_restarts = 2" in verdict.reason
    assert record.restarts == 2


def test_the_rate_counts_the_last_minute_only():
    record = RestartRecord(_limits(restarts_per_minute=2))
    record.failed(0.0)
    record.failed(30.0)
    verdict = record.failed(59.9)
    assert isinstance(verdict, GiveUp) and "restarts_per_minute = 2" in verdict.reason
    again = RestartRecord(_limits(restarts_per_minute=2))
    again.failed(0.0)
    again.failed(30.0)
    assert isinstance(again.failed(60.0), float)


def test_no_cap_means_none():
    record = RestartRecord(_limits(max_restarts=None, max_failures_in_row=None))
    assert all(isinstance(record.failed(n * 10.0), float) for n in range(3000))


def test_a_row_of_failures_is_the_end_unless_an_action_was_answered():
    record = RestartRecord(_limits(max_failures_in_row=3))
    for _ in range(5):
        assert all(isinstance(record.failed(0.0), float) for _ in range(2))
        record.answered()
    assert all(isinstance(record.failed(0.0), float) for _ in range(2))
    verdict = record.failed(0.0)
    assert isinstance(verdict, GiveUp) and "max_failures_in_row = 3" in verdict.reason
    assert record.restarts == 12
