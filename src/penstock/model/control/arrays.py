"""A control policy's parameters as named arrays; see `penstock.model.arrays`."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array

from penstock.model.arrays import named_leaves, with_named_leaves
from penstock.model.control.policy import ControlPolicy


def named_arrays(policy: ControlPolicy) -> dict[str, Array]:
    """Every parameter of the policy by name (``memory.recurrent``, ``value_head.bias``), in a fixed order."""
    return named_leaves(policy)


def with_named_arrays(policy: ControlPolicy, arrays: Mapping[str, Array | np.ndarray]) -> ControlPolicy:
    """A policy of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    return with_named_leaves(policy, arrays, "the control policy")
