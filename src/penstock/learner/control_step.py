"""The compiled functions of a control policy's update: what to train on, and one optimiser step.

`prepare` looks at the whole batch once under the parameters that the update begins with: values, log-probabilities,
advantages, and how far the fleet's log-probabilities are from them. `optimise` takes some fragments' columns and does
one step. Both see few shapes and are compiled once for each; learners of equal configuration share them.
Parameters are never donated, because a fleet may be reading them; the optimiser's state is.
"""

from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from penstock.learner.advantages import Chain, Estimates, VTraceClips, gae, vtrace
from penstock.learner.control_config import PpoConfig
from penstock.learner.control_losses import (
    LossTerms,
    StepOutputs,
    StepTargets,
    explained_variance,
    kl_estimate,
    masked_mean,
    normalised,
    ppo_loss,
)
from penstock.learner.fragment_arrays import FragmentArrays
from penstock.learner.losses import correction_weight
from penstock.learner.optimizer import Applied, OptimizerState, apply_gradients
from penstock.model.control import ControlPolicy, Distribution, named_arrays


class Summary(NamedTuple):
    """Of a whole batch, under the parameters before the update.

    `own_*` are over steps sampled under the learner's version, `other_*` over the rest of those that count; KL terms
    are sums of expm1(x) − x with x = ℓ_p − ℓ_b.
    """

    counted_steps: Float32[Array, ""]
    trained_steps: Float32[Array, ""]
    own_steps: Float32[Array, ""]
    own_kl: Float32[Array, ""]
    mismatch_max: Float32[Array, ""]
    other_steps: Float32[Array, ""]
    other_kl: Float32[Array, ""]
    bounded: Float32[Array, ""]
    old_steps: Float32[Array, ""]
    explained_variance: Float32[Array, ""]
    value_mean: Float32[Array, ""]
    advantage_mean: Float32[Array, ""]
    advantage_std: Float32[Array, ""]


class Prepared(NamedTuple):
    """What the optimiser steps read, on the device, and what is told of it."""

    steps: StepTargets
    summary: Summary


class Minibatches(NamedTuple):
    """What all optimiser steps of an update read.

    Attributes:
        arrays: The batch.
        steps: What to train it on, [T, B].
    """

    arrays: FragmentArrays
    steps: StepTargets


class Outcome(NamedTuple):
    """What one minibatch came to.

    Attributes:
        terms: Of the loss.
        applied: Of the optimiser step.
        empty: No step of it is trained, so that nothing was changed; `terms` and `applied` then say nothing.
    """

    terms: LossTerms
    applied: Applied
    empty: Bool[Array, ""]


@cache
def preparer(config: PpoConfig) -> Any:
    """Compiled `prepare`: (policy, arrays) -> `Prepared`."""
    return jax.jit(partial(prepare, config))


@cache
def optimiser(config: PpoConfig, values_only: bool) -> Any:
    """Compiled `optimise`: (policy, state, reference, minibatches, columns, rate, β); `state` is donated."""
    return jax.jit(partial(optimise, config, values_only), donate_argnums=1)


def prepare(config: PpoConfig, policy: ControlPolicy, arrays: FragmentArrays) -> Prepared:
    """Values, advantages and log-probabilities before the update."""
    distribution, values, states = policy.unroll(arrays.observations, arrays.first, arrays.initial_state)
    logprobs = _without_last(distribution).log_prob(arrays.actions)
    following = _next_values(policy, arrays, values, states)
    log_ratio = jnp.where(arrays.counted, logprobs - arrays.logprobs, 0.0)
    rewards = arrays.rewards * config.reward_scale
    chain = Chain(rewards, values[:-1], following, arrays.terminated, arrays.truncated, arrays.counted)
    ratio = jnp.exp(log_ratio)
    estimates = _estimates(config, chain, ratio, arrays.old)
    bounded_ratio = correction_weight(config.correction, ratio.reshape(-1)).reshape(ratio.shape)
    weights = jnp.where(arrays.old, 1.0, bounded_ratio)
    late = jnp.arange(arrays.counted.shape[0])[:, None] >= config.burn_in
    trained = arrays.counted & late
    advantages = estimates.advantages
    if config.normalize_advantages == "batch":
        advantages = normalised(advantages, trained)
    before = jnp.where(arrays.counted, logprobs, 0.0)
    steps = StepTargets(advantages, estimates.targets, values[:-1], before, weights, trained)
    bounded = trained & ~arrays.old & (bounded_ratio != ratio) & (config.correction.kind != "none")
    return Prepared(steps, _summary(arrays, estimates, values[:-1], log_ratio, trained, bounded))


