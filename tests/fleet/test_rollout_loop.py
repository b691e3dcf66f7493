"""The worker's loop: when inference begins, that both sides overlap, and that nothing waits for the absent."""

import threading
import time

import numpy as np
import pytest
from tests.fleet.fake_pool import FakePool, FakeRunner, Script

from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.fleet.pipeline_monitor import PipelineMonitor
from penstock.fleet.rollout_loop import BatchFiller, RolloutWorker

pytestmark = pytest.mark.timeout(60)


def config_of(envs=4, **more) -> FleetConfig:
    return FleetConfig(tasks={"fake": SimulatorConfig(id="Fake-v0")}, envs_per_worker=envs, **more)


def worker_of(pool, runner, handler=lambda batch: None, **more):
    pool.start(1)
    return RolloutWorker(pool, runner, config_of(pool.num_slots, **more), handler)


def play(worker, steps, limit_s=20.0):
    done, deadline = 0, time.monotonic() + limit_s
    while done < steps:
        assert time.monotonic() < deadline, f"{done} of {steps} steps"
        done += worker.run_once(0.05)
    return done + worker.finish()


def test_every_step_is_reported_once_and_acted_on_once():
    pool, runner, seen = FakePool(6, 2, order=np.random.default_rng(0)), FakeRunner(12), []

    def handler(batch):
        seen.extend(
            (*where.astype(int), int(action), float(value))
            for where, action, value in zip(
                batch.observations[""], batch.decision.actions[""], batch.decision.values, strict=True
            )
        )

    steps = play(worker_of(pool, runner, handler, envs_per_process=2), 300)
    truth = sorted((*step.observation, step.action) for steps in pool.truth for step in steps)
    assert sorted(row[:4] for row in seen) == truth and len(truth) == steps == pool.steps_taken
    assert all(value == step for _, _, step, _, value in seen)


def test_a_batch_holds_most_in_batch_and_never_more():
    pool, runner = FakePool(8), FakeRunner(8)
    play(worker_of(pool, runner, batch_size=3, max_wait_ms=10_000), 90)
    sizes = {len(batch) for batch in runner.batches}
    assert sizes == {3}


def test_processes_act_as_wholes():
    pool, runner = FakePool(3, 2), FakeRunner(6)
    play(worker_of(pool, runner, batch_size=5, envs_per_process=2, max_wait_ms=10_000), 40)
    assert {len(batch) for batch in runner.batches} == {4}
    assert all(
        batch.reshape(-1, 2)[:, 0].tolist() == (batch.reshape(-1, 2)[:, 1] - 1).tolist() for batch in runner.batches
    )


def test_a_batch_smaller_than_a_process_takes_the_process_whole():
    pool, runner = FakePool(2, 3), FakeRunner(6)
    play(worker_of(pool, runner, batch_size=1, envs_per_process=3, max_wait_ms=10_000), 12)
    assert {len(batch) for batch in runner.batches} == {3}


@pytest.mark.parametrize(
    ("batch_size", "parts", "most"), [(None, 1, 6), (1, 1, 4), (5, 1, 5), (99, 1, 12), (1, 2, 2), (1, 4, 1)]
)
def test_a_policy_is_made_for_as_many_as_a_batch_may_hold(batch_size, parts, most):
    shape = {"envs_per_worker": 12, "envs_per_process": 4, "parts_per_process": parts, "batch_size": batch_size}
    assert FleetConfig(tasks={"t": SimulatorConfig(id="CartPole-v1")}, **shape).most_in_batch == most


def test_a_batch_that_is_not_full_begins_after_the_longest_wait():
    slow = Script(delay_s=lambda process: 30.0 if process == 1 else 0.0)
    pool, runner = FakePool(2, script=slow), FakeRunner(2)
    worker = worker_of(pool, runner, batch_size=2, max_wait_ms=30)
    assert play(worker, 2) == 2
    began = time.monotonic()
    assert play(worker, 1) == 1 and runner.batches[-1].tolist() == [0]
    assert 0.03 <= time.monotonic() - began < 5
    monitor = worker._monitor.metrics()
    assert monitor["fleet/wait_p99_s"] >= 0.029 and monitor["fleet/batch_slots_mean"] == 1.5


def test_a_batch_that_is_not_full_sleeps_until_it_is_due():
    pool = FakePool(2, script=Script(delay_s=lambda process: 30.0 if process == 1 else 0.0))
    worker = worker_of(pool, FakeRunner(2), batch_size=2, max_wait_ms=200)
    play(worker, 2)
    polls, used = pool.polls, time.process_time()
    play(worker, 1)
    assert pool.polls - polls <= 6 and time.process_time() - used < 0.1


def test_the_wait_is_that_of_the_first_slot():
    pool = FakePool(2)
    pool.start(1)
    filler = BatchFiller(pool.spaces, 2)
    for now, arrival in enumerate(pool.poll(0)):
        filler.add(arrival, 5.0 + now)
    assert filler.count == 2 and filler.first_at == 5.0


