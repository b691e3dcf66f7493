"""Timings: percentiles, fills and lags of known samples; and that noting them is cheap."""

import time

import numpy as np
import pytest

from penstock.fleet.pipeline_monitor import PipelineMonitor, RingBuffer, pipeline_metrics


def test_percentiles_fills_and_lags_of_known_samples():
    monitor = PipelineMonitor(8)
    for milliseconds in range(1, 101):
        slots = 8 if milliseconds <= 50 else 3
        monitor.note_batch(slots, 0.5, milliseconds / 1000, 0.25, 0.125)
    monitor.note_batch(1, 0.5, 0.0505, 0.25, 0.125)
    monitor.note_receive(0.01)
    monitor.note_steps([0.001, 0.003])
    monitor.note_lag(np.array([0, 1, 5]))
    metrics = monitor.metrics()
    assert metrics["fleet/inference_p50_s"] == pytest.approx(0.0505)
    assert metrics["fleet/inference_p99_s"] == pytest.approx(0.099)
    assert metrics["fleet/step_p50_s"] == pytest.approx(0.002) and metrics["fleet/send_p99_s"] == 0.25
    assert (metrics["fleet/lag_min"], metrics["fleet/lag_mean"], metrics["fleet/lag_max"]) == (0, 2, 5)
    assert metrics["fleet/steps_total"] == 50 * 8 + 50 * 3 + 1
    assert metrics["fleet/batch_slots_mean"] == pytest.approx(551 / 101)
    fills = [metrics[f"fleet/batch_fill_to_{quarter}"] * 101 for quarter in (25, 50, 75, 100)]
    assert fills == pytest.approx([1, 50, 0, 50])


def test_reports_of_several_workers_are_merged_by_sample():
    slow, fast = PipelineMonitor(4), PipelineMonitor(4)
    slow.note_batch(4, 0, 0.9, 0, 0)
    for _ in range(3):
        fast.note_batch(2, 0, 0.1, 0, 0)
    metrics = pipeline_metrics([slow.report(), fast.report()])
    assert metrics["fleet/inference_p50_s"] == pytest.approx(0.1) and metrics["fleet/batch_slots_mean"] == 2.5
    assert metrics["fleet/steps_total"] == 10


def test_what_was_not_measured_is_left_out():
    assert PipelineMonitor(4).metrics() == {"fleet/steps_total": 0.0}


@pytest.mark.parametrize("writes", [[1], [3], [2, 2], [5], [3, 1, 2], [7, 2]])
def test_a_ring_holds_the_latest(writes):
    ring, written = RingBuffer(4), []
    for count in writes:
        samples = [float(len(written) + i) for i in range(count)]
        ring.extend(samples)
        written += samples
    ring.add(99.0)
    assert sorted(ring.latest(10)) == sorted([*written, 99.0][-4:])
    assert ring.latest(1) == [99.0]


def test_noting_a_batch_takes_microseconds():
    monitor, steps = PipelineMonitor(64), [0.001] * 64
    began = time.process_time()
    for _ in range(1000):
        monitor.note_receive(0.1)
        monitor.note_batch(64, 0.1, 0.1, 0.1, 0.1)
        monitor.note_steps(steps)
    assert time.process_time() - began < 0.2, "more than 200 microseconds per batch"
