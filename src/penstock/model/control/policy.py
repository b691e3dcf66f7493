"""A control policy: encoder, memory, heads; one network for the fleet and the learner.

`step` is what a fleet calls, `unroll` what a learner calls; over the same steps both give the same, and `first` says
where an episode begins, so that memory is reset there. Time comes before the batch. State is a flat mapping of
[batch, …] arrays; it is empty for a policy without memory.

A head makes a distribution over one action leaf out of features. `make_control_policy` draws a policy for a simulator's
spaces; `named_arrays` and `with_named_arrays` are its parameters by name, as weights travel and checkpoints hold them.
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from penstock.model.arrays import named_leaves, with_named_leaves
from penstock.model.control.config import ControlModelConfig
from penstock.model.control.distributions import (
    IMPOSSIBLE,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    LeafDistribution,
)
from penstock.model.control.encoders import Encoder, ObservationStatistics
from penstock.model.control.layers import Dense
from penstock.model.control.memory import Memory, RecurrentMemory, State, WindowMemory
from penstock.types import ConfigError, LeafSpace, Spaces, fold, generator


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


class ControlPolicy(eqx.Module):
    """What `make_control_policy` makes.

    Attributes:
        encoder: From observations to features.
        memory: None without.
        heads: One per action leaf.
        value_head: The estimate of the return.
        value_encoder: The value's own encoder, where it does not share the actions'.
        statistics: By which observations are normalised; None where they are taken as they come.
        config: How it was made.
        spaces: For what.
    """

    encoder: Encoder
    memory: Memory | None
    heads: tuple[ActionHead, ...]
    value_head: Dense
    value_encoder: Encoder | None
    statistics: ObservationStatistics | None
    config: ControlModelConfig = eqx.field(static=True)
    spaces: Spaces = eqx.field(static=True)

    @property
    def still(self) -> tuple[str, ...]:
        """Patterns of the names of arrays that no gradient moves."""
        return () if self.statistics is None else ("statistics.*",)

    def initial_state(self, batch: int) -> dict[str, Array]:
        """The state before an episode's first step, [batch, …]; empty without memory."""
        return {} if self.memory is None else self.memory.initial_state(batch)

    def step(
        self, observations: Observations, state: State, first: Bool[Array, " batch"]
    ) -> tuple[Distribution, Float[Array, " batch"], dict[str, Array]]:
        """One step of a batch.

        Args:
            observations: [batch, …].
            state: Before the step.
            first: The observation begins an episode: the state is reset before it is used.

        Returns:
            What to do, the value of the observation, and the state after the step.
        """
        observations = self._normalised(observations)
        features, after = self.encoder(observations), dict(state)
        if self.memory is not None:
            features, after = self.memory.step(features, state, first)
        own = features if self.value_encoder is None else self.value_encoder(observations)
        return self._distribution(features), self.value_head(own)[..., 0], after

    def unroll(
        self, observations: Observations, first: Bool[Array, "time batch"], state: State
    ) -> tuple[Distribution, Float[Array, "time batch"], dict[str, Array]]:
        """T steps of a batch.

        Args:
            observations: [T, batch, …].
            first: As in `step`.
            state: Before the first step, [batch, …].

        Returns:
            Distributions and values [T, batch], and the states after each step, [T, batch, …].
        """
        observations = self._normalised(observations)
        features, after = _over_time(self.encoder, observations, first.shape), {}
        if self.memory is not None:
            features, after = self.memory.unroll(features, state, first)
        own = features if self.value_encoder is None else _over_time(self.value_encoder, observations, first.shape)
        return self._distribution(features), self.value_head(own)[..., 0], after

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

    def _normalised(self, observations: Observations) -> Observations:
        return observations if self.statistics is None else self.statistics(observations)

    def _distribution(self, features: Float[Array, "*batch features"]) -> Distribution:
        return Distribution(tuple(head(features) for head in self.heads), tuple(h.leaf.name for h in self.heads))


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
        ConfigError: the network does not fit the spaces, or no device holds one of their arrays exactly; the message
            names the leaf and the remedy.
    """
    for leaf in (*spaces.observations, *spaces.actions):
        _ = leaf.device_dtype  # it raises here, before anything is learned
    rng = generator(fold(seed, "model"))
    encoder = Encoder.draw(rng, config, spaces.observations)
    memory = _memory(rng, config, encoder.features)
    width = encoder.features if memory is None else config.memory_size
    heads = tuple(ActionHead.draw(rng, config, leaf, width) for leaf in spaces.actions)
    own = Encoder.draw(rng, config, spaces.observations) if config.value_network == "separate" else None
    value_head = Dense.draw(rng, width, 1, config.value_gain)
    known = ObservationStatistics.of_none(config, spaces.observations) if config.normalize_observations else None
    return ControlPolicy(encoder, memory, heads, value_head, own, known, config, spaces)


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
