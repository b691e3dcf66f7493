"""Makes the policy of a fleet run, and what runs it for workers and evaluations."""

import jax
import numpy as np

from penstock.fleet.jax_policy import JaxPolicyRunner, compute_inline
from penstock.model.control import ControlPolicy, make_control_policy
from penstock.overseer.control.simulators import EVALUATOR_ID, evaluation_fleet
from penstock.overseer.control_config import FleetRunConfig
from penstock.types import Spaces, WeightVersion, fold

FIRST_VERSION = WeightVersion(0, 0)


def make_policy(config: FleetRunConfig, spaces: Spaces) -> ControlPolicy:
    """As initialised from the run's seed; a fleet's first use of JAX in any process."""
    compute_inline()
    return make_control_policy(config.model, spaces, config.seed)


def count_parameters(policy: ControlPolicy) -> int:
    """Numbers in all its arrays."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(policy) if hasattr(leaf, "shape"))


def state_bytes(policy: ControlPolicy) -> int:
    """Of one slot's recurrent state; 0 without memory."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(policy.initial_state(1)))


def make_worker_runner(
    policy: ControlPolicy, config: FleetRunConfig, number: int, version: WeightVersion, incarnation: int
) -> JaxPolicyRunner:
    """Samples actions for one life of a rollout worker, under the version given here until it takes another."""
    fleet = config.fleet
    seed = fold(config.seed, "actions", number, version.lineage, incarnation)
    return JaxPolicyRunner(policy, fleet.envs_per_worker, fleet.most_in_batch, seed, version=version)


def make_evaluation_runner(
    policy: ControlPolicy, config: FleetRunConfig, version: WeightVersion = FIRST_VERSION
) -> JaxPolicyRunner:
    """Acts in an evaluation."""
    fleet = evaluation_fleet(config)
    return JaxPolicyRunner(
        policy,
        fleet.envs_per_worker,
        fleet.most_in_batch,
        fold(config.seed, "actions", EVALUATOR_ID),
        version=version,
        deterministic=config.evaluation.deterministic,
    )
