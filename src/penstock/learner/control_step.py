"""The compiled functions of a control policy's update, and the arrays that they take.

`prepare` looks at the whole batch once under the parameters that the update begins with: values, log-probabilities,
advantages, and how far the fleet's log-probabilities are from them. `optimise` does one optimiser step on a minibatch:
steps drawn from all fragments, or whole fragments where the policy has memory, which is then unrolled. Both see few
shapes and are compiled once for each; learners of equal configuration share them. Parameters are never donated, because
a fleet may be reading them; the optimiser's state is.

Fragments lie side by side, [T, B, …], in few different shapes. Shorter fragments are padded at their end. Final
observations are packed, [K, …] with the step and fragment that each belongs to, and only where a value is bootstrapped
from them. What is not counted (padding, faults) has action, reward and log-probability 0, and no observation of it that
is a number in the first place stays infinite or NaN, so that it can meet no gradient. These arrays are NumPy's; the
learner moves them to its device in one piece.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from penstock.learner.control_config import PpoConfig
from penstock.learner.control_losses import (
    Estimates,
    LossTerms,
    StepChain,
    StepOutputs,
    StepTargets,
    VTraceClips,
    explained_variance,
    gae,
    kl_estimate,
    masked_mean,
    normalised,
    ppo_loss,
    vtrace,
)
from penstock.learner.losses import correction_weight
from penstock.learner.optimizer import AppliedUpdate, OptimizerState, apply_gradients, join_frozen, split_frozen
from penstock.model.control import ActionDistribution, ControlPolicy, named_arrays
from penstock.model.control.encoders import ObservationStatistics
from penstock.types import InvalidRolloutError, LeafSpace, SampleFragment, Spaces

FEWEST_FINALS = 16
"""K is this times a power of 4, so that an update is compiled for few sizes."""

Arrays = dict[str, Any]
"""By leaf name; NumPy arrays, or the device's."""


class BatchShape(NamedTuple):
    """Sizes of the arrays of an update.

    Attributes:
        steps: T.
        fragments: B, blank ones at the end included.
        finals: K.
    """

    steps: int
    fragments: int
    finals: int

    @classmethod
    def holding(cls, fragments: Sequence[SampleFragment], minibatches: int, least_steps: int = 0) -> "BatchShape":
        """The shape for a batch; with one blank fragment where minibatches cannot all be of one size.

        Args:
            fragments: At least one.
            minibatches: Into which an epoch is cut.
            least_steps: T of earlier batches: shorter fragments need no arrays of their own.
        """
        blank = len(fragments) % min(minibatches, len(fragments)) > 0
        needed = sum(len(_bootstrapping(fragment)) for fragment in fragments)
        finals = FEWEST_FINALS
        while finals < needed:
            finals *= 4
        return cls(max(least_steps, *(f.length for f in fragments)), len(fragments) + blank, finals)


class FragmentArrays(NamedTuple):
    """A batch; time comes first.

    Attributes:
        observations: By leaf name, [T + 1, B, …].
        actions: By leaf name, [T, B, …].
        rewards: float32 [T, B].
        terminated: bool [T, B].
        truncated: bool [T, B].
        counted: bool [T, B]: real, without a fault, and with all that its value needs.
        first: bool [T + 1, B].
        logprobs: float32 [T, B], of the behaviour policy.
        own_version: bool [T, B]: counted, and sampled by the learner's version, as was all since the last state that
            is known: there the learner must find the same log-probability.
        old: bool [B]: beyond the staleness from where on V-trace is used.
        final_steps: int32 [K]; T where there is none.
        final_fragments: int32 [K].
        final_observations: By leaf name, [K, …].
        initial_state: By name, [B, …].
    """

    observations: Arrays
    actions: Arrays
    rewards: Any
    terminated: Any
    truncated: Any
    counted: Any
    first: Any
    logprobs: Any
    own_version: Any
    old: Any
    final_steps: Any
    final_fragments: Any
    final_observations: Arrays
    initial_state: Arrays


