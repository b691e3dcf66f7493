"""Which shapes are tried, which is proposed, and a real measurement."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.overseer import FleetRunConfig
from penstock.overseer.control import autotune as fleet_autotune
from penstock.overseer.control.autotune import AutotuneReport, Measurement, Shape, autotune, neighbours
from tests.overseer.test_control_config import build

FLAT = {"observation_shape": [4], "dtype": "float32"}
SHAPE = Shape(workers=1, envs_per_worker=8, envs_per_process=2, batch_size=4, max_wait_ms=0.0)


def test_neighbours_differ_in_one_thing_and_are_valid():
    found = list(neighbours(SHAPE, tasks=1))
    assert Shape(1, 8, 4, 4, 0.0) in found and Shape(1, 8, 1, 4, 0.0) in found and Shape(1, 16, 2, 8, 0.0) in found
    assert Shape(1, 8, 2, 8, 0.0) in found and Shape(1, 8, 2, 2, 0.0) in found and Shape(2, 4, 2, 4, 0.0) in found
    assert replace(SHAPE, max_wait_ms=2.0) in found and SHAPE not in found
    assert Shape(1, 8, 4, 4, 0.0, 2) in found and Shape(1, 8, 2, 4, 0.0, 2) in found
    assert all(shape.parts_per_process == 1 for shape in neighbours(SHAPE, 1, parts=False))
    parted = Shape(1, 16, 8, 4, 0.0, 2)
    assert replace(parted, parts_per_process=1) not in neighbours(parted, 1), "a batch would not hold a process"
    found += neighbours(parted, 1)
    assert {shape.parts_per_process for shape in found} == {1, 2}
    for shape in found:
        build({"fleet": {name: getattr(shape, name) for name in Shape.__dataclass_fields__}})
    assert all(shape.workers * shape.envs_per_worker // shape.envs_per_process >= 4 for shape in neighbours(SHAPE, 4))


def test_waits_are_varied_in_both_directions_within_bounds():
    def waits(wait_ms: float) -> set[float]:
        return {shape.max_wait_ms for shape in neighbours(replace(SHAPE, max_wait_ms=wait_ms), 1)} - {wait_ms}

    assert waits(0.0) == {2.0} and waits(2.0) == {0.0, 10.0} and waits(10.0) == {2.0, 50.0} and waits(50.0) == {10.0}
    patient = list(neighbours(replace(SHAPE, max_wait_ms=100.0), 1))
    assert {shape.max_wait_ms for shape in patient} == {20.0, 100.0}  # a recipe's own wait does not end the search


def test_a_shape_is_proposed_only_where_it_is_clearly_faster():
    other = Shape(1, 16, 2, 8, 0.0)

    def report(steps_per_s: float) -> AutotuneReport:
        return AutotuneReport(SHAPE, (Measurement(SHAPE, 100.0), Measurement(other, steps_per_s)), 1.0)

    assert report(104.0).best.shape == SHAPE and report(106.0).best.shape == other
    assert report(106.0).to_json()["proposal"] == (
        "fleet.workers=1 fleet.envs_per_worker=16 fleet.envs_per_process=2 fleet.batch_size=8 fleet.max_wait_ms=0 "
        "fleet.parts_per_process=1"
    )


@pytest.mark.slow
def test_the_recipe_and_better_shapes_are_measured_within_the_time(monkeypatch):
    monkeypatch.setattr(fleet_autotune, "WARM_UP_S", 0.1)
    monkeypatch.setattr(fleet_autotune, "MEASURE_S", 0.2)
    told: list[str] = []
    report = autotune(build({"model": {"hidden_sizes": [4]}}), seconds=0.01, tell=told.append)
    assert [measured.shape for measured in report.measurements] == [Shape(1, 4, 1, 2, 0.0)] and len(told) == 1
    assert report.best.steps_per_s > 50 and 1 <= report.best.batch_slots <= 2
    console = Console(file=io.StringIO(), width=120)
    report.print(console)
    assert "fleet.envs_per_worker=4" in console.file.getvalue()


def test_why_a_shape_failed_is_told_whole_beside_what_is_proposed():
    shape, failure = Shape(1, 4, 1, 2, 0.0), f"simulator 3 was given up: {'x' * 200} (sims.py:70)"
    measured = Measurement(shape, 900.0, 1.5, 0.2)
    other = Measurement(Shape(1, 8, 1, 4, 0.0), 0.0, 0.0, 0.0, failure)
    console = Console(file=io.StringIO(), width=80)
    AutotuneReport(shape, (measured, other), 9.0).print(console)
    told = console.file.getvalue()
    assert f"failed: {other.shape.words()}: {failure}\n" in told and "900" in told
    assert told.rstrip().endswith(shape.words())


def slow_to_reset(seconds: float, **limits: float) -> FleetRunConfig:
    task = {"id": "synthetic", "kwargs": {"reset_s": seconds, "episode_steps": 1 << 30, **FLAT}}
    fleet = {"tasks": {"pole": task}, "envs_per_worker": 2, "limits": limits}
    return build({"fleet": fleet, "model": {"hidden_sizes": [4]}})


@pytest.mark.slow
def test_nothing_is_measured_before_every_simulator_has_stepped(monkeypatch):
    monkeypatch.setattr(fleet_autotune, "WARM_UP_S", 0.05)
    monkeypatch.setattr(fleet_autotune, "MEASURE_S", 0.2)
    report = autotune(slow_to_reset(3.0), seconds=0.01)
    assert not report.best.failure and report.best.steps_per_s > 50


@pytest.mark.slow
def test_simulators_that_never_step_are_a_finding_and_nothing_is_proposed(monkeypatch):
    monkeypatch.setattr(fleet_autotune, "MEASURE_S", 0.2)
    report = autotune(slow_to_reset(60.0, spawn_timeout_s=30, reset_timeout_s=1, max_failures_in_row=2), seconds=0.01)
    assert report.best.steps_per_s == 0 and "given up" in report.best.failure
    assert report.to_json()["proposal"] is None
    console = Console(file=io.StringIO(), width=200)
    report.print(console)
    assert "no shape could be measured: " in console.file.getvalue() and "try:" not in console.file.getvalue()


@pytest.mark.slow
def test_steps_that_are_faults_are_none(monkeypatch):
    monkeypatch.setattr(fleet_autotune, "WARM_UP_S", 0.05)
    monkeypatch.setattr(fleet_autotune, "MEASURE_S", 0.1)
    faulty = {"id": "synthetic", "kwargs": {"faulty_rate": 1.0, **FLAT}}
    fleet = {"tasks": {"pole": faulty}, "envs_per_worker": 1, "limits": {"spawn_timeout_s": 3, "reset_timeout_s": 1}}
    report = autotune(build({"fleet": fleet, "model": {"hidden_sizes": [4]}}), seconds=0.01)
    assert report.best.steps_per_s == 0
    assert report.best.failure.startswith("1 simulators took no step without a fault within 4 s")


@pytest.mark.slow
def test_no_step_in_the_time_that_is_measured_is_a_finding(monkeypatch):
    monkeypatch.setattr(fleet_autotune, "WARM_UP_S", 0.05)
    monkeypatch.setattr(fleet_autotune, "MEASURE_S", 0.1)
    slow = {"id": "synthetic", "kwargs": {"step_s": 2.0, **FLAT}}
    config = build({"fleet": {"tasks": {"pole": slow}, "envs_per_worker": 1}, "model": {"hidden_sizes": [4]}})
    report = autotune(config, seconds=0.01)
    assert "no simulator stepped within the 0.1 s that were measured" in report.best.failure


@pytest.mark.slow
def test_a_shape_that_fails_is_a_finding(monkeypatch):
    monkeypatch.setattr(fleet_autotune, "WARM_UP_S", 0.1)
    monkeypatch.setattr(fleet_autotune, "MEASURE_S", 0.5)
    tasks = {"pole": {"id": "tests.overseer.simulators:Guess", "kwargs": {"die_at": 5}}}
    config = build({"fleet": {"tasks": tasks, "limits": {"max_restarts": 0}}})
    report = autotune(config, seconds=0.01)
    failure = report.measurements[0].failure
    assert "given up" in failure and "fleet.limits.max_restarts" in failure, "the whole reason, with its key"
    assert report.measurements[0].steps_per_s == 0
