"""Parameters of any network as a flat mapping of named arrays: the form in which weights travel.

Names are tree paths: ``layers.query``, ``encoder.mlp.layers.0.weight``. Arrays go by reference; nothing is copied.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from penstock.types.errors import WeightsError

Network = TypeVar("Network")
_MOST_NAMED = 5


def named_leaves(network: object) -> dict[str, Any]:
    """Every parameter by name, in a fixed order: arrays, or what `shapes_of` has in their place."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(network)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def shapes_of(network: Network) -> Network:
    """The same network with shape, dtype and placement of each JAX array in its place: keeps none of them alive."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), network)


def with_named_leaves(network: Network, arrays: Mapping[str, Array | np.ndarray], what: str) -> Network:
    """A network of the same shape that holds these arrays instead.

    Args:
        network: Gives the shape; `shapes_of` it will do.
        arrays: The arrays to put in, by their name in the network.
        what: The network in words, for the error.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    current = named_leaves(network)
    problems = [f"{name} is missing" for name in current if name not in arrays]
    problems += [f"{name} is unknown" for name in arrays if name not in current]
    problems += [
        f"{name} is {_signature(arrays[name])}, not {_signature(array)}"
        for name, array in current.items()
        if name in arrays and _signature(arrays[name]) != _signature(array)
    ]
    if problems:
        more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise WeightsError(f"weights do not fit {what}: {'; '.join(problems[:_MOST_NAMED])}{more}")
    return jax.tree.unflatten(jax.tree.structure(network), [jnp.asarray(arrays[name]) for name in current])


def _signature(array: Array | np.ndarray | jax.ShapeDtypeStruct) -> str:
    return f"{array.dtype}{list(array.shape)}"
