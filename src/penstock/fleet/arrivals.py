"""What rollout workers, simulator processes and policies hand each other: one record each way, arrays over slots.

A rollout worker has slots 0 … n − 1, one per simulator. Arrays by leaf name, as in `penstock.types.Spaces`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.types import WeightVersion

Leaves = Mapping[str, np.ndarray]
"""Arrays by leaf name."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """What the simulators of one process say together; n of them. Arrays are views that hold until `act` is called.

    Attributes:
        process: Which process of the worker.
        slots: int64 [n].
        observations: By leaf name, [n, …]: what to act on next.
        first: bool [n], the observation begins an episode (after a reset, a start, or a restart).
        rewards: float32 [n], of the last action; 0 where there was none.
        terminated: bool [n], of the last action.
        truncated: bool [n], likewise; also true where a fault ended the episode.
        faults: bool [n], the last action's step must not be trained on.
        cut: bool [n], truncated only because the process is to be replaced (`restart_interval_s`): learned from like
            any truncation, but no whole episode.
        acted: bool [n], there was a last action: false at the very first observation of a process's first life, and
            only there; a restart answers the action that was lost with a fault.
        has_final: bool [n], the episode ended with a known observation.
        final_observations: By leaf name, [n, …]; rows where `has_final`.
        returns: float64 [n], sum of raw rewards of the episode that ended or was cut; where it ended, without a fault.
        lengths: int64 [n], its steps.
        simulate_s: Seconds that the process worked on it.
    """

    process: int
    slots: np.ndarray
    observations: Leaves
    first: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    faults: np.ndarray
    cut: np.ndarray
    acted: np.ndarray
    has_final: np.ndarray
    final_observations: Leaves
    returns: np.ndarray
    lengths: np.ndarray
    simulate_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What the policy decided for n slots.

    Attributes:
        actions: By leaf name, [n, …], of the spaces' dtypes.
        logprobs: float32 [n].
        values: float32 [n].
        states: Recurrent state *before* the decision, [n, …] by leaf name; empty without one.
        version: Whose weights decided.
    """

    actions: Leaves
    logprobs: np.ndarray
    values: np.ndarray
    version: WeightVersion
    states: Leaves = field(default_factory=dict[str, np.ndarray])


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One inference batch, as progress handlers are told of it: n slots.

    It joins what the last actions led to (the arrivals' fields) with what was decided now.

    Attributes:
        slots: int64 [n].
        observations: By leaf name, [n, …]. Like all arrays here they hold until the handler returns: copy what is kept.
        first: bool [n].
        rewards: float32 [n], of each slot's last action.
        terminated: bool [n], likewise.
        truncated: bool [n], likewise.
        faults: bool [n], likewise.
        cut: bool [n], likewise; see `Arrival`.
        acted: bool [n], whether there was a last action.
        has_final: bool [n].
        final_observations: By leaf name, [n, …].
        returns: float64 [n]; see `Arrival`.
        lengths: int64 [n]; see `Arrival`.
        decision: What was decided on `observations`.
    """

    slots: np.ndarray
    observations: Leaves
    first: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    faults: np.ndarray
    cut: np.ndarray
    acted: np.ndarray
    has_final: np.ndarray
    final_observations: Leaves
    returns: np.ndarray
    lengths: np.ndarray
    decision: Decision