class FragmentReadOptions(NamedTuple):
    """What fragments are read as.

    Attributes:
        spaces: The policy's.
        initial_state: The policy's state before an episode, [1, …].
        version_step: The learner's version.
        old_beyond: Fragments whose oldest counted step lies more versions back are `old`; None: none is.
    """

    spaces: Spaces
    initial_state: Mapping[str, np.ndarray]
    version_step: int
    old_beyond: int | None


def stack_fragments(
    fragments: Sequence[SampleFragment], shape: BatchShape, reading: FragmentReadOptions
) -> FragmentArrays:
    """The arrays of a batch.

    Args:
        fragments: As many as `shape` has room for, none longer.
        shape: From `BatchShape.holding`.
        reading: For which policy and version.

    Raises:
        InvalidRolloutError: a fragment's leaves or recurrent state are not those of the policy.
    """
    arrays = blank_arrays(shape, reading)
    versions = np.full(arrays.rewards.shape, reading.version_step, np.int32)
    finals = 0
    for column, fragment in enumerate(fragments):
        _check_names(fragment, reading)
        length = fragment.length
        counted = _counted(fragment)
        arrays.counted[:length, column] = counted
        versions[:length, column] = fragment.weight_steps
        for name in ("rewards", "logprobs"):
            getattr(arrays, name)[:length, column] = np.where(counted, getattr(fragment, name), 0)
        for name in ("terminated", "truncated"):
            getattr(arrays, name)[:length, column] = getattr(fragment, name)
        arrays.first[: length + 1, column] = fragment.first
        _place(fragment, "observations", arrays.observations, np.s_[: length + 1, column])
        _place(fragment, "actions", arrays.actions, np.s_[:length, column])
        _place(fragment, "initial_state", arrays.initial_state, column)
        for leaf in arrays.actions.values():
            leaf[:length, column][~counted] = 0
        finals = _place_finals(fragment, column, arrays, finals)
    _without_infinities(arrays)
    recurrent = bool(reading.initial_state)
    own = _own_version(versions, arrays.first[:-1], reading.version_step, recurrent) & arrays.counted
    return arrays._replace(own_version=own, old=_old(versions, arrays.counted, reading))


def blank_arrays(shape: BatchShape, reading: FragmentReadOptions) -> FragmentArrays:
    """Arrays of that shape in which nothing is counted."""
    steps, fragments, finals = shape

    def flags(rows: int) -> np.ndarray:
        return np.zeros((rows, fragments), bool)

    def leaves(spaces: Sequence[LeafSpace], *batch: int) -> Arrays:
        return {leaf.name: np.zeros((*batch, *leaf.shape), leaf.device_dtype) for leaf in spaces}

    states = reading.initial_state.items()
    return FragmentArrays(
        observations=leaves(reading.spaces.observations, steps + 1, fragments),
        actions=leaves(reading.spaces.actions, steps, fragments),
        rewards=np.zeros((steps, fragments), np.float32),
        terminated=flags(steps),
        truncated=flags(steps),
        counted=flags(steps),
        first=flags(steps + 1),
        logprobs=np.zeros((steps, fragments), np.float32),
        own_version=flags(steps),
        old=np.zeros(fragments, bool),
        final_steps=np.full(finals, steps, np.int32),
        final_fragments=np.zeros(finals, np.int32),
        final_observations=leaves(reading.spaces.observations, finals),
        initial_state={name: np.repeat(np.asarray(array), fragments, axis=0) for name, array in states},
    )


