"""A loss of one's own: tapered off-policy REINFORCE (Le Roux et al. 2025, https://arxiv.org/abs/2503.14286).

What turned out well is imitated however old it is; what turned out badly is pushed away only as far as the policy still
does it. Try it:

    penstock train cats learner.loss.module=examples/own_loss.py:TaperedReinforce
"""

import jax
import jax.numpy as jnp
import numpy as np

from penstock.batch import rloo
from penstock.learner import LossInputs
from penstock.types import RolloutGroup


class TaperedReinforce:
    """−w · A · ℓ_θ with w = 1 where A ≥ 0, else min(π_θ(sequence) / π_b(sequence), 1)."""

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [n], one for each rollout of the group."""
        return rloo(group)

    def loss(self, inputs: LossInputs) -> jax.Array:
        """float32 [n], one for each token; the learner weighs and adds them (`learner.loss.aggregation`)."""
        drift = inputs.sequence_sum(inputs.logprobs - inputs.behaviour_logprobs)
        weight = jnp.where(inputs.advantage < 0, jnp.exp(jnp.minimum(drift, 0.0)), 1.0)
        return -jax.lax.stop_gradient(weight) * inputs.advantage * inputs.logprobs
