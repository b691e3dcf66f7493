"""A worker's life: threads, weights, ends and failures; and that every step is accounted for, whatever happens."""

import threading
import time

import numpy as np
import pytest
from tests.fleet.fake_pool import ACTIONS, FakePool, FakeRunner, ListSink, Script
from tests.waiting import wait_until

from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.fleet.user_policy import UserPolicyRunner
from penstock.fleet.worker import RolloutWorkerWrapper
from penstock.types import NoProgressError, Stopped, SupersededVersionError, UnreachableError, WeightVersion
from penstock.weights import InProcessBroadcaster

pytestmark = pytest.mark.timeout(60)


def config_of(envs=4, **more) -> FleetConfig:
    given = {"fragment_length": 5, "max_wait_ms": 1, **more}
    return FleetConfig(tasks={"fake": SimulatorConfig(id="Fake-v0")}, envs_per_worker=envs, **given)


def wrapper_of(pool, runner, sink, weights=None, events=None, incarnation=0, **more):
    on_event = (
        (lambda kind, values: None) if events is None else (lambda kind, values: events.append((kind, dict(values))))
    )
    wait_s = more.pop("first_weights_timeout_s", 20.0)
    return RolloutWorkerWrapper(
        "w", incarnation, config_of(pool.num_slots, **more), pool, runner, sink, weights, on_event=on_event,
        first_weights_timeout_s=wait_s,
    )  # fmt: skip


def published(step, broadcaster=None):
    broadcaster = broadcaster or InProcessBroadcaster()
    broadcaster.publish(WeightVersion(0, step), {"w": np.array([float(step)])})
    return broadcaster


def check_account(wrapper, pool, sink):
    """Against what the simulators and the sink counted themselves."""
    account = wrapper.account()
    assert account.closes and account.in_flight == 0
    assert account.started == pool.steps_taken
    assert account.sent == sum(fragment.trainable_steps for fragment in sink.fragments)
    assert account.sent_faults == sum(int(fragment.faults.sum()) for fragment in sink.fragments)
    return account


def test_a_life_in_good_order():
    pool, sink, events = FakePool(4), ListSink(), []
    wrapper = wrapper_of(pool, FakeRunner(4), sink, events=events)
    assert wrapper.condition().state == "new"
    wrapper.start()
    wait_until(lambda: len(sink.fragments) >= 12)
    assert wrapper.condition().state == "running" and wrapper.account().closes
    assert wrapper.stop(10) == []
    account = check_account(wrapper, pool, sink)
    assert account.started == account.sent + account.abandoned and account.abandoned <= 4 * 5
    assert pool.closed and wrapper.condition().state == "ended" and wrapper.stop(1) == []
    assert [kind for kind, _ in events] == ["worker_started", "worker_ended"]
    assert len({fragment.group_id for fragment in sink.fragments}) == len(sink.fragments)
    threads = {thread.name for thread in threading.enumerate()}
    assert not threads & {"w.rollout", "w.sender", "w.weights"}


def test_while_its_threads_are_being_started_it_is_new_and_never_ended(monkeypatch):
    wrapper, states, start = wrapper_of(FakePool(4), FakeRunner(4), ListSink()), [], threading.Thread.start

    def looked_at(thread):
        states.append(wrapper.condition().state)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", looked_at)
        wrapper.start()
    assert states == ["new", "new"]
    assert wrapper.stop(10) == [] and wrapper.condition().state == "ended"


def test_what_is_complete_is_sent_before_it_ends():
    pool, sink = FakePool(4), ListSink()
    sink.gate.clear()
    wrapper = wrapper_of(pool, FakeRunner(4), sink)
    wrapper.start()
    wait_until(lambda: wrapper.metrics()["fleet/queue_depth"] >= 10)
    sink.gate.set()
    assert wrapper.stop(20) == []
    account = check_account(wrapper, pool, sink)
    assert account.abandoned <= 4 * 5, "only what was in no complete fragment"


