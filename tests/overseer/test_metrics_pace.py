"""How fast a run goes, and how long the rest of it will take, by a clock that is set by hand."""

import pytest

from penstock.overseer.metrics import Pace, UpdateTimes


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_pace_of_a_slow_model_is_over_whole_updates_and_never_zero(clock: Clock):
    """300 tokens in 20 s, then 40 s in which the learner updates: 5 per second, whenever one looks."""
    pace, total, seen = Pace(clock), 0.0, []
    for _ in range(6):
        for second in range(60):
            clock.now_s += 1.0
            total += 15.0 if second < 20 else 0.0
            seen.append(pace.note(total))
        pace.note_update()
    assert seen[0] == 15.0 and seen[59] == 5.0 and min(seen) == 5.0, "the first update's own pace"
    assert max(seen[5 * 60 :]) < 5.9, "then over four updates and what has been of the fifth"


def test_the_pace_of_a_fast_model_is_that_of_the_last_ten_seconds(clock: Clock):
    pace, total = Pace(clock), 0.0
    for number in range(1000):
        clock.now_s += 0.1
        total += 100.0 if number < 800 else 50.0
        shown = pace.note(total)
        pace.note_update()
    assert shown == pytest.approx(500.0, rel=0.02)
    assert len(pace._marks) <= 103


def test_the_pace_is_not_known_before_anything_was_generated_in_this_phase(clock: Clock):
    pace = Pace(clock)
    clock.now_s += 5.0
    assert pace.note(0.0) is None
    clock.now_s += 5.0
    assert pace.note(100.0) == 10.0
    pace.begin()
    clock.now_s += 5.0
    assert pace.note(100.0) is None
    clock.now_s += 5.0
    assert pace.note(200.0) == 10.0


def test_a_count_that_falls_with_a_server_is_no_growth_and_goes_on_from_there(clock: Clock):
    pace = Pace(clock)
    clock.now_s += 1.0
    assert pace.note(1000.0) == 1000.0
    clock.now_s += 1.0
    assert pace.note(400.0) == 500.0
    clock.now_s += 2.0
    assert pace.note(600.0) == 300.0


def test_nothing_is_forecast_before_five_intervals_and_then_a_steady_pace_is_a_point(clock: Clock):
    times, known = UpdateTimes(clock), []
    for _ in range(6):
        clock.now_s += 2.0
        times.note()
        known.append(times.left_s(10))
    assert known == [None] * 5 + [(20.0, 20.0)]
    assert times.mean_s == 2.0 and times.left_s(0) is None


def test_the_compilation_before_the_first_update_is_in_no_forecast(clock: Clock):
    times = UpdateTimes(clock)
    clock.now_s += 500.0
    for _ in range(6):
        times.note()
        clock.now_s += 1.0
    assert times.left_s(10) == (10.0, 10.0)


def test_a_pace_that_changes_is_a_range_and_what_is_long_ago_is_forgotten(clock: Clock):
    times = UpdateTimes(clock)
    for seconds in [1.0] * 10 + [3.0] * 10:
        times.note()
        clock.now_s += seconds
    times.note()
    least, most = times.left_s(100)
    assert least == 100.0 and most == 300.0, "the means of the older and of the newer half"
    for _ in range(64):
        clock.now_s += 3.0
        times.note()
    assert times.left_s(100) == (300.0, 300.0)


def test_uneven_updates_widen_the_range_by_the_error_of_their_mean(clock: Clock):
    times = UpdateTimes(clock)
    times.note()
    for number in range(64):
        clock.now_s += 1.0 if number % 2 else 3.0
        times.note()
    least, most = times.left_s(100)
    error = 2 * (64 / 63) ** 0.5 / 8
    assert least == pytest.approx(100 * (2 - error)) and most == pytest.approx(100 * (2 + error))


def test_an_update_that_hangs_lengthens_the_forecast(clock: Clock):
    times = UpdateTimes(clock)
    for _ in range(10):
        times.note()
        clock.now_s += 1.0
    before = times.left_s(10)
    clock.now_s += 59.0
    assert before == (10.0, 10.0) and times.left_s(10)[1] > 100.0