def test_the_room_of_a_batch_lies_where_a_device_reads_it_in_place():
    pool = FakePool(2)
    pool.start(1)
    room = BatchFiller(pool.spaces, 5).room
    assert all(len(array) == 5 and array.ctypes.data % 64 == 0 for array in room.values())


def test_what_was_acted_on_before_an_action_failed_is_reported():
    pool, reported = FakePool(2), []
    worker = worker_of(pool, FakeRunner(2), lambda batch: reported.append(batch.slots.tolist()), batch_size=2)
    act = pool.act

    def fail_at_one(process, actions, part):
        if process == 1:
            raise RuntimeError("the pool broke")
        act(process, actions, part)

    pool.act = fail_at_one
    with pytest.raises(RuntimeError, match="the pool broke"):
        play(worker, 2)
    assert reported == [[0, 1]] and pool.steps_taken == 1


def test_no_batch_waits_for_the_quarantined():
    pool, runner = FakePool(4), FakeRunner(4)
    worker = worker_of(pool, runner, batch_size=4, max_wait_ms=10_000)
    pool.quarantine(3)
    assert play(worker, 30) == 30
    assert {tuple(sorted(batch.tolist())) for batch in runner.batches} == {(0, 1, 2)}


def test_a_dead_simulator_comes_back_while_others_play():
    script = Script(kills=lambda process, acts: (process, acts) == (0, 3), restart_s=0.15)
    pool, runner = FakePool(4, script=script), FakeRunner(4)
    worker = worker_of(pool, runner, batch_size=4, max_wait_ms=1)
    while not pool.counts()["restarts"]:
        play(worker, 1)
    others = len(pool.truth[1])
    while len(pool.truth[0]) < 5:
        play(worker, 1)
    assert len(pool.truth[1]) > others + 10
    assert [step.fault for step in pool.truth[0]][:4] == [False, False, True, False]
    assert pool.truth[0][2].truncated and pool.truth[0][3].observation == (0, 1, 0)


def test_arrivals_are_taken_in_while_inference_runs():
    pool, runner = FakePool(4), FakeRunner(4, inference_s=0.03)
    worker = worker_of(pool, runner, batch_size=2, max_wait_ms=10_000)
    worker.run_once(1)
    assert len(runner.batches) == 1 and worker._filling.count == 2
    assert worker.run_once(1) == 2
    assert len(runner.batches) == 2, "the next inference begins before anything else arrives"


def test_the_next_inference_begins_before_the_batch_is_reported():
    pool, runner, begun = FakePool(4), FakeRunner(4), []
    worker = worker_of(pool, runner, lambda batch: begun.append(len(runner.batches)), batch_size=2, max_wait_ms=10_000)
    worker.run_once(1)
    worker.run_once(1)
    assert begun == [2]


def test_reported_arrays_hold_while_the_handler_runs():
    pool, runner, wrong = FakePool(4, image=(20, 20, 3)), FakeRunner(4), []

    def handler(batch):
        frames = batch.observations["where"].sum(1).astype(np.uint8)
        wrong.extend(batch.observations["image"][:, 0, 0, 0] != frames)
        wrong.extend(batch.decision.values % 1000 != batch.observations["where"][:, 2])

    play(worker_of(pool, runner, handler, batch_size=2), 100)
    assert len(wrong) >= 200 and not any(wrong)


def test_an_idle_loop_sleeps_and_stops_when_asked():
    pool = FakePool(1, script=Script(delay_s=lambda process: 30.0))
    worker, stopping = worker_of(pool, FakeRunner(1)), threading.Event()
    thread = threading.Thread(target=worker.run, args=(stopping,))
    thread.start()
    while not pool.truth[0]:
        time.sleep(0.001)
    polls, used = pool.polls, time.process_time()
    time.sleep(0.3)
    assert pool.polls - polls <= 3 and time.process_time() - used < 0.15
    stopping.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_batch_says_how_long_its_slots_were_worked_on():
    told = []
    pool, runner = FakePool(2, 2), FakeRunner(4, inference_s=0.002)
    play(worker_of(pool, runner, told.append), 20)
    assert min(batch.inference_s for batch in told) >= 0.002
    assert {tuple(batch.simulate_s) for batch in told} <= {(0.001,) * 2, (0.001,) * 4}
    assert all(len(batch.simulate_s) == len(batch.slots) for batch in told)


def test_stages_are_told_to_the_monitor():
    pool, runner = FakePool(4), FakeRunner(4, inference_s=0.002)
    worker = worker_of(pool, runner, batch_size=2)
    steps = play(worker, 20)
    metrics = worker._monitor.metrics()
    assert isinstance(worker._monitor, PipelineMonitor)
    assert metrics["fleet/steps_total"] == steps
    assert metrics["fleet/inference_p50_s"] >= 0.002 and metrics["fleet/step_p50_s"] == 0.001
    assert {f"fleet/{stage}_p50_s" for stage in ("wait", "receive", "send", "report")} <= set(metrics)
    assert metrics["fleet/batch_fill_to_100"] == 1.0
