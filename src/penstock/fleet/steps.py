"""What rollout workers, simulator processes and policies hand each other: one record each way, arrays over slots.

A rollout worker has slots 0 … n − 1, one per simulator. Arrays by leaf name, as in `penstock.types.Spaces`; those of
`aligned_zeros` XLA reads where they lie, instead of copying them first.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.types import WeightVersion

Leaves = Mapping[str, np.ndarray]
"""Arrays by leaf name."""

STEP_ROW = np.dtype(
    [
        ("returns", np.float64), ("lengths", np.int64), ("slots", np.int64), ("rewards", np.float32),
        ("first", np.bool_), ("terminated", np.bool_), ("truncated", np.bool_), ("faults", np.bool_),
        ("cut", np.bool_), ("acted", np.bool_), ("has_final", np.bool_),
    ],
    align=True,
)  # fmt: skip
"""What one slot says beside its observations; `StepRows` says what the fields mean."""

_WHOLE_ROW = np.dtype((np.void, STEP_ROW.itemsize))


def whole_rows(rows: np.ndarray) -> np.ndarray:
    """The same memory without its fields: NumPy copies such rows whole, others field by field."""
    return rows.view(_WHOLE_ROW)


class StepRows:
    """Something with `rows`, `STEP_ROW` [n]; each field of them is a view."""

    __slots__ = ()
    rows: np.ndarray

    @property
    def slots(self) -> np.ndarray:
        """Whose rows they are, int64 [n]."""
        return self.rows["slots"]

    @property
    def first(self) -> np.ndarray:
        """The observation begins an episode (after a reset, a start, or a restart), bool [n]."""
        return self.rows["first"]

    @property
    def rewards(self) -> np.ndarray:
        """Of the last action; 0 where there was none; float32 [n]."""
        return self.rows["rewards"]

    @property
    def terminated(self) -> np.ndarray:
        """Of the last action, bool [n]."""
        return self.rows["terminated"]

    @property
    def truncated(self) -> np.ndarray:
        """Of the last action, bool [n]; also true where a fault ended the episode."""
        return self.rows["truncated"]

    @property
    def faults(self) -> np.ndarray:
        """The last action's step must not be trained on, bool [n]."""
        return self.rows["faults"]

    @property
    def cut(self) -> np.ndarray:
        """The episode that ended is no whole one, bool [n]: for statistics only, it is learned from like any other.

        It was truncated because the process is to be replaced (`restart_interval_s`), or it began with random steps
        (`decorrelate_steps`).
        """
        return self.rows["cut"]

    @property
    def acted(self) -> np.ndarray:
        """There was a last action, bool [n].

        False at the very first observation of a process's first life, and only there; a restart answers the action
        that was lost with a fault.
        """
        return self.rows["acted"]

    @property
    def has_final(self) -> np.ndarray:
        """The episode ended with a known observation, bool [n]."""
        return self.rows["has_final"]

    @property
    def returns(self) -> np.ndarray:
        """Sum of raw rewards of the episode that ended or was cut, float64 [n]; where it ended, without a fault."""
        return self.rows["returns"]

    @property
    def lengths(self) -> np.ndarray:
        """Its steps, int64 [n]."""
        return self.rows["lengths"]


@dataclass(frozen=True, slots=True, eq=False)
class StepArrival(StepRows):
    """What the simulators of one part of a process say together; n of them. Arrays are views that hold until `act`.

    Attributes:
        process: Which process of the worker.
        rows: `STEP_ROW` [n].
        observations: By leaf name, [n, …]: what to act on next.
        final_observations: By leaf name, [n, …]; rows where `has_final`.
        simulate_s: Seconds that the process worked on it.
        part: Which part of the process.
    """

    process: int
    rows: np.ndarray
    observations: Leaves
    final_observations: Leaves
    simulate_s: float = 0.0
    part: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ActionBatch:
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
class StepBatch(StepRows):
    """One inference batch, as progress handlers are told of it: n slots.

    It joins what the last actions led to (the arrivals' rows) with what was decided now. All arrays hold until the
    handler returns: copy what is kept.

    Attributes:
        rows: `STEP_ROW` [n].
        observations: By leaf name, [n, …].
        final_observations: By leaf name, [n, …].
        decision: What was decided on `observations`.
        simulate_s: float64 [n], seconds that the slot's process worked on the last actions; or of all alike.
        inference_s: Seconds that the decision took.
    """

    rows: np.ndarray
    observations: Leaves
    final_observations: Leaves
    decision: ActionBatch
    simulate_s: np.ndarray | float = 0.0
    inference_s: float = 0.0


_ALIGNMENT = 64  # bytes: XLA uses memory of its caller only where it begins at a multiple of this


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeros that XLA can use without a copy of its own."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT
    return memory[offset : offset + nbytes].view(dtype).reshape(shape)
