"""What a policy says about actions: distributions over one leaf, and their product over all leaves.

Batch axes come first and are any number; an action's own axes come last, and log-probabilities, entropies and
divergences are summed over them. All in float32. A Gaussian is over the number that was sampled: a simulator clips it
to its bounds on its own side, so that the log-probability is the unclipped sample's. Not covered: squashed Gaussians,
action masks, distributions in which one leaf depends on another.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, PRNGKeyArray

IMPOSSIBLE = -1e30
"""Log-probability of a choice that an element does not have; finite, so that p · log p is 0 and gradients are."""


@runtime_checkable
class ActionDistribution(Protocol):
    """What a network gives: over all action leaves together, a pytree of arrays that all begin with the batch's axes.

    `Distribution` is one. A fleet samples row by row, from arrays that have no batch axes left; all else is asked of
    [batch, …], and of [time, batch, …] by a learner.
    """

    def sample(self, key: PRNGKeyArray) -> dict[str, Array]:
        """Actions by leaf name, of integers but for a box of floats."""
        ...

    def mode(self) -> dict[str, Array]:
        """What an evaluation does: the most probable actions, or what stands for them."""
        ...

    def log_prob(self, actions: Mapping[str, Array]) -> Float[Array, "*batch"]:
        """Of what `sample` gave, in nats."""
        ...

    def entropy(self) -> Float[Array, "*batch"]:
        """In nats, or an estimate that has a gradient."""
        ...

    def kl(self, other: Any) -> Float[Array, "*batch"]:
        """KL(self ‖ other) in nats; only `learner.reference_kl` asks for its number."""
        ...


class LeafDistribution(eqx.Module):
    """Over one action leaf."""

    @abstractmethod
    def sample(self, key: PRNGKeyArray) -> Num[Array, "*batch"]:
        """One action for each batch element: [batch, …, leaf's shape]."""

    @abstractmethod
    def mode(self) -> Num[Array, "*batch"]:
        """The most probable action."""

    @abstractmethod
    def log_prob(self, actions: Num[Array, "*action"]) -> Float[Array, "*batch"]:
        """Natural logarithm of the probability or density."""

    @abstractmethod
    def entropy(self) -> Float[Array, "*batch"]:
        """In nats; differential for a Gaussian."""

    @abstractmethod
    def kl(self, other: "LeafDistribution") -> Float[Array, "*batch"]:
        """KL(self ‖ other) in nats, exact."""


class Categorical(LeafDistribution):
    """One choice per element: ``discrete`` (no element axis) and ``multi_discrete``.

    Attributes:
        logprobs: Normalised over the last axis; choices that an element lacks are `IMPOSSIBLE`.
        rank: Number of the action's own axes.
    """

    logprobs: Float[Array, "*batch choices"]
    rank: int = eqx.field(static=True)

    @classmethod
    def of(cls, logits: Float[Array, "*batch choices"], rank: int) -> "Categorical":
        """From scores of any scale."""
        return cls(jax.nn.log_softmax(logits.astype(jnp.float32)), rank)

    @property
    def log_total(self) -> Float[Array, "*batch"]:
        """Logarithm of what each element's probabilities add up to: 0, where they are some."""
        return jax.nn.logsumexp(self.logprobs, axis=-1)

    def sample(self, key: PRNGKeyArray) -> Num[Array, "*action"]:
        """int32."""
        return jax.random.categorical(key, self.logprobs).astype(jnp.int32)

    def mode(self) -> Num[Array, "*action"]:
        """int32; the first of equals."""
        return jnp.argmax(self.logprobs, axis=-1).astype(jnp.int32)

    def log_prob(self, actions: Num[Array, "*action"]) -> Float[Array, "*batch"]:
        """Sum over the elements."""
        chosen = jnp.take_along_axis(self.logprobs, actions.astype(jnp.int32)[..., None], axis=-1)[..., 0]
        return _summed(chosen, self.rank)

    def entropy(self) -> Float[Array, "*batch"]:
        """Sum over the elements."""
        return _summed(-jnp.sum(jnp.exp(self.logprobs) * self.logprobs, axis=-1), self.rank)

    def kl(self, other: LeafDistribution) -> Float[Array, "*batch"]:
        """Sum over the elements."""
        assert isinstance(other, Categorical)
        return _summed(jnp.sum(jnp.exp(self.logprobs) * (self.logprobs - other.logprobs), axis=-1), self.rank)


class Bernoulli(LeafDistribution):
    """A coin per element: ``multi_binary``.

    Attributes:
        logits: log(p / (1 − p)) of a 1.
        rank: Number of the action's own axes.
    """

    logits: Float[Array, "*batch_and_action"]
    rank: int = eqx.field(static=True)

    def sample(self, key: PRNGKeyArray) -> Num[Array, "*action"]:
        """int8."""
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logits)).astype(jnp.int8)

    def mode(self) -> Num[Array, "*action"]:
        """int8; 0 at p = 1/2."""
        return (self.logits > 0).astype(jnp.int8)

    def log_prob(self, actions: Num[Array, "*action"]) -> Float[Array, "*batch"]:
        """Sum over the elements."""
        return _summed(jax.nn.log_sigmoid(jnp.where(actions > 0, self.logits, -self.logits)), self.rank)

    def entropy(self) -> Float[Array, "*batch"]:
        """Sum over the elements."""
        return -self._expected(self.logits)

    def kl(self, other: LeafDistribution) -> Float[Array, "*batch"]:
        """Sum over the elements."""
        assert isinstance(other, Bernoulli)
        return self._expected(self.logits) - self._expected(other.logits)

    def _expected(self, logits: Float[Array, "*batch_and_action"]) -> Float[Array, "*batch"]:
        """The mean log-probability, under these coins, of coins with those logits."""
        heads = jax.nn.sigmoid(self.logits) * jax.nn.log_sigmoid(logits)
        return _summed(heads + jax.nn.sigmoid(-self.logits) * jax.nn.log_sigmoid(-logits), self.rank)


