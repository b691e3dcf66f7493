"""PPO's loss over n steps, and its advantages and value targets (GAE, V-trace), composed of small pure functions.

L = mean(−sg(w) · min(ρA, clip(ρ)A)) + c_V · value loss − c_H · entropy + β · KL(reference ‖ policy); every mean is over
the steps that are trained, and what is not trained may hold any finite number. ρ = exp(ℓ_θ − ℓ_p) with ℓ_p the policy's
log-probability at the start of the update, and w bounds exp(ℓ_p − ℓ_b), what lies between the fleet's version and that
one: the same ratio is never applied twice. Schulman et al. 2017, https://arxiv.org/abs/1707.06347.

Advantages are pure functions over time, [T], of one chain of steps; `jax.vmap` them over fragments. Termination and
truncation stay apart: after a terminated step nothing follows; a truncated one bootstraps from the value of the
observation that its episode ended with. Neither lets anything through from the next episode. A step that is not to be
trained on (a simulator's fault, padding) has advantage 0 and cuts the chain: the step before it bootstraps from the
value of its observation. What is not counted may hold anything, even NaN.

Not covered: action masks, discounts that differ from step to step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from penstock.learner.control_config import PpoConfig
from penstock.learner.critic import value_token_loss
from penstock.learner.losses import ppo_clipped, ppo_surrogate, probability_ratio


class StepTargets(NamedTuple):
    """What an update knows of each step before its first optimiser step.

    Attributes:
        advantages: A.
        targets: What the value should be.
        values: What it was.
        logprobs: ℓ_p.
        weights: w; 1 where V-trace has weighted the advantage.
        trained: The step counts.
    """

    advantages: Float32[Array, "*n"]
    targets: Float32[Array, "*n"]
    values: Float32[Array, "*n"]
    logprobs: Float32[Array, "*n"]
    weights: Float32[Array, "*n"]
    trained: Bool[Array, "*n"]


class StepOutputs(NamedTuple):
    """What the policy that is trained gives for each step.

    Attributes:
        logprobs: ℓ_θ of the action.
        values: V.
        entropy: Of the distribution, in nats.
        reference_kl: KL(reference ‖ policy); 0 without a reference.
    """

    logprobs: Float32[Array, " n"]
    values: Float32[Array, " n"]
    entropy: Float32[Array, " n"]
    reference_kl: Float32[Array, " n"]


class LossTerms(NamedTuple):
    """Means over the trained steps of a minibatch."""

    loss: Float32[Array, ""]
    policy_loss: Float32[Array, ""]
    value_loss: Float32[Array, ""]
    entropy: Float32[Array, ""]
    reference_kl: Float32[Array, ""]
    approx_kl: Float32[Array, ""]
    clip_fraction: Float32[Array, ""]
    ratio_mean: Float32[Array, ""]


def masked_mean(values: Float32[Array, "*n"], where: Bool[Array, "*n"]) -> Float32[Array, ""]:
    """Mean where true; 0 where nothing is."""
    return jnp.sum(jnp.where(where, values, 0.0)) / jnp.maximum(jnp.sum(where, dtype=jnp.float32), 1.0)


def normalised(values: Float32[Array, "*n"], where: Bool[Array, "*n"]) -> Float32[Array, "*n"]:
    """(x − mean) / (std + 1e-8) over what is true, 0 elsewhere: [1, 3, 9] where the first two -> [−1, 1, 0]."""
    centred = values - masked_mean(values, where)
    deviation = jnp.sqrt(masked_mean(jnp.square(centred), where))
    return jnp.where(where, centred / (deviation + 1e-8), 0.0)


def kl_estimate(log_ratio: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """expm1(x) − x with x = ℓ_θ − ℓ': per sample an unbiased, never negative estimate of KL(π' ‖ π_θ).

    Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return jnp.expm1(log_ratio) - log_ratio


def explained_variance(
    values: Float32[Array, "*n"], targets: Float32[Array, "*n"], where: Bool[Array, "*n"]
) -> Float32[Array, ""]:
    """1 − Var(R − V) / Var(R): 1 perfect, 0 no better than a constant; not finite where R does not vary."""
    left = targets - values
    residual = masked_mean(jnp.square(left - masked_mean(left, where)), where)
    return 1.0 - residual / masked_mean(jnp.square(targets - masked_mean(targets, where)), where)


def ppo_loss(
    config: PpoConfig,
    outputs: StepOutputs,
    steps: StepTargets,
    kl_coefficient: Float32[Array, ""],
    values_only: bool = False,
) -> tuple[Float32[Array, ""], LossTerms]:
    """The loss of one minibatch, and what it consists of.

    Args:
        config: Coefficients and clips.
        outputs: Of the policy that is trained; differentiated.
        steps: [n] each; constants.
        kl_coefficient: β.
        values_only: The loss is the value's alone (warm-up); the terms are the same.
    """
    advantages = steps.advantages
    if config.normalize_advantages == "minibatch":
        advantages = normalised(advantages, steps.trained)
    ratio, clips = probability_ratio(outputs.logprobs, steps.logprobs), (config.clip, config.clip, config.dual_clip)
    surrogate = ppo_surrogate(ratio, advantages, *clips)
    error, _ = value_token_loss(outputs.values, steps.values, steps.targets, config.value_clip)
    clipped = ppo_clipped(ratio, advantages, *clips).astype(jnp.float32)

    def mean(values: Array) -> Array:
        return masked_mean(values, steps.trained)

    policy_loss, value_loss = -mean(steps.weights * surrogate), mean(error)
    entropy, reference_kl = mean(outputs.entropy), mean(outputs.reference_kl)
    loss = config.value_coefficient * value_loss
    if not values_only:
        loss += policy_loss - config.entropy_coefficient * entropy + kl_coefficient * reference_kl
    kl = mean(kl_estimate(outputs.logprobs - steps.logprobs))
    terms = LossTerms(loss, policy_loss, value_loss, entropy, reference_kl, kl, mean(clipped), mean(ratio))
    return loss, jax.lax.stop_gradient(terms)


