"""A control policy: one network for the fleet and the learner, which is encoder, memory and heads, or one's own.

`step` is what a fleet calls, `unroll` what a learner calls; over the same steps both give the same, and `first` says
where an episode begins, so that memory is reset there. Time comes before the batch. State is a flat mapping of
[batch, …] arrays; it is empty for a policy without memory.

A head makes a distribution over one action leaf out of features. `make_control_policy` draws a policy for a simulator's
spaces; `named_arrays` and `with_named_arrays` are its parameters by name, as weights travel and checkpoints hold them.

A network of one's own is any `equinox.Module` with the methods of `ControlNetwork`. Its arrays are the parameters; what
else lies in its tree (functions, numbers) is kept beside them, so that it may be built of other libraries' layers. What
it gives is looked at once, by shapes alone, when it is made. Not covered: networks that draw random numbers in `step`
(dropout), or change arrays there (batch statistics).
"""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from penstock.model.arrays import named_leaves, with_named_leaves
from penstock.model.control.config import ControlModelConfig
from penstock.model.control.distributions import (
    IMPOSSIBLE,
    ActionDistribution,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    LeafDistribution,
)
from penstock.model.control.encoders import Encoder, ObservationStatistics
from penstock.model.control.layers import Dense
from penstock.model.control.memory import Memory, RecurrentMemory, State, WindowMemory, reset
from penstock.types import ConfigError, LeafSpace, Spaces, fold, generator
from penstock.types.errors import raised_at
from penstock.types.importing import code_digest, load_attribute


class ActionHead(eqx.Module):
    """The layer behind one action leaf.

    Attributes:
        dense: To one number per choice, coin or coordinate (two per coordinate with `state_dependent_std`).
        log_std: Of a Gaussian whose deviation does not depend on the state; else None.
        leaf: The action.
        log_std_range: Limits of a Gaussian's.
        initial_log_std: Added to the head's output where the deviation depends on the state.
    """

    dense: Dense
    log_std: Float[Array, "*action"] | None
    leaf: LeafSpace = eqx.field(static=True)
    log_std_range: tuple[float, float] = eqx.field(static=True)
    initial_log_std: float = eqx.field(static=True)

    @classmethod
    def draw(cls, rng: np.random.Generator, config: ControlModelConfig, leaf: LeafSpace, features: int) -> "ActionHead":
        """A head for that leaf.

        Raises:
            ConfigError: a policy cannot act in it.
        """
        elements = math.prod(leaf.shape)
        gaussian = leaf.kind == "box"
        if leaf.kind == "text" or (gaussian and not np.issubdtype(np.dtype(leaf.dtype), np.floating)):
            raise ConfigError(
                f"action {leaf.name!r} is {leaf.kind} of {leaf.dtype}: a control policy acts in discrete, "
                "multi_discrete, multi_binary and floating-point box spaces; wrap the simulator"
            )
        learned = gaussian and not config.state_dependent_std
        outputs = sum(leaf.n) if leaf.n else elements * (2 if gaussian and config.state_dependent_std else 1)
        dense = Dense.draw(rng, features, outputs, config.policy_gain)
        log_std = jnp.full(leaf.shape, config.initial_log_std, jnp.float32) if learned else None
        return cls(dense, log_std, leaf, config.log_std_range, config.initial_log_std)

    def __call__(self, features: Float[Array, "*batch features"]) -> LeafDistribution:
        """The distribution, with the features' batch axes."""
        outputs = self.dense(features)
        batch, rank = outputs.shape[:-1], len(self.leaf.shape)
        if self.leaf.kind == "box":
            return self._gaussian(outputs, batch, rank)
        if self.leaf.kind == "multi_binary":
            return Bernoulli(outputs.reshape(*batch, *self.leaf.shape), rank)
        return Categorical.of(self._choices(outputs).reshape(*batch, *self.leaf.shape, max(self.leaf.n)), rank)

    def _choices(self, outputs: Float[Array, "*batch outputs"]) -> Float[Array, "*batch padded"]:
        """Every element's scores in a row as long as the longest, filled with what cannot be chosen."""
        longest = max(self.leaf.n)
        if all(n == longest for n in self.leaf.n):
            return outputs
        places = np.full((len(self.leaf.n), longest), sum(self.leaf.n), np.int32)
        start = 0
        for element, n in enumerate(self.leaf.n):
            places[element, :n] = np.arange(start, start + n)
            start += n
        filler = jnp.full((*outputs.shape[:-1], 1), IMPOSSIBLE, outputs.dtype)
        return jnp.concatenate([outputs, filler], axis=-1)[..., places.ravel()]

    def _gaussian(self, outputs: Float[Array, "*batch outputs"], batch: Any, rank: int) -> DiagonalGaussian:
        """The deviation's logarithm is clipped, so that a policy can neither freeze nor overflow."""
        if self.log_std is None:
            mean, log_std = jnp.split(outputs, 2, axis=-1)
            log_std = log_std.reshape(*batch, *self.leaf.shape) + self.initial_log_std
        else:
            mean, log_std = outputs, jnp.broadcast_to(self.log_std, (*batch, *self.leaf.shape))
        return DiagonalGaussian(mean.reshape(*batch, *self.leaf.shape), jnp.clip(log_std, *self.log_std_range), rank)


