"""From features to a distribution over one action leaf."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from penstock.model.control.config import ControlModelConfig
from penstock.model.control.distributions import (
    IMPOSSIBLE,
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    LeafDistribution,
)
from penstock.model.control.layers import Dense
from penstock.types import ConfigError, LeafSpace


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