def test_what_the_last_inference_completes_is_sent_although_the_weights_thread_ended_before():
    pool, sink = FakePool(2), ListSink()
    wrapper = wrapper_of(pool, FakeRunner(2, None, inference_s=0.35), sink, published(0), fragment_length=1)
    wrapper.start()
    wait_until(lambda: wrapper.account().started >= 2)
    assert wrapper.stop(20) == []
    account = check_account(wrapper, pool, sink)
    assert account.abandoned == 2 and account.sent == account.started - 2 > 0


def test_a_sink_that_hangs_does_not_keep_it_from_ending():
    pool, sink = FakePool(4), ListSink()
    sink.gate.clear()
    wrapper = wrapper_of(pool, FakeRunner(4), sink, queue_fragments=3)
    wrapper.start()
    wait_until(lambda: wrapper.metrics()["fleet/blocked_s"] > 0)
    began = time.monotonic()
    late = wrapper.stop(0.3)
    assert late == ["w.sender"] and time.monotonic() - began < 5
    account = wrapper.account()
    assert account.closes and account.in_flight == 0 and account.sent == 0 and account.abandoned == account.started
    sink.gate.set()
    wait_until(lambda: wrapper.condition().state == "ended")
    assert wrapper.account().closes and wrapper.account().started == pool.steps_taken


def test_simulators_that_a_full_queue_blocks_end_at_once_and_the_account_closes():
    pool, sink = FakePool(4), ListSink()
    sink.gate.clear()
    wrapper = wrapper_of(pool, FakeRunner(4), sink, queue_fragments=3, send_timeout_s=60.0)
    wrapper.start()
    wait_until(lambda: sink.entered.is_set() and wrapper.metrics()["fleet/blocked_s"] > 0.2)
    late = []
    stop = threading.Thread(target=lambda: late.append(wrapper.stop(30)))
    stop.start()
    wait_until(lambda: pool.closed)
    assert stop.is_alive(), "what the queue holds may still be sent"
    sink.gate.set()
    stop.join(10)
    account = check_account(wrapper, pool, sink)
    assert late == [[]] and account.sent > 0 and 5 <= account.abandoned <= 4 * (5 + 1)


@pytest.mark.parametrize("policy", ["block", "drop_oldest"])
def test_the_account_closes_under_faults_deaths_ends_and_staleness(policy):
    chance = np.random.default_rng(3)
    script = Script(
        ends=lambda slot, episode, step: "truncated" if chance.random() < 0.1 else None,
        faults=lambda slot, episode, step: chance.random() < 0.1,
        kills=lambda process, acts: chance.random() < 0.02, restart_s=0.002,
    )  # fmt: skip
    pool, sink, weights = FakePool(3, 2, script), ListSink(delay_s=0.004), published(0)
    wrapper = wrapper_of(
        pool, FakeRunner(6, None), sink, weights, full_queue=policy, queue_fragments=2, max_staleness=1,
        envs_per_process=2,
    )  # fmt: skip
    wrapper.start()
    for step in range(1, 60):
        published(step, weights)
        assert wrapper.account().closes
        time.sleep(0.005)
    wait_until(lambda: len(sink.fragments) > 20)
    wrapper.stop(10)
    account = check_account(wrapper, pool, sink)
    assert account.sent_faults > 0 and account.stale > 0
    assert (account.dropped > 0) == (policy == "drop_oldest")
    assert (wrapper.metrics()["fleet/blocked_s"] > 0) == (policy == "block")


class CountsSteps:
    """A user's policy: acts with the number of its steps in the episode, and knows it from its own state."""

    def __init__(self):
        self.gain = 0.0

    def initial_state(self, batch):
        return {"steps": np.zeros(batch, np.int64)}

    def act(self, observations, state, key):
        n, steps = len(state["steps"]), state["steps"]
        return steps % ACTIONS, np.full(n, -1.0), steps + self.gain, {"steps": steps + 1}

    def set_arrays(self, arrays):
        self.gain = float(arrays["w"][0])


