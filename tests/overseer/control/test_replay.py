"""The replay buffer of a fleet owes progress for what is being delivered, and counts its work."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.overseer import FleetRunConfig
from penstock.overseer.component import Settings
from penstock.overseer.config_loading import build_config
from penstock.overseer.control.replay import FleetReplayRole
from penstock.replay import FRAGMENTS
from penstock.rundir import RunDirectory
from tests.overseer.lonely import Lonely
from tests.waiting import wait_until

LIMIT_S = 280.0


@pytest.fixture
def role(run_dir: Path):
    config = build_config(
        FleetRunConfig,
        {"runtime": "ray", "steps": 1, "fleet": {"tasks": {"guess": {"id": "tests.overseer.simulators:Guess"}}}},
    )
    role: Any = FleetReplayRole(
        Lonely("replay"), Settings(config, RunDirectory.create(run_dir, config.dump()), "0" * 64)
    )  # type: ignore[arg-type]
    role.start()
    role.admit()
    yield role
    role.stop(LIMIT_S)


def test_a_delivery_that_is_not_answered_is_its_debt_and_its_work(role, monkeypatch: pytest.MonkeyPatch):
    may_end = threading.Event()
    slow = replace(FRAGMENTS, from_message=lambda message: may_end.wait(LIMIT_S) and [])
    monkeypatch.setattr(role._service, "_experience", slow)
    assert role.condition().progress is None
    delivering = threading.Thread(target=role.deliver, args=("rollout-0", 0, None, 1, b""))
    delivering.start()
    wait_until(lambda: role.condition().progress == 0.0, "debt", LIMIT_S)
    busy_s = role.condition().busy_s
    assert role.has_room("rollout-0", 1)  # whatever else it answers is no progress
    wait_until(lambda: role.condition().busy_s > busy_s, "work", LIMIT_S)
    assert role.condition().progress == 0.0
    may_end.set()
    delivering.join(LIMIT_S)
    told = role.condition()
    assert told.progress is None and told.busy_s + told.idle_s > 0
