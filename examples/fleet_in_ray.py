"""A fleet in a Ray program of one's own: the manager is an actor, and so is each rollout worker.

    python examples/fleet_in_ray.py

A training run under `runtime: ray` needs none of this: there the overseer makes and watches the workers. Here
`RolloutManager` does, for programs that want fragments and bring their own learner. The manager broadcasts weights
once, each worker fetches them over Arrow Flight beside its rollout, and fragments go to any object with `add_batches`.
"""

import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray

from penstock.fleet import (
    FleetConfig,
    JaxPolicyRunner,
    RolloutManager,
    RolloutWorkerWrapper,
    SimulatorPool,
    WorkerReport,
)
from penstock.model.control import ControlModelConfig, ControlPolicy, make_control_policy, named_arrays
from penstock.types import WeightVersion, fold
from penstock.weights import WeightsConfig, open_broadcaster, open_client

WEIGHTS = WeightsConfig(transport="arrow_flight")
ANSWER_S, START_S = 20.0, 120.0


class Collector:
    """An actor in the learner's place: takes fragments, counts their steps."""

    def __init__(self) -> None:
        self.steps = 0

    def add_batches(self, batches: Any) -> None:
        """See `penstock.types.RolloutSink`."""
        self.steps += sum(fragment.length for batch in batches for fragment in batch.rollouts())

    def collected(self) -> int:
        """Steps so far."""
        return self.steps


class Sink:
    """Sends fragments to the collector; waits until it has them, so that a slow one slows the fleet."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def add_batches(self, batches: Any) -> None:
        """See `penstock.types.RolloutSink`."""
        ray.get(self._collector.add_batches.remote(batches), timeout=ANSWER_S)


class Worker(RolloutWorkerWrapper):
    """An actor: one life of a rollout worker, with simulators, policy, sender and weights of its own."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        config: FleetConfig,
        policy: ControlPolicy,
        collector: Any,
        endpoint: Mapping[str, Any],
        token: str,
    ) -> None:
        seed = fold(0, name, incarnation)  # a replaced worker plays other episodes
        runner = JaxPolicyRunner(policy, config.envs_per_worker, config.most_in_batch, seed)
        weights = open_client(endpoint, WEIGHTS, token, f"{name}.{incarnation}")
        super().__init__(name, incarnation, config, SimulatorPool(config, name, seed), runner, Sink(collector), weights)


class RemoteWorker:
    """A worker's actor as the manager sees it (`penstock.fleet.FleetWorker`); one that died has failed."""

    def __init__(self, *arguments: Any) -> None:
        self._actor = ray.remote(Worker).options(max_concurrency=4, max_restarts=0).remote(*arguments)
        self._last: WorkerReport = ray.get(self._actor.report.remote(), timeout=START_S)

    def start(self) -> None:
        """See `FleetWorker.start`."""
        ray.get(self._actor.start.remote(), timeout=START_S)

    def stop(self, timeout_s: float) -> list[str]:
        """See `FleetWorker.stop`; whatever did not end ends with the actor's process."""
        try:
            return ray.get(self._actor.stop.remote(timeout_s), timeout=timeout_s + ANSWER_S)
        except ray.exceptions.RayActorError:
            return []
        finally:
            ray.kill(self._actor)

    def report(self, since_episode: int = 0) -> WorkerReport:
        """See `FleetWorker.report`; of a dead actor the last one, with what happened."""
        try:
            self._last = ray.get(self._actor.report.remote(since_episode), timeout=ANSWER_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            failure = f"its actor does not answer: {type(error).__name__}"
            condition = replace(self._last.condition, state="failed", failure=failure)
            self._last = replace(self._last, condition=condition, episodes=[])
        return self._last


class Fleet(RolloutManager):
    """An actor: makes and supervises workers, publishes weights once for all of them, adds up what they say."""

    def __init__(self, config: FleetConfig, policy: ControlPolicy, collector: Any) -> None:
        token = secrets.token_hex(16)
        broadcaster = open_broadcaster(WEIGHTS, "fleet-in-ray", token, tempfile.gettempdir())

        def make_worker(name: str, incarnation: int) -> RemoteWorker:
            return RemoteWorker(name, incarnation, config, policy, collector, broadcaster.endpoint(), token)

        super().__init__(config, make_worker, broadcaster=broadcaster)


def untrained_policy(config: FleetConfig) -> ControlPolicy:
    """One for the spaces that a simulator of the fleet has."""
    pool = SimulatorPool(config.model_copy(update={"envs_per_worker": 1}), "probe", 0)
    try:
        pool.start(START_S)
        return make_control_policy(ControlModelConfig(hidden_sizes=(16, 16)), pool.spaces, 0)
    finally:
        pool.close()


def main() -> None:
    """Plays CartPole in two actors of four simulators until 5,000 steps have come."""
    config = FleetConfig.model_validate({
        "tasks": {"pole": {"id": "CartPole-v1"}}, "workers": 2, "envs_per_worker": 4, "fragment_length": 32,
    })  # fmt: skip
    ray.init(num_cpus=8, include_dashboard=False)
    try:
        policy = untrained_policy(config)
        collector = ray.remote(Collector).options(num_cpus=0).remote()
        fleet = ray.remote(Fleet).options(max_concurrency=4).remote(config, policy, collector)
        ray.get(fleet.start.remote(), timeout=START_S)
        ray.get(fleet.update_model.remote(WeightVersion(0, 1), named_arrays(policy)), timeout=START_S)
        deadline = time.monotonic() + START_S
        while ray.get(collector.collected.remote(), timeout=ANSWER_S) < 5000:
            ray.get(fleet.supervise.remote(), timeout=START_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"5,000 steps did not come within {START_S:g} s")
            time.sleep(0.2)
        statistics = ray.get(fleet.log_statistics.remote(), timeout=ANSWER_S)
        print(f"{statistics['fleet/steps_sent']:,.0f} steps sent by {statistics['fleet/workers']:.0f} workers")
        print(
            f"{statistics['fleet/pole/episodes']:.0f} episodes, mean return {statistics['fleet/pole/reward_mean']:.1f}"
        )
        ray.get(fleet.stop.remote(), timeout=START_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
