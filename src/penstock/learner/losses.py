"""The policy loss of one token, composed of small pure functions: L = −sg(w) · surrogate + β · kl − c_H · H.

Notation: ℓ_θ log-probability under the weights being trained, ℓ_b under those that sampled the token (behaviour),
ℓ_p at the start of the update (proximal), ℓ_ref under a reference, sg stop-gradient; all of
softmax(logits / temperature), float32; H the entropy of that distribution.

**The same ratio is never applied twice.** The off-policy ratio exp(ℓ_θ − ℓ_b) splits into ρ = exp(ℓ_θ − ℓ_p), which
the surrogate differentiates and clips, and exp(ℓ_p − ℓ_b), which the correction bounds and never differentiates. Where
ℓ_p comes from:

- *one optimiser step per update*: the weights of the forward pass are the proximal ones, ℓ_p = sg(ℓ_θ). Then ρ has
  value 1 and carries the gradient ∇ℓ_θ, the clip cannot act, all staleness stands in w, and the gradient of ``ppo`` is
  −w A ∇ℓ_θ: REINFORCE with truncated importance sampling;
- *several*: ℓ_p is computed before the first, and ρ is what the steps so far have moved;
- *behaviour*: ℓ_p = ℓ_b. Then w is exactly 1, and ρ is all of the off-policy ratio.

Aggregation: the loss of a step is Σ_i a_i Σ_t m_it L_it, with one weight a_i per sequence that is known before any
forward pass. It is computed once, on the host, over *all* sequences of the step; micro-batches then only add, so that
their number and their contents cannot change the gradient. Sums over a sequence are taken inside one micro-batch, in
which it always lies whole.

Not covered: values (`penstock.learner.critic`); a KL in the reward (`penstock.batch.with_kl_in_reward`).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from penstock.batch.advantages import ADVANTAGES
from penstock.learner.config import Aggregation, CorrectionConfig, LearnerConfig, LossConfig
from penstock.learner.head import HeadOutputs
from penstock.learner.loss_terms import KlConfig
from penstock.types import ConfigError, RLLossModule, RolloutGroup

MOST_LOG_RATIO = 20.0
"""ρ is formed of ℓ_θ − ℓ_p within ± this (e^20 is 5e8), so that no token's ratio is infinite."""


class LossInputs(NamedTuple):
    """What a loss is made of: n entries, each a token that the policy sampled, and padding after them.

    Attributes:
        logprobs: ℓ_θ, differentiated.
        behaviour_logprobs: ℓ_b, as the engine recorded them.
        proximal_logprobs: ℓ_p, not differentiated.
        advantage: A, not differentiated.
        entropy: H of the distribution that the token was drawn from; differentiated where the loss asks for it.
        sequence: Number of the entry's sequence, less than n; what padding has means nothing.
        real: False for padding.
        reference_logprobs: ℓ_ref, not differentiated; None where the run has no reference (`learner.kl.reference`).
    """

    logprobs: Float32[Array, " n"]
    behaviour_logprobs: Float32[Array, " n"]
    proximal_logprobs: Float32[Array, " n"]
    advantage: Float32[Array, " n"]
    entropy: Float32[Array, " n"]
    sequence: Int32[Array, " n"]
    real: Bool[Array, " n"]
    reference_logprobs: Float32[Array, " n"] | None = None

    def of_head(self, outputs: HeadOutputs, current: bool) -> "LossInputs":
        """With what the head says of the tokens; `current` if ℓ_p is ℓ_θ itself, and not what is given."""
        proximal = jax.lax.stop_gradient(outputs.logprobs) if current else self.proximal_logprobs
        return self._replace(logprobs=outputs.logprobs, entropy=outputs.entropy, proximal_logprobs=proximal)

    def sequence_sum(self, values: Float32[Array, " n"]) -> Float32[Array, " n"]:
        """At every entry the sum over its sequence's entries."""
        n = self.real.shape[0]
        sums = jax.ops.segment_sum(jnp.where(self.real, values, 0.0), self.sequence, num_segments=n)
        return sums[self.sequence]

    def sequence_mean(self, values: Float32[Array, " n"]) -> Float32[Array, " n"]:
        """At every entry the mean over its sequence's entries."""
        return self.sequence_sum(values) / jnp.maximum(self.sequence_sum(jnp.ones_like(values)), 1.0)