Observations = Mapping[str, Array]
"""Arrays by leaf name, [batch, …] or [time, batch, …], of the spaces' dtypes or JAX's nearest."""


class ControlNetwork(Protocol):
    """What a network of one's own has (`model.module`): an `equinox.Module` with these methods.

    It may have ``unroll(observations, first, state)``, too, as of `ControlPolicy`, for what is faster over T steps than
    T calls of `step`; it then resets the state where `first` says so, and gives what `step` gives.
    """

    def initial_state(self, batch: int) -> Mapping[str, Array]:
        """The state before an episode's first step: zeros, [batch, …], by name; empty without memory."""
        ...

    def step(
        self, observations: Observations, state: State, first: Bool[Array, " batch"]
    ) -> tuple[ActionDistribution, Float[Array, " batch"], Mapping[str, Array]]:
        """As of `ControlPolicy`; the state is zero already where `first` is true."""
        ...


class ControlPolicy(eqx.Module):
    """What `make_control_policy` makes.

    Attributes:
        statistics: By which observations are normalised; None where they are taken as they come.
        config: How it was made.
        spaces: For what.
    """

    statistics: ObservationStatistics | None
    config: ControlModelConfig = eqx.field(static=True)
    spaces: Spaces = eqx.field(static=True)

    @property
    def still(self) -> tuple[str, ...]:
        """Patterns of the names of arrays that no gradient moves."""
        return () if self.statistics is None else ("statistics.*",)

    @abstractmethod
    def initial_state(self, batch: int) -> dict[str, Array]:
        """The state before an episode's first step, [batch, …]; empty without memory."""

    def step(
        self, observations: Observations, state: State, first: Bool[Array, " batch"]
    ) -> tuple[ActionDistribution, Float[Array, " batch"], dict[str, Array]]:
        """One step of a batch.

        Args:
            observations: [batch, …].
            state: Before the step.
            first: The observation begins an episode: the state is reset before it is used.

        Returns:
            What to do, the value of the observation, and the state after the step.
        """
        return self._step(self._normalised(observations), state, first)

    def unroll(
        self, observations: Observations, first: Bool[Array, "time batch"], state: State
    ) -> tuple[ActionDistribution, Float[Array, "time batch"], dict[str, Array]]:
        """T steps of a batch.

        Args:
            observations: [T, batch, …].
            first: As in `step`.
            state: Before the first step, [batch, …].

        Returns:
            Distributions and values [T, batch], and the states after each step, [T, batch, …].
        """
        return self._unroll(self._normalised(observations), first, state)

    def act(
        self, observations: Observations, state: State, key: PRNGKeyArray
    ) -> tuple[dict[str, Array], Float[Array, " batch"], Float[Array, " batch"], dict[str, Array]]:
        """Samples actions inside episodes: the caller has put `initial_state` where one begins.

        Returns:
            Actions by leaf name, their log-probabilities, values, and the state after.
        """
        batch = len(next(iter(observations.values())))
        distribution, values, after = self.step(observations, state, jnp.zeros(batch, bool))
        actions = distribution.sample(key)
        return actions, distribution.log_prob(actions), values, after

    @abstractmethod
    def _step(self, observations: Observations, state: State, first: Array) -> tuple[ActionDistribution, Array, Any]:
        """Of observations as the network sees them."""

    @abstractmethod
    def _unroll(self, observations: Observations, first: Array, state: State) -> tuple[ActionDistribution, Array, Any]:
        """Of observations as the network sees them."""

    def _normalised(self, observations: Observations) -> Observations:
        return observations if self.statistics is None else self.statistics(observations)


