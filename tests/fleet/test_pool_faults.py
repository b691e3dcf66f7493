"""Simulator processes that die, hang, raise, or cannot start: others go on, the books close, nothing is left behind."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.fleet.driving import QUICK, await_gone, cause, config_of, driven, lives, open_descriptors

from penstock.fleet.fork_client import FORK_SERVER_END_S, ForkServerClient
from penstock.fleet.pool import SimulatorPool
from penstock.types import ConfigError, NoProgressError, RunFailed


def _limits(**changes):
    return QUICK.model_copy(update=changes)


def _pairs(path):
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


def _failures(events):
    return [fields["reason"] for name, fields in events if name == "simulator_failed"]


def _assert_one_fault(driver, slots):
    """Exactly one action of each of the slots was lost, and came back as a cut, faulty first row."""
    driver.check_books()
    for slot in range(driver.pool.num_slots):
        faults = driver.faults(slot)
        assert len(faults) == (slot in slots), (slot, faults)
        for number in faults:
            row = driver.rows[slot][number]
            assert row["truncated"] and not row["terminated"] and row["first"] and not row["has_final"]
            assert (row["reward"], row["return"], row["length"]) == (0.0, 0.0, 0)
    assert driver.pool.counts()["faults"] == len(slots)


@pytest.mark.attack
@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (2, 1), (2, 2)])
def test_a_killed_process_is_respawned_alone_and_its_actions_come_back_as_faults(rows, parts):
    events = []
    with driven(config_of(3, rows, parts=parts), events=events) as driver:
        driver.steps(4)
        before = driver.pool.process_ids()
        os.kill(before[1], signal.SIGKILL)
        killed_s = time.monotonic()
        victims = set(range(rows, 2 * rows))
        driver.run_until(lambda: driver.faults(rows))
        assert time.monotonic() - killed_s < 15.0  # not at `step_timeout_s`, 30 s
        driver.steps(8)
        after = driver.pool.process_ids()
        _assert_one_fault(driver, victims)
        assert (after[0], after[2]) == (before[0], before[2]) and after[1] != before[1]
        assert driver.pool.counts()["restarts"] == 1 and driver.pool.live_slots == 3 * rows
    assert _failures(events) == ["it was ended by SIGKILL"]


def test_others_go_on_while_one_is_being_made_again():
    with driven(config_of(2, 1, limits=_limits(backoff_s=0.5))) as driver:
        driver.steps(2)
        os.kill(driver.pool.process_ids()[0], signal.SIGKILL)
        driver.run_until(lambda: driver.pool.counts()["respawning"] == 1)
        assert driver.pool.live_slots == 1
        goal = len(driver.rows[1]) + 200
        driver.run_until(lambda: len(driver.rows[1]) >= goal)
        assert not driver.faults(0)  # still waiting for its restart
        driver.run_until(lambda: driver.faults(0))
        _assert_one_fault(driver, {0})


def test_a_process_that_dies_between_arrival_and_action_loses_that_action():
    with driven(config_of(1, 1)) as driver:
        driver.steps(3)
        driver.run_until(lambda: 0 in driver.open, act=False)
        seen = len(driver.rows[0])
        old = driver.pool.process_ids()[0]
        os.kill(old, signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while driver.pool.process_ids()[0] in (old, None) or driver.pool.live_slots == 0:
            assert driver.pool.poll(0.05) == [] and time.monotonic() < deadline_s
        for _ in range(10):
            assert driver.pool.poll(0.02) == []  # the new life waits for the action of the old one
        driver.answer(0)
        assert driver.gather(5.0) == [0] and len(driver.rows[0]) == seen + 1
        _assert_one_fault(driver, {0})


@pytest.mark.attack
def test_a_stopped_process_is_killed_after_its_deadline():
    events = []
    with driven(config_of(2, 1, limits=_limits(step_timeout_s=0.4, reset_timeout_s=0.4)), events=events) as driver:
        driver.steps(3)
        stopped = driver.pool.process_ids()[0]
        os.kill(stopped, signal.SIGSTOP)
        driver.run_until(lambda: driver.faults(0))
        driver.steps(3)
        _assert_one_fault(driver, {0})
        assert not lives(stopped)
    (reason,) = _failures(events)
    late = [
        (f"{word} (slot 0)", f"fleet.limits.{key}_timeout_s")
        for word, key in (("stepping", "step"), ("resetting", "reset"))
    ]
    assert any(f"{what} took longer than {key} = 0.4: raise {key}" in reason for what, key in late), reason


@pytest.mark.attack
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("call", ["step", "reset"])
def test_an_exception_is_told_with_its_traceback_and_ends_its_process_only(call, rows, tmp_path):
    events = []
    with driven(config_of(2, rows, trouble=str(tmp_path)), events=events) as driver:
        driver.steps(2)
        cause(tmp_path / call, "raise")
        driver.run_until(lambda: any(driver.faults(slot) for slot in range(2 * rows)))
        driver.steps(6)
        lost = {slot for slot in range(2 * rows) if driver.faults(slot)}
        assert lost in (set(range(rows)), set(range(rows, 2 * rows)))
        _assert_one_fault(driver, lost)
    (failure,) = [fields for name, fields in events if name == "simulator_failed"]
    assert failure["reason"].startswith({"step": "stepping", "reset": "resetting"}[call])
    assert f"raised RuntimeError: trouble in {call}" in failure["reason"]
    assert "_misbehave" in failure["traceback"]


def _broken(folder, lives, good, **limits):
    limits = _limits(backoff_s=0.001, max_backoff_s=0.001, **limits)
    return config_of(id="tests.fleet.toys:Broken", limits=limits, folder=str(folder), lives=lives, good=good)


def test_code_that_has_never_worked_is_tried_three_times(tmp_path):
    gist = r"IndexError: pop from empty list \(toys\.py:\d+\); no simulator of its task has ever answered an action"
    with pytest.raises(RunFailed, match=gist), driven(_broken(tmp_path, 99, 0)) as driver:
        driver.steps(99)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(("lives", "good", "limits"), [(2, 0, {}), (6, 2, {}), (9, 0, {"max_failures_in_row": None})])
def test_code_that_may_heal_is_tried_as_often_as_an_engine(lives, good, limits, tmp_path):
    """It fails twice only; it has worked before; or the config wants no such limit."""
    with driven(_broken(tmp_path, lives, good, **limits)) as driver:
        driver.steps(lives + 5)
    assert len(list(tmp_path.iterdir())) == lives


@pytest.mark.attack
def test_a_process_that_ends_itself_is_reported_with_its_last_words(tmp_path):
    events = []
    with driven(config_of(1, 1, trouble=str(tmp_path)), events=events) as driver:
        driver.steps(1)
        cause(tmp_path / "step", "exit")
        driver.run_until(lambda: driver.faults(0))
    assert _failures(events) == ["it ended by itself with code 7; it last wrote: leaving now"]


@pytest.mark.attack
@pytest.mark.parametrize(("call", "limit"), [("reset", "reset_timeout_s"), ("step", "step_timeout_s")])
def test_resets_and_steps_have_deadlines_of_their_own(call, limit, tmp_path):
    other = "step_timeout_s" if call == "reset" else "reset_timeout_s"
    events = []
    limits = _limits(**{limit: 0.3, other: 20.0})
    with driven(config_of(1, 1, limits=limits, trouble=str(tmp_path)), events=events) as driver:
        driver.steps(1)
        cause(tmp_path / ("step" if call == "reset" else "reset"), "sleep 0.7")  # longer than the other's limit
        driver.steps(12)
        assert not driver.faults(0)
        cause(tmp_path / call, "hang")
        driver.run_until(lambda: driver.faults(0))
        _assert_one_fault(driver, {0})
    assert len(_failures(events)) == 1 and f"took longer than fleet.limits.{limit} = 0.3: raise" in _failures(events)[0]


@pytest.mark.attack
def test_a_simulator_that_is_made_too_slowly_is_killed_and_given_up():
    events = []
    limits = _limits(spawn_timeout_s=0.3, max_restarts=1)
    with (
        pytest.raises(RunFailed, match="given up.*making took longer than fleet.limits.spawn_timeout_s = 0.3"),
        driven(config_of(1, 1, limits=limits, init_s=30.0), events=events),
    ):
        pass
    assert len(_failures(events)) == 2 and events[-1][0] == "simulator_quarantined"


@pytest.mark.attack
@pytest.mark.parametrize(
    ("id", "message"),
    [("NoSuchThing-v0", "NoSuchThing"), ("tests.fleet.toys:Missing", "Missing"), ("tests.fleet.toys:Odd", "Sequence")],
)
def test_a_simulator_that_cannot_be_is_a_config_error_at_once(id, message):
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"task 't'.*{message}"), driven(config_of(2, 1, id=id)):
        pass
    assert time.monotonic() - began_s < 10


def test_a_start_that_takes_too_long_says_what_it_waits_for():
    pool = SimulatorPool(config_of(1, 1, init_s=30.0), "w0", 1)
    with pytest.raises(NoProgressError, match="no simulator of task 't' was made within 0.3 s"):
        pool.start(0.3)
    pool.close()


@pytest.mark.attack
def test_a_process_that_fails_for_ever_is_quarantined_and_the_others_go_on(tmp_path):
    events = []
    limits = _limits(max_restarts=2, backoff_s=0.01)
    with driven(config_of(2, 1, limits=limits, trouble=str(tmp_path)), events=events) as driver:
        driver.steps(2)
        for number in range(3):
            if number:
                cause(tmp_path / "make", "raise")
            else:
                os.kill(driver.pool.process_ids()[0], signal.SIGKILL)
                cause(tmp_path / "make", "raise")
            driver.run_until(lambda number=number: len(_failures(events)) > number)
        (tmp_path / "make").unlink(missing_ok=True)
        driver.run_until(lambda: driver.pool.counts()["quarantined"] == 1)
        goal = len(driver.rows[1]) + 50
        driver.run_until(lambda: len(driver.rows[1]) >= goal)
        counts = driver.pool.counts()
        assert (counts["live"], counts["quarantined"], counts["restarts"], counts["abandoned"]) == (1, 1, 2, 1)
        assert list(driver.pool.given_up()) == [0] and "making (slot 0) raised" in driver.pool.given_up()[0]
        assert driver.pool.live_slots == 1 and not driver.faults(0) and not driver.faults(1)
        assert len(driver.rows[0]) == driver.acted[0]  # the last action is the abandoned one
    (quarantined,) = [fields for name, fields in events if name == "simulator_quarantined"]
    assert "max_restarts = 2" in quarantined["limit"] and "making (slot 0) raised" in quarantined["reason"]


def test_a_bad_action_fails_the_run_with_its_leaf_and_value():
    with driven(config_of()) as driver:
        driver.gather(5.0)
        driver.acted[0] = 4
        driver.pool.act(0, {"": driver.open.pop(0).slots + 9})
        with pytest.raises(RunFailed, match=r"task 't': action '' is 9: it must be in \[0, 5\)"):
            driver.gather(5.0)
            driver.gather(5.0)


@pytest.mark.attack
@pytest.mark.parametrize("said", ["error", "nan"])
def test_a_step_that_the_simulator_calls_faulty_is_marked_and_the_episode_goes_on(said, tmp_path):
    with driven(config_of(1, 1, trouble=str(tmp_path), terminate_after=50)) as driver:
        driver.steps(2)
        cause(tmp_path / "step", said)
        driver.run_until(lambda: driver.faults(0))
        driver.steps(3)
        (number,) = driver.faults(0)
        row = driver.rows[0][number]
        assert not row["first"] and not row["truncated"] and not row["terminated"]
        assert row["observation"][""][1] == number
        assert driver.pool.counts()["restarts"] == 0


def test_a_faulty_step_that_ends_its_episode_is_a_truncation(tmp_path):
    with driven(config_of(1, 1, trouble=str(tmp_path), terminate_after=1)) as driver:
        driver.steps(2)
        cause(tmp_path / "step", "error")
        driver.run_until(lambda: driver.faults(0))
        row = driver.rows[0][driver.faults(0)[0]]
        assert row["truncated"] and not row["terminated"] and row["first"] and not row["has_final"]
        assert row["length"] == 0


@pytest.mark.attack
@pytest.mark.parametrize("name", ["group", "session"])
def test_a_simulators_children_end_with_it(name, tmp_path):
    children = tmp_path / "children" / name
    with driven(config_of(2, 1, child=str(children))) as driver:
        driver.steps(1)
        driver.run_until(lambda: len(_pairs(children)) == 2)
        (first, first_child), (second, second_child) = _pairs(children)
        os.kill(first, signal.SIGKILL)
        driver.run_until(lambda: len(_pairs(children)) == 3)
        await_gone([first, first_child])
        assert lives(second) and lives(second_child)
        driver.steps(2)
        everyone = [pid for pair in _pairs(children) for pid in pair]
    await_gone(everyone, 0.5)


@pytest.mark.attack
def test_the_death_of_the_fork_server_ends_all_and_another_begins(tmp_path):
    children, events = tmp_path / "children" / "session", []
    with driven(config_of(2, 1, child=str(children)), events=events) as driver:
        driver.steps(2)
        everyone = [pid for pair in _pairs(children) for pid in pair]
        os.kill(_parent(driver.pool.process_ids()[0]), signal.SIGKILL)
        driver.run_until(lambda: driver.faults(0) and driver.faults(1))
        await_gone(everyone)
        driver.steps(2)
        _assert_one_fault(driver, {0, 1})
        assert driver.pool.counts()["restarts"] == 0
    assert [name for name, _ in events].count("nursery_ended") == 1


@pytest.mark.attack
def test_a_killed_fork_server_that_does_not_end_is_left_behind_and_another_begins(monkeypatch):
    events, waits = [], []

    def never(process, timeout=None):
        waits.append(timeout)
        raise subprocess.TimeoutExpired("fork server", timeout)

    with driven(config_of(2, 1), events=events) as driver:
        driver.steps(2)
        fork_server = _parent(driver.pool.process_ids()[0])
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "wait", never)
            os.kill(fork_server, signal.SIGKILL)
            driver.run_until(lambda: waits)
        driver.run_until(lambda: driver.faults(0) and driver.faults(1))
        driver.steps(2)
        _assert_one_fault(driver, {0, 1})
    assert waits == [FORK_SERVER_END_S]
    (left,) = [fields for name, fields in events if name == "nursery_left_behind"]
    assert left["pid"] == fork_server and "was killed; 6 s later it had not ended" in left["reason"]
    assert [name for name, _ in events].count("nursery_ended") == 1


def test_a_pool_whose_fork_server_does_not_end_closes_all_the_same(monkeypatch):
    events = []
    with driven(config_of(1, 1), events=events) as driver:
        driver.steps(1)
        pids = [_parent(driver.pool.process_ids()[0]), *driver.pool.process_ids()]
        with monkeypatch.context() as patch:
            patch.setattr(ForkServerClient, "close", lambda link: not link.kill())
            driver.pool.close()
    await_gone(pids)
    assert [fields["pid"] for name, fields in events if name == "nursery_left_behind"] == pids[:1]


def _parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


_WORKER = """
import sys, numpy as np
from penstock.fleet.pool import SimulatorPool
from tests.fleet.driving import config_of
pool = SimulatorPool(config_of(2, 1, child=sys.argv[1]), "w0", 1)
pool.start(20.0)
arrived = set()
while len(arrived) < 2:
    for arrival in pool.poll(1.0):
        arrived.add(arrival.process)
        pool.act(arrival.process, {"": np.array([0])})
