import time
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.inference import meter, scheduler, sequence
from penstock.inference.meter import LATENCY_BOUNDS_S, ThroughputMeter
from penstock.inference.sequence import GenerationRequest, PendingRequest, Response
from penstock.types import Decoding


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of these modules alone: an event loop of the process that looks at it meanwhile would wait for long."""
    clock = [100.0]
    own = SimpleNamespace(**vars(time) | {"monotonic": lambda: clock[0]})
    for module in (meter, scheduler, sequence):
        monkeypatch.setattr(module, "time", own)
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


def test_how_long_responses_wait(now: list[float]):
    meter, pending = ThroughputMeter(), PendingRequest(GenerationRequest(np.array([1], np.int32), Decoding(), 0), (), 9)
    pending.submitted_s = now[0]
    response = Response(pending, 0)
    now[0] += 0.3
    meter.add_waits([response])
    now[0] += 0.4
    meter.add_tokens([(2, response)], np.array([0, 0, 4]))
    now[0] += 0.08
    response.finish_reason = "stop"
    meter.add_tokens([(2, response)], np.array([0, 0, 2]))
    found = {name: (each.total_s, each.counts) for name, each in meter.latencies().items()}
    seen = {name: [(LATENCY_BOUNDS_S[i], n) for i, n in enumerate(counts) if n] for name, (_, counts) in found.items()}
    assert seen == {
        "queue_s": [(0.5, 1)], "first_token_s": [(1.0, 1)], "between_tokens_s": [(0.05, 2)], "whole_s": [(1.0, 1)],
    }  # fmt: skip
    assert [total for total, _ in found.values()] == pytest.approx([0.3, 0.7, 0.08, 0.78])
