"""`examples/fleet_in_ray.py`: manager and rollout workers as actors, one of which is killed."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

from penstock.environments.simulators.processes import command_line, descendants
from penstock.fleet import FleetConfig
from penstock.model.control import named_arrays
from penstock.types import WeightVersion

pytestmark = pytest.mark.ray
EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet_in_ray.py"
LIMIT_S = 280.0


@pytest.fixture
def example():
    import ray

    found = importlib.util.spec_from_file_location("fleet_in_ray", EXAMPLE)
    module = importlib.util.module_from_spec(found)
    sys.modules["fleet_in_ray"] = module  # dataclasses and pickles look there
    found.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    ray.init("local", num_cpus=8, include_dashboard=False)  # whatever cluster other tests have
    yield module
    ray.shutdown()
    del sys.modules["fleet_in_ray"]


def test_manager_and_workers_are_actors_and_one_that_is_killed_is_replaced(example):
    import ray

    def ask(call):
        return ray.get(call, timeout=LIMIT_S)

    config = FleetConfig.model_validate(
        {"tasks": {"pole": {"id": "CartPole-v1"}}, "workers": 2, "envs_per_worker": 2, "fragment_length": 16}
    )
    policy = example.untrained_policy(config)
    collector = ray.remote(example.Collector).options(num_cpus=0).remote()
    fleet = ray.remote(example.Fleet).options(max_concurrency=4).remote(config, policy, collector)
    ask(fleet.start.remote())
    ask(fleet.update_model.remote(WeightVersion(0, 3), named_arrays(policy)))

    def reports():
        ask(fleet.supervise.remote())
        return ask(fleet.reports.remote())

    def steps():
        return {name: (found.condition.incarnation, found.condition.steps) for name, found in reports().items()}

    wait_until(lambda: min(count for _, count in steps().values()) > 200, timeout_s=LIMIT_S)
    versions = {found.condition.version for found in reports().values()}
    assert versions == {WeightVersion(0, 3)}  # published once, fetched by each

    killed, *_ = [one.pid for one in descendants(os.getpid()) if "ray::Worker" in " ".join(command_line(one.pid))]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: sorted(life for life, _ in steps().values()) == [0, 1], timeout_s=LIMIT_S)
    wait_until(lambda: min(count for _, count in steps().values()) > 200, timeout_s=LIMIT_S)

    ask(fleet.scale.remote(1))
    assert len(steps()) == 1
    found = ask(fleet.log_statistics.remote())
    assert (found["fleet/workers"], found["fleet/worker_restarts"]) == (1.0, 1.0)
    assert found["fleet/pole/episodes"] > 20 and 8 < found["fleet/pole/reward_mean"] < 60
    ask(fleet.stop.remote())
    account = ask(fleet.account.remote())
    assert account.in_flight == 0 and ask(collector.collected.remote()) >= account.sent > 400