class BuiltinPolicy(ControlPolicy):
    """What the keys of `ControlModelConfig` describe.

    Attributes:
        encoder: From observations to features.
        memory: None without.
        heads: One per action leaf.
        value_head: The estimate of the return.
        value_encoder: The value's own encoder, where it does not share the actions'.
    """

    encoder: Encoder
    memory: Memory | None
    heads: tuple[ActionHead, ...]
    value_head: Dense
    value_encoder: Encoder | None

    @classmethod
    def draw(
        cls, statistics: ObservationStatistics | None, config: ControlModelConfig, spaces: Spaces, rng: Any
    ) -> "BuiltinPolicy":
        """With first weights from a NumPy generator.

        Raises:
            ConfigError: as of `make_control_policy`.
        """
        encoder = Encoder.draw(rng, config, spaces.observations)
        memory = _memory(rng, config, encoder.features)
        width = encoder.features if memory is None else config.memory_size
        heads = tuple(ActionHead.draw(rng, config, leaf, width) for leaf in spaces.actions)
        own = Encoder.draw(rng, config, spaces.observations) if config.value_network == "separate" else None
        value_head = Dense.draw(rng, width, 1, config.value_gain)
        return cls(statistics, config, spaces, encoder, memory, heads, value_head, own)

    def initial_state(self, batch: int) -> dict[str, Array]:
        """The memory's."""
        return {} if self.memory is None else self.memory.initial_state(batch)

    def _step(self, observations: Observations, state: State, first: Array) -> tuple[ActionDistribution, Array, Any]:
        features, after = self.encoder(observations), dict(state)
        if self.memory is not None:
            features, after = self.memory.step(features, state, first)
        own = features if self.value_encoder is None else self.value_encoder(observations)
        return self._distribution(features), self.value_head(own)[..., 0], after

    def _unroll(self, observations: Observations, first: Array, state: State) -> tuple[ActionDistribution, Array, Any]:
        features, after = _over_time(self.encoder, observations, first.shape), {}
        if self.memory is not None:
            features, after = self.memory.unroll(features, state, first)
        own = features if self.value_encoder is None else _over_time(self.value_encoder, observations, first.shape)
        return self._distribution(features), self.value_head(own)[..., 0], after

    def _distribution(self, features: Float[Array, "*batch features"]) -> Distribution:
        return Distribution(tuple(head(features) for head in self.heads), tuple(h.leaf.name for h in self.heads))


_TIMES, _ROWS = 11, 13
"""Steps and simulators with which a network of one's own is looked at: no layer's width is likely to be one of them."""


