"""AdamW on float32 master weights: the learning rate's course, the transformation, and the state by name.

The learning rate is computed on the host from the learner's step and passed in, so that a resumed or extended run
needs no state for it. A model in float32 is its own master; one in bfloat16 would lose updates smaller than its
last bit, so the state then holds a float32 copy. Names of the state's arrays are paths through its tree, so a file says
what is in it.

Arrays that are frozen have no part in any of it: no gradient is computed of them (`split_frozen`), and the state has
nothing of them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, PyTree

from penstock.learner.config import OptimizerConfig
from penstock.types import CheckpointError, ConfigError

Tree = TypeVar("Tree")
_OF_ARRAY = re.compile(r"(?:adam\.\d+\.[mn]u|master)\.(.+)")
"""Names in the state that belong to one array of the model."""


class OptimizerState(NamedTuple):
    """What an optimiser step reads and replaces; donated at every step.

    Attributes:
        adam: optax state; moments are float32, of the arrays that train.
        master: float32 parameters of those, or None where the model itself is float32.
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
    `final_fraction` of it at the last update, along a line or half a cosine; that floor beyond. ``wsd`` stays at the
    peak and takes the line over the last `decay_fraction` of the updates (Hu et al. 2024,
    https://arxiv.org/abs/2404.06395), or over what the warm-up leaves of them.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    begin = config.warmup_steps
    if config.schedule == "wsd":
        begin = max(begin, total_steps - 1 - max(round(config.decay_fraction * total_steps), 1))
    progress = min(max(step - begin, 0) / max(total_steps - 1 - begin, 1), 1.0)
    left = (1.0 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1.0 - progress
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
    """The state before the first step; of parameters that are shapes only, its shapes.

    Raises:
        ConfigError: arrays are frozen that the model does not have, or all that it has.
    """
    names = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(parameters)[0]]
    idle = [pattern for pattern in config.frozen if not any(_matches(name, [pattern]) for name in names)]
    if idle:
        raise ConfigError(f"learner.optimizer.frozen has {idle}, which match no array: there are {', '.join(names)}")
    trained, _ = split_frozen(config.frozen, parameters)
    if not jax.tree.leaves(trained):
        raise ConfigError(f"learner.optimizer.frozen is {list(config.frozen)}, all arrays: nothing would train")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trained)):
        return jax.eval_shape(partial(initial_state, config), parameters)
    as_float32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)
    own = all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trained))
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
        gradients: float32, of the whole step; None for an array that stays as it is in this step, whose moments decay.
        rate: Learning rate of this step, a scalar.
        loss: Of the whole step.
    """
    trained, rest = split_frozen(config.frozen, parameters)
    gradients, _ = split_frozen(config.frozen, gradients)
    grad_norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    master = trained if state.master is None else state.master
    moves = jax.tree.map(lambda leaf, gradient: gradient is not None, trained, gradients)
    whole = jax.tree.map(lambda leaf, own: jnp.zeros_like(leaf) if own is None else own, master, gradients)
    direction, adam = transformation(config).update(whole, state.adam, master)
    moved = jax.tree.map(lambda leaf, by, moving: leaf - rate * by if moving else leaf, master, direction, moves)

    def chosen(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    moved, adam = chosen(moved, master), chosen(adam, state.adam)
    updated = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), moved, trained)
    kept = OptimizerState(adam, None if state.master is None else moved)
    changed = _changed_fraction(trained, updated, moves)
    return join_frozen(updated, rest), kept, AppliedUpdate(grad_norm, finite, changed)


def direction_of(config: OptimizerConfig, parameters: PyTree, state: OptimizerState, gradients: PyTree) -> PyTree:
    """What an optimiser step subtracts from the float32 parameters, before it is multiplied by the learning rate.

    Args:
        config: Coefficients, clipping and weight decay of the optimiser.
        parameters: All of the model's.
        state: Moments and count before this step.
        gradients: float32, of the whole step.
    """
    master = split_frozen(config.frozen, parameters)[0] if state.master is None else state.master
    return transformation(config).update(gradients, state.adam, master)[0]


def _changed_fraction(before: PyTree, after: PyTree, moves: PyTree) -> Float32[Array, ""]:
    """Of the elements of all arrays that move."""
    changed, size = jnp.zeros((), jnp.float32), 0
    for old, new, moving in zip(*map(jax.tree.leaves, (before, after, moves)), strict=True):
        if moving:
            changed, size = changed + jnp.sum(old != new, dtype=jnp.float32), size + old.size
    return changed / max(size, 1)


def split_frozen(frozen: Sequence[str], tree: Tree) -> tuple[Tree, Tree]:
    """A tree of arrays in two of its shape: what trains and what is frozen, each None where the other has an array.

    A gradient with respect to the first alone costs nothing for the second.

    Args:
        frozen: Patterns of names.
        tree: Parameters, or anything with their names.
    """

    def is_frozen(path: tuple) -> bool:
        return _matches(_name(path), frozen)

    trained = jax.tree_util.tree_map_with_path(lambda path, leaf: None if is_frozen(path) else leaf, tree)
    return trained, jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if is_frozen(path) else None, tree)


def join_frozen(trained: Tree, rest: Tree) -> Tree:
    """The tree that `split_frozen` was given."""
    return eqx.combine(trained, rest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _decayed(parameters: PyTree) -> PyTree:
    """True for matrices, false for norms and biases (told by name: stacked leaves hide their rank)."""

    def decays(path: tuple, leaf: Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not name.endswith(("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decays, parameters)


def to_named(tree: object) -> dict[str, np.ndarray]:
    """Every array of a tree by its path, for example ``adam.1.mu.layers.query``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def from_named(like: OptimizerState, arrays: Mapping[str, np.ndarray], frozen: Sequence[str] = ()) -> OptimizerState:
    """A state of the same structure as `like`, with these arrays.

    What they have of arrays that are frozen now is left out; where they have nothing of one that was frozen when they
    were saved, it begins as in `like`.

    Raises:
        CheckpointError: naming what is missing, extra, or of another shape or dtype.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {_name(path): leaf for path, leaf in leaves}
    arrays = {name: array for name, array in arrays.items() if not _matches(_array_of(name), frozen)}
    known = {_array_of(name) for name in arrays}
    arrays |= {name: np.asarray(leaf) for name, leaf in wanted.items() if _array_of(name) not in known}
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


def _array_of(name: str) -> str:
    """The model's array that an array of the state belongs to; its own name where it belongs to none."""
    found = _OF_ARRAY.fullmatch(name)
    return name if found is None else found[1]
