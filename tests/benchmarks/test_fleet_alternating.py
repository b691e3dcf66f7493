"""A fleet beside independent processes, by turns: nothing of them stays, and work is priced. Nothing is timed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fleet import alternating, independent, running
from benchmarks.fleet.workloads import WORKLOADS, Simulators
from tests.waiting import wait_until


@pytest.mark.slow
def test_processes_of_their_own_step_the_simulator_and_time_its_resets():
    workload = replace(WORKLOADS["ale"], simulators=(Simulators("CartPole-v1", 2),))
    with independent.playing(workload, 2) as (counts, pids):
        wait_until(lambda: bool((counts[:, 1] > 3).all()), "both reset their simulators")
        steps, resets, step_s, reset_s = counts.sum(0)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids) and len(set(pids)) == 2
    assert steps > 8 * resets and 0 < step_s / steps < 1e-2 and 0 < reset_s / resets < 1e-1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_work_is_priced_by_the_processor_time_that_it_takes_alone():
    # alone, two processors: 20 s of steps of 0.4 ms and of 20 resets of 0.5 s; the fleet's 1000 steps and 3 resets a
    # second are 1.9 s of such work
    alone = {"at_s": 10.0, "steps": 25_000, "resets": 20, "step_s": 10.0, "reset_s": 10.0}
    fleet = {"at_s": 5.0, "steps": 5000, "resets": 15, "batches": 1250, "main_s": 0.5, "simulators_s": 9.0}
    ours, others = alternating.ratios(fleet, alone)
    assert ours["work_ratio"] == pytest.approx(0.95) and ours["steps_ratio"] == pytest.approx(0.4)
    assert (ours["main_cpu"], ours["simulators_cpu"], ours["batch_slots_mean"]) == pytest.approx((0.1, 1.8, 4.0))
    assert others == pytest.approx({"steps_per_s": 2500.0, "step_s": 4e-4, "reset_s": 0.5})
    never_reset = alternating.ratios(fleet | {"resets": 0}, alone | {"resets": 0, "reset_s": 0.0})[0]
    assert never_reset["work_ratio"] == pytest.approx(never_reset["steps_ratio"])


COUNTING = """
import subprocess, sys, threading, time
sys.path.insert(0, {root!r})
from benchmarks.fleet.alternating import AT_S, PROCESSES, answer_lines
turns, child = 0, subprocess.Popen(["sleep", "600"])
def count():
    global turns
    while True:
        turns += 1
        time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
answer_lines(lambda: {{AT_S: time.perf_counter(), "turns": turns, PROCESSES: [child.pid]}})
sys.exit({code})
"""


def _counting_side(code=0):
    return alternating.Side([sys.executable, "-c", COUNTING.format(root=str(running.ROOT), code=code)], 30.0)


def _states(side):
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in side.pids]


@pytest.mark.slow
def test_sides_play_by_turns_while_all_processes_of_the_other_are_stopped_and_nothing_stays():
    with _counting_side() as one, _counting_side() as other:
        found = alternating.alternate([one, other], turns=3, turn_s=0.1, warm_up_s=0.05)
        assert len(found) == 3
        for turn in found:
            assert all(0.1 <= counts["at_s"] < 5 and counts["turns"] > 0 for counts in turn)
        wait_until(lambda: _states(one) == _states(other) == ["T", "T"], "both are stopped")
        pids = [*one.pids, *other.pids]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")


@pytest.mark.slow
def test_stopped_sides_and_their_processes_die_with_whoever_asked_them():
    asking = f"""
import sys, time
sys.path.insert(0, {str(running.ROOT)!r})
from benchmarks.fleet import alternating
command = [sys.executable, "-m", "benchmarks.fleet.independent", "cartpole"]
with alternating.Side(command, 60.0) as side:
    side.stop()
    print(*side.pids, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", asking], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        pids = asker.stdout.readline().split()
        assert len(pids) > 1 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        asker.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")


def test_a_side_that_ends_hangs_or_fails_is_named():
    with pytest.raises(running.Failed, match="a side ended with 3"):
        alternating.Side([sys.executable, "-c", "raise SystemExit(3)"], 30.0)
    with pytest.raises(running.Failed, match="said nothing within 0.2 s"):
        alternating.Side([sys.executable, "-c", "import sys; sys.stdin.read()"], 0.2)
    side = _counting_side(code=4)
    with pytest.raises(running.Failed, match="ended with 4"):
        side.end()