class OwnPolicy(ControlPolicy):
    """A network of one's own.

    Attributes:
        network: It, with None in the place of what is no array.
        rest: What is no array, in the order of the tree, and the tree's structure.
        code: Digest of what computes with the arrays: the file of the network's class, and `rest`.
    """

    network: Any
    rest: tuple[tuple[Any, ...], Any] = eqx.field(static=True)
    code: str = eqx.field(static=True)

    @classmethod
    def draw(
        cls, statistics: ObservationStatistics | None, config: ControlModelConfig, spaces: Spaces, seed: int
    ) -> "OwnPolicy":
        """Imports what `config.module` names, and makes the network.

        Raises:
            ConfigError: it cannot be imported or made, or gives what no fleet or learner could use.
        """
        assert config.module is not None
        make = load_attribute(config.module, "model.module")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*array is being set as static")  # two of one form could not be compared
            given = ", ".join(("spaces", "seed", *(f"{name}=…" for name in config.kwargs)))
            made = _asked(config, f"making it with ({given})", lambda: make(spaces, seed, **config.kwargs))
        lacking = [name for name in ("initial_state", "step") if not callable(getattr(made, name, None))]
        if lacking or not isinstance(made, eqx.Module):
            reason = f"which lacks {' and '.join(lacking)}" if lacking else "which is no equinox.Module"
            raise _refused(config, f"it gives a {type(made).__name__}, {reason}")
        arrays, others = eqx.partition(_asked(config, "taking its arrays", lambda: _of_jax(made)), eqx.is_array)
        leaves, structure = jax.tree.flatten(others)
        code = code_digest(type(made), f"{leaves}{structure}")
        policy = cls(statistics, config, spaces, arrays, (tuple(leaves), structure), code)
        policy._check_arrays()
        policy._check_outputs()
        policy._check_scores()
        return policy

    def initial_state(self, batch: int) -> dict[str, Array]:
        """The network's."""
        return {name: jnp.asarray(array) for name, array in _named(self._whole.initial_state(batch)).items()}

    def _step(self, observations: Observations, state: State, first: Array) -> tuple[Any, Array, Any]:
        distribution, values, after = self._whole.step(observations, reset(state, first), first)
        return distribution, values.astype(jnp.float32), _named(after)

    def _unroll(self, observations: Observations, first: Array, state: State) -> tuple[Any, Array, Any]:
        if hasattr(self._whole, "unroll"):
            distribution, values, after = self._whole.unroll(observations, first, state)
            return distribution, values.astype(jnp.float32), _named(after)
        if not state:
            flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), (dict(observations), first))
            given = self._step(flat[0], {}, flat[1])
            return jax.tree.map(lambda array: array.reshape(*first.shape, *array.shape[1:]), given)

        def run(before: Any, row: Any) -> tuple[Any, Any]:
            distribution, values, after = self._step(row[0], before, row[1])
            return after, (distribution, values, after)

        return jax.lax.scan(run, dict(state), (dict(observations), first))[1]

    @property
    def _whole(self) -> Any:
        leaves, structure = self.rest
        return eqx.combine(self.network, jax.tree.unflatten(structure, leaves))

    def _check_arrays(self) -> None:
        """They can be trained, sent and saved.

        Raises:
            ConfigError: there is none, two have one name, or one has a dtype or numbers that are not for parameters.
        """
        arrays = named_leaves(self.network)
        if not arrays:
            raise _refused(self.config, "its network has no arrays, so that nothing could be trained")
        if len(arrays) < len(jax.tree.leaves(self.network)):
            raise _refused(
                self.config,
                f"two arrays have one name, by which they would travel (of {', '.join(arrays)}): let no key of a "
                "dict hold a dot",
            )
        for name, array in arrays.items():
            if array.dtype != jnp.float32:
                raise _refused(
                    self.config,
                    f"{name} is {array.dtype}: parameters are float32; cast it, or keep what is no parameter as a "
                    "number or a tuple in an equinox.field(static=True)",
                )
            if not np.all(np.isfinite(array)):
                raise _refused(self.config, f"{name} holds numbers that are not finite: look at where they come from")

    def _check_outputs(self) -> None:
        """By shapes alone: of one simulator's step, and of some steps of several, with numbers of no layer's width.

        Raises:
            ConfigError: what `initial_state`, `step` or `unroll` gives is not what `ControlNetwork` says.
        """
        for method, axes in (("step", (_ROWS,)), ("step", (1,)), ("unroll", (_TIMES, _ROWS))):
            state = self._checked_state(axes[-1])
            observations = {leaf.name: _blank(leaf, axes) for leaf in self.spaces.observations}
            given = (observations, state, jnp.zeros(axes, bool))
            asked = partial(self._outputs, method, axes)
            self._check_forms(method, _asked(self.config, method, partial(jax.eval_shape, asked, *given)), axes, state)

        def loss(network: Any) -> Array:
            numbers = replace(self, network=network)._outputs(method, axes, *given)
            return numbers["log_prob"].sum() + numbers["entropy"].sum() + numbers["values"].sum()

        _asked(self.config, "its gradient", lambda: jax.eval_shape(jax.grad(loss), self.network))

    def _check_scores(self) -> None:
        """Scores that are no log-probabilities look like them by shape, and would train to something else."""
        seen = self._normalised({leaf.name: _blank(leaf, (1,)) for leaf in self.spaces.observations})

        def totals(network: Any) -> list[Array]:
            own = replace(self, network=network)
            given = own._step(seen, own.initial_state(1), jnp.ones(1, bool))[0]
            return [leaf.log_total for leaf in getattr(given, "leaves", ()) if isinstance(leaf, Categorical)]

        try:
            found = jax.jit(totals)(self.network)
        except Exception:  # zeros may be nothing that it is ever shown
            return
        if any(np.any(np.abs(total) > 1e-3) for total in found):
            raise _refused(self.config, "a Categorical's probabilities do not add up to 1: make it by Categorical.of")

    def _checked_state(self, batch: int) -> dict[str, Array]:
        state = _asked(self.config, "initial_state", lambda: self.initial_state(batch))
        for name, array in state.items():
            if array.dtype.kind not in "biuf":
                raise _refused(
                    self.config,
                    f"initial_state({batch})[{name!r}] is {_form(array)}, and fragments keep flags, integers and "
                    "floats: cast it to float32 there, and back in step",
                )
            if array.shape[:1] != (batch,) or np.any(array):
                raise _refused(
                    self.config,
                    f"initial_state({batch})[{name!r}] is {_form(array)}: every episode begins with zeros, here of "
                    f"{batch} rows",
                )
        return state

    def _outputs(
        self, method: str, axes: tuple[int, ...], observations: Observations, state: State, first: Array
    ) -> dict[str, Any]:
        """All that a fleet asks of what `step` gives, or a learner of what `unroll` does, by what it is called."""
        acting, seen = method == "step", self._normalised(observations)
        distribution, values, after = self._step(seen, state, first) if acting else self._unroll(seen, first, state)
        self._check_distribution(distribution, axes)
        if acting:  # row by row, each with a key of its own
            keys, one = jax.random.split(jax.random.key(0), axes[0]), jax.vmap(lambda row, key: row.sample(key))
            what = "sample of one row, whose arrays have no batch's axes,"
            actions = _asked(self.config, what, lambda: one(distribution, keys))
            modes = distribution.mode()
        else:
            actions, modes = {leaf.name: _blank(leaf, axes) for leaf in self.spaces.actions}, {}
        numbers = distribution.log_prob(actions), distribution.entropy(), distribution.kl(distribution)
        found = dict(zip(("log_prob", "entropy", "kl"), numbers, strict=True)) | {"values": values}
        found |= {f"action {name!r}": array for name, array in actions.items()}
        found |= {f"most probable action {name!r}": array for name, array in modes.items()}
        return found | {f"state {name!r}": array for name, array in after.items()}

    def _check_distribution(self, distribution: Any, axes: tuple[int, ...]) -> None:
        needed = ("sample", "mode", "log_prob", "entropy", "kl")
        lacking = [name for name in needed if not callable(getattr(distribution, name, None))]
        if lacking:
            raise TypeError(f"the first of three results, a distribution, lacks {', '.join(lacking)}")
        if isinstance(distribution, LeafDistribution):
            kind = type(distribution).__name__
            raise TypeError(f"a {kind} is of one action leaf: give Distribution(({kind}(…),), (its name,))")
        if not all(np.shape(array)[: len(axes)] == axes for array in jax.tree.leaves(distribution)):
            raise TypeError(f"every array in a distribution begins with the batch's axes, {list(axes)} here")
        if not isinstance(distribution, Distribution):
            return
        if len(set(distribution.names)) < len(distribution.names):
            raise TypeError(f"its Distribution has a name twice: {', '.join(map(repr, distribution.names))}")
        choices = {leaf.name: max(leaf.n) for leaf in self.spaces.actions if leaf.n}
        for name, own in zip(distribution.names, distribution.leaves, strict=True):
            if isinstance(own, Categorical) and name in choices and own.logprobs.shape[-1] != choices[name]:
                raise TypeError(
                    f"action {name!r} has scores for {own.logprobs.shape[-1]} choices, and its space has "
                    f"{choices[name]}"
                )

    def _check_forms(self, method: str, found: Mapping[str, Any], axes: tuple[int, ...], state: State) -> None:
        wanted: dict[str, tuple[tuple[int, ...], Any]] = {
            name: (axes, np.dtype(np.float32)) for name in ("log_prob", "entropy", "kl", "values")
        }
        for leaf in self.spaces.actions:
            for called in ("action", "most probable action")[: 2 if method == "step" else 1]:
                wanted[f"{called} {leaf.name!r}"] = ((*axes, *leaf.shape), leaf.device_dtype)
        for name, array in state.items():
            wanted[f"state {name!r}"] = ((*axes[:-1], *array.shape), array.dtype)
        for name in sorted(wanted.keys() | found.keys()):
            if name not in found or name not in wanted:
                known = ", ".join(sorted(wanted if name in found else found))
                what = "is not" if name not in found else "is, and should not be,"
                raise _refused(self.config, f"{method}: {name} {what} among what it gives ({known})")
            (shape, dtype), array = wanted[name], found[name]
            exact = name.startswith("state ")
            fits = array.dtype == dtype if exact else _is_floating(array.dtype) == _is_floating(dtype)
            if array.shape != shape or not fits:
                raise _refused(self.config, f"{method}: {name} is {_form(array)}, not {dtype}{list(shape)}")


