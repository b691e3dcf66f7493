"""Starts that fail: tried again by a probe and by an evaluation, and whose mistake it is where they never succeed."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.overseer import FleetRunConfig
from penstock.overseer.control.simulators import PROBE_FAILURES, open_evaluation_pool, probe_spaces
from penstock.types import ConfigError, RunFailed
from tests.overseer.test_control_config import build

pytestmark = pytest.mark.timeout(60)


def flaky(folder: Path, failures: int, **limits: Any) -> FleetRunConfig:
    task = {"id": "tests.overseer.simulators:Flaky", "kwargs": {"folder": str(folder), "failures": failures}}
    evaluation = {"simulators": 1, "episodes": 1}
    return build(
        {"fleet": {"tasks": {"pole": task}, "limits": {"backoff_s": 0.01, **limits}}, "evaluation": evaluation}
    )


def test_a_start_that_fails_at_first_does_not_refuse_the_run(tmp_path):
    assert probe_spaces(flaky(tmp_path, 2)).observations[0].shape == (2,)
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(("limits", "tries"), [({}, PROBE_FAILURES), ({"max_failures_in_row": 2}, 2)])
def test_one_that_always_fails_is_bad_input_after_few_tries(tmp_path, limits, tries):
    with pytest.raises(
        ConfigError,
        match=f"no simulator could be made in {tries} attempts; the last: task 'pole'.*port is taken "
        r"\(simulators\.py:\d+\)$",
    ):
        probe_spaces(flaky(tmp_path, 99, **limits))
    assert len(os.listdir(tmp_path)) == tries


def test_an_unknown_simulator_is_tried_once():
    began = time.monotonic()
    with pytest.raises(ConfigError, match="CartPole-v1"):
        probe_spaces(build({"fleet": {"tasks": {"pole": {"id": "CartPol-v1"}}, "limits": {"backoff_s": 100}}}))
    assert time.monotonic() - began < 50


def test_an_evaluation_tries_again_and_a_failure_of_it_is_no_bad_input(tmp_path):
    open_evaluation_pool(flaky(tmp_path, 2), lambda kind, fields: None).close()
    with pytest.raises(RunFailed, match="its port is taken"):
        open_evaluation_pool(flaky(tmp_path, 99, max_failures_in_row=3), lambda kind, fields: None)
    assert len(os.listdir(tmp_path)) == 2 + 3