class DiagonalGaussian(LeafDistribution):
    """Independent normal numbers: ``box``.

    Attributes:
        mean: In the action's own units.
        log_std: Natural logarithm of the standard deviation, of the same shape.
        rank: Number of the action's own axes.
    """

    mean: Float[Array, "*batch_and_action"]
    log_std: Float[Array, "*batch_and_action"]
    rank: int = eqx.field(static=True)

    def sample(self, key: PRNGKeyArray) -> Num[Array, "*action"]:
        """float32, not clipped to the simulator's bounds."""
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape, jnp.float32)

    def mode(self) -> Num[Array, "*action"]:
        """The mean."""
        return self.mean

    def log_prob(self, actions: Num[Array, "*action"]) -> Float[Array, "*batch"]:
        """Of the sample before any clipping."""
        deviations = (actions.astype(jnp.float32) - self.mean) * jnp.exp(-self.log_std)
        return _summed(-0.5 * jnp.square(deviations) - self.log_std - 0.5 * math.log(2 * math.pi), self.rank)

    def entropy(self) -> Float[Array, "*batch"]:
        """Sum of log σ + ½ log 2πe."""
        return _summed(self.log_std + 0.5 * math.log(2 * math.pi * math.e), self.rank)

    def kl(self, other: LeafDistribution) -> Float[Array, "*batch"]:
        """Sum of log σ′/σ + (σ² + (μ − μ′)²) / 2σ′² − ½."""
        assert isinstance(other, DiagonalGaussian)
        shift = jnp.square((self.mean - other.mean) * jnp.exp(-other.log_std))
        spread = jnp.exp(2 * (self.log_std - other.log_std))
        return _summed(other.log_std - self.log_std + 0.5 * (spread + shift - 1), self.rank)


class Distribution(eqx.Module):
    """The product over action leaves; what every policy gives.

    Attributes:
        leaves: One per action leaf, all with the same batch axes.
        names: Theirs.
    """

    leaves: tuple[LeafDistribution, ...]
    names: tuple[str, ...] = eqx.field(static=True)

    def sample(self, key: PRNGKeyArray) -> dict[str, Array]:
        """Actions by leaf name, [batch, …, leaf's shape]; int32, int8 or float32."""
        keys = jax.random.split(key, len(self.leaves)) if len(self.leaves) > 1 else [key]
        return {name: leaf.sample(k) for name, leaf, k in zip(self.names, self.leaves, keys, strict=True)}

    def mode(self) -> dict[str, Array]:
        """The most probable actions by leaf name."""
        return {name: leaf.mode() for name, leaf in zip(self.names, self.leaves, strict=True)}

    def log_prob(self, actions: Mapping[str, Array]) -> Float[Array, "*batch"]:
        """Of all leaves together."""
        terms = [leaf.log_prob(actions[name]) for name, leaf in zip(self.names, self.leaves, strict=True)]
        return _total(terms)

    def entropy(self) -> Float[Array, "*batch"]:
        """Of all leaves together, in nats."""
        return _total([leaf.entropy() for leaf in self.leaves])

    def kl(self, other: "Distribution") -> Float[Array, "*batch"]:
        """KL(self ‖ other) of all leaves together, in nats."""
        return _total([mine.kl(its) for mine, its in zip(self.leaves, other.leaves, strict=True)])


def _total(terms: list[Array]) -> Array:
    return sum(terms[1:], start=terms[0])


def _summed(values: Array, rank: int) -> Array:
    """Sums over the action's own axes, the last `rank`."""
    return values.sum(axis=tuple(range(-rank, 0))) if rank else values
