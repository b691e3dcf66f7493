"""Optimisers on float32 master weights: the learning rate's course, the transformation, and the state by name.

The learning rate is computed on the host from the learner's step and passed in, so that a resumed or extended run
needs no state for it. A model in float32 is its own master; one in bfloat16 would lose updates smaller than its
last bit, so the state then holds a float32 copy. Names of the state's arrays are paths through its tree, so a file says
what is in it.

Arrays that are frozen have no part in any of it: no gradient is computed of them (`split_frozen`), and the state has
nothing of them. The supervised steps before reinforcement learning have an optimiser of their own (`WarmStart`).

*Offloaded*, moments and master lie in the host's memory, which a chip reads by itself; an AdamW step takes one piece of
an array after the other (a layer of a stack) to the chip and back, so that of the state no more than pieces are there.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float32, PyTree

from penstock.learner.config import STACKED, LearnerConfig, OptimizerConfig
from penstock.model.arrays import are_shapes
from penstock.model.language.config import ADAPTER, ModelConfig
from penstock.model.programs import light_compilation
from penstock.types import CheckpointError, ConfigError

Tree = TypeVar("Tree")
_HOST = "pinned_host"
"""JAX's name of the host's memory that a chip can read."""
_OF_ARRAY = re.compile(r"(?:adam\.\d+\.(?:(?:muon|adam)\.)?(?:mu|nu|v|v_row|v_col)|master)\.(.+)")
"""Names in the state that belong to one array of the model."""


class OptimizerState(NamedTuple):
    """What an optimiser step reads and replaces; donated at every step.

    Attributes:
        adam: optax state of whatever optimiser, by the name that files of before have; moments are float32, of the
            arrays that train.
        master: float32 parameters of those, or None where the model itself is float32.
    """

    adam: PyTree
    master: PyTree | None


class AppliedUpdate(NamedTuple):
    """What one optimiser step came to; from the device it comes as one array, in this order.

    Attributes:
        grad_norm: Before clipping.
        finite: False, or 0, where the step was skipped.
        changed_fraction: Of the parameters that train, how many are another number in the model's dtype than before.
    """

    grad_norm: Float32[Array, ""]
    finite: Bool[Array, ""]
    changed_fraction: Float32[Array, ""]


def transformation(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, the optimiser's scaling, decoupled weight decay, `rates`; the caller multiplies by −learning rate.

    AdamW: Kingma and Ba 2015, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter 2019,
    https://arxiv.org/abs/1711.05101.
    """
    limit, scaling = config.max_grad_norm, {"adamw": _adam, "adafactor": _adafactor, "muon": _muon}[config.name]
    by_rate = optax.stateless(lambda updates, _: _scaled_by_rates(config, updates))
    return optax.chain(
        optax.identity() if limit is None else optax.clip_by_global_norm(limit),
        scaling(config),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
        by_rate if config.rates else optax.identity(),
    )


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=jnp.float32)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Divides by √V̂, and scales each matrix down to a root mean square of at most 1; a vector has its whole V.

    V̂ is R C / mean(R), with R and C the means over columns and rows of V_t = β V_{t−1} + (1 − β)(g² + 1e-30),
    β = 1 − t^−0.8. The learning rate is absolute: no step in proportion to the parameter, no relative steps, no
    momentum. Every layer's matrix is one of its own. Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235.
    """
    rms, clip = optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0)

    def update_one(updates: PyTree, state: Any, parameters: PyTree) -> tuple[PyTree, Any]:
        scaled, state = rms.update(updates, state, parameters)
        return clip.update(scaled, optax.EmptyState())[0], state

    def init(params: PyTree) -> Any:
        axes = _stack_axes(params)
        state_axes = optax.FactoredState(count=None, v_row=axes, v_col=axes, v=axes)  # pyright: ignore[reportArgumentType]
        return _by_layer(rms.init, (axes,), state_axes)(params)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        axes = _stack_axes(updates)
        state_axes = optax.FactoredState(count=None, v_row=axes, v_col=axes, v=axes)  # pyright: ignore[reportArgumentType]
        return _by_layer(update_one, (axes, state_axes, axes), (axes, state_axes))(updates, state, params)

    return optax.GradientTransformation(init, update)


class _MuonState(NamedTuple):
    """Of the arrays that each of the two has."""

    muon: Any
    adam: Any


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Of a matrix [a, b]: .2 √max(a, b) · NS(momentum), five Newton–Schulz steps towards U Vᵀ; else AdamW.

    The factor gives a step the root mean square of AdamW's, so that both live by one learning rate and decay.
    Momentum is Nesterov's, and the matrices of stacked layers are orthogonalised one by one. Jordan 2024,
    https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, https://arxiv.org/abs/2502.16982.
    """
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)  # what comes before is a batch axis

    def matrices(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: numbers, tree)

    muon = optax.contrib.scale_by_muon(
        beta=config.momentum,
        mu_dtype=jnp.float32,
        weight_dimension_numbers=matrices,  # pyright: ignore[reportArgumentType]
    )
    adam = _adam(config)

    def split(tree: PyTree) -> tuple[PyTree, PyTree]:
        return _split(lambda name, leaf: config.orthogonalises(name, jnp.ndim(leaf)), tree)

    def init(params: PyTree) -> _MuonState:
        own, rest = split(params)
        return _MuonState(muon.init(own), adam.init(rest))

    def update(updates: PyTree, state: _MuonState, params: PyTree | None = None) -> tuple[PyTree, _MuonState]:
        own, rest = split(updates)
        own, of_own = muon.update(own, state.muon)
        own = jax.tree.map(lambda leaf: 0.2 * math.sqrt(max(leaf.shape[-2:])) * leaf, own)
        rest, of_rest = adam.update(rest, state.adam)
        return join_frozen(own, rest), _MuonState(of_own, of_rest)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _stack_axes(tree: PyTree) -> PyTree:
    """Of each array the axis of layers, or None."""
    return jax.tree_util.tree_map_with_path(lambda path, _: 0 if _name(path).startswith(STACKED) else None, tree)