def _asked(config: ControlModelConfig, what: str, call: Callable[[], Any]) -> Any:
    """What a network of one's own gives.

    Raises:
        ConfigError: whatever it raised, in words.
    """
    try:
        return call()
    except ConfigError:
        raise
    except Exception as error:  # whatever somebody's network raises
        words = str(error).strip().partition("\n")[0]
        hint = " (model.kwargs says where it lies)" if isinstance(error, FileNotFoundError) and config.kwargs else ""
        raise _refused(config, f"{what} raised {type(error).__name__}: {words}{hint}{raised_at(error)}") from error


def _refused(config: ControlModelConfig, why: str) -> ConfigError:
    return ConfigError(f"model.module {config.module!r}: {why}; docs/control.md shows one of thirty lines")


def _of_jax(made: Any) -> Any:
    """With JAX's arrays in the place of NumPy's.

    Raises:
        TypeError: it has a layer that changes as it is called, or arrays of no numbers.
    """
    for leaf in jax.tree.leaves(made, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex)):
        if isinstance(leaf, eqx.nn.StateIndex):
            raise TypeError(
                "a layer of it changes numbers in step (an equinox.nn.StateIndex, as of BatchNorm), which nothing here "
                "would keep: take LayerNorm or GroupNorm, or model.normalize_observations"
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, made)