def test_any_object_that_acts_rolls_out():
    pool, sink = FakePool(4), ListSink()
    runner = UserPolicyRunner(CountsSteps(), pool.spaces, pool.num_slots, seed=0)
    wrapper = wrapper_of(pool, runner, sink, published(3))
    wrapper.start()
    wait_until(lambda: len(sink.fragments) >= 12)
    wrapper.stop(10)
    check_account(wrapper, pool, sink)
    for fragment in sink.fragments:
        step = fragment.observations[""][:, 2]
        np.testing.assert_array_equal(fragment.actions[""], step[:-1] % ACTIONS)
        np.testing.assert_array_equal(fragment.values, step + 3.0)
        assert fragment.initial_state["steps"] == step[0] and (fragment.weight_steps == 3).all()


def test_a_version_belongs_to_its_arrays_while_weights_change():
    pool, sink, weights = FakePool(4), ListSink(), published(0)
    wrapper = wrapper_of(pool, FakeRunner(4, None), sink, weights)
    wrapper.start()
    for step in range(1, 200):
        published(step, weights)
        time.sleep(0.0005)
    wait_until(lambda: sink.fragments and sink.fragments[-1].oldest_weight_step == 199)
    wrapper.stop(10)
    for fragment in sink.fragments:
        np.testing.assert_array_equal(fragment.values[:-1] // 1000, fragment.weight_steps)
        assert fragment.metadata.weight_step == fragment.weight_steps[0]
    assert len({step for fragment in sink.fragments for step in fragment.weight_steps.tolist()}) > 5
    lag = wrapper.metrics()
    assert 0 <= lag["fleet/lag_min"] <= lag["fleet/lag_mean"] <= lag["fleet/lag_max"]


class SlowSource:
    """Publishes 2 while 1 is being loaded; superseded and silent once each."""

    def __init__(self):
        self.newest, self.fetched, self.trouble = 1, [], [UnreachableError("silent"), SupersededVersionError("gone")]

    def latest(self):
        return WeightVersion(0, self.newest)

    def wait_for(self, newer_than, timeout_s):
        if newer_than is None or newer_than.step < self.newest:
            return WeightVersion(0, self.newest)
        time.sleep(min(timeout_s, 0.01))
        return None

    def fetch(self, version):
        if self.trouble:
            raise self.trouble.pop()
        self.fetched.append(version.step)
        self.newest = 2
        return {"w": np.array([float(version.step)])}


def test_a_version_published_during_a_load_is_loaded_next():
    pool, sink, source, runner = FakePool(2), ListSink(), SlowSource(), FakeRunner(2, None)
    wrapper = wrapper_of(pool, runner, sink, source)
    wrapper.start()
    wait_until(lambda: any(fragment.weight_steps[0] == 2 for fragment in list(sink.fragments)))
    wrapper.stop(10)
    assert source.fetched == [1, 2] and not source.trouble and wrapper.failure is None
    assert wrapper.metrics()["fleet/weight_loads"] == 2


def test_rolling_out_waits_for_the_first_weights_only():
    pool, sink, weights = FakePool(2), ListSink(), InProcessBroadcaster()
    wrapper = wrapper_of(pool, FakeRunner(2, None), sink, weights)
    wrapper.start()
    wait_until(lambda: pool.started)
    time.sleep(0.05)
    assert pool.steps_taken == 0 and wrapper.condition().state == "starting"
    published(4, weights)
    wait_until(lambda: len(sink.fragments) > 2)
    assert sink.fragments[0].weight_steps.tolist() == [4] * 5 and wrapper.condition().version == WeightVersion(0, 4)
    weights.close()
    wait_until(lambda: wrapper.condition().state == "ended")
    assert wrapper.failure is None


def test_weights_that_never_come_are_named():
    pool = FakePool(2)
    wrapper = wrapper_of(pool, FakeRunner(2, None), ListSink(), InProcessBroadcaster(), first_weights_timeout_s=0.05)
    wrapper.start()
    wait_until(lambda: wrapper.condition().state == "failed")
    assert isinstance(wrapper.failure, NoProgressError) and "w waited 0.05 s for the first weights" in str(
        wrapper.failure
    )
    assert pool.closed


def broken_pool():
    pool = FakePool(2)
    wait_until(lambda: True)
    pool.start = lambda timeout_s: (_ for _ in ()).throw(RuntimeError("it broke: pool"))
    return pool


class BrokenRunner(FakeRunner):
    def decide(self, slots, observations, first):
        if len(self.batches) == 20:
            raise RuntimeError("it broke: runner")
        return super().decide(slots, observations, first)

    def set_weights(self, version, arrays):
        if version.step == 1:
            raise RuntimeError("it broke: weights")
        super().set_weights(version, arrays)


@pytest.mark.parametrize("part", ["pool", "runner", "weights", "sink"])
def test_a_failure_of_any_part_ends_all_threads_and_is_told(part):
    pool = broken_pool() if part == "pool" else FakePool(2)
    sink = ListSink(fails_at=2, error=RuntimeError("it broke: sink")) if part == "sink" else ListSink()
    runner = BrokenRunner(2) if part in ("runner", "weights") else FakeRunner(2)
    weights = published(int(part == "weights"))
    events = []
    wrapper = wrapper_of(pool, runner, sink, weights, events, queue_fragments=2)
    wrapper.start()
    wait_until(lambda: wrapper.condition().state == "failed")
    assert wrapper.condition().failure == f"RuntimeError: it broke: {part}"
    assert [values["reason"] for kind, values in events if kind == "worker_failed"] == [
        f"RuntimeError: it broke: {part}"
    ]
    assert pool.closed and wrapper.stop(5) == []
    check_account(wrapper, pool, sink)


def test_a_sink_that_was_closed_ends_it_without_a_failure():
    pool = FakePool(2)
    wrapper = wrapper_of(pool, FakeRunner(2), ListSink(fails_at=3, error=Stopped("closed")))
    wrapper.start()
    wait_until(lambda: wrapper.condition().state == "ended")
    assert wrapper.failure is None


def test_reports_can_be_asked_for_again():
    pool, sink, handled = FakePool(2), ListSink(), []
    wrapper = RolloutWorkerWrapper("w", 3, config_of(2), pool, FakeRunner(2), sink, None, on_batch=[handled.append])
    assert wrapper.report().episodes == []
    wrapper.start()
    wait_until(lambda: len(pool.returns[0]) > 3)
    wrapper.stop(5)
    first, again = wrapper.report(), wrapper.report()
    assert first.episodes == again.episodes and first.next_episode == len(first.episodes)
    assert wrapper.report(first.next_episode).episodes == []
    assert first.condition.incarnation == 3 and len(handled) > 10
    assert sink.fragments[0].group_id == "w-3-0-0"
    metrics = wrapper.metrics()
    assert metrics["fleet/live"] == 2 and metrics["fleet/steps_started"] == pool.steps_taken
    assert metrics["fleet/weight_step"] == 0 and metrics["fleet/fragments_sent"] == len(sink.fragments)


def test_it_tells_when_it_has_another_version():
    events, broadcaster = [], published(4)
    wrapper = wrapper_of(FakePool(1), FakeRunner(1), ListSink(), weights=broadcaster, events=events)
    began = time.time()
    wrapper.start()
    wait_until(lambda: "weights_served" in [kind for kind, _ in events])
    published(6, broadcaster)
    wait_until(lambda: [kind for kind, _ in events].count("weights_served") == 2)
    wrapper.stop(10)
    told = [fields for kind, fields in events if kind == "weights_served"]
    assert [fields["version"] for fields in told] == [[0, 4], [0, 6]]
    assert {(fields["worker"], fields["incarnation"]) for fields in told} == {("w", 0)}
    assert began <= told[0]["time"] <= told[1]["time"] <= time.time()
