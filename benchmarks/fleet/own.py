"""Our fleet, measured in a process of its own: policy, fragments and monitoring on.

    python -m benchmarks.fleet.own WORKLOAD SECONDS WARM_UP_S
    python -m benchmarks.fleet.own WORKLOAD

The second plays until its input ends, one side of `benchmarks.fleet.alternating`.

The whole of a rollout worker runs as in training, `RolloutWorkerWrapper` with its threads over `SimulatorPool` and
`JaxPolicyRunner`; only the sink throws away what it gets, and no weights arrive. The policy averages frames to 16 x 16
and has two hidden layers of 64. Measured after a warm-up that begins when every slot has filled SETTLED_FRAGMENTS:
until then fragments are written to memory that the system has yet to give. Prints one JSON line.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

from benchmarks.fleet.alternating import PROCESSES, answer_lines
from benchmarks.fleet.counting import Tally, ThrowingAway, processor_s, rates, rates_during_gaps
from benchmarks.fleet.workloads import SLOW_RESET_S, SLOW_TASK, WORKLOADS, Workload
from penstock.fleet import FleetConfig, RolloutWorkerWrapper, SimulatorPool
from penstock.fleet.jax_policy import JaxPolicyRunner, compute_inline
from penstock.model.control import ControlModelConfig, make_control_policy
from penstock.overseer.config import RoleConfig
from penstock.overseer.kind import processor_environment
from penstock.types import RunFailed

START_S, STOP_S = 120.0, 30.0
POLICY = ControlModelConfig(network="mlp", pooled_size=16, hidden_sizes=(64, 64))
SEED = 1
SETTLED_FRAGMENTS = 2
"""The slots' first arrays are written again in the third."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Numbers that only grow."""

    at_s: float
    steps: int
    resets: int
    batches: int
    main_s: float
    simulators_s: float

    @classmethod
    def now(cls, tally: Tally, pool: SimulatorPool) -> Self:
        simulators_s = processor_s(pool.process_ids())
        return cls(time.perf_counter(), tally.steps, tally.resets, tally.batches, time.process_time(), simulators_s)

    def rates_until(self, later: Self) -> dict[str, float]:
        """Per second, and per batch."""
        return rates({name: after - getattr(self, name) for name, after in asdict(later).items()})


def started_worker(
    config: FleetConfig, tally_of: Any, sink: Any, weights_of: Any = lambda policy: None
) -> tuple[RolloutWorkerWrapper, SimulatorPool, Any]:
    """A worker that rolls out, its pool, and its handler, made of the pool by `tally_of`; that has seen everyone."""
    pool = SimulatorPool(config, "worker-0", SEED)
    try:
        pool.start(START_S)
        compute_inline()
        policy = make_control_policy(POLICY, pool.spaces, SEED)
        runner = JaxPolicyRunner(policy, pool.num_slots, config.most_in_batch, SEED)
        runner.compile()
    except BaseException:
        pool.close()
        raise
    tally = tally_of(pool)
    wrapper = RolloutWorkerWrapper("worker-0", 0, config, pool, runner, sink, weights_of(policy), on_batch=[tally])
    wrapper.start()
    if not tally.everyone.wait(START_S):
        wrapper.stop(STOP_S)
        raise RunFailed(f"not every simulator made its first steps within {START_S:g} s: {wrapper.condition()}")
    return wrapper, pool, tally


@contextmanager
def playing(workload: Workload) -> Iterator[tuple[RolloutWorkerWrapper, SimulatorPool, Tally]]:
    """Our fleet while the context lasts, once all of it is settled; afterwards its books are checked.

    Raises:
        RunFailed: it did not start, failed, or lost a step.
    """
    sink, config = ThrowingAway(), workload.fleet_config()

    def tally_of(pool: SimulatorPool) -> Tally:
        watched = pool.tasks.index(SLOW_TASK) if SLOW_TASK in pool.tasks else None
        return Tally(pool.num_slots, watched, SETTLED_FRAGMENTS * config.fragment_length)

    wrapper, pool, tally = started_worker(config, tally_of, sink)
    try:
        yield wrapper, pool, tally
        sink.begun.wait(START_S)
    finally:
        late = wrapper.stop(STOP_S)
    check(wrapper, sink, late)


def measure(workload: Workload, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Rates, shares of one processor, and how full batches were."""
    with playing(workload) as (_, pool, tally):
        time.sleep(warm_up_s)
        begin, seen = Moment.now(tally, pool), len(tally.moments)
        time.sleep(seconds)
        found = begin.rates_until(Moment.now(tally, pool))
        moments = tally.moments[seen:]
    if workload.ideal == "others_during_reset":
        found["others_during"], found["others_otherwise"] = rates_during_gaps(moments, SLOW_RESET_S / 2)
    return found


def check(wrapper: RolloutWorkerWrapper, sink: Any, late: list[str]) -> None:
    """Whether all went well and every step is accounted for, here and at the sink.

    Raises:
        RunFailed: not so.
    """
    account = wrapper.account()
    books = account.closes and account.in_flight == 0
    if wrapper.failure is not None or late or not books or sink.trainable + sink.faults == 0:
        raise RunFailed(f"{wrapper.failure!r}, late {late}, {account}, sent {sink.trainable} + {sink.faults}")
    if (account.sent, account.sent_faults) != (sink.trainable, sink.faults):
        raise RunFailed(f"{account}, but the sink was given {sink.trainable} steps and {sink.faults} faults")


def main(name: str, seconds: str | None = None, warm_up_s: str = "0") -> None:
    workload = WORKLOADS[name]
    os.environ.update(processor_environment(RoleConfig()))  # as a rollout worker in a process of its own has it
    if seconds is not None:
        print(json.dumps(measure(workload, float(seconds), float(warm_up_s))))
        return
    with playing(workload) as (_, pool, tally):
        answer_lines(lambda: asdict(Moment.now(tally, pool)) | {PROCESSES: [pid for pid in pool.process_ids() if pid]})


if __name__ == "__main__":
    main(*sys.argv[1:])
