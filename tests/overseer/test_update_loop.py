"""`penstock.updates`: the updates of a run, one by one, and however the loop over them ends."""

import _thread
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import penstock
from penstock.overseer.supervision import Watchdog
from penstock.rundir import read_events, read_metrics, read_status
from penstock.types import ConfigError, PenstockError
from tests.overseer.conftest import tiny
from tests.overseer.environments import RaisingEnvironment
from tests.overseer.test_fleet_training import tiny as tiny_control
from tests.waiting import wait_until

LIMIT_S = 280.0


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith("step-"))


def ends_of(run_dir: Path) -> list[str]:
    return [event["event"] for event in read_events(run_dir / "events.jsonl") if event["event"] in ("end", "failure")]


@pytest.fixture(autouse=True)
def earlier() -> set[threading.Thread]:
    """Threads of runs of other tests of this process, which may have been given up."""
    return {thread for thread in threading.enumerate() if thread.name in ("overseer", "run")}


def left_since(earlier: set[threading.Thread]) -> list[str]:
    """The threads of runs that were begun since, and live."""
    present = [thread for thread in threading.enumerate() if thread.name in ("overseer", "run")]
    return [thread.name for thread in present if thread not in earlier]


def test_a_loop_sees_each_update_with_its_metrics_batch_and_rollouts(
    run_dir: Path, capsys, earlier: set[threading.Thread]
):
    loop = penstock.updates(tiny(), run_dir, quiet=True)
    assert loop.summary is None and not run_dir.exists()
    steps = []
    for update in loop:
        steps.append(update.step)
        written = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
        assert {"step": update.step, **update.metrics}.items() <= {**written[-1], "time": 0}.items()
        assert len(written) == update.step == update.batch.step + 1  # the learner waits
        groups = update.rollouts.groups
        assert [group.group_id for group in groups] == list(update.batch.group_ids)
        rollouts = {rollout.rollout_id: rollout for group in groups for rollout in group.rollouts}
        assert [len(group.rollouts) for group in groups] == [3, 3, 3] and groups[0].key.startswith("cats:")
        for example in update.batch.examples:
            said = rollouts[example.rollout_ids[0]].response_tokens.tolist()
            assert example.tokens[example.loss_mask].tolist() == said
        assert repr(update).startswith(f"Update(step {update.step}, reward_mean ") and "9 examples" in repr(update)
    assert steps == [1, 2, 3] and capsys.readouterr().out == ""
    assert loop.summary is not None and loop.summary.complete and loop.summary.run_dir == run_dir
    assert loop.summary.metrics == update.metrics and "cats" in loop.summary.after
    assert next(loop, None) is None
    loop.close()
    assert not left_since(earlier)


def test_break_ends_the_run_at_that_update_with_a_checkpoint_and_it_goes_on(
    run_dir: Path, earlier: set[threading.Thread]
):
    for update in penstock.updates(tiny({"steps": 50}), run_dir, quiet=True):
        if update.step == 2:
            break
    assert not left_since(earlier)
    assert checkpoints(run_dir) == ["step-0", "step-2"] and ends_of(run_dir) == ["end"]
    status = read_status(run_dir / "status.json")
    assert (status["state"], status["step"]) == ("stopped", 2)
    ledger = status["ledger"]
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    assert [update.step for update in penstock.updates(run_dir=run_dir, resume=True, quiet=True, steps=3)] == [3]


def test_an_exception_in_the_loop_ends_the_run_and_is_raised(run_dir: Path, earlier: set[threading.Thread]):
    with pytest.raises(ZeroDivisionError):
        for update in penstock.updates(tiny({"steps": 50}), run_dir, quiet=True):
            print(1 / (update.step - 1))
    assert not left_since(earlier)
    assert checkpoints(run_dir) == ["step-0", "step-1"] and ends_of(run_dir) == ["end"]


