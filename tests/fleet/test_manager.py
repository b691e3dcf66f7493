"""The fleet's centre: workers made anew, steps and episodes counted once over all lives, scaling, weights."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from tests.fleet.fake_pool import FakePool, FakeRunner, ListSink, Script
from tests.waiting import wait_until

from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.fleet.manager import RolloutManager
from penstock.fleet.worker import RolloutWorkerWrapper
from penstock.types import ConfigError, RunFailed, WeightVersion
from penstock.weights import InProcessBroadcaster

pytestmark = pytest.mark.timeout(60)


class Fleet:
    """Makes wrappers over fake pools, and keeps all of them."""

    def __init__(self, workers=2, breaks=lambda name, incarnation: False, **more):
        self.config = FleetConfig(
            tasks={"fake": SimulatorConfig(id="Fake-v0")}, workers=workers, envs_per_worker=2, fragment_length=5,
            max_wait_ms=1,
        )  # fmt: skip
        self.sink, self.weights, self.events, self.logged = ListSink(), InProcessBroadcaster(), [], []
        self.pools: dict[tuple[str, int], FakePool] = {}
        self.slow, self.waiting, self.go = "", threading.Event(), threading.Event()
        self._breaks = breaks
        self.manager = RolloutManager(
            self.config, self.make, broadcaster=self.weights, log=self.logged.append,
            on_event=lambda kind, values: self.events.append((kind, dict(values))), **more,
        )  # fmt: skip

    def make(self, name, incarnation):
        def end(slot, episode, step):
            if episode == 3 and self._breaks(name, incarnation):
                raise RuntimeError("the pool broke")
            return "terminated" if step == 9 else None

        pool = self.pools[name, incarnation] = FakePool(2, script=Script(ends=end))
        worker = RolloutWorkerWrapper(
            name, incarnation, self.config, pool, FakeRunner(2, None), self.sink, self.weights
        )
        if self.slow == "making" and incarnation:
            self.wait()
        if self.slow == "ending" and not incarnation:
            stop = worker.stop
            worker.stop = lambda timeout_s: self.wait() or stop(timeout_s)
        return worker

    def wait(self):
        self.waiting.set()
        assert self.go.wait(20)

    @contextmanager
    def restarting(self):
        """While fleet-0 is being restarted by another thread, which waits for `go`."""
        self.manager.start()
        self.manager.update_model(WeightVersion(0, 0), {"w": np.array([0.0])})
        thread = threading.Thread(target=lambda: wait_until(lambda: self.manager.supervise() or self.waiting.is_set()))
        thread.start()
        late = threading.Timer(5.0, self.go.set)  # so that a test that is held up fails
        late.start()
        try:
            assert self.waiting.wait(20)
            yield
        finally:
            late.cancel()
            self.go.set()
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def fleet():
    made: list[Fleet] = []

    def make(**more):
        made.append(Fleet(**more))
        return made[-1]

    yield make
    for one in made:
        one.manager.stop(10)


def test_weights_are_broadcast_once_for_all_workers(fleet):
    one = fleet(workers=3)
    one.manager.start()
    assert one.manager.worker_ids == ("fleet-0", "fleet-1", "fleet-2")
    one.manager.update_model(WeightVersion(0, 5), {"w": np.array([5.0])})
    wait_until(lambda: {f.metadata.worker_id for f in list(one.sink.fragments)} == set(one.manager.worker_ids))
    assert {int(f.weight_steps[0]) for f in one.sink.fragments} == {5}
    metrics = one.manager.metrics()
    assert metrics["fleet/weight_step_min"] == metrics["fleet/weight_step_max"] == 5
    assert metrics["fleet/workers"] == 3 and one.manager.log_statistics() == one.logged[-1]


def test_a_failed_worker_is_made_anew_and_nothing_is_counted_twice(fleet):
    one = fleet(breaks=lambda name, incarnation: name == "fleet-1" and incarnation < 2)
    one.manager.start()
    one.manager.update_model(WeightVersion(0, 0), {"w": np.array([0.0])})

    def restarted():
        one.manager.supervise()
        return len(one.pools.get(("fleet-1", 2), FakePool(1)).returns[0]) > 4

    wait_until(restarted)
    kinds = [(kind, values.get("incarnation")) for kind, values in one.events if kind == "worker_restarted"]
    assert kinds == [("worker_restarted", 1), ("worker_restarted", 2)]
    assert "RuntimeError: the pool broke" in one.events[-1][1]["reason"]
    one.manager.stop(10)
    account = one.manager.account()
    assert account.closes and account.in_flight == 0
    assert account.sent == sum(f.length for f in one.sink.fragments)
    # The step in which a pool broke was decided, and lost with it: no simulator finished it.
    assert 0 <= account.started - sum(pool.steps_taken for pool in one.pools.values()) <= 2 * 2
    played = sum(len(returns) for pool in one.pools.values() for returns in pool.returns)
    unseen = sum(pool.num_slots for pool in one.pools.values())  # ended, but its arrival was never decided on
    assert played - unseen <= one.manager.statistics.count("fake") <= played
    assert len({f.group_id for f in one.sink.fragments}) == len(one.sink.fragments)
    assert one.manager.metrics()["fleet/worker_restarts"] == 2


@pytest.mark.parametrize("slow", ["making", "ending"])
def test_numbers_are_there_at_once_while_a_worker_is_restarted(fleet, slow):
    one = fleet(breaks=lambda name, incarnation: name == "fleet-0" and incarnation == 0)
    one.slow = slow
    with one.restarting():
        began = time.monotonic()
        metrics, account, reports = one.manager.metrics(), one.manager.account(), one.manager.reports()
        assert time.monotonic() - began < 2.0 and not one.go.is_set()
        there = ("fleet-1",) if slow == "making" else ("fleet-0", "fleet-1")
        assert tuple(reports) == one.manager.worker_ids == there and metrics["fleet/workers"] == len(there)
        assert account.closes and account.started >= 2 * 30
        steps = reports["fleet-1"].condition.steps
        wait_until(lambda: one.manager.metrics() and one.manager.reports()["fleet-1"].condition.steps > steps + 20)
    metrics = one.manager.metrics()
    assert sorted(one.manager.worker_ids) == ["fleet-0", "fleet-1"] and metrics["fleet/worker_restarts"] == 1
    assert one.manager.account().closes


def test_a_fleet_that_is_stopped_during_a_restart_begins_no_worker(fleet):
    one = fleet(breaks=lambda name, incarnation: name == "fleet-0" and incarnation == 0)
    one.slow = "making"
    with one.restarting(), pytest.raises(RunFailed, match="restarts a worker.* within 0.2 s"):
        one.manager.stop(0.2)
    assert one.manager.worker_ids == () and one.manager.account().closes and one.manager.account().in_flight == 0
    assert not one.pools["fleet-0", 1].started and one.pools["fleet-1", 0].closed
    assert "worker_restarted" not in [kind for kind, _ in one.events]
    with pytest.raises(RunFailed, match="make another"):
        one.manager.start()


def test_statistics_are_the_simulators_own(fleet):
    one = fleet(workers=1)
    one.manager.start()
    one.manager.update_model(WeightVersion(0, 0), {"w": np.array([0.0])})
    wait_until(lambda: len(one.pools["fleet-0", 0].returns[1]) > 5)
    one.manager.metrics()
    one.manager.metrics()
    one.manager.stop(10)
    metrics = one.manager.metrics()
    played = [returns for returns in one.pools["fleet-0", 0].returns]
    seen = int(metrics["fleet/fake/episodes"])
    assert sum(map(len, played)) - 2 <= seen <= sum(map(len, played))
    assert metrics["fleet/fake/length_mean"] == 10 and metrics["fleet/fake/reward_min"] == 55


def test_a_worker_that_fails_too_often_ends_the_fleet(fleet):
    one = fleet(breaks=lambda name, incarnation: name == "fleet-0", max_restarts=1, restart_window_s=60.0)
    one.manager.start()
    one.manager.update_model(WeightVersion(0, 0), {"w": np.array([0.0])})

    def supervised():
        one.manager.supervise()
        return False

    with pytest.raises(
        RunFailed,
        match=(
            "fleet-0 failed 2 times within overseer.restart_window_s = 60, more than overseer.max_restarts = 1 allows; "
            "the last time: RuntimeError: the pool broke"
        ),
    ):
        wait_until(supervised)


def test_a_worker_whose_weights_were_closed_ended_in_order_and_is_left_alone(fleet):
    one = fleet(workers=1)
    one.manager.start()
    one.manager.update_model(WeightVersion(0, 0), {"w": np.array([0.0])})
    one.weights.close()
    wait_until(lambda: one.manager.metrics() and one.manager.reports()["fleet-0"].condition.state == "ended")
    one.manager.supervise()
    assert list(one.pools) == [("fleet-0", 0)] and one.manager.account().closes


def test_scaling_up_and_down(fleet):
    one = fleet(workers=1)
    one.manager.start()
    one.manager.update_model(WeightVersion(0, 0), {"w": np.array([0.0])})
    one.manager.scale(3)
    wait_until(lambda: {f.metadata.worker_id for f in list(one.sink.fragments)} == {"fleet-0", "fleet-1", "fleet-2"})
    one.manager.scale(1)
    assert one.manager.worker_ids == ("fleet-0",)
    assert one.pools["fleet-1", 0].closed and one.pools["fleet-2", 0].closed and not one.pools["fleet-0", 0].closed
    assert not [t for t in threading.enumerate() if t.name.startswith(("fleet-1.", "fleet-2."))]
    one.manager.scale(2)
    assert ("fleet-1", 1) in one.pools, "a name that comes again is another incarnation"
    assert [values for kind, values in one.events if kind == "fleet_scaled"] == [
        {"from": 0, "to": 1}, {"from": 1, "to": 3}, {"from": 3, "to": 1}, {"from": 1, "to": 2},
    ]  # fmt: skip
    assert one.manager.account().closes
    with pytest.raises(ConfigError, match="workers = 0"):
        one.manager.scale(0)


def test_without_a_broadcaster_weights_are_published_elsewhere():
    config = Fleet().config
    with pytest.raises(ConfigError, match="their own source of weights"):
        RolloutManager(config, lambda name, incarnation: None).update_model(WeightVersion(0, 0), {})
