"""The built-in simulators that are real engines, as simulator processes of a pool."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.environments.simulators.minestudio_stub import JAR
from tests.fleet.driving import QUICK, await_gone, config_of, driven, lives
from tests.waiting import wait_until

from penstock.environments.simulators.processes import descendants

pytestmark = pytest.mark.timeout(60)

LOST_CONNECTION = 7  # the stub's


def shared_memory_of(pid):
    """Paths of what an engine has in shared memory; other tests' engines have their own."""
    return set(re.findall(r"/dev/shm/ViZDoom\w+", Path(f"/proc/{pid}/maps").read_text()))


def engine_of(pid):
    (engine,) = descendants(pid)
    assert b"vizdoom" in Path(f"/proc/{engine.pid}/cmdline").read_bytes()
    return engine.pid


@pytest.mark.parametrize("victim", ["engine", "process"])
def test_a_killed_engine_and_its_killed_process_cost_one_step_and_leave_nothing(victim):
    pytest.importorskip("vizdoom")
    limits = QUICK.model_copy(update={"step_timeout_s": 2.0})
    with driven(config_of(1, 1, id="vizdoom:basic", limits=limits)) as driver:
        driver.steps(3)
        old = driver.pool.process_ids()[0]
        engine = engine_of(old)
        shared = shared_memory_of(engine)
        os.kill(engine if victim == "engine" else old, signal.SIGKILL)
        driver.run_until(lambda: driver.faults(0))
        driver.steps(3)
        driver.check_books()
        (fault,) = driver.faults(0)
        row = driver.rows[0][fault]
        assert row["truncated"] and not row["terminated"] and not row["has_final"]
        assert driver.rows[0][-1]["observation"]["screen"].shape == (120, 160, 3)
        await_gone([old, engine])
        new = driver.pool.process_ids()[0]
        last = [new, engine_of(new)]
        shared |= shared_memory_of(last[1])
    await_gone(last)
    assert len(shared) == 6, "two queues and the pictures of two engines"
    assert not [path for path in shared if os.path.exists(path)] and not any(map(lives, last))


def minecraft(folder, **kwargs):
    (folder / JAR).parent.mkdir(parents=True)
    (folder / JAR).touch()
    return config_of(1, 1, id="tests.environments.simulators.minestudio_stub:make", folder=str(folder), **kwargs)


def act_in_minecraft(driver, camera):
    driver.run_until(lambda: 0 in driver.open, act=False)
    driver.open.pop(0)
    driver.pool.act(0, {"buttons": np.array([[3]]), "camera": np.array([[camera]])})
    driver.run_until(lambda: 0 in driver.open, act=False)
    return driver.rows[0][-1]


def test_minecraft_loses_its_connection_and_then_its_process_and_leaves_no_engine(tmp_path):
    with driven(minecraft(tmp_path)) as driver:
        row = act_in_minecraft(driver, 60)
        assert row["reward"] == 0.5 and row["observation"]["image"].shape == (16, 32, 3) and not row["fault"]
        row = act_in_minecraft(driver, LOST_CONNECTION)
        assert row["fault"] and row["truncated"] and not row["terminated"] and row["first"] and not row["has_final"]
        assert not act_in_minecraft(driver, 60)["fault"], "the error stays in MineStudio's info, and counts once"
        pid = driver.pool.process_ids()[0]
        wait_until(lambda: len(of_first(driver)) > 2, "the engine's processes")
        engine = [one for one in of_first(driver) if one != pid]
        assert all(os.getsid(one) != os.getsid(pid) for one in engine)
        os.kill(pid, signal.SIGKILL)
        row = act_in_minecraft(driver, 60)
        assert row["fault"] and row["truncated"] and driver.pool.counts()["faults"] == 1
        await_gone([pid, *engine])
        driver.run_until(lambda: len(of_first(driver)) > 1, act=False)  # its successor has an engine, too
        last = of_first(driver)
    await_gone(last)


def of_first(driver) -> list[int]:
    """The first process of a pool and its descendants; none while there is no such process."""
    first = driver.pool.process_ids()[0]
    return [] if first is None else [first, *(each.pid for each in descendants(first))]


@pytest.mark.parametrize(
    ("id", "package", "leaf", "shape"),
    [
        ("atari:pong", "ale_py", "", (84, 84, 4)),
        pytest.param("crafter", "crafter", "", (64, 64, 3), marks=pytest.mark.slow),
        ("minigrid:Empty-5x5-v0", "minigrid", "image", (7, 7, 3)),
    ],
)
def test_others_are_stepped_in_parts_as_alone(id, package, leaf, shape):
    pytest.importorskip(package)
    with driven(config_of(1, 2, id=id, parts=2)) as driver:
        driver.steps(3)
        driver.check_books()
        for slot in range(2):
            observation = driver.rows[slot][-1]["observation"][leaf]
            assert observation.shape == shape and np.ptp(observation) > 0 and not driver.faults(slot)