def test_ctrl_c_while_an_update_is_awaited_ends_the_loop_with_a_checkpoint(run_dir: Path):
    with penstock.updates(tiny({"steps": 5000}), run_dir, quiet=True) as loop:
        next(loop)
        interrupter = threading.Timer(0.2, _thread.interrupt_main)
        interrupter.start()
        steps = [update.step for update in loop]  # until it is interrupted
    summary = loop.summary
    assert summary is not None and not summary.complete
    assert checkpoints(run_dir)[-1] == f"step-{summary.step}" and summary.step - 1 <= len(steps) + 1 < 5000
    assert read_status(run_dir / "status.json")["state"] == "stopped"


def test_ctrl_c_in_the_body_is_raised_and_ends_the_run(run_dir: Path, earlier: set[threading.Thread]):
    with pytest.raises(KeyboardInterrupt):
        for update in penstock.updates(tiny({"steps": 50}), run_dir, quiet=True):
            assert update.step == 1
            raise KeyboardInterrupt
    assert not left_since(earlier) and checkpoints(run_dir) == ["step-0", "step-1"]


@pytest.mark.slow
def test_a_body_may_take_longer_than_a_run_may_be_silent(run_dir: Path):
    silence_s = 3.0
    waited = threading.Event()
    config = tiny({"steps": 2, "overseer": {"no_progress_s": silence_s, "stop_timeout_s": 60}})
    for update in penstock.updates(config, run_dir, quiet=True):
        if update.step == 1:
            waited.wait(silence_s + 2)
    assert update.step == 2 and ends_of(run_dir) == ["end"]


def test_what_a_run_fails_with_is_raised_by_the_loop(run_dir: Path, earlier: set[threading.Thread]):
    config = tiny({"replay": {"max_failed_groups_per_batch": 2}})
    reached = []
    with pytest.raises(PenstockError, match="failed"):
        for update in penstock.updates(config, run_dir, quiet=True, environment=RaisingEnvironment):
            reached.append(update.step)
    assert not reached and ends_of(run_dir) == ["failure"] and not left_since(earlier)


def test_a_run_that_fails_while_an_update_is_looked_at_is_raised_by_the_next(run_dir: Path, monkeypatch):
    loop = penstock.updates(tiny({"steps": 50}), run_dir, quiet=True)
    assert next(loop).step == 1

    def silent(self: Watchdog) -> None:
        raise PenstockError("somebody else failed")

    monkeypatch.setattr(Watchdog, "check", silent)
    wait_until(lambda: ends_of(run_dir) == ["failure"], "it did not fail")
    with pytest.raises(PenstockError, match="somebody else failed"):
        next(loop)
    assert next(loop, None) is None and "step-1" in checkpoints(run_dir)


@pytest.mark.slow
def test_a_loop_that_is_forgotten_ends_with_the_interpreter(tmp_path: Path):
    script = """
        import penstock
        from tests.overseer.conftest import tiny
        loop = penstock.updates(tiny({"steps": 50}), "run", quiet=True)
        print(next(loop).step, next(loop).step, loop)
    """
    root = Path(penstock.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 2 UpdateLoop(run, at step 2)\n"
    assert checkpoints(tmp_path / "run") == ["step-0", "step-2"] and ends_of(tmp_path / "run") == ["end"]


@pytest.mark.slow
def test_a_fleets_updates_have_their_fragments(run_dir: Path):
    for update in penstock.updates(tiny_control({"steps": 2}), run_dir, quiet=True):
        fragments = [fragment.group_id for fragment in update.rollouts.rollouts()]
        assert fragments == list(update.batch.group_ids) and len(fragments) == len(update.batch.examples)
    assert update.step == 2


def test_a_run_in_many_processes_is_refused():
    with pytest.raises(ConfigError, match='^runtime is ray, and penstock.updates goes .*: set runtime="local", or use'):
        penstock.updates("cats", runtime="ray")
