import pytest

from penstock.inference import scheduler
from penstock.inference.scheduler import ThroughputMeter


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: clock[0])
    return clock


def test_the_rate_is_that_of_the_last_seconds_in_which_dispatches_ran(now: list[float]):
    meter = ThroughputMeter()
    for number in range(100):
        now[0] += 0.5  # idle
        started = now[0]
        now[0] += 0.5
        meter.add_dispatch(started, 100 if number < 50 else 200)
    assert meter.read()["tokens_per_s"] == 400.0 and meter.busy_s == 50.0
    assert meter.read()["tokens_total"] == 15_000.0


def test_a_model_whose_dispatches_take_longer_than_the_window_still_has_a_rate(now: list[float]):
    meter = ThroughputMeter()
    assert meter.read()["tokens_per_s"] == 0.0
    for _ in range(6):
        started = now[0]
        now[0] += 30.0
        meter.add_dispatch(started, 60)
    now[0] += 600.0  # an update
    assert meter.read()["tokens_per_s"] == 2.0
