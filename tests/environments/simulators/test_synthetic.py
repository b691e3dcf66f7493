"""The simulator that is made to measure: exact trajectories, times as told, faults as often as told."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from penstock.environments.simulators import SyntheticError, SyntheticSimulator
from penstock.environments.simulators import synthetic as synthetic_module

SMALL = {"observation_shape": (2,)}


@pytest.fixture
def slept(monkeypatch):
    """Durations that the simulator asked to sleep, instead of sleeping."""
    durations = []
    monkeypatch.setattr(synthetic_module.time, "sleep", durations.append)
    return durations


def test_a_trajectory_is_what_the_seed_and_the_actions_say():
    simulator = SyntheticSimulator(**SMALL, num_actions=3, episode_steps=4)
    first, said = simulator.reset(seed=0)
    assert (first.tolist(), first.dtype, said) == ([168, 196], np.uint8, {})
    steps = [simulator.step(action) for action in (0, 1, 2, 0)]
    assert [frame.tolist() for frame, *_ in steps] == [[150, 178], [107, 135], [55, 83], [63, 91]]
    assert [round(reward * 255) for _, reward, *_ in steps] == [199, 156, 104, 112]
    assert [step[2:4] for step in steps] == [(False, False)] * 3 + [(False, True)]


def test_another_action_gives_another_trajectory_for_good():
    frames = []
    for actions in ([0, 0, 0, 0], [1, 0, 0, 0]):
        simulator = SyntheticSimulator(**SMALL)
        simulator.reset(seed=0)
        frames.append([simulator.step(action)[0].tolist() for action in actions])
    assert all(one != other for one, other in zip(*frames, strict=True))


def test_times_and_faults_leave_the_trajectory_alone(slept):
    plain = SyntheticSimulator(**SMALL)
    troubled = SyntheticSimulator(
        **SMALL, step_s=0.5, jitter=1.0, faulty_rate=0.5, slow_reset_s=9.0, slow_reset_rate=0.5
    )
    for seed in (3, None, None):
        assert plain.reset(seed=seed)[0].tolist() == troubled.reset(seed=seed)[0].tolist()
        for _ in range(5):
            assert plain.step(1)[0].tolist() == troubled.step(1)[0].tolist()
    assert len(slept) > 15


@pytest.mark.parametrize(("dtype", "high"), [("uint8", 255), ("int32", 255), ("float32", 1), ("float64", 1)])
def test_frames_have_the_shape_and_the_dtype_that_was_asked_for(dtype, high):
    simulator = SyntheticSimulator(observation_shape=(3, 4), dtype=dtype)
    frames = [simulator.reset(seed=0)[0], *(simulator.step(0)[0] for _ in range(20))]
    assert all(frame.shape == (3, 4) and frame.dtype == dtype for frame in frames)
    assert all(frame in simulator.observation_space for frame in frames)
    assert np.max(frames) > 0.9 * high and len({frame.tobytes() for frame in frames}) == 21


def test_jitter_keeps_the_mean_duration_and_has_the_sigma_that_was_asked_for(slept):
    simulator = SyntheticSimulator(**SMALL, step_s=0.01, jitter=0.5)
    simulator.reset(seed=0)
    slept.clear()
    for _ in range(5000):
        simulator.step(0)
    assert np.mean(slept) == pytest.approx(0.01, rel=0.03)
    assert np.std(np.log(slept)) == pytest.approx(0.5, rel=0.03)


def test_burnt_time_is_processor_time_of_this_process():
    simulator = SyntheticSimulator(**SMALL, step_s=0.02, work="cpu")
    simulator.reset(seed=0)
    before_s = time.process_time()
    for _ in range(5):
        simulator.step(0)
    assert 0.1 <= time.process_time() - before_s < 0.13


def test_slept_time_is_no_processor_time():
    simulator = SyntheticSimulator(**SMALL, step_s=0.02)
    simulator.reset(seed=0)
    before_s, wall_s = time.process_time(), time.monotonic()
    for _ in range(5):
        simulator.step(0)
    assert time.process_time() - before_s < 0.02 and time.monotonic() - wall_s >= 0.1


def test_errors_and_faulty_steps_come_as_often_as_told():
    simulator = SyntheticSimulator(**SMALL, error_rate=0.1, faulty_rate=0.2)
    simulator.reset(seed=1)
    errors = faulty = 0
    for _ in range(2000):
        try:
            faulty += "error" in simulator.step(0)[4]
        except SyntheticError:
            errors += 1
    assert (errors, faulty) == (203, 383)


def test_resets_are_slow_or_fail_as_often_as_told(slept):
    simulator = SyntheticSimulator(
        **SMALL, reset_s=1.0, slow_reset_s=7.0, slow_reset_rate=0.25, reset_error_rate=0.5, init_s=3.0
    )
    assert slept == [3.0]
    failed = 0
    for _ in range(400):
        try:
            simulator.reset()
        except SyntheticError:
            failed += 1
    assert set(slept[1:]) == {1.0, 7.0}
    assert 70 < slept.count(7.0) < 130 and 160 < failed < 240


def test_a_hanging_step_takes_an_hour(slept):
    simulator = SyntheticSimulator(**SMALL, hang_rate=1.0)
    simulator.reset(seed=0)
    slept.clear()
    simulator.step(0)
    assert slept == [3600]


def test_a_child_that_is_killed_is_noticed_at_once():
    simulator = SyntheticSimulator(**SMALL, child_process=True)
    child_pid = simulator.reset(seed=0)[1]["child_pid"]
    simulator.step(0)
    os.kill(child_pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(SyntheticError, match=f"child process {child_pid} is dead"):
        simulator.step(0)
    assert time.monotonic() - began_s < 10
    simulator.close()


def test_close_ends_the_child():
    simulator = SyntheticSimulator(**SMALL, child_process=True)
    child_pid = simulator.reset(seed=0)[1]["child_pid"]
    simulator.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child_pid, 0)


def test_a_crash_kills_the_process_and_leaves_the_child():
    program = (
        "from penstock.environments.simulators import SyntheticSimulator\n"
        "simulator = SyntheticSimulator((2,), crash_rate=1.0, child_process=True)\n"
        "print(simulator.reset(seed=0)[1]['child_pid'], flush=True)\n"
        "simulator.step(0)\n"
    )
    started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    child_pid = int(started.stdout.readline())
    try:
        assert started.wait(20) == -signal.SIGKILL
        os.kill(child_pid, 0)
    finally:
        os.kill(child_pid, signal.SIGKILL)
        started.stdout.close()


def test_frames_can_be_filmed():
    simulator = SyntheticSimulator((8, 8, 3), render_mode="rgb_array")
    frame, _ = simulator.reset(seed=0)
    assert simulator.render().tolist() == frame.tolist()
    assert SyntheticSimulator((4,), "float32", render_mode="rgb_array").render().shape == (16, 16, 3)