class StepChain(NamedTuple):
    """T consecutive steps of one simulator and the values that its policy is judged by.

    Attributes:
        rewards: r_t, what action t led to.
        values: V(s_t), of the observation that action t was chosen on.
        next_values: V(s'_t), of the observation that action t led to: the last one of its episode where that ended.
        terminated: The episode reached an end of its own at t.
        truncated: It was cut at t.
        counted: The step is real and without a fault.
    """

    rewards: Float32[Array, " time"]
    values: Float32[Array, " time"]
    next_values: Float32[Array, " time"]
    terminated: Bool[Array, " time"]
    truncated: Bool[Array, " time"]
    counted: Bool[Array, " time"]


class Estimates(NamedTuple):
    """What to train on; 0 where a step is not counted.

    Attributes:
        advantages: Of the policy's loss, importance weights included (V-trace).
        targets: Of the value's.
    """

    advantages: Float32[Array, " time"]
    targets: Float32[Array, " time"]


class VTraceClips(NamedTuple):
    """Largest importance ratios: of the value error, of what it is carried back with, of the policy gradient."""

    rho: float = 1.0
    c: float = 1.0
    policy: float = 1.0


def gae(chain: StepChain, discount: float, gae_lambda: float) -> Estimates:
    """Generalised advantage estimation, and advantage plus value as the value's target.

    δ_t = r_t + γ (1 − term_t) V(s'_t) − V(s_t); A_t = δ_t + γ λ (1 − term_t)(1 − trunc_t) A_{t+1}.
    Schulman et al. 2016, https://arxiv.org/abs/1506.02438. The last step bootstraps from its next value.

    Args:
        chain: The steps.
        discount: γ.
        gae_lambda: λ; 0: the one-step error, 1: discounted returns less values.
    """
    errors = _errors(chain, discount)
    advantages = _carried_back(errors, discount * gae_lambda * _linked(chain))
    targets = jnp.where(chain.counted, advantages + chain.values, 0.0)
    return Estimates(advantages, targets)


def vtrace(
    chain: StepChain, ratios: Float32[Array, " time"], discount: float, gae_lambda: float, clips: VTraceClips
) -> Estimates:
    """V-trace: what GAE would be if the policy itself had acted, with bounded variance.

    With ρ_t = π(a_t|s_t) / μ(a_t|s_t), ρ̄_t = min(ρ_t, rho), c_t = λ min(ρ_t, c):
    e_t = ρ̄_t δ_t + γ (1 − term_t)(1 − trunc_t) c_t e_{t+1}; the value's target is v_t = V(s_t) + e_t;
    A_t = min(ρ_t, policy) · (δ_t + γ λ (1 − term_t)(1 − trunc_t) e_{t+1}).
    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, with the λ of its remark 2. Where all ratios are 1 it is
    `gae`. The importance weight is inside A_t and must not be applied again.

    Args:
        chain: The steps.
        ratios: ρ_t, current over behaviour policy; a constant of the update.
        discount: γ.
        gae_lambda: λ.
        clips: Of the ratios.
    """
    ratios = jnp.where(chain.counted, ratios, 1.0)
    linked = discount * gae_lambda * _linked(chain)
    deltas = _errors(chain, discount)
    errors = _carried_back(jnp.minimum(ratios, clips.rho) * deltas, linked * jnp.minimum(ratios, clips.c))
    following = jnp.concatenate([errors[1:], jnp.zeros(1, errors.dtype)])
    advantages = jnp.minimum(ratios, clips.policy) * (deltas + linked * following)
    return Estimates(advantages, jnp.where(chain.counted, chain.values + errors, 0.0))


def _errors(chain: StepChain, discount: float) -> Float32[Array, " time"]:
    """δ_t; 0 where a step is not counted."""
    bootstrap = jnp.where(chain.terminated, 0.0, chain.next_values)  # which may be anything after an end
    return jnp.where(chain.counted, chain.rewards + discount * bootstrap - chain.values, 0.0)


def _linked(chain: StepChain) -> Float32[Array, " time"]:
    """1 where the next step belongs to the same episode and this one learns from it."""
    return (chain.counted & ~chain.terminated & ~chain.truncated).astype(jnp.float32)


def _carried_back(terms: Float32[Array, " time"], factors: Float32[Array, " time"]) -> Float32[Array, " time"]:
    """x_t = terms_t + factors_t · x_{t+1}, with 0 behind the last."""
    return jax.lax.scan(_one_back, jnp.zeros((), terms.dtype), (terms, factors), reverse=True)[1]


def _one_back(following: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
    total = row[0] + row[1] * following
    return total, total