def _by_layer(function: Any, in_axes: tuple[Any, ...], out_axes: Any) -> Any:
    """The function, layer by layer of what is stacked; itself where nothing is."""
    return jax.vmap(function, in_axes, out_axes) if jax.tree.leaves(in_axes) else function


def _scaled_by_rates(config: OptimizerConfig, updates: PyTree) -> PyTree:
    def scaled(path: tuple, leaf: Array) -> Array:
        multiplier = config.rate_of(_name(path))
        return leaf if multiplier == 1 else multiplier * leaf

    return jax.tree_util.tree_map_with_path(scaled, updates)


def initial_state(config: OptimizerConfig, parameters: PyTree) -> OptimizerState:
    """The state before the first step; of parameters that are shapes only, its shapes.

    Raises:
        ConfigError: arrays are frozen that the model does not have, or all that it has; a pattern of `rates` is of no
            array that trains; or Muon has no matrix.
    """
    _check_patterns("frozen", config.frozen, parameters, "array")
    trained, _ = split_frozen(config.frozen, parameters)
    if not jax.tree.leaves(trained):
        raise ConfigError(f"learner.optimizer.frozen is {list(config.frozen)}, all arrays: nothing would train")
    _check_patterns("rates", config.rates, trained, "array that trains")
    ranks = {name: leaf.ndim for name, leaf in _named_leaves(trained)}
    if config.name == "muon" and not any(config.orthogonalises(*each) for each in ranks.items()):
        raise ConfigError(
            f"learner.optimizer.name is 'muon', but no matrix of a layer trains (there are {', '.join(ranks)}): take "
            "adamw"
        )
    if config.offload:
        return _initial_in_host(config, trained)
    if are_shapes(trained):
        return jax.eval_shape(partial(initial_state, config), parameters)
    as_float32 = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)
    own = all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trained))
    return OptimizerState(_moments_maker(config)(as_float32), None if own else as_float32)


