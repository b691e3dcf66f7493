"""A control policy's parameters as a flat mapping of named arrays: the form in which weights travel.

Names are tree paths: ``encoder.mlp.layers.0.weight``, ``memory.recurrent``, ``value_head.bias``. Array for array by
reference; nothing is copied.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from penstock.model.control.policy import ControlPolicy
from penstock.types.errors import WeightsError


def named_arrays(policy: ControlPolicy) -> dict[str, Array]:
    """Every parameter of the policy by name, in a fixed order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(policy)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def with_named_arrays(policy: ControlPolicy, arrays: Mapping[str, Array | np.ndarray]) -> ControlPolicy:
    """A policy of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    current = named_arrays(policy)
    problems = [f"{name} is missing" for name in current if name not in arrays]
    problems += [f"{name} is unknown" for name in arrays if name not in current]
    problems += [
        f"{name} is {_signature(arrays[name])}, not {_signature(array)}"
        for name, array in current.items()
        if name in arrays and _signature(arrays[name]) != _signature(array)
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError(f"weights do not fit the control policy: {'; '.join(problems[:5])}{more}")
    return jax.tree.unflatten(jax.tree.structure(policy), [jnp.asarray(arrays[name]) for name in current])


def _signature(array: Array | np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