class TokenLoss(NamedTuple):
    """Per token, before aggregation.

    Attributes:
        loss: L.
        clipped: Where the surrogate's clip decided.
        bounded: Where the correction changed the weight.
    """

    loss: Float32[Array, " n"]
    clipped: Bool[Array, " n"] | bool = False
    bounded: Bool[Array, " n"] | bool = False


def probability_ratio(
    logprobs: Float32[Array, " n"], denominator_logprobs: Float32[Array, " n"]
) -> Float32[Array, " n"]:
    """exp(ℓ − ℓ'): how much more probable a token is under the first policy; inf where it overflows."""
    return jnp.exp(logprobs - denominator_logprobs)


def sequence_ratio(log_ratio: Float32[Array, " n"], inputs: LossInputs) -> Float32[Array, " n"]:
    """exp(mean of ℓ_θ − ℓ_p over the sequence), with the gradient of each token's own ℓ_θ (straight through).

    s_t = sg(s) · exp(ℓ_θ − sg(ℓ_θ)): the whole sequence is clipped or not, and ∇s_t = s ∇ℓ_θ,t, whose mean over the
    sequence is ∇s. Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071. ℓ_θ − ℓ_p of [.1, .3] -> e^.2 at both.
    """
    fixed = jax.lax.stop_gradient(inputs.sequence_mean(log_ratio))
    return jnp.exp(fixed + log_ratio - jax.lax.stop_gradient(log_ratio))