@cache
def _moments_maker(config: OptimizerConfig) -> Any:
    """One program; otherwise it would be one for each shape of zeros."""
    return jax.jit(transformation(config).init)


def lower_moments(config: OptimizerConfig, parameters: PyTree) -> Any:
    """The program of `initial_state` for arrays of these shapes on a device, lowered."""
    trained, _ = split_frozen(config.frozen, parameters)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    return _moments_maker(config).lower(shapes)


def _initial_in_host(config: OptimizerConfig, trained: PyTree) -> OptimizerState:
    """The same in the host's memory, but for the counter; of no array more than one is on the chip meanwhile."""
    placed = jax.tree.leaves(trained)[0].sharding  # None of shapes that are of no device
    on_chip = SingleDeviceSharding(jax.devices()[0]) if placed is None else placed
    in_host = on_chip.with_memory_kind(_HOST)
    whole, shapes = config.model_copy(update={"offload": False, "frozen": ()}), are_shapes(trained)
    kinds = jax.eval_shape(partial(initial_state, whole), trained)

    def placed(kind: Any, value: Callable[[], Any]) -> Any:
        place = in_host if kind.ndim else on_chip
        return (
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place) if shapes else jax.device_put(value(), place)
        )

    moments = jax.tree.map(lambda kind: placed(kind, lambda: np.zeros(kind.shape, kind.dtype)), kinds.adam)
    if kinds.master is None:
        return OptimizerState(moments, None)
    masters = jax.tree.map(lambda kind, leaf: placed(kind, lambda: leaf.astype(kind.dtype)), kinds.master, trained)
    return OptimizerState(moments, masters)


def _check_patterns(key: str, patterns: Iterable[str], tree: PyTree, what: str) -> None:
    names = [name for name, _ in _named_leaves(tree)]
    idle = [pattern for pattern in patterns if not any(_matches(name, [pattern]) for name in names)]
    if idle:
        raise ConfigError(f"learner.optimizer.{key} has {idle}, which match no {what}: there are {', '.join(names)}")


@cache
def applier(config: OptimizerConfig, platform: str = "", dtype: str = "") -> Any:
    """`apply_gradients`, compiled; for that platform and dtype of the model, where they are told.

    State and gradients are donated; parameters are not, because an engine may be reading them. What it returns begins
    with the state: XLA's results take the place of donated arrays in this order, each of the first that has its shape;
    and ends with an `AppliedUpdate` as one array.
    """

    def state_first(*arguments: Any) -> tuple[OptimizerState, PyTree, Float32[Array, "3"]]:
        parameters, state, applied = apply_gradients(config, *arguments)
        return state, parameters, jnp.stack(applied)

    light = light_compilation(platform, dtype, newer_fusions=True)
    return jax.jit(state_first, donate_argnums=(1, 2), compiler_options=light)


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
    if config.name == "adamw":
        limit = jnp.float32(jnp.inf if config.max_grad_norm is None else config.max_grad_norm)
        stride = _Stride(rate, jnp.where(grad_norm < limit, 1.0, limit / grad_norm), finite, jnp.int32(0))
        updated, kept, changed = _moved_one_by_one(config, trained, state, gradients, stride)
        return join_frozen(updated, rest), kept, AppliedUpdate(grad_norm, finite, changed)
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


class _Stride(NamedTuple):
    """What a step of all arrays has in common.

    Attributes:
        rate: Learning rate.
        scale: Of all gradients, by which they are clipped.
        finite: Whether the step is taken at all.
        count: Steps with this one.
    """

    rate: Array
    scale: Array
    finite: Array
    count: Array


class _Piece(NamedTuple):
    """Of an array, or of a part of it, what a step reads and makes; the last three in the host's memory, if offloaded.

    Attributes:
        own: The parameters.
        gradient: Of them, None where they stay as they are; afterwards how many are another number than before.
        mu: First moments.
        nu: Second ones.
        master: float32 parameters, None where they are their own.
    """

    own: Array
    gradient: Array | None
    mu: Array
    nu: Array
    master: Array | None


