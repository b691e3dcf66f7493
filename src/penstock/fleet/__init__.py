"""Simulator fleets: many slow, uneven, crash-prone simulators behind one policy, and their steps as fragments."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.fleet.accounting import StepAccount
    from penstock.fleet.arrivals import Arrival, Decision, StepBatch
    from penstock.fleet.config import FleetConfig, SimulatorConfig, SimulatorLimits, VideoConfig
    from penstock.fleet.cutter import FragmentCutter
    from penstock.fleet.episode_statistics import Episode, EpisodeStatistics
    from penstock.fleet.evaluation import PolicyEvaluation, evaluate_policy
    from penstock.fleet.filming import FilmedPool
    from penstock.fleet.manager import FleetWorker, RolloutManager
    from penstock.fleet.pipeline_monitor import PipelineMonitor
    from penstock.fleet.policy_runner import JaxPolicyRunner
    from penstock.fleet.pool import SimulatorPool
    from penstock.fleet.reports import CountedSink, FleetReports
    from penstock.fleet.rollout_worker import RolloutWorker
    from penstock.fleet.runner import Pending, PolicyRunner, Simulators
    from penstock.fleet.serial import SerialPool
    from penstock.fleet.user_policy import UserPolicyRunner
    from penstock.fleet.wrapper import RolloutWorkerWrapper, WorkerCondition, WorkerReport

_EXPORTS = {
    "Arrival": "arrivals",
    "CountedSink": "reports",
    "Decision": "arrivals",
    "Episode": "episode_statistics",
    "EpisodeStatistics": "episode_statistics",
    "FilmedPool": "filming",
    "FleetConfig": "config",
    "FleetReports": "reports",
    "FleetWorker": "manager",
    "FragmentCutter": "cutter",
    "JaxPolicyRunner": "policy_runner",
    "Pending": "runner",
    "PipelineMonitor": "pipeline_monitor",
    "PolicyEvaluation": "evaluation",
    "PolicyRunner": "runner",
    "RolloutManager": "manager",
    "RolloutWorker": "rollout_worker",
    "RolloutWorkerWrapper": "wrapper",
    "SerialPool": "serial",
    "SimulatorConfig": "config",
    "SimulatorLimits": "config",
    "SimulatorPool": "pool",
    "Simulators": "runner",
    "StepAccount": "accounting",
    "StepBatch": "arrivals",
    "UserPolicyRunner": "user_policy",
    "VideoConfig": "config",
    "WorkerCondition": "wrapper",
    "WorkerReport": "wrapper",
    "evaluate_policy": "evaluation",
}

__all__ = [
    "Arrival", "CountedSink", "Decision", "Episode", "EpisodeStatistics", "FilmedPool", "FleetConfig", "FleetReports",
    "FleetWorker", "FragmentCutter", "JaxPolicyRunner", "Pending", "PipelineMonitor", "PolicyEvaluation",
    "PolicyRunner", "RolloutManager", "RolloutWorker", "RolloutWorkerWrapper", "SerialPool", "SimulatorConfig",
    "SimulatorLimits", "SimulatorPool", "Simulators", "StepAccount", "StepBatch", "UserPolicyRunner", "VideoConfig",
    "WorkerCondition", "WorkerReport", "evaluate_policy",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
