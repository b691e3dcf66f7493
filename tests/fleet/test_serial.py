"""A fleet in processes and a serial loop with the same seeds play the same trajectories, through the whole worker."""

import numpy as np
import pytest
from tests.fleet.driving import QUICK
from tests.fleet.fake_pool import FakePending, FakeRunner

from penstock.fleet.config import FleetConfig
from penstock.fleet.fragments import FragmentCutter
from penstock.fleet.pool import SimulatorPool
from penstock.fleet.rollout_loop import RolloutWorker
from penstock.fleet.serial import SerialPool
from penstock.types import RunFailed

pytestmark = pytest.mark.timeout(60)


class Pushing(FakeRunner):
    """Pushes the pole to where it falls: each slot's action depends on nothing but its own observation."""

    def decide(self, slots, observations, first) -> FakePending:
        decision = super().decide(slots, {"": np.zeros((len(slots), 3))}, first).result()
        decision.actions[""][:] = observations[""][: len(slots), 2] > 0  # type: ignore[index]
        return FakePending(decision, 0.0)


def config_of(envs, per_process, **more):
    return FleetConfig(
        tasks={"pole": {"id": "CartPole-v1"}}, envs_per_worker=envs, envs_per_process=per_process, max_wait_ms=1,
        limits=QUICK, **more,
    )  # fmt: skip


def fragments(pool, config, count):
    """The first `count` fragments of each slot."""
    cut = [[] for _ in range(pool.num_slots)]
    pool.start(20)
    try:
        cutter = FragmentCutter(pool, 16, "w", "w-0")

        def take(batch):
            for unsent in cutter.add(batch):
                cut[unsent.fragment.slot].append(unsent.fragment)

        worker = RolloutWorker(pool, Pushing(pool.num_slots), config, take)
        for _ in range(20_000):
            worker.run_once(1.0)
            if min(map(len, cut)) >= count:
                return [ours[:count] for ours in cut]
        raise AssertionError("the fragments did not come")
    finally:
        worker.finish()
        pool.close()


@pytest.mark.parametrize(("envs", "per_process", "parts"), [(1, 1, 1), (4, 2, 1), (8, 4, 2)])
def test_a_fleet_and_a_serial_loop_give_the_same_trajectories(envs, per_process, parts):
    config = config_of(envs, per_process, parts_per_process=parts)
    fleet = fragments(SimulatorPool(config, "w", 5), config, 3)
    serial = fragments(SerialPool(config, "w", 5), config, 3)
    assert len(fleet) == envs and any(one.terminated.any() for one in serial[0])
    for ours, theirs in zip(fleet, serial, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.observations[""], other.observations[""])
            np.testing.assert_array_equal(one.final_observations[""], other.final_observations[""])
            for name in ("rewards", "terminated", "truncated", "faults", "first", "episodes", "final_steps"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
            np.testing.assert_array_equal(one.actions[""], other.actions[""])
    starts = {tuple(ours[0].observations[""][0].tolist()) for ours in fleet}
    assert len(starts) == envs, "no two slots begin alike"


def test_other_seeds_and_workers_play_other_trajectories():
    config = config_of(1, 1)
    starts = [
        fragments(SerialPool(config, worker, seed), config, 1)[0][0].observations[""][0].tolist()
        for worker, seed in (("w", 5), ("w", 6), ("v", 5))
    ]
    assert len({tuple(start) for start in starts}) == 3


def test_spaces_are_known_after_the_start():
    pool = SerialPool(config_of(2, 1), "w", 5)
    with pytest.raises(RunFailed, match="start the pool first"):
        _ = pool.spaces
    pool.start(1)
    assert pool.spaces.observations[0].shape == (4,) and pool.counts()["live"] == 2 and pool.live_slots == 2
    pool.close()
    pool.close()
