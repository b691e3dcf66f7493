import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.dashboard import read_run_status
from penstock.dashboard.status import components
from penstock.types import RunDirectoryError
from tests.small_disk import fill, small_disk

NOW = 1000.0


def run_of(tmp_path: Path, config: str = "runtime: ray\n", **status: Any) -> Path:
    (tmp_path / "config.yaml").write_text(config)
    if status:
        (tmp_path / "status.json").write_text(json.dumps({"state": "running", "time": NOW, "pid": 7, **status}))
    return tmp_path


def look(path: Path, age_s: float = 1.0, lives: bool = True):
    return read_run_status(path, lambda: NOW + age_s, lambda pid: lives)


def test_a_young_status_of_a_living_process_is_believed(tmp_path):
    status = look(run_of(tmp_path, step=5))
    assert (status.state, status.why, status.age_s, status.runtime) == ("running", "", 1.0, "ray")
    assert status.alive and status.content["step"] == 5


def test_a_run_whose_process_is_gone_is_dead(tmp_path):
    status = look(run_of(tmp_path, host=socket.gethostname()), lives=False)
    assert (status.state, status.why, status.alive) == ("dead", "its process 7 is gone", False)


def test_a_process_of_another_machine_cannot_be_looked_for(tmp_path):
    path = run_of(tmp_path, host="elsewhere.invalid")
    assert look(path, lives=False).state == "running"
    assert look(path, age_s=31.0, lives=False).state == "dead"


@pytest.mark.parametrize(
    ("config", "limit_s"), [("{}", 30.0), ("overseer: {status_s: 10}", 100.0), ("overseer: 3", 30.0)]
)
def test_an_old_status_is_a_dead_runs(tmp_path, config, limit_s):
    path = run_of(tmp_path, config, step=1)
    assert look(path, limit_s - 0.5).state == "running"
    status = look(path, limit_s + 0.5)
    assert status.state == "dead" and "s old, and a new one is written every few seconds" in status.why


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_ended_stays_what_it_was(tmp_path, state):
    status = look(run_of(tmp_path, state=state), age_s=1e6, lives=False)
    assert (status.state, status.why, status.alive) == (state, "", False)


def test_a_failed_run_says_its_error_without_control_characters(tmp_path):
    status = look(run_of(tmp_path, state="failed", failure="no room:\x1b[2J make room"), lives=False)
    assert (status.state, status.why, status.alive) == ("failed", "no room:\\x1b[2J make room", False)
    assert look(run_of(tmp_path, state="finished", failure="of a life before")).why == ""


def test_before_the_first_status_a_run_is_starting_for_a_while(tmp_path):
    path = run_of(tmp_path)
    made = (path / "config.yaml").stat().st_mtime
    assert read_run_status(path, lambda: made + 5.0).state == "starting"
    (path / "status.json").write_text("{")  # torn
    status = read_run_status(path, lambda: made + 31.0)
    assert (status.state, status.why) == ("dead", "it has written no status that can be read")


def test_what_is_no_run_is_refused_and_nothing_is_made(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a run directory: .* give one that penstock train wrote"):
        look(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_real_processes_are_told_apart(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while not zombie(child.pid):
        time.sleep(0.01)
    path = run_of(tmp_path, pid=child.pid, host=socket.gethostname())
    assert read_run_status(path, lambda: NOW).state == "dead"  # not collected yet, but dead
    child.wait(30)
    assert read_run_status(path, lambda: NOW).state == "dead"
    run_of(tmp_path, pid=os.getpid(), host=socket.gethostname())
    assert read_run_status(path, lambda: NOW).state == "running"
    run_of(tmp_path, pid=10**30, host=socket.gethostname())
    assert read_run_status(path, lambda: NOW).state == "dead"


def zombie(pid: int) -> bool:
    return ") Z " in Path(f"/proc/{pid}/stat").read_text()


def test_how_far_behind_each_server_is():
    told = {"inference-0": {"version": [1, 4]}, "inference-1": {"version": [1, 6]}, "rollout-0": {}}
    found = components({"step": 6, "components": told})
    assert [found[name].get("lag_steps") for name in told] == [2, 0, None]


@pytest.mark.parametrize("told", [None, [], {"a": 3}, {"a": {"version": "x"}}, {"a": {"version": ["x", "y"]}}])
def test_a_status_of_another_form_is_read_as_far_as_it_goes(told):
    assert set(components({"step": 6, "components": told})) <= {"a"}


def test_the_json_form_has_the_state_as_it_is_now(tmp_path):
    members = {"inference-0": {"version": [0, 5], "state": "running"}, "rollout-0": {"state": "dead"}}
    path = run_of(tmp_path, step=6, components=members)
    told = look(path, lives=False).to_json()
    assert (told["state"], told["why"], told["step"]) == ("dead", "its process 7 is gone", 6)
    assert told["components"]["inference-0"] == {"version": [0, 5], "state": "ended", "lag_steps": 1}
    assert told["components"]["rollout-0"] == {"state": "dead"}
    assert look(path).to_json()["components"]["inference-0"]["state"] == "running"


@pytest.mark.attack
def test_an_old_status_on_a_full_disk_is_believed_as_long_as_the_run_waits_for_room(tmp_path):
    with small_disk(tmp_path / "disk", "128k") as disk:
        run_of(disk, "replay: {store: {full_disk_s: 60}}\n", time=NOW)
        assert look(disk, age_s=31).state == "dead"
        ballast = fill(disk)
        assert look(disk, age_s=89).state == "running"
        assert look(disk, age_s=91).state == "dead"
        assert look(disk, age_s=31, lives=False).state == "dead"
        ballast.unlink()
        assert look(disk, age_s=31).state == "dead"
