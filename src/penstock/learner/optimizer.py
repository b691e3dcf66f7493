"""AdamW on float32 master weights: the learning rate's course, the transformation, and the state by name.

The learning rate is computed on the host from the learner's step and passed in, so that a resumed or extended run
needs no state for it. A model in float32 is its own master; one in bfloat16 would lose updates smaller than its
last bit, so the state then holds a float32 copy. Names of the state's arrays are paths through its tree, so a file says
what is in it.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, PyTree

from penstock.learner.config import OptimizerConfig
from penstock.types import CheckpointError, ConfigError


class OptimizerState(NamedTuple):
    """What an optimiser step reads and replaces; donated at every step.

    Attributes:
        adam: optax state; moments are float32.
        master: float32 parameters, or None where the model itself is float32.
    """

    adam: PyTree
    master: PyTree | None


class AppliedUpdate(NamedTuple):
    """What one optimiser step came to.

    Attributes:
        grad_norm: Before clipping.
        finite: False where the step was skipped.
        changed_fraction: Of the parameters that train, how many are another number in the model's dtype than before.
    """

    grad_norm: Float32[Array, ""]
    finite: Bool[Array, ""]
    changed_fraction: Float32[Array, ""]


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of update `step` (from 0) of `total_steps`.

    Linear warm-up, (step + 1) / warmup_steps of the peak; then constant, or from the peak down to
    `final_fraction` of it at the last update, along a line or half a cosine; that floor beyond.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    remaining = max(total_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / remaining, 1.0)
    left = 1.0 - progress if config.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * left)


def transformation(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, Adam's scaling and decoupled weight decay; the caller multiplies by −learning rate.

    Kingma and Ba 2015, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter 2019,
    https://arxiv.org/abs/1711.05101.
    """
    limit = config.max_grad_norm
    return optax.chain(
        optax.identity() if limit is None else optax.clip_by_global_norm(limit),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=jnp.float32),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
    )


def initial_state(config: OptimizerConfig, parameters: PyTree) -> OptimizerState:
    """The state before the first step.

    Raises:
        ConfigError: arrays are frozen that the model does not have.
    """
    names = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(parameters)[0]]
    idle = [pattern for pattern in config.frozen if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        raise ConfigError(f"learner.optimizer.frozen has {idle}, which match no array: there are {', '.join(names)}")
    as_float32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters)
    own = all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(parameters))
    moments = jax.jit(transformation(config).init)(as_float32)  # one program; otherwise one for each shape of zeros
    return OptimizerState(moments, None if own else as_float32)


@cache
def applier(config: OptimizerConfig) -> Any:
    """`apply_gradients`, compiled.

    State and gradients are donated; parameters are not, because an engine may be reading them.
    """
    return jax.jit(partial(apply_gradients, config), donate_argnums=(1, 2))


def apply_gradients(
    config: OptimizerConfig,
    parameters: PyTree,
    state: OptimizerState,
    gradients: PyTree,
    rate: Float32[Array, ""],
    loss: Float32[Array, ""],
) -> tuple[PyTree, OptimizerState, AppliedUpdate]:
    """One optimiser step, or none where the loss or the gradient's norm is not finite.

    Args:
        config: Coefficients, clipping and weight decay of the optimiser.
        parameters: Never donated: an engine may be reading them.
        state: Moments and count before this step.
        gradients: float32, of the whole step.
        rate: Learning rate of this step, a scalar.
        loss: Of the whole step.
    """
    gradients = _without_frozen(config, gradients, gradients, 0.0)
    grad_norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    master = parameters if state.master is None else state.master
    direction, adam = transformation(config).update(gradients, state.adam, master)
    moved = jax.tree.map(lambda leaf, by: leaf - rate * by, master, direction)
    moved = _without_frozen(config, moved, master)

    def chosen(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    moved, adam = chosen(moved, master), chosen(adam, state.adam)
    updated = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), moved, parameters)
    kept = OptimizerState(adam, None if state.master is None else moved)
    return updated, kept, AppliedUpdate(grad_norm, finite, _changed_fraction(config, parameters, updated))


def _changed_fraction(config: OptimizerConfig, before: PyTree, after: PyTree) -> Float32[Array, ""]:
    """Of the elements of all arrays that are not frozen."""
    changed, size = jnp.zeros((), jnp.float32), 0
    for (path, old), new in zip(jax.tree_util.tree_flatten_with_path(before)[0], jax.tree.leaves(after), strict=True):
        if not any(fnmatchcase(_name(path), pattern) for pattern in config.frozen):
            changed, size = changed + jnp.sum(old != new, dtype=jnp.float32), size + old.size
    return changed / max(size, 1)


def _without_frozen(config: OptimizerConfig, tree: PyTree, kept: PyTree, factor: float = 1.0) -> PyTree:
    """`tree`, but with `factor` times the leaves of `kept` where arrays are frozen."""
    if not config.frozen:
        return tree

    def chosen(path: tuple, leaf: Array, own: Array) -> Array:
        return factor * own if any(fnmatchcase(_name(path), pattern) for pattern in config.frozen) else leaf

    return jax.tree_util.tree_map_with_path(chosen, tree, kept)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _decayed(parameters: PyTree) -> PyTree:
    """True for matrices, false for norms and biases (told by name: stacked leaves hide their rank)."""

    def decays(path: tuple, leaf: Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decays, parameters)


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
