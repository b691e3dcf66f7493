"""The loss of a cluster: what a run says of it, what it keeps, and what it leaves behind."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.chaos.invariants import violations

from penstock.overseer.config import RayConfig
from penstock.rundir import RunDirectory, read_events, read_status
from penstock.types import ConfigError, RunFailed
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.attack, pytest.mark.timeout(500)]
TRAIN = [sys.executable, "-m", "penstock", "train", "-q"]
WORDS = [
    "runtime=ray", "rollout.workers=1", "inference.servers=1", "replay.groups_per_batch=4", "steps=100000",
    "overseer.heartbeat_s=0.3", "overseer.checkpoint_every=1000", "overseer.status_s=0.2",
]  # fmt: skip
LIMIT_S = 240.0


def control_service(address: str, own: bool):
    from penstock.overseer.ray import ControlService

    return ControlService(address, own)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_daemons_of_ray_that_do_not_start_are_one_line(monkeypatch: pytest.MonkeyPatch):
    import ray

    from penstock.overseer.ray import connect

    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"^Ray could not start a cluster here: .*timed out during startup") as raised:
        connect(RayConfig(), "a test")
    assert "\n" not in str(raised.value)


def test_a_control_service_of_our_own_that_is_gone_is_given_up_at_once():
    address = f"127.0.0.1:{closed_port()}"
    service = control_service(address, own=True)
    service.check()
    with pytest.raises(RunFailed, match=f"control service .GCS. at {address} was not reached .* with --resume") as told:
        service.watch()
    assert service.is_lost and "start the cluster again" not in str(told.value)
    with pytest.raises(RunFailed, match=address):
        service.check()


def test_that_of_another_cluster_may_come_back_within_its_time(monkeypatch):
    from penstock.overseer import ray as ray_launcher

    monkeypatch.setattr(ray_launcher, "_LOOK_S", 0.02)
    monkeypatch.setattr(ray_launcher, "_JOINED_PATIENCE_S", 2.0)
    port = closed_port()
    service, failures = control_service(f"127.0.0.1:{port}", own=False), []

    def watch() -> None:
        try:
            service.watch()
        except RunFailed as error:
            failures.append(str(error))

    watching = threading.Thread(target=watch)
    watching.start()
    time.sleep(0.5)
    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(10)
        server.accept()[0].close()
        assert not service.is_lost and failures == []
    watching.join(30)
    assert len(failures) == 1 and "start the cluster again, then go on" in failures[0]


def test_one_that_answers_is_looked_at_until_the_launcher_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        service = control_service(f"127.0.0.1:{server.getsockname()[1]}", own=True)
        watching = threading.Thread(target=service.watch)
        watching.start()
        for _ in range(2):
            server.accept()[0].close()
        service.close()
        watching.join(10)
        assert not watching.is_alive() and not service.is_lost


def test_a_run_whose_control_service_dies_says_so_keeps_its_last_version_and_leaves_nothing_behind(tmp_path: Path):
    run_dir = tmp_path / "run"
    lose_the_control_service(run_dir, ["cats", *WORDS, f"--run-dir={run_dir}"], updates=5, replaced="evaluator-0")
    kept = newest(run_dir)  # a resumed run has not met everybody whom a checkpoint asks when it makes its first update
    lose_the_control_service(run_dir, ["--resume", str(run_dir)], updates=kept + 1)
    resumed = subprocess.run(
        [*TRAIN, "--resume", str(run_dir), f"steps={newest(run_dir) + 5}"],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert violations(RunDirectory(run_dir)) == []


def lose_the_control_service(run_dir: Path, words: list[str], updates: int, replaced: str = "") -> None:
    """One life of the run: it loses its cluster at that update, and ends as it must.

    Args:
        run_dir: Where it is.
        words: That it is begun with.
        updates: How many there must have been.
        replaced: A component whose first incarnation dies before that, and which nobody has asked since.
    """
    out = run_dir.with_suffix(".out")
    with out.open("w") as file:
        run = subprocess.Popen([*TRAIN, *words], stdout=file, stderr=file, cwd=run_dir.parent)
    try:
        wait_until(lambda: trained(run_dir) >= updates or run.poll() is not None, f"update {updates}", LIMIT_S)
        assert run.poll() is None, out.read_text()
        if replaced:
            psutil.Process(component(run_dir, replaced)["pid"]).kill()
            wait_until(lambda: is_up_again(component(run_dir, replaced)), f"another {replaced}", LIMIT_S)
        family, reached = psutil.Process(run.pid).children(recursive=True), trained(run_dir)
        next(child for child in family if child.name().startswith("gcs_server")).kill()
        assert run.wait(60) == 1, out.read_text()
    finally:
        run.kill()
    assert "Ray's control service (GCS) at 127.0.0.1" in out.read_text()
    assert "Traceback" not in out.read_text() and "Failed to connect to GCS" not in out.read_text()
    status = read_status(run_dir / "status.json")
    assert status is not None and status["state"] == "failed"
    assert [event["error"] for event in read_events(run_dir / "events.jsonl") if event["event"] == "failure"][-1:] == [
        "RunFailed"
    ]
    assert newest(run_dir) >= reached >= updates, "the learner saved its last version"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def component(run_dir: Path, name: str) -> dict[str, Any]:
    return (read_status(run_dir / "status.json") or {}).get("components", {}).get(name, {})


def is_up_again(told: dict[str, Any]) -> bool:
    return told.get("incarnation") == 1 and told.get("state") == "running"


def newest(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def trained(run_dir: Path) -> int:
    try:
        return int((read_status(run_dir / "status.json") or {}).get("step", 0))
    except json.JSONDecodeError:
        return 0