def _moved_one_by_one(
    config: OptimizerConfig, trained: PyTree, state: OptimizerState, gradients: PyTree, stride: _Stride
) -> tuple[PyTree, OptimizerState, Array]:
    """What `apply_gradients` returns of AdamW's step, array by array; of a state in the host's memory by pieces."""
    (index,) = [n for n, each in enumerate(state.adam) if isinstance(each, optax.ScaleByAdamState)]
    adam, structure = state.adam[index], jax.tree.structure(trained)
    stride = stride._replace(count=jnp.asarray(optax.safe_increment(adam.count)))
    masters = [None] * structure.num_leaves if state.master is None else structure.flatten_up_to(state.master)
    arrays = map(structure.flatten_up_to, (trained, gradients, adam.mu, adam.nu))
    pieces = [_Piece(*each) for each in zip(*arrays, masters, strict=True)]
    step = _in_pieces if config.offload else lambda step, piece: step(piece)
    named = zip(_named_leaves(trained), pieces, strict=True)
    moved = [step(partial(_move_piece, config, name, stride), piece) for (name, _), piece in named]
    own, changes, mu, nu, master = (list(each) for each in zip(*moved, strict=True))
    count = jnp.where(stride.finite, stride.count, adam.count)
    adam = optax.ScaleByAdamState(count, structure.unflatten(mu), structure.unflatten(nu))
    kept = None if state.master is None else structure.unflatten(master)
    size = sum(float(piece.own.size) for piece in pieces if piece.gradient is not None)
    changed = sum(changes, jnp.zeros((), jnp.float32)) / max(size, 1.0)
    chain = (*state.adam[:index], adam, *state.adam[index + 1 :])
    return structure.unflatten(own), OptimizerState(chain, kept), changed


_WHOLE, _MOST_PIECES, _TILE_ROWS = 2**20, 64, 16
"""Elements that are a piece by themselves; into how many a larger array is cut at most; rows of a TPU's tile."""


