"""`penstock status` and `penstock scale` against run directories."""

import json
import os
import time

import pytest

from penstock.cli import main


@pytest.fixture
def make_run(tmp_path):
    def make(runtime: str = "ray", **status):
        (tmp_path / "config.yaml").write_text(f"runtime: {runtime}\n")
        content = {"state": "running", "time": time.time(), "pid": os.getpid(), "step": 3, "steps": 9, **status}
        (tmp_path / "status.json").write_text(json.dumps(content))
        return str(tmp_path)

    return make


def test_the_status_of_a_run_that_goes_on(make_run, capsys):
    assert main(["status", make_run(phase="training")]) == 0
    printed = capsys.readouterr().out
    assert "«running»" in printed and "3 of 9" in printed


def test_the_status_of_a_dead_run_as_json(make_run, capsys):
    assert main(["status", make_run(time=1.0), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state"] == "dead" and told["step"] == 3


def test_the_status_of_what_is_no_run(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "words", "part"),
    [
        ({"runtime": "local"}, ["rollout=8"], "only runtime: ray can be scaled"),
        ({"state": "finished"}, ["rollout=8"], "is finished: only a run that goes on can be scaled"),
        ({"time": 1.0}, ["rollout=8"], "is dead: only a run that goes on can be scaled"),
        ({}, ["rollout"], "'rollout' is not of the form role=number"),
        ({}, ["rollout=2", "rollout=3"], "rollout is given twice"),
    ],
)
def test_what_cannot_be_scaled_is_refused_and_leaves_nothing_behind(make_run, tmp_path, capsys, run, words, part):
    path = make_run(**run)
    assert main(["scale", path, *words]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "requests").exists()


def test_an_overseer_that_does_not_answer_is_not_waited_for_forever(make_run, tmp_path, capsys):
    assert main(["scale", make_run(), "rollout=8", "--timeout", "0.2"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("penstock: the overseer of ") and "did not answer rollout=8 within 0.2 s" in error
    assert list((tmp_path / "requests").iterdir()) == []


def test_the_overseers_answer_is_printed(make_run, tmp_path, capsys):
    import threading

    from penstock.overseer.supervisor.scaling import ScaleRequests

    taken: list[tuple[str, int]] = []
    desk = ScaleRequests(tmp_path, lambda role, count: taken.append((role, count)))
    done = threading.Event()

    def serve() -> None:
        while not done.wait(0.02):
            desk.serve()

    overseer = threading.Thread(target=serve)
    overseer.start()
    try:
        assert main(["scale", make_run(), "rollout=8", "inference=2"]) == 0
    finally:
        done.set()
        overseer.join(30)
    assert taken == [("rollout", 8), ("inference", 2)]
    assert capsys.readouterr().out == (
        "rollout=8: the overseer has begun to make it so\ninference=2: the overseer has begun to make it so\n"
    )


def test_importing_the_scale_side_needs_no_jax():
    import subprocess
    import sys

    program = "import sys, penstock.overseer.supervisor.scaling, penstock.dashboard.status; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout == "False\n"
