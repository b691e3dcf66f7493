"""A control policy: encoder, memory, heads; one network for the fleet and the learner.

`step` is what a fleet calls, `unroll` what a learner calls; over the same steps both give the same, and `first` says
where an episode begins, so that memory is reset there. Time comes before the batch. State is a flat mapping of
[batch, …] arrays; it is empty for a policy without memory.
"""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from penstock.model.control.config import ControlModelConfig
from penstock.model.control.distributions import Distribution
from penstock.model.control.encoders import Encoder
from penstock.model.control.heads import ActionHead
from penstock.model.control.layers import Dense
from penstock.model.control.memory import Memory, State
from penstock.types import Spaces

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
        config: How it was made.
        spaces: For what.
    """

    encoder: Encoder
    memory: Memory | None
    heads: tuple[ActionHead, ...]
    value_head: Dense
    value_encoder: Encoder | None
    config: ControlModelConfig = eqx.field(static=True)
    spaces: Spaces = eqx.field(static=True)

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

    def _distribution(self, features: Float[Array, "*batch features"]) -> Distribution:
        return Distribution(tuple(head(features) for head in self.heads), tuple(h.leaf.name for h in self.heads))


def _over_time(encoder: Encoder, observations: Observations, shape: tuple[int, ...]) -> Array:
    """Encodes [T, batch, …] as one batch of T · batch."""
    flat = jax.tree.map(lambda array: jnp.reshape(array, (-1, *array.shape[2:])), dict(observations))
    return encoder(flat).reshape(*shape, -1)
