"""Spaces, policies and observations drawn for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.control import ControlModelConfig, make_control_policy
from penstock.types import LeafSpace, Spaces

VECTOR = LeafSpace("", "box", (4,), "float32")
CHOICE = LeafSpace("", "discrete", (), "int64", (3,))


def leaf_values(rng, leaf, *batch):
    """Values of a leaf, [*batch, …]."""
    shape = (*batch, *leaf.shape)
    if leaf.kind in ("discrete", "multi_discrete"):
        return rng.integers(0, np.array(leaf.n).reshape(leaf.shape), shape).astype(leaf.dtype)
    if leaf.kind == "multi_binary":
        return rng.integers(0, 2, shape).astype(leaf.dtype)
    if leaf.dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    if leaf.kind == "text":
        return rng.integers(-1, 128, shape).astype(np.int32)
    return rng.standard_normal(shape).astype(leaf.dtype)


@pytest.fixture
def draw():
    """Observations (or actions) of leaves with batch axes."""

    def make(leaves, *batch, seed=0):
        rng = np.random.default_rng(seed)
        return {leaf.name: jnp.asarray(leaf_values(rng, leaf, *batch)) for leaf in leaves}

    return make


@pytest.fixture
def make_policy():
    """A small policy; every parameter is perturbed, so that nothing is zero or uniform."""

    def make(observations=(VECTOR,), actions=(CHOICE,), seed=0, perturbed=True, **fields):
        config = ControlModelConfig(**({"hidden_sizes": (8, 8), "memory_size": 8} | fields))
        policy = make_control_policy(config, Spaces(tuple(observations), tuple(actions)), seed)
        rng = np.random.default_rng(seed)
        if not perturbed:
            return policy
        return jax.tree.map(lambda a: a + 0.2 * rng.standard_normal(a.shape).astype(np.float32), policy)

    return make