print("up", *pool.process_ids(), flush=True)
while True:
    for arrival in pool.poll(1.0):
        pool.act(arrival.process, {"": np.array([0])})
"""


@pytest.mark.attack
def test_nothing_outlives_a_worker_that_was_killed(tmp_path):
    children = tmp_path / "children" / "session"
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(children)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert worker.stdout is not None
    with worker.stdout:
        pids = [int(word) for word in worker.stdout.readline().split()[1:]]
        everyone = [_parent(pids[0]), *pids, *(child for _, child in _pairs(children))]
        assert len(everyone) == 5 and all(map(lives, everyone))
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(5)
        await_gone(everyone)


@pytest.mark.slow
@pytest.mark.attack
def test_a_hundred_restarts_leave_no_descriptor_and_no_memory_behind():
    limits = _limits(backoff_s=0.001, max_backoff_s=0.001, restarts_per_minute=1000, max_failures_in_row=None)
    with driven(config_of(2, 1, limits=limits)) as driver:
        driver.steps(2)
        gc.collect()
        before = open_descriptors()
        for number in range(1, 51):
            driver.run_until(lambda: None not in driver.pool.process_ids())
            for pid in driver.pool.process_ids():
                os.kill(pid, signal.SIGKILL)
            driver.run_until(lambda number=number: min(len(driver.faults(0)), len(driver.faults(1))) == number)
        assert driver.pool.counts()["restarts"] == 100
        driver.steps(1)
        driver.check_books()
        gc.collect()
        after = open_descriptors()
        assert len(after) == len(before) and sum("memfd" in name for name in after) == 2
    driver.rows.clear()
    driver.open.clear()
    gc.collect()
    assert not [name for name in open_descriptors() if "memfd" in name]