def minibatch_steps(counted: np.ndarray, minibatches: int, rng: np.random.Generator) -> np.ndarray:
    """Which steps each minibatch of one epoch takes: a random partition of those that count, as even as it can be.

    Args:
        counted: bool [T, B].
        minibatches: How many; with fewer steps than that some are empty.
        rng: Shuffles the steps.

    Returns:
        int32 [minibatches, ceil(T · B / minibatches)], indices of t · B + b; (T + 1) · B, which is none even of the
        observations, behind the last.
    """
    none = counted.size + counted.shape[1]
    chosen = np.full((minibatches, -(-counted.size // minibatches)), none, np.int32)
    for row, part in zip(chosen, np.array_split(rng.permutation(np.flatnonzero(counted)), minibatches), strict=True):
        row[: len(part)] = part
    return chosen


def squared_returns(arrays: FragmentArrays, discount: float) -> np.ndarray:
    """Of each fragment the sum of the squares of its counted steps' discounted returns, and how many are not 0; [B, 2].

    A return ends with its episode or its fragment, and knows no value: what comes after is not guessed.

    Args:
        arrays: A batch in host memory.
        discount: γ.
    """
    fragments = arrays.rewards.shape[1]
    following, sums = np.zeros(fragments), np.zeros((fragments, 2))
    for step in reversed(range(len(arrays.rewards))):
        following = arrays.rewards[step] + discount * np.where(arrays.first[step + 1], 0.0, following)
        told = np.where(arrays.counted[step], following, 0.0)
        sums += np.stack([told**2, told != 0], axis=-1)
    return sums


def minibatch_columns(count: int, minibatches: int, blank: int, rng: np.random.Generator) -> np.ndarray:
    """Which fragments each minibatch of one epoch takes: a random partition, as even as it can be.

    Args:
        count: Fragments of the batch.
        minibatches: How many; no more than there are fragments are made, so that none is empty.
        blank: Column of a blank fragment, which fills those that are one short.
        rng: Shuffles the fragments.

    Returns:
        int32 [minibatches, size].
    """
    parts = np.array_split(rng.permutation(count), min(minibatches, count))
    size = len(parts[0])  # none is longer
    return np.stack([np.append(part, [blank] * (size - len(part))) for part in parts]).astype(np.int32)


def _counted(fragment: SampleFragment) -> np.ndarray:
    """Which steps count, bool [T]; a truncated step needs the observation that its episode ended with."""
    known = np.zeros(fragment.length, bool)
    known[fragment.final_steps] = True
    return ~fragment.faults & ~(fragment.truncated & ~fragment.terminated & ~known)


def _bootstrapping(fragment: SampleFragment) -> np.ndarray:
    """Which final observations have values that count, as indices into them."""
    at = fragment.final_steps
    return np.flatnonzero((fragment.truncated & ~fragment.terminated & ~fragment.faults)[at])


def _place_finals(fragment: SampleFragment, column: int, arrays: FragmentArrays, start: int) -> int:
    """Adds a fragment's final observations; returns where the next one's begin."""
    chosen = _bootstrapping(fragment)
    end = start + len(chosen)
    arrays.final_steps[start:end] = fragment.final_steps[chosen]
    arrays.final_fragments[start:end] = column
    for name, array in arrays.final_observations.items():
        if len(chosen):
            array[start:end] = fragment.final_observations[name][chosen]
    return end


def _place(fragment: SampleFragment, field: str, into: Arrays, index: Any) -> None:
    for name, array in into.items():
        shape, found = np.shape(array[index]), getattr(fragment, field)[name]
        if shape != np.shape(found):
            raise InvalidRolloutError(
                f"fragment {fragment.rollout_id}: {field}[{name!r}] is {list(np.shape(found))}, the policy needs "
                f"{list(shape)}: fleet and learner were made for different spaces or networks"
            )
        array[index] = found


def _check_names(fragment: SampleFragment, reading: FragmentReadOptions) -> None:
    expected = {
        "observations": {leaf.name for leaf in reading.spaces.observations},
        "actions": {leaf.name for leaf in reading.spaces.actions},
        "initial_state": set(reading.initial_state),
    }
    for field, names in expected.items():
        if set(getattr(fragment, field)) != names:
            raise InvalidRolloutError(
                f"fragment {fragment.rollout_id}: {field} has {sorted(getattr(fragment, field))}, the policy needs "
                f"{sorted(names)}: fleet and learner were made for different spaces or networks"
            )


def _without_infinities(arrays: FragmentArrays) -> None:
    """0 for what is no finite number in an observation that nothing is learned from."""
    for array in arrays.observations.values():
        if np.issubdtype(array.dtype, np.floating):
            steps = array[:-1]
            steps[~arrays.counted] = np.nan_to_num(steps[~arrays.counted], posinf=0.0, neginf=0.0)


def _own_version(versions: np.ndarray, first: np.ndarray, version_step: int, recurrent: bool) -> np.ndarray:
    """Steps of that very version; recurrent state must also come from it, a fragment's start or an episode's."""
    own = versions == version_step
    if recurrent:
        for step in range(1, len(own)):
            own[step] &= own[step - 1] | first[step]
    return own


def _old(versions: np.ndarray, counted: np.ndarray, reading: FragmentReadOptions) -> np.ndarray:
    if reading.old_beyond is None:
        return np.zeros(versions.shape[1], bool)
    oldest = np.where(counted, versions, reading.version_step).min(axis=0)
    return reading.version_step - oldest > reading.old_beyond


class Summary(NamedTuple):
    """Of a whole batch, under the parameters before the update.

    `own_*` are over steps sampled under the learner's version, `other_*` over the rest of those that count; KL terms
    are sums of expm1(x) − x with x = ℓ_p − ℓ_b.
    """

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


class Minibatches(NamedTuple):
    """What all optimiser steps of an update read.

    Attributes:
        arrays: The batch.
        steps: What to train it on, [T, B].
    """

    arrays: FragmentArrays
    steps: StepTargets


class MinibatchResult(NamedTuple):
    """What one minibatch came to.

    Attributes:
        terms: Of the loss.
        applied: Of the optimiser step.
        empty: No step of it is trained, so that nothing was changed; `terms` and `applied` then say nothing.
    """

    terms: LossTerms
    applied: AppliedUpdate
    empty: Bool[Array, ""]


@cache
def preparer(config: PpoConfig) -> Any:
    """Compiled `prepare`: (policy, arrays, reward scale) -> (targets of the steps, summary)."""
    return jax.jit(partial(prepare, config))


@cache
def optimiser(config: PpoConfig, values_only: bool) -> Any:
    """Compiled `optimise`: (policy, state, reference, minibatches, chosen, rate, β); `state` is donated."""
    return jax.jit(partial(optimise, config, values_only), donate_argnums=1)


@cache
def observer() -> Any:
    """Compiled `ObservationStatistics.with_steps`."""
    return jax.jit(ObservationStatistics.with_steps)


def prepare(
    config: PpoConfig, policy: ControlPolicy, arrays: FragmentArrays, reward_scales: Float32[Array, " b"]
) -> tuple[StepTargets, Summary]:
    """Values, advantages and log-probabilities before the update: what the optimiser steps read, and what is told.

    `reward_scales` are the fragments' own.
    """
    distribution, values, states = policy.unroll(arrays.observations, arrays.first, arrays.initial_state)
    logprobs = _without_last(distribution).log_prob(arrays.actions)
    following = _next_values(policy, arrays, values, states)
    log_ratio = jnp.where(arrays.counted, logprobs - arrays.logprobs, 0.0)
    rewards = arrays.rewards * reward_scales
    chain = StepChain(rewards, values[:-1], following, arrays.terminated, arrays.truncated, arrays.counted)
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
    return steps, _summary(arrays, estimates, values[:-1], log_ratio, trained, bounded)


def optimise(
    config: PpoConfig,
    values_only: bool,
    policy: ControlPolicy,
    state: OptimizerState,
    reference: ControlPolicy | None,
    minibatches: Minibatches,
    chosen: Int32[Array, " m"],
    rate: Float32[Array, ""],
    kl_coefficient: Float32[Array, ""],
) -> tuple[ControlPolicy, OptimizerState, MinibatchResult]:
    """One optimiser step on a minibatch; none where the loss or its gradient is not finite, or no step is trained.

    A gradient of 0 is no reason to stay: momentum and weight decay would move the parameters all the same.

    Args:
        config: Losses and optimiser of the learner.
        values_only: Only `PpoConfig.value_arrays` train.
        policy: The parameters; never donated, since a rollout worker may be reading them.
        state: The optimiser's state; donated.
        reference: Of the KL penalty; None without.
        minibatches: The whole batch.
        chosen: Of this minibatch, a row of `minibatch_steps`; with memory of `minibatch_columns`.
        rate: Learning rate of this step, a scalar.
        kl_coefficient: β.
    """
    part = _columns(minibatches, chosen) if minibatches.arrays.initial_state else _steps(minibatches, chosen)
    flat = jax.tree.map(lambda array: array[config.burn_in :].reshape(-1), part.steps)
    reference_distribution = None if reference is None else _unrolled(config, reference, part.arrays)[0]

    still = [*config.optimizer.frozen]
    if values_only:
        still += sorted(named_arrays(policy).keys() - values_own(config, policy))
    trained, rest = split_frozen(still, policy)

    def loss_of(moving: ControlPolicy) -> tuple[Array, LossTerms]:
        distribution, values = _unrolled(config, join_frozen(moving, rest), part.arrays)
        logprobs, entropy = distribution.log_prob(_after(config, part.arrays.actions)), distribution.entropy()
        kl = jnp.zeros_like(values) if reference_distribution is None else reference_distribution.kl(distribution)
        outputs = StepOutputs(*(array.reshape(-1) for array in (logprobs, values, entropy, kl)))
        return ppo_loss(config, outputs, flat, kl_coefficient, values_only)

    (loss, terms), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
    updated, advanced, applied = apply_gradients(config.optimizer, policy, state, gradients, rate, loss)
    empty = ~jnp.any(flat.trained)
    kept = partial(jax.tree.map, partial(jnp.where, empty))
    return kept(policy, updated), kept(state, advanced), MinibatchResult(terms, applied, empty)


def _steps(minibatches: Minibatches, chosen: Array) -> Minibatches:
    """Those steps alone, side by side, [1, m]; where there is none, all is zero and nothing is trained."""
    arrays = minibatches.arrays

    def taken(array: Array) -> Array:
        return jnp.take(array.reshape(-1, *array.shape[2:]), chosen, axis=0, mode="fill", fill_value=0)[None]

    observations, actions, steps = jax.tree.map(taken, (arrays.observations, arrays.actions, minibatches.steps))
    first = jnp.zeros((1, len(chosen)), bool)
    return Minibatches(arrays._replace(observations=observations, first=first, actions=actions), steps)


def _next_values(policy: ControlPolicy, arrays: FragmentArrays, values: Array, states: Any) -> Array:
    """V(s'_t), [T, B]: of the next observation, or of the one that the episode ended with."""
    at = (arrays.final_steps, arrays.final_fragments)
    state = jax.tree.map(lambda array: array[at], states)
    inside = jnp.zeros(arrays.final_steps.shape, bool)
    _, finals, _ = policy.step(arrays.final_observations, state, inside)
    return values[1:].at[at].set(finals, mode="drop")  # rows without one name step T, which is none


def _estimates(config: PpoConfig, chain: StepChain, ratios: Array, old: Array) -> Estimates:
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


def _unrolled(config: PpoConfig, policy: ControlPolicy, part: FragmentArrays) -> tuple[ActionDistribution, Array]:
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


def _without_last(distribution: ActionDistribution) -> ActionDistribution:
    return jax.tree.map(lambda array: array[:-1], distribution)


def values_own(config: PpoConfig, policy: ControlPolicy) -> list[str]:
    """Names of the arrays that only values depend on, as `PpoConfig.value_arrays` says."""
    return [name for name in named_arrays(policy) if any(fnmatchcase(name, own) for own in config.value_arrays)]
