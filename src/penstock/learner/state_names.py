"""The optimiser's state as named arrays: names are paths through the tree, so a file says what is in it."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from penstock.types import CheckpointError

Tree = TypeVar("Tree")


def to_named(tree: object) -> dict[str, np.ndarray]:
    """Every array of a tree by its path, for example ``adam.1.mu.layers.query``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def from_named(like: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """A tree of the same structure as `like`, with these arrays.

    Raises:
        CheckpointError: naming what is missing, extra, or of another shape or dtype.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {_name(path): leaf for path, leaf in leaves}
    missing, extra = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    if missing or extra:
        raise CheckpointError(f"optimiser state does not fit: missing {missing[:3]}, unknown {extra[:3]}")
    for name, leaf in wanted.items():
        found = arrays[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise CheckpointError(
                f"optimiser state {name} is {found.dtype}{list(found.shape)}, "
                f"this model needs {leaf.dtype}{list(leaf.shape)}"
            )
    return jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in wanted])


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
