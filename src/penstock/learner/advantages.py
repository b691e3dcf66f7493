"""Advantages and value targets of one chain of control steps: GAE, and V-trace for what an older policy did.

Pure functions over time, [T]; `jax.vmap` them over fragments. Termination and truncation stay apart: after a
terminated step nothing follows; a truncated one bootstraps from the value of the observation that its episode ended
with. Neither lets anything through from the next episode. A step that is not to be trained on (a simulator's fault,
padding) has advantage 0 and cuts the chain: the step before it bootstraps from the value of its observation.

What is not counted may hold anything, even NaN. Not covered: discounts that differ from step to step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


class Chain(NamedTuple):
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


def gae(chain: Chain, discount: float, gae_lambda: float) -> Estimates:
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
    chain: Chain, ratios: Float32[Array, " time"], discount: float, gae_lambda: float, clips: VTraceClips
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
    counted = chain.counted
    return Estimates(jnp.where(counted, advantages, 0.0), jnp.where(counted, chain.values + errors, 0.0))


def _errors(chain: Chain, discount: float) -> Float32[Array, " time"]:
    """δ_t; 0 where a step is not counted."""
    bootstrap = jnp.where(chain.terminated, 0.0, chain.next_values)  # which may be anything after an end
    return jnp.where(chain.counted, chain.rewards + discount * bootstrap - chain.values, 0.0)


def _linked(chain: Chain) -> Float32[Array, " time"]:
    """1 where the next step belongs to the same episode and this one learns from it."""
    return (chain.counted & ~chain.terminated & ~chain.truncated).astype(jnp.float32)


def _carried_back(terms: Float32[Array, " time"], factors: Float32[Array, " time"]) -> Float32[Array, " time"]:
    """x_t = terms_t + factors_t · x_{t+1}, with 0 behind the last."""
    return jax.lax.scan(_one_back, jnp.zeros((), terms.dtype), (terms, factors), reverse=True)[1]


def _one_back(following: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
    total = row[0] + row[1] * following
    return total, total