def optimise(
    config: PpoConfig,
    values_only: bool,
    policy: ControlPolicy,
    state: OptimizerState,
    reference: ControlPolicy | None,
    minibatches: Minibatches,
    columns: Int32[Array, " fragments"],
    rate: Float32[Array, ""],
    kl_coefficient: Float32[Array, ""],
) -> tuple[ControlPolicy, OptimizerState, Outcome]:
    """One optimiser step on some fragments; none where the loss or its gradient is not finite, or no step is trained.

    A gradient of 0 is no reason to stay: momentum and weight decay would move the parameters all the same.

    Args:
        config: The learner's.
        values_only: Only `PpoConfig.value_arrays` train.
        policy: Never donated.
        state: Replaced.
        reference: Of the KL penalty; None without.
        minibatches: The whole batch.
        columns: Which fragments.
        rate: Learning rate.
        kl_coefficient: β.
    """
    part = _columns(minibatches, columns)
    flat = jax.tree.map(lambda array: array[config.burn_in :].reshape(-1), part.steps)
    reference_distribution = None if reference is None else _unrolled(config, reference, part.arrays)[0]

    def loss_of(trained: ControlPolicy) -> tuple[Array, LossTerms]:
        distribution, values = _unrolled(config, trained, part.arrays)
        logprobs, entropy = distribution.log_prob(_after(config, part.arrays.actions)), distribution.entropy()
        kl = jnp.zeros_like(values) if reference_distribution is None else reference_distribution.kl(distribution)
        outputs = StepOutputs(*(array.reshape(-1) for array in (logprobs, values, entropy, kl)))
        return ppo_loss(config, outputs, flat, kl_coefficient, values_only)

    (loss, terms), gradients = jax.value_and_grad(loss_of, has_aux=True)(policy)
    settings = config.optimizer
    if values_only:
        settings = settings.model_copy(update={"frozen": (*settings.frozen, *_other_arrays(config, policy))})
    updated, advanced, applied = apply_gradients(settings, policy, state, gradients, rate, loss)
    empty = ~jnp.any(flat.trained)
    kept = partial(jax.tree.map, partial(jnp.where, empty))
    return kept(policy, updated), kept(state, advanced), Outcome(terms, applied, empty)


def _next_values(policy: ControlPolicy, arrays: FragmentArrays, values: Array, states: Any) -> Array:
    """V(s'_t), [T, B]: of the next observation, or of the one that the episode ended with."""
    at = (arrays.final_steps, arrays.final_fragments)
    state = jax.tree.map(lambda array: array[at], states)
    inside = jnp.zeros(arrays.final_steps.shape, bool)
    _, finals, _ = policy.step(arrays.final_observations, state, inside)
    return values[1:].at[at].set(finals, mode="drop")  # rows without one name step T, which is none


def _estimates(config: PpoConfig, chain: Chain, ratios: Array, old: Array) -> Estimates:
    """GAE, or V-trace for the old, of [T, B]."""
    own = jax.vmap(lambda c: gae(c, config.discount, config.gae_lambda), 1, 1)(chain)
    if config.vtrace.beyond_staleness is None:
        return own
    clips = VTraceClips(config.vtrace.rho_clip, config.vtrace.c_clip, config.vtrace.policy_clip)
    others = jax.vmap(lambda c, r: vtrace(c, r, config.discount, config.gae_lambda, clips), 1, 1)(chain, ratios)
    return jax.tree.map(lambda a, b: jnp.where(old, b, a), own, others)


def _summary(
    arrays: FragmentArrays, estimates: Estimates, values: Array, log_ratio: Array, trained: Array, bounded: Array
) -> Summary:
    own, other = arrays.own_version, arrays.counted & ~arrays.own_version
    kl = kl_estimate(log_ratio)
    mean = masked_mean(estimates.advantages, trained)

    def total(terms: Array, where: Array) -> Array:
        return jnp.sum(jnp.where(where, terms, 0.0))

    def count(where: Array) -> Array:
        return jnp.sum(where, dtype=jnp.float32)

    return Summary(
        counted_steps=count(arrays.counted),
        trained_steps=count(trained),
        own_steps=count(own),
        own_kl=total(kl, own),
        mismatch_max=jnp.max(jnp.where(own, jnp.abs(log_ratio), 0.0)),
        other_steps=count(other),
        other_kl=total(kl, other),
        bounded=count(bounded),
        old_steps=count(trained & arrays.old),
        explained_variance=explained_variance(values, estimates.targets, trained),
        value_mean=masked_mean(values, trained),
        advantage_mean=mean,
        advantage_std=jnp.sqrt(masked_mean(jnp.square(estimates.advantages - mean), trained)),
    )


def _columns(minibatches: Minibatches, columns: Array) -> Minibatches:
    """Those fragments alone; without what follows the last step, and without final observations."""
    arrays = minibatches.arrays
    state = jax.tree.map(lambda array: array[columns], arrays.initial_state)
    taken = jax.tree.map(lambda array: array[:-1, columns], (arrays.observations, arrays.first))
    actions = jax.tree.map(lambda array: array[:, columns], arrays.actions)
    part = arrays._replace(observations=taken[0], first=taken[1], actions=actions, initial_state=state)
    return Minibatches(part, jax.tree.map(lambda array: array[:, columns], minibatches.steps))


def _unrolled(config: PpoConfig, policy: ControlPolicy, part: FragmentArrays) -> tuple[Distribution, Array]:
    """Distributions and values after the burn-in, through which no gradient flows."""
    state = part.initial_state
    if config.burn_in:
        observations = jax.tree.map(lambda array: array[: config.burn_in], part.observations)
        _, _, states = policy.unroll(observations, part.first[: config.burn_in], state)
        state = jax.lax.stop_gradient(jax.tree.map(lambda array: array[-1], states))
    distribution, values, _ = policy.unroll(_after(config, part.observations), _after(config, part.first), state)
    return distribution, values


def _after(config: PpoConfig, tree: Any) -> Any:
    return jax.tree.map(lambda array: array[config.burn_in :], tree)


def _without_last(distribution: Distribution) -> Distribution:
    return jax.tree.map(lambda array: array[:-1], distribution)


def _other_arrays(config: PpoConfig, policy: ControlPolicy) -> tuple[str, ...]:
    """Names of all arrays but the value's own."""
    return tuple(
        name for name in named_arrays(policy) if not any(fnmatchcase(name, own) for own in config.value_arrays)
    )
