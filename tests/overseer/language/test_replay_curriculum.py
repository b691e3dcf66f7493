"""The curriculum's work is what it is told; it owes progress only while it is told something."""

import threading
import time
from typing import Any

import pytest

from penstock.overseer import load_config
from penstock.overseer.component import Settings
from penstock.overseer.language.replay import CurriculumRole
from penstock.rundir import RunDirectory
from tests.overseer.lonely import Lonely
from tests.waiting import wait_until

LIMIT_S = 280.0


@pytest.fixture
def role(tmp_path):
    config = load_config("cats", ["runtime=ray", "overseer.heartbeat_s=0.1"])
    role: Any = CurriculumRole(Lonely("curriculum"), Settings(config, RunDirectory(tmp_path), "0" * 64))  # type: ignore[arg-type]
    yield role
    role.stop(LIMIT_S)


def test_progress_is_owed_and_time_is_counted_while_a_log_is_applied(role, monkeypatch: pytest.MonkeyPatch):
    may_end = threading.Event()
    monkeypatch.setattr(role._service, "apply", lambda: may_end.wait(LIMIT_S))
    role.apply = role._handling.of(role._service.apply)
    role.start()
    assert role.condition().progress is None
    applying = threading.Thread(target=role.apply)
    applying.start()
    wait_until(lambda: role.condition().progress == 0.0, "debt", LIMIT_S)
    time.sleep(0.05)
    may_end.set()
    applying.join(LIMIT_S)
    told = role.condition()
    assert told.progress is None and role._handling.done == 1
    assert told.busy_s >= 0.05 and told.idle_s > 0


def test_it_drains_at_once_but_for_the_time_in_which_others_hear_of_it(role):
    role.start()
    role.drain()
    assert role.condition().state == "running"
    wait_until(lambda: role.condition().state == "drained", "end of the drain", LIMIT_S)
