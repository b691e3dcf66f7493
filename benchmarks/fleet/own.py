"""Our fleet, measured in a process of its own: policy, fragments and monitoring on.

    python -m benchmarks.fleet.own WORKLOAD SECONDS WARM_UP_S [ENVS]

The whole of a rollout worker runs as in training, `RolloutWorkerWrapper` with its threads over `SimulatorPool` and
`JaxPolicyRunner`; only the sink throws away what it gets, and no weights arrive. The policy averages frames to 16 x 16
and has two hidden layers of 64. Measured from when every simulator has stepped, after a warm-up. Prints one JSON line.
"""

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.counting import Tally, ThrowingAway, processor_s, rates_during_gaps
from benchmarks.fleet.workloads import SLOW_RESET_S, SLOW_TASK, WORKLOADS, Workload
from penstock.fleet import FleetConfig, RolloutWorkerWrapper, SimulatorPool
from penstock.fleet.policy_call import compute_inline
from penstock.fleet.policy_runner import JaxPolicyRunner
from penstock.model.control import ControlModelConfig, make_control_policy
from penstock.types import RunFailed

START_S, STOP_S = 120.0, 30.0
POLICY = ControlModelConfig(network="mlp", pooled_size=16, hidden_sizes=(64, 64))
SEED = 1


@dataclass(frozen=True, slots=True)
class Moment:
    """Numbers that only grow."""

    at_s: float
    steps: int
    resets: int
    main_s: float
    simulators_s: float

    @classmethod
    def now(cls, tally: Tally, pool: SimulatorPool) -> "Moment":
        return cls(time.perf_counter(), tally.steps, tally.resets, time.process_time(), processor_s(pool.process_ids()))

    def rates_until(self, later: "Moment") -> dict[str, float]:
        """Per second."""
        seconds = later.at_s - self.at_s
        return {
            "steps_per_s": (later.steps - self.steps) / seconds,
            "resets_per_s": (later.resets - self.resets) / seconds,
            "main_cpu": (later.main_s - self.main_s) / seconds,
            "simulators_cpu": (later.simulators_s - self.simulators_s) / seconds,
        }


def started_worker(
    config: FleetConfig, tally_of: Any, sink: Any, weights_of: Any = lambda policy: None
) -> tuple[RolloutWorkerWrapper, SimulatorPool, Any]:
    """A worker that rolls out, its pool, and the handler that `tally_of` makes of the pool; all have stepped."""
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
        raise RunFailed(f"not every simulator stepped within {START_S:g} s: {wrapper.condition()}")
    return wrapper, pool, tally


def measure(workload: Workload, seconds: float, warm_up_s: float) -> dict[str, float]:
    """Rates, shares of one processor, and how full batches were."""
    sink = ThrowingAway()
    wrapper, pool, tally = started_worker(workload.fleet_config(), _tally_of, sink)
    try:
        time.sleep(warm_up_s)
        begin, seen = Moment.now(tally, pool), len(tally.moments)
        time.sleep(seconds)
        found = begin.rates_until(Moment.now(tally, pool))
        moments = tally.moments[seen:]
        timings = wrapper.metrics()
        sink.begun.wait(START_S)
    finally:
        late = wrapper.stop(STOP_S)
    check(wrapper, sink, late)
    found |= {name: timings[f"fleet/{name}"] for name in ("batch_slots_mean", "inference_p50_s", "wait_p50_s")}
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


def _tally_of(pool: SimulatorPool) -> Tally:
    return Tally(pool.num_slots, pool.tasks.index(SLOW_TASK) if SLOW_TASK in pool.tasks else None)


def main(name: str, seconds: str, warm_up_s: str, envs: str = "0") -> None:
    workload = WORKLOADS[name].smaller(int(envs)) if int(envs) else WORKLOADS[name]
    print(json.dumps(measure(workload, float(seconds), float(warm_up_s))))


if __name__ == "__main__":
    main(*sys.argv[1:])