def _named(state: Any) -> dict[str, Any]:
    """A state as it was given.

    Raises:
        TypeError: it is no mapping of arrays by name.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise TypeError(
            f"the state is a {type(state).__name__}, not a mapping of arrays by name, as of {{'hidden': …}}"
        )
    for name, array in state.items():
        if not hasattr(array, "dtype"):
            raise TypeError(f"the state's {name!r} is a {type(array).__name__}, not an array: a state is flat")
    return dict(state)


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _form(array: Any) -> str:
    return f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"


def _blank(leaf: LeafSpace, axes: tuple[int, ...]) -> Array:
    return jnp.zeros((*axes, *leaf.shape), leaf.device_dtype)


def _over_time(encoder: Encoder, observations: Observations, shape: tuple[int, ...]) -> Array:
    """Encodes [T, batch, …] as one batch of T · batch."""
    flat = jax.tree.map(lambda array: jnp.reshape(array, (-1, *array.shape[2:])), dict(observations))
    return encoder(flat).reshape(*shape, -1)


def make_control_policy(config: ControlModelConfig, spaces: Spaces, seed: int) -> ControlPolicy:
    """A policy with first weights drawn from the run's seed.

    Args:
        config: Sizes and kinds of its encoders, memory and heads.
        spaces: What it sees and does.
        seed: The run's; the same seed gives the same weights.

    Raises:
        ConfigError: the network does not fit the spaces, or one of their arrays is empty or held by no device; the
            message names the leaf and the remedy; or one's own cannot be made, or gives what is not a policy's.
    """
    for leaf in (*spaces.observations, *spaces.actions):
        _ = leaf.device_dtype  # it raises here, before anything is learned
        if 0 in leaf.shape:
            shape = f"{leaf.kind} {leaf.name!r} has shape {list(leaf.shape)}, which holds no number"
            raise ConfigError(f"{shape}: wrap the simulator so that its spaces leave it out")
    known = ObservationStatistics.of_none(config, spaces.observations) if config.normalize_observations else None
    if config.module is not None:
        return OwnPolicy.draw(known, config, spaces, fold(seed, "model") % 2**31)
    return BuiltinPolicy.draw(known, config, spaces, generator(fold(seed, "model")))


def _memory(rng: np.random.Generator, config: ControlModelConfig, inputs: int) -> Memory | None:
    if config.memory == "none":
        return None
    if config.memory == "transformer":
        return WindowMemory.draw(
            rng, inputs, config.memory_size, config.memory_layers, config.memory_heads, config.memory_window
        )
    return RecurrentMemory.draw(rng, config.memory, inputs, config.memory_size)


def named_arrays(policy: ControlPolicy) -> dict[str, Array]:
    """Every parameter of the policy by name (``memory.recurrent``, ``value_head.bias``), in a fixed order."""
    return named_leaves(policy)


def with_named_arrays(policy: ControlPolicy, arrays: Mapping[str, Array | np.ndarray]) -> ControlPolicy:
    """A policy of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    return with_named_leaves(policy, arrays, "the control policy")
