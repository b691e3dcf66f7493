"""The check of `penstock doctor` that starts simulators: whether processes can be made here, and how fast they step."""

import importlib.util
import time

import numpy as np

from penstock.fleet import SimulatorPool
from penstock.fleet.config import FleetConfig, SimulatorConfig
from penstock.overseer.doctor import Check

STEPS_S = 0.3
START_LIMIT_S = 60.0
PROCESSES, EACH = 2, 8
EXTRAS = ("ale_py", "crafter", "vizdoom", "minigrid", "av", "minestudio")
"""What simulators and films need beyond the core, by the modules that are imported."""


def check_simulators() -> Check:
    """Steps a small fleet of CartPole without a policy."""
    config = FleetConfig(
        tasks={"cartpole": SimulatorConfig(id="CartPole-v1")}, envs_per_worker=PROCESSES * EACH, envs_per_process=EACH
    )
    pool = SimulatorPool(config, "doctor", 0)
    try:
        began = time.perf_counter()
        pool.start(START_LIMIT_S)
        started_s = time.perf_counter() - began
        steps_per_s = _rate(pool)
    finally:
        pool.close()
    there = [name for name in EXTRAS if importlib.util.find_spec(name) is not None]
    absent = [name for name in EXTRAS if name not in there]
    detail = (
        f"CartPole in {PROCESSES} processes up after {started_s:.2f} s, {steps_per_s:,.0f} steps/s without a policy; "
        f"packages there: {', '.join(there) or 'none'}; not there: {', '.join(absent) or 'none'}"
    )
    return Check("simulators", "ok", detail)


def _rate(pool: SimulatorPool) -> float:
    """Steps per second with actions of zero."""
    actions = {leaf.name: leaf.zeros(EACH) for leaf in pool.spaces.actions}
    steps, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < STEPS_S:
        for arrival in pool.poll(STEPS_S):
            steps += int(np.count_nonzero(arrival.acted))
            pool.act(arrival.process, actions)
    return steps / elapsed_s