def _in_pieces(step: Callable[[_Piece], _Piece], whole: _Piece) -> _Piece:
    """The step over pieces of the first axis, each after the other, as many as divide it."""
    shape, count = whole.own.shape, _piece_count(whole.own.shape)
    if count == 1:
        return step(whole)
    cut = jax.tree.map(lambda leaf: leaf.reshape(count, shape[0] // count, *shape[1:]), whole)
    _, done = jax.lax.scan(lambda _, piece: (None, step(piece)), None, cut)
    changed = jnp.sum(jnp.asarray(done.gradient))
    joined = jax.tree.map(lambda leaf: leaf.reshape(shape), done._replace(gradient=done.own))
    return joined._replace(gradient=changed)


def _piece_count(shape: tuple[int, ...]) -> int:
    """Into how many parts an array is cut; a matrix into whole tiles of rows, so that nothing is copied for it."""
    if math.prod(shape) <= _WHOLE:
        return 1
    tile = _TILE_ROWS if len(shape) == 2 else 1
    return max(n for n in range(1, _MOST_PIECES + 1) if n == 1 or shape[0] % (n * tile) == 0)


def _move_piece(config: OptimizerConfig, name: str, stride: _Stride, piece: _Piece) -> _Piece:
    """`transformation` of a part of one array.

    What is computed of the new moments waits for them on CPUs: else XLA computes them twice there, of old ones that it
    has copied, because each new array is written where an old one lay.
    """
    gradient, mu, nu, kept = piece.gradient, piece.mu, piece.nu, piece.master
    if config.offload:
        mu, nu, kept = jax.device_put((mu, nu, kept), jax.memory.Space.Device)
    scaled = 0.0 if gradient is None else stride.scale * gradient
    mu = jnp.where(stride.finite, (1 - config.beta1) * scaled + config.beta1 * mu, mu)
    nu = jnp.where(stride.finite, (1 - config.beta2) * scaled**2 + config.beta2 * nu, nu)
    settled = jax.lax.optimization_barrier
    mu, nu = jax.lax.platform_dependent(mu, nu, cpu=lambda *each: settled(each), default=lambda *each: each)
    master = piece.own if kept is None else kept
    if gradient is None:
        moved = master
    else:
        mean, square = mu / (1 - config.beta1**stride.count), nu / (1 - config.beta2**stride.count)
        direction = mean / (jnp.sqrt(square) + config.epsilon)
        if config.weight_decay and not name.endswith(_SPARED):
            direction = direction + config.weight_decay * master
        moved = jnp.where(stride.finite, master - stride.rate * (config.rate_of(name) * direction), master)
    own = moved.astype(piece.own.dtype)
    changed = jnp.sum(own != piece.own, dtype=jnp.float32)  # not an integer, which a model may exceed
    kept = None if kept is None else moved
    if config.offload:
        mu, nu, kept = jax.device_put((mu, nu, kept), jax.memory.Space.Host)
    return _Piece(own, changed, mu, nu, kept)


def direction_of(config: OptimizerConfig, parameters: PyTree, state: OptimizerState, gradients: PyTree) -> PyTree:
    """What an optimiser step subtracts from the float32 parameters, before it is multiplied by the learning rate.

    Args:
        config: Coefficients, clipping and weight decay of the optimiser.
        parameters: All of the model's.
        state: Moments and count before this step.
        gradients: float32, of the whole step.
    """
    state = jax.device_put(state, jax.memory.Space.Device)
    master = split_frozen(config.frozen, parameters)[0] if state.master is None else state.master
    return transformation(config).update(gradients, state.adam, master)[0]


def _changed_fraction(before: PyTree, after: PyTree, moves: PyTree) -> Float32[Array, ""]:
    """Of the elements of all arrays that move."""
    changed, size = jnp.zeros((), jnp.float32), 0.0  # not an integer, which a model may exceed
    for old, new, moving in zip(*map(jax.tree.leaves, (before, after, moves)), strict=True):
        if moving:
            changed, size = changed + jnp.sum(old != new, dtype=jnp.float32), size + old.size
    return changed / max(size, 1.0)


def beside_base(config: OptimizerConfig, model: ModelConfig) -> OptimizerConfig:
    """With all arrays frozen that never train: beside an adapter all but the adapter.

    Raises:
        ConfigError: `frozen` names some of them as if they did.
    """
    if not model.still:
        return config
    adapter = [name for name in model.parameter_shapes() if name.startswith(ADAPTER)]
    idle = [pattern for pattern in config.frozen if not any(_matches(name, [pattern]) for name in adapter)]
    if idle:
        raise ConfigError(
            f"learner.optimizer.frozen has {idle}, and beside an adapter all but the adapter stays as it is: name some "
            f"of {', '.join(adapter)}, or leave it out"
        )
    return config.model_copy(update={"frozen": (*config.frozen, *model.still)})


def split_frozen(frozen: Sequence[str], tree: Tree) -> tuple[Tree, Tree | None]:
    """A tree of arrays in two of its shape: what trains and what is frozen, each None where the other has an array.

    A gradient with respect to the first alone costs nothing for the second, which is None where nothing is frozen.

    Args:
        frozen: Patterns of names.
        tree: Parameters, or anything with their names.
    """
    if not frozen:
        return tree, None
    rest, trained = _split(lambda name, _: _matches(name, frozen), tree)
    return trained, rest


def _split(chosen: Callable[[str, Any], bool], tree: Tree) -> tuple[Tree, Tree]:
    """The arrays that are chosen by name and value, and the others."""
    mask = jax.tree_util.tree_map_with_path(lambda path, leaf: chosen(_name(path), leaf), tree)
    return eqx.partition(tree, mask)


def join_frozen(trained: Tree, rest: Tree | None) -> Tree:
    """The tree that `split_frozen` was given."""
    return trained if rest is None else eqx.combine(trained, rest)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


_SPARED = ("norm", "bias")
"""Ends of the names of arrays that do not decay."""


def _decayed(parameters: PyTree) -> PyTree:
    """True for matrices, false for norms and biases (told by name: stacked leaves hide their rank)."""

    def decays(path: tuple, leaf: Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not name.endswith(_SPARED)

    return jax.tree_util.tree_map_with_path(decays, parameters)


def to_named(tree: object) -> dict[str, np.ndarray]:
    """Every array of a tree by its path, for example ``adam.1.mu.layers.query``."""
    return {name: np.asarray(leaf) for name, leaf in _named_leaves(tree)}


def from_named(like: OptimizerState, arrays: Mapping[str, np.ndarray], frozen: Sequence[str] = ()) -> OptimizerState:
    """A state of the same structure as `like`, with these arrays.

    What they have of arrays that are frozen now is left out; where they have nothing of one that was frozen when they
    were saved, it begins as in `like`.

    Raises:
        CheckpointError: naming what is missing, extra, or of another shape or dtype.
    """
    structure, wanted = jax.tree.structure(like), dict(_named_leaves(like))
    arrays = {name: array for name, array in arrays.items() if not _matches(_array_of(name), frozen)}
    known = {_array_of(name) for name in arrays}
    arrays |= {name: np.asarray(leaf) for name, leaf in wanted.items() if _array_of(name) not in known}
    missing, extra = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    if missing or extra:
        raise CheckpointError(
            f"optimiser state does not fit: missing {missing[:3]}, unknown {extra[:3]}; it is of another model, or "
            "learner.optimizer.name was another"
        )
    for name, leaf in wanted.items():
        found = arrays[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise CheckpointError(
                f"optimiser state {name} is {found.dtype}{list(found.shape)}, "
                f"this model needs {leaf.dtype}{list(leaf.shape)}"
            )
    return jax.tree.unflatten(structure, [_beside(leaf, arrays[name]) for name, leaf in wanted.items()])


def _beside(leaf: Array, array: np.ndarray) -> Array:
    """On the chip, or in the host's memory, where the other lies."""
    return jax.device_put(array, leaf.sharding) if leaf.sharding.memory_kind == _HOST else jnp.asarray(array)


def _array_of(name: str) -> str:
    """The model's array that an array of the state belongs to; its own name where it belongs to none."""
    found = _OF_ARRAY.fullmatch(name)
    return name if found is None else found[1]


@final
class WarmStart:
    """The supervised phase's own optimiser; empty before and after.

    Args:
        config: The learner's; what counts is `warm_start`, without which nothing can be begun.
        accumulate: Compiled, as `penstock.learner.step.supervised_accumulator` gives it.

    Attributes:
        state: The optimiser's; None before and after.
        accumulate: As given.
        apply: Compiled optimiser step.
    """

    def __init__(self, config: LearnerConfig, accumulate: Any) -> None:
        self._config = config
        self.accumulate = accumulate
        self.state: OptimizerState | None = None
        self._steps_done = 0
        if config.warm_start is not None:
            self._optimizer: OptimizerConfig = config.warm_start.optimizer(config.optimizer)
            self.apply = applier(self._optimizer)

    def begin(self, decoder: PyTree) -> OptimizerState:
        """The state, a new one at the first step.

        Raises:
            ConfigError: no warm start is configured.
        """
        if self._config.warm_start is None:
            raise ConfigError("supervised_update needs learner.warm_start: steps, batch_size, learning_rate")
        return initial_state(self._optimizer, decoder) if self.state is None else self.state

    def learning_rate(self) -> float:
        """Of the next step."""
        assert self._config.warm_start is not None
        self._steps_done += 1
        return self._optimizer.rate_at(self._steps_done - 1, self._config.warm_start.steps)

    def discard(self) -> None:
        """The phase is over."""
        self.state = None
