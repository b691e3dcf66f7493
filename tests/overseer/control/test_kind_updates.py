import pytest

from penstock.overseer.control.kind import ThroughputTrend, find_bottleneck


def update(steps: float, blocked_s: float = 0.0, wait_s: float = 1.0, update_s: float = 1.0) -> dict[str, float]:
    return {
        "time/wait_for_batch": wait_s, "time/update": update_s, "fleet/steps_total": steps, "fleet/workers": 2.0,
        "fleet/batch_slots_mean": 8.0, "fleet/inference_p50_s": 0.01, "fleet/blocked_s": blocked_s,
        "fleet/step_p50_s": 0.02,
    }  # fmt: skip


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_counters_are_compared_with_those_before(clock):
    pace = ThroughputTrend(clock)
    first = pace.note(update(1000.0, blocked_s=1.0))
    assert first["fleet/steps_per_s"] == 500.0, "the first update tells of its own 2 s"
    clock.now_s += 2.0
    found = pace.note(update(2600.0, blocked_s=2.0))
    # 2,600 steps in 4 s; 325 batches of 10 ms by two workers; blocked for 2 of 8 worker-seconds
    assert found == {
        "fleet/steps_per_s": 650.0,
        "time/idle/learner": 0.5,
        "time/idle/inference": pytest.approx(1 - 650 / 8 * 0.01 / 2),
        "fleet/blocked_fraction": 0.25,
    }
    assert pace.steps_per_s == 650.0
    assert pace.bottleneck.words.startswith("learner idle 50%: simulators set the pace, 20 ms")


def test_what_is_told_twice_a_second_is_a_steady_rate_however_often_updates_come(clock):
    """1,000 steps per second, told of every 0.5 s; updates every 0.1 s."""
    pace, shown = ThroughputTrend(clock), []
    for number in range(1, 300):
        clock.now_s += 0.1
        told = 500.0 * int(number * 0.1 / 0.5 + 1e-9)
        shown.append(pace.note(update(told, wait_s=0.05, update_s=0.05)).get("fleet/steps_per_s"))
    assert shown[:4] == [None] * 4, "nothing was told of yet"
    assert all(rate == pytest.approx(1000.0, rel=0.02) for rate in shown[4:])


def test_slow_steps_between_seldom_updates_are_not_nothing(clock):
    pace = ThroughputTrend(clock)
    for number in range(1, 5):
        clock.now_s += 60.0
        assert pace.note(update(3.0 * number, wait_s=59.0))["fleet/steps_per_s"] == pytest.approx(0.05)


def test_simulators_that_stand_still_are_seen(clock):
    pace = ThroughputTrend(clock)
    for number in range(20):
        clock.now_s += 1.0
        pace.note(update(100.0 * number))
    rates = []
    for _ in range(100):
        clock.now_s += 1.0
        rates.append(pace.note(update(1900.0))["fleet/steps_per_s"])
    assert rates[3] == 100.0 and rates[-1] < 10.0 and sorted(rates, reverse=True) == rates


def test_a_counter_that_begins_anew_is_no_fall(clock):
    pace = ThroughputTrend(clock)
    for total in (1000.0, 2000.0, 3000.0, 40.0, 1040.0, 2040.0):
        clock.now_s += 1.0
        rate = pace.note(update(total, wait_s=0.5, update_s=0.5))["fleet/steps_per_s"]
        assert rate == pytest.approx(1000.0)


def test_an_update_without_time_says_nothing():
    assert ThroughputTrend().note(update(10.0, wait_s=0.0, update_s=0.0)) == {}


@pytest.mark.parametrize(
    ("learner_idle", "inference_busy", "part", "words"),
    [
        (0.05, 0.9, "learner", "learner busy 95%: it sets the pace"),
        (0.5, 0.8, "inference", "learner idle 50%: inference is busy 80%"),
        (0.5, 0.7, "simulators", "learner idle 50%: simulators set the pace, 20 ms for a process's step"),
    ],
)
def test_the_bottleneck_in_words(learner_idle, inference_busy, part, words):
    found = find_bottleneck(learner_idle, inference_busy, 0.02)
    assert found.part == part and found.words.startswith(words)