def ppo_surrogate(
    ratio: Float32[Array, " n"],
    advantage: Float32[Array, " n"],
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> Float32[Array, " n"]:
    """min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A): no reward for moving further than the clip.

    With a dual clip c no less than cA where A < 0, so that one token that became likelier in spite of a negative
    advantage cannot outweigh all others (Ye et al. 2020, https://arxiv.org/abs/1912.09729).

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; two epsilons: Yu et al. 2025 (DAPO),
    https://arxiv.org/abs/2503.14476. ρ = 1.5, A = 1, ε = .2 -> 1.2; ρ = .5, A = −1 -> −.8; ρ = 5, A = −1, c = 3 -> −3.
    """
    clipped = jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    if dual_clip is None:
        return surrogate
    return jnp.where(advantage < 0, jnp.maximum(surrogate, dual_clip * advantage), surrogate)


def ppo_clipped(
    ratio: Float32[Array, " n"],
    advantage: Float32[Array, " n"],
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> Bool[Array, " n"]:
    """Where a clip of `ppo_surrogate` decides, so that the token has no gradient."""
    too_high = (ratio > 1.0 + epsilon_high) & (advantage > 0)
    too_low = (ratio < 1.0 - epsilon_low) & (advantage < 0)
    if dual_clip is None:
        return too_high | too_low
    return too_high | too_low | ((ratio > dual_clip) & (advantage < 0))


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


def correction_weight(config: CorrectionConfig, ratio: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """The off-policy weight by configuration, from w = exp(ℓ_p − ℓ_b).

    ``truncate`` min(w, C), truncated importance sampling: [.5, 1, 3] with C = 2 -> [.5, 1, 2]; inf -> C. Ionides 2008,
    https://doi.org/10.1198/106186008X320456; for engines that differ from the learner: Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl. ``mask`` w where low ≤ w ≤ high, else 0 (IcePop): [.4, .5, 1, 5, 6] with
    .5 and 5 -> [0, .5, 1, 5, 0]; a masked token stays in the denominators. Ling Team 2025,
    https://arxiv.org/abs/2510.18855. ``none`` 1.
    """
    if config.kind == "truncate":
        return jnp.minimum(ratio, config.cap)
    if config.kind == "mask":
        return jnp.where((ratio >= config.low) & (ratio <= config.high), ratio, 0.0)
    return jnp.ones_like(ratio)


def off_policy_ratio(config: CorrectionConfig, inputs: LossInputs) -> Float32[Array, " n"]:
    """What the correction bounds: exp(ℓ_p − ℓ_b) of the token, exp Σ of its sequence, or exp mean of it.

    ℓ_p − ℓ_b of a sequence [.1, .3] -> token [e^.1, e^.3], sequence e^.4 at both, sequence_mean e^.2 at both. The
    product is the sequence's true ratio, whose variance grows with its length; the mean does not grow, and is biased.
    """
    difference = inputs.proximal_logprobs - inputs.behaviour_logprobs
    if config.scope == "sequence":
        return jnp.exp(inputs.sequence_sum(difference))
    if config.scope == "sequence_mean":
        return jnp.exp(inputs.sequence_mean(difference))
    return probability_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs)


def vetoed(threshold: float, inputs: LossInputs) -> Bool[Array, " n"]:
    """The tokens of sequences of which some token has exp(ℓ_p − ℓ_b) < `threshold`.

    Such a token is all but impossible for the learner: engine and learner do not mean the same text, or the sequence
    went where this policy does not go.
    """
    outlying = inputs.proximal_logprobs - inputs.behaviour_logprobs < math.log(threshold)
    return inputs.sequence_sum(outlying.astype(jnp.float32)) > 0


def policy_token_loss(config: LossConfig, inputs: LossInputs) -> TokenLoss:
    """−sg(w) · surrogate − c_H · H.

    Args:
        config: Ratio, surrogate, clips, correction and entropy bonus.
        inputs: Of the tokens; what `proximal_logprobs` are decides what the ratio and the correction see.
    """
    weight, bounded = _correction(config.correction, inputs)
    log_ratio = jnp.clip(inputs.logprobs - inputs.proximal_logprobs, -MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio = jnp.exp(log_ratio) if config.ratio == "token" else sequence_ratio(log_ratio, inputs)
    advantage = inputs.advantage
    low, high = config.clip_epsilon_low, config.clip_epsilon_high
    clipped = False
    if config.surrogate == "ppo":
        surrogate = ppo_surrogate(ratio, advantage, low, high, config.dual_clip)
        clipped = ppo_clipped(ratio, advantage, low, high, config.dual_clip)
    elif config.surrogate == "cispo":
        surrogate = cispo_surrogate(ratio, advantage, inputs.logprobs, high)
        clipped = ratio > 1.0 + high
    else:
        surrogate = advantage * inputs.logprobs  # Williams 1992, https://doi.org/10.1007/BF00992696
    loss = -weight * surrogate
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * inputs.entropy
    return TokenLoss(loss, clipped, bounded)


def kl_estimate(
    estimator: str, logprobs: Float32[Array, " n"], reference_logprobs: Float32[Array, " n"]
) -> Float32[Array, " n"]:
    """An estimate of KL(θ ‖ ref) from tokens that θ sampled, of x = ℓ_θ − ℓ_ref; each has the KL as its mean, but k2.

    ``k1`` x: may be negative, and the expected gradient of a loss of it is 0. ``k2`` x²/2: biased, but its gradient
    x∇ℓ_θ has the KL's as its mean. ``k3`` expm1(−x) + x: never negative, with little variance; its gradient
    (1 − e^−x)∇ℓ_θ has that of KL(ref ‖ θ) as its mean; x is within ± `MOST_LOG_RATIO` there. x = ln 2 -> .6931, .2402,
    .1931.

    Schulman 2020, http://joschu.net/blog/kl-approx.html; Shao et al. 2024 (k3 in GRPO), https://arxiv.org/abs/2402.03300.
    """
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    bounded = jnp.clip(difference, -MOST_LOG_RATIO, MOST_LOG_RATIO)
    return jnp.expm1(-bounded) + bounded


def kl_token_loss(config: KlConfig, base: Callable[[LossInputs], TokenLoss], inputs: LossInputs) -> TokenLoss:
    """A loss with β · kl added at each token, whatever the advantage is; not weighted by the correction.

    Args:
        config: Coefficient and estimator.
        base: The loss without it.
        inputs: With reference log-probabilities.
    """
    assert inputs.reference_logprobs is not None  # the config names a reference
    terms = base(inputs)
    estimate = kl_estimate(config.estimator, inputs.logprobs, inputs.reference_logprobs)
    return terms._replace(loss=terms.loss + config.coefficient * estimate)


def _correction(config: CorrectionConfig, inputs: LossInputs) -> tuple[Float32[Array, " n"], Bool[Array, " n"] | bool]:
    """The weight w, and where it is another than the off-policy ratio itself."""
    off_policy = off_policy_ratio(config, inputs)
    weight = jax.lax.stop_gradient(correction_weight(config, off_policy))
    bounded = (weight != off_policy) & (config.kind != "none")
    if config.veto is not None:
        out = vetoed(config.veto, inputs)
        weight, bounded = jnp.where(out, 0.0, weight), bounded | out
    return weight, bounded


def own_token_loss(module: RLLossModule, inputs: LossInputs) -> TokenLoss:
    """The loss of each token by a user's module, which may return it alone.

    Raises:
        ConfigError: it raises, or returns anything but one float32 for each token (and bools beside it).
    """
    name = f"learner.loss.module: {type(module).__name__}.loss"
    try:
        made: Any = module.loss(inputs)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        asks = isinstance(error, TypeError | AttributeError) and inputs.reference_logprobs is None
        hint = "; reference_logprobs is None unless learner.kl.reference names one" if asks else ""
        raise ConfigError(
            f"{name} raised {type(error).__name__}: {error}{hint} (PENSTOCK_TRACEBACK=1 shows where)"
        ) from error
    terms = made if isinstance(made, TokenLoss) else TokenLoss(made)
    shape, dtype = getattr(terms.loss, "shape", None), getattr(terms.loss, "dtype", None)
    if shape != inputs.real.shape or dtype != jnp.float32:
        if inspect.iscoroutine(made):
            made.close()
        given = type(terms.loss).__name__ if shape is None else f"{dtype} {list(shape)}"
        raise ConfigError(
            f"{name} gave {given}: it must be float32 {list(inputs.real.shape)}, one for each token; the learner sums "
            "them up"
        )
    for field in ("clipped", "bounded"):
        told: Any = jnp.asarray(getattr(terms, field))
        if told.dtype != jnp.bool_ or told.shape not in ((), inputs.real.shape):
            raise ConfigError(
                f"{name} gave {field} of shape {told.shape} and dtype {told.dtype}: it must be bool "
                f"{list(inputs.real.shape)}, where each token was {field}; or leave it out"
            )
    return terms


def check_own_loss(config: LearnerConfig) -> None:
    """Traces a loss of one's own over the tokens of a micro-batch, where there is one; nothing is computed.

    Raises:
        ConfigError: it cannot be made, raises, or gives anything but the loss of each token.
    """
    module = config.loss.load_module()
    if module is None:
        return
    n = config.micro_batch_rows * config.row_length
    numbers, sequence, real = (jax.ShapeDtypeStruct((n,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool_))
    reference = numbers if config.reads_reference else None
    traced: Any = (numbers, numbers, numbers, numbers, numbers, sequence, real, reference)
    jax.eval_shape(partial(own_token_loss, module), LossInputs(*traced))


def supervised_token_loss(inputs: LossInputs) -> TokenLoss:
    """−ℓ_θ, the cross-entropy of a reference solution's token."""
    return TokenLoss(-inputs.logprobs)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A configured loss as the protocol `penstock.types.RLLossModule` has it."""

    config: LossConfig

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [n]; raises ConfigError for an advantage that needs more than one group, or is one per token."""
        if self.config.advantage not in ADVANTAGES:
            raise ConfigError(
                f"learner.loss.advantage {self.config.advantage} needs the whole batch, or is one number per token: "
                "use penstock.batch.compute_advantages"
            )
        return ADVANTAGES[self.config.advantage](group)

    def loss(self, inputs: LossInputs) -> TokenLoss:
        """`policy_token_loss` with this configuration."""
        return policy_token_loss(self.config, inputs)


def sequence_weights(
    sampled_tokens: Sequence[int], aggregation: Aggregation, max_tokens: int | Sequence[int]
) -> Float32[np.ndarray, " sequences"]:
    """The weight a_i of every loss token of sequence i, of B sequences with n_i loss tokens.

    ``token`` 1 / Σ n_j (long answers count more); ``sequence`` 1 / (B · n_i) (Shao et al. 2024, GRPO: a token of
    a long answer counts less); ``constant`` 1 / (B · max_tokens_i) (Liu et al. 2025, https://arxiv.org/abs/2503.20783).

    Args:
        sampled_tokens: n_i ≥ 1.
        aggregation: Which of the three.
        max_tokens: Denominator of ``constant``: one for all, or one for each sequence.

    Example:
        Lengths 1 and 3: token [1/4, 1/4], sequence [1/2, 1/6], constant with max_tokens 4 [1/8, 1/8].
    """
    lengths = np.asarray(sampled_tokens, np.float64)
    if aggregation == "token":
        weights = np.full(len(lengths), 1.0 / max(lengths.sum(), 1.0))
    elif aggregation == "sequence":
        weights = 1.0 / (len(lengths) * lengths)
    else:
        weights = np.broadcast_to(1.0 / (len(lengths) * np.asarray(max_tokens, np.float64)), len(lengths))
    return weights.astype(np.float32)
