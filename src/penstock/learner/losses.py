"""The policy loss of one token, composed of small pure functions: L = −sg(w) · surrogate.

Notation: ℓ_θ log-probability under the weights being trained, ℓ_b under those that sampled the token (behaviour),
ℓ_p at the start of the update (proximal), sg stop-gradient; all of softmax(logits / temperature), float32.

**The same ratio is never applied twice.** The off-policy ratio exp(ℓ_θ − ℓ_b) splits into ρ = exp(ℓ_θ − ℓ_p), which
the surrogate differentiates and clips, and exp(ℓ_p − ℓ_b), which the correction bounds and never differentiates.
This learner takes one optimiser step per batch, so the weights of the forward pass *are* the proximal ones:
ℓ_p = sg(ℓ_θ). Then ρ has value 1 and carries the gradient ∇ℓ_θ, the clip cannot act, all staleness stands in
w = sg(min(exp(ℓ_θ − ℓ_b), C)), and the gradient of ``ppo`` is −w A ∇ℓ_θ: REINFORCE with truncated importance
sampling. A second step on the same batch would need ℓ_p kept from before the first.

Not covered: KL to a reference, entropy bonus, sequence-level ratios. Aggregation is `penstock.learner.aggregation`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from penstock.batch.advantages import ADVANTAGES
from penstock.learner.config import CorrectionConfig, LossConfig
from penstock.types import ConfigError, RolloutGroup


class TokenLoss(NamedTuple):
    """Per token, before aggregation.

    Attributes:
        loss: L.
        clipped: Where the surrogate's clip decided.
        bounded: Where the correction changed the weight.
    """

    loss: Float32[Array, " n"]
    clipped: Bool[Array, " n"]
    bounded: Bool[Array, " n"]


def probability_ratio(
    logprobs: Float32[Array, " n"], denominator_logprobs: Float32[Array, " n"]
) -> Float32[Array, " n"]:
    """exp(ℓ − ℓ'): how much more probable a token is under the first policy; inf where it overflows."""
    return jnp.exp(logprobs - denominator_logprobs)


def ppo_surrogate(
    ratio: Float32[Array, " n"], advantage: Float32[Array, " n"], epsilon_low: float, epsilon_high: float
) -> Float32[Array, " n"]:
    """min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A): no reward for moving further than the clip.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; two epsilons: Yu et al. 2025 (DAPO),
    https://arxiv.org/abs/2503.14476. ρ = 1.5, A = 1, ε = .2 -> 1.2; ρ = .5, A = −1 -> −.8.
    """
    clipped = jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def ppo_clipped(
    ratio: Float32[Array, " n"], advantage: Float32[Array, " n"], epsilon_low: float, epsilon_high: float
) -> Bool[Array, " n"]:
    """Where the clip of `ppo_surrogate` decides, so that the token has no gradient."""
    too_high = (ratio > 1.0 + epsilon_high) & (advantage > 0)
    too_low = (ratio < 1.0 - epsilon_low) & (advantage < 0)
    return too_high | too_low


def cispo_surrogate(
    ratio: Float32[Array, " n"],
    advantage: Float32[Array, " n"],
    logprobs: Float32[Array, " n"],
    epsilon_high: float,
) -> Float32[Array, " n"]:
    """sg(min(ρ, 1 + ε_high)) · A · ℓ_θ: the ratio is bounded but every token keeps a gradient.

    MiniMax 2025, https://arxiv.org/abs/2506.13585. ρ = 2, A = 1, ℓ = −1, ε = .28 -> −1.28.
    """
    bounded = jax.lax.stop_gradient(jnp.minimum(ratio, 1.0 + epsilon_high))
    return bounded * advantage * logprobs


def reinforce_surrogate(advantage: Float32[Array, " n"], logprobs: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """A · ℓ_θ. Williams 1992, https://doi.org/10.1007/BF00992696."""
    return advantage * logprobs


def truncated_weight(ratio: Float32[Array, " n"], cap: float) -> Float32[Array, " n"]:
    """min(w, C), truncated importance sampling: [.5, 1, 3] with C = 2 -> [.5, 1, 2]; inf -> C.

    Ionides 2008, https://doi.org/10.1198/106186008X320456; for engines that differ from the learner: Yao et al.
    2025, https://fengyao.notion.site/off-policy-rl.
    """
    return jnp.minimum(ratio, cap)


def masked_weight(ratio: Float32[Array, " n"], low: float, high: float) -> Float32[Array, " n"]:
    """W where low ≤ w ≤ high, else 0 (IcePop): [.4, .5, 1, 5, 6] with .5 and 5 -> [0, .5, 1, 5, 0].

    Ling Team 2025, https://arxiv.org/abs/2510.18855. A masked token stays in the denominators.
    """
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def correction_weight(config: CorrectionConfig, ratio: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """The off-policy weight by configuration, from w = exp(ℓ_p − ℓ_b)."""
    if config.kind == "truncate":
        return truncated_weight(ratio, config.cap)
    if config.kind == "mask":
        return masked_weight(ratio, config.low, config.high)
    return jnp.ones_like(ratio)


def policy_token_loss(
    config: LossConfig,
    logprobs: Float32[Array, " n"],
    behaviour_logprobs: Float32[Array, " n"],
    advantage: Float32[Array, " n"],
) -> TokenLoss:
    """−sg(w) · surrogate for one optimiser step per batch, where ℓ_p = sg(ℓ_θ).

    Args:
        config: Surrogate, clip and correction.
        logprobs: ℓ_θ, differentiated.
        behaviour_logprobs: ℓ_b, as the engine recorded them.
        advantage: A.
    """
    proximal_logprobs = jax.lax.stop_gradient(logprobs)
    off_policy = probability_ratio(proximal_logprobs, behaviour_logprobs)
    weight = jax.lax.stop_gradient(correction_weight(config.correction, off_policy))
    bounded = (weight != off_policy) & (config.correction.kind != "none")
    ratio = probability_ratio(logprobs, proximal_logprobs)
    low, high = config.clip_epsilon_low, config.clip_epsilon_high
    clipped = jnp.zeros(logprobs.shape, bool)
    if config.surrogate == "ppo":
        surrogate = ppo_surrogate(ratio, advantage, low, high)
        clipped = ppo_clipped(ratio, advantage, low, high)
    elif config.surrogate == "cispo":
        surrogate = cispo_surrogate(ratio, advantage, logprobs, high)
        clipped = ratio > 1.0 + high
    else:
        surrogate = reinforce_surrogate(advantage, logprobs)
    return TokenLoss(-weight * surrogate, clipped, bounded)


def supervised_token_loss(
    logprobs: Float32[Array, " n"],
    behaviour_logprobs: Float32[Array, " n"],
    advantage: Float32[Array, " n"],
) -> TokenLoss:
    """−ℓ_θ, the cross-entropy of a reference solution's token; the other arguments are not used."""
    nowhere = jnp.zeros(logprobs.shape, bool)
    return TokenLoss(-logprobs, nowhere, nowhere)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A configured loss as the protocol `penstock.types.RLLossModule` has it."""

    config: LossConfig

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [n]; raises ConfigError for an advantage that needs more than one group."""
        if self.config.advantage not in ADVANTAGES:
            raise ConfigError(
                f"learner.loss.advantage {self.config.advantage} needs the whole batch: "
                "use penstock.batch.compute_advantages"
            )
        return ADVANTAGES[self.config.advantage](group)

    def loss(
        self,
        logprobs: Float32[Array, " n"],
        behaviour_logprobs: Float32[Array, " n"],
        advantage: Float32[Array, " n"],
    ) -> TokenLoss:
        """`policy_token_loss` with this configuration."""
        return policy_token_loss(self.config, logprobs, behaviour_logprobs, advantage)
