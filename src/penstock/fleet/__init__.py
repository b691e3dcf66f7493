"""Simulator fleets: many slow, uneven, crash-prone simulators behind one policy, and their steps as fragments."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.fleet.accounting import StepAccount
    from penstock.fleet.config import FleetConfig, SimulatorConfig, SimulatorLimits, VideoConfig
    from penstock.fleet.episode_statistics import Episode, EpisodeStatistics
    from penstock.fleet.evaluation import PolicyEvaluation, evaluate_policy
    from penstock.fleet.fragments import FragmentCutter
    from penstock.fleet.jax_policy import GymPolicy, JaxPolicyRunner
    from penstock.fleet.manager import CountingSink, FleetReports, FleetWorker, RolloutManager
    from penstock.fleet.pipeline_monitor import PipelineMonitor
    from penstock.fleet.policy import Pending, PolicyRunner, Simulators
    from penstock.fleet.pool import SimulatorPool
    from penstock.fleet.rollout_loop import RolloutWorker
    from penstock.fleet.serial import SerialPool
    from penstock.fleet.steps import ActionBatch, StepArrival, StepBatch
    from penstock.fleet.user_policy import UserPolicyRunner
    from penstock.fleet.video import RecordingPool
    from penstock.fleet.worker import RolloutWorkerWrapper, WorkerReport, WorkerStatus

_EXPORTS = {
    "accounting": ["StepAccount"],
    "config": ["FleetConfig", "SimulatorConfig", "SimulatorLimits", "VideoConfig"],
    "episode_statistics": ["Episode", "EpisodeStatistics"],
    "evaluation": ["PolicyEvaluation", "evaluate_policy"],
    "fragments": ["FragmentCutter"],
    "jax_policy": ["GymPolicy", "JaxPolicyRunner"],
    "manager": ["CountingSink", "FleetReports", "FleetWorker", "RolloutManager"],
    "pipeline_monitor": ["PipelineMonitor"],
    "policy": ["Pending", "PolicyRunner", "Simulators"],
    "pool": ["SimulatorPool"],
    "rollout_loop": ["RolloutWorker"],
    "serial": ["SerialPool"],
    "steps": ["ActionBatch", "StepArrival", "StepBatch"],
    "user_policy": ["UserPolicyRunner"],
    "video": ["RecordingPool"],
    "worker": ["RolloutWorkerWrapper", "WorkerReport", "WorkerStatus"],
}

__all__ = [
    "ActionBatch", "CountingSink", "Episode", "EpisodeStatistics",
    "FleetConfig", "FleetReports", "FleetWorker", "FragmentCutter", "GymPolicy", "JaxPolicyRunner", "Pending",
    "PipelineMonitor",
    "PolicyEvaluation", "PolicyRunner", "RecordingPool", "RolloutManager", "RolloutWorker", "RolloutWorkerWrapper",
    "SerialPool", "SimulatorConfig", "SimulatorLimits", "SimulatorPool", "Simulators", "StepAccount", "StepArrival",
    "StepBatch", "UserPolicyRunner", "VideoConfig", "WorkerReport", "WorkerStatus",
    "evaluate_policy",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
