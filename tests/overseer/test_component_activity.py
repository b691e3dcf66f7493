import pytest

from penstock.overseer.component import BusyTime, CallCounter


def test_work_that_overlaps_counts_once_and_waiting_inside_it_is_idle():
    now = 0.0
    activity = BusyTime(clock=lambda: now)
    now = 5.0
    activity.begin()  # before, nothing counts
    now = 6.0
    with activity.busy():
        now = 7.0
        with activity.busy():
            now = 9.0
            with activity.waiting():
                now = 10.0  # the other one works
        now = 11.0
        with activity.waiting():
            now = 14.0
            assert activity.read() == (5.0, 4.0)
    now = 16.0
    assert activity.read() == (5.0, 6.0)


def test_a_call_is_work_while_it_is_handled_and_counted_whatever_came_of_it():
    now = 0.0
    activity = BusyTime(clock=lambda: now)
    activity.begin()
    handling = CallCounter(activity)

    def divide(by: int) -> float:
        nonlocal now
        now += 2.0
        assert (handling.under_way, activity.working) == (1, True)
        return 6 / by

    handled = handling.of(divide)
    assert handled(3) == 2.0
    with pytest.raises(ZeroDivisionError):
        handled(0)
    now += 1.0
    assert (handling.under_way, handling.done) == (0, 2)
    assert activity.read() == (4.0, 1.0)
