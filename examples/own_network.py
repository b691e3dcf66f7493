"""A control network of one's own, out of Equinox's layers: two towers, one for the actions and one for the values.

Try it:

    penstock train examples/own_network.yaml
"""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from penstock.model.control import Categorical, Distribution
from penstock.types import Spaces


class Towers(eqx.Module):
    """For one observation of numbers, and one choice among actions."""

    actor: eqx.nn.MLP
    critic: eqx.nn.MLP

    def __init__(self, spaces: Spaces, seed: int, width: int = 64) -> None:
        """First weights from the seed; `width` comes from `model.kwargs`."""
        (seen,), (chosen,) = spaces.observations, spaces.actions
        keys = jax.random.split(jax.random.key(seed))
        self.actor = eqx.nn.MLP(seen.shape[0], chosen.n[0], width, 2, jnp.tanh, key=keys[0])
        self.critic = eqx.nn.MLP(seen.shape[0], 1, width, 2, jnp.tanh, key=keys[1])

    def initial_state(self, batch: int) -> dict[str, Array]:
        """Nothing is remembered; a memory's would be zeros, [batch, …], by name."""
        return {}

    def step(
        self, observations: Mapping[str, Array], state: Mapping[str, Array], first: Array
    ) -> tuple[Distribution, Array, dict[str, Array]]:
        """Of a batch: what to do, the values [batch], and the state after the step."""
        scores = jax.vmap(self.actor)(observations[""])
        values = jax.vmap(self.critic)(observations[""])[:, 0]
        return Distribution((Categorical.of(scores, rank=0),), ("",)), values, {}
