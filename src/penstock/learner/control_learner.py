"""The learner of control policies: fragments in, epochs of PPO's optimiser steps out, with the numbers of each update.

It holds the parameters, the optimiser's state, the step, and the reference of a KL penalty; what is drawn (which steps
or fragments share a minibatch) follows from seed and step alone. Each update looks at the whole batch first, compares
log-probabilities with the fleet's, and only then takes optimiser steps, waiting for each, so that a policy on the same
device gets its turns. Parameters that were handed out are never donated. One thread at a time.

The reference is a folder's policy, or a version of the run's own that is kept and travels in the checkpoint. Until that
one is there the learner's own policy stands in for it with coefficient 0, so that the update is compiled once.

A metric that is undefined for a batch or not finite is left out, never zero.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from penstock.learner import control_step as compiled
from penstock.learner.config import OptimizerConfig
from penstock.learner.control_config import PpoConfig, ReferenceKlConfig
from penstock.learner.control_losses import LossTerms
from penstock.learner.control_step import (
    FEWEST_FINALS,
    BatchShape,
    FragmentArrays,
    FragmentReadOptions,
    MinibatchResult,
    Summary,
    blank_arrays,
    minibatch_columns,
    minibatch_steps,
    squared_returns,
    stack_fragments,
)
from penstock.learner.metrics import finite_only, rate_metrics, skipped_in_a_row
from penstock.learner.optimizer import AppliedUpdate, from_named, initial_state, to_named
from penstock.learner.snapshot import LearnerSnapshot
from penstock.model.control import (
    ControlPolicy,
    load_control_policy,
    named_arrays,
    save_control_policy,
    with_named_arrays,
)
from penstock.model.programs import Programs, compile_programs
from penstock.types import (
    CheckpointError,
    ConfigError,
    FragmentExample,
    MismatchError,
    SampleFragment,
    TrainingBatch,
    WeightsError,
    fold,
    generator,
)

_PREFIX = "reference."


class ReferencePolicy:
    """Nothing, where no penalty is configured.

    Args:
        config: The penalty's; None: none.
        policy: The learner's first.

    Raises:
        ConfigError: the folder's policy sees, does or remembers other things than the learner's.
        CheckpointError: the folder cannot be read.
    """

    def __init__(self, config: ReferenceKlConfig | None, policy: ControlPolicy) -> None:
        self._config = config
        self._policy = None if config is None else policy
        if config is not None and config.reference is not None:
            self._policy = load_control_policy(Path(config.reference), policy.config.module, policy.config.kwargs)
            _check_fits(self._policy, policy, config.reference)

    @property
    def policy(self) -> ControlPolicy | None:
        """What the penalty is computed with."""
        return self._policy

    def coefficient(self, step: int) -> float:
        """Of the penalty in update `step`."""
        return 0.0 if self._config is None else self._config.coefficient_at(step)

    def keep(self, step: int, policy: ControlPolicy) -> None:
        """Version `step` has this policy."""
        if self._own and self._config is not None and step == self._config.reference_version:
            self._policy = policy

    def state_arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of it."""
        if not self._own or self._policy is None:
            return {}
        return {_PREFIX + name: np.asarray(array) for name, array in named_arrays(self._policy).items()}

    def restore(self, arrays: Mapping[str, np.ndarray], step: int, policy: ControlPolicy) -> dict[str, np.ndarray]:
        """Takes `state_arrays` back; returns what is not its own.

        Raises:
            CheckpointError: there is no reference, or one of another shape, and its version has passed.
        """
        kept = {name.removeprefix(_PREFIX): array for name, array in arrays.items() if name.startswith(_PREFIX)}
        if self._own and self._config is not None:
            if not kept and step > self._config.reference_version:
                raise CheckpointError(
                    f"the checkpoint of version {step} has no reference policy: it was taken without "
                    "learner.reference_kl; name a folder in learner.reference_kl.reference"
                )
            try:
                self._policy = with_named_arrays(policy, kept) if kept else policy
            except WeightsError as error:
                raise CheckpointError(f"the checkpoint's reference policy does not fit: {error}") from error
        return {name: array for name, array in arrays.items() if not name.startswith(_PREFIX)}

    @property
    def _own(self) -> bool:
        return self._config is not None and self._config.reference is None


def _check_fits(reference: ControlPolicy, policy: ControlPolicy, folder: str) -> None:
    if not reference.spaces.same_form(policy.spaces):
        raise ConfigError(
            f"learner.reference_kl.reference: {folder} is a policy for other spaces than the learner's "
            f"({policy.spaces.differences(reference.spaces)}); name another folder"
        )
    states = [jax.tree.map(lambda array: array.shape, each.initial_state(1)) for each in (reference, policy)]
    if states[0] != states[1]:
        raise ConfigError(
            f"learner.reference_kl.reference: {folder} has recurrent state {states[0]}, the learner's policy "
            f"{states[1]}, and fragments carry only that one; name another folder, or give both the same memory"
        )


def check_fleet_mismatch(summary: Summary, limit: float, step: int) -> None:
    """Ends the run where log-probabilities of the learner's own version disagree.

    Args:
        summary: Of the batch, fetched from the device.
        limit: Largest |ℓ_p − ℓ_b| over steps sampled under exactly these weights.
        step: For the message.

    Raises:
        MismatchError: the limit is exceeded.
    """
    if summary.own_steps and float(summary.mismatch_max) > limit:
        raise MismatchError(
            f"update {step}: learner and fleet disagree about log-probabilities of the same weights by up to "
            f"{float(summary.mismatch_max):.3g} (learner.mismatch_limit is {limit:g}); nothing was applied. Different "
            "weights, observations that were changed on the way, and recurrent state that was not the fragment's own "
            "are usual causes, and, of a network of one's own, chance in `step` or in what is no array of it, "
            "rows of a batch that depend on one another, or an `unroll` that differs from `step`; a larger limit is "
            "right only where the two sides compute on different hardware"
        )


def batch_summary_metrics(summary: Summary) -> dict[str, float]:
    """``train/…`` numbers of the whole batch before the update."""
    metrics = {"train/trained_steps": float(summary.trained_steps)}
    if summary.trained_steps:
        metrics |= _trained_metrics(summary)
    if summary.own_steps:
        metrics["train/mismatch_max"] = float(summary.mismatch_max)
        metrics["train/mismatch_kl"] = _share(summary.own_kl, summary.own_steps)
    if summary.other_steps:
        metrics["train/staleness_kl"] = _share(summary.other_kl, summary.other_steps)
    return metrics


def _trained_metrics(summary: Summary) -> dict[str, float]:
    return {
        "train/explained_variance": float(summary.explained_variance),
        "train/value_mean": float(summary.value_mean),
        "train/advantage_mean": float(summary.advantage_mean),
        "train/advantage_std": float(summary.advantage_std),
        "train/correction_fraction": _share(summary.bounded, summary.trained_steps),
        "train/vtrace_fraction": _share(summary.old_steps, summary.trained_steps),
    }


def optimisation_metrics(outcomes: Sequence[MinibatchResult]) -> dict[str, float]:
    """``train/…`` numbers of the optimiser steps, means over them; fetched from the device.

    Minibatches of which no step is trained are counted, and nothing else of them is told.
    """
    full = [outcome for outcome in outcomes if not outcome.empty]
    counts = {
        "train/optimizer_steps": float(len(full)),
        "train/empty_minibatches": float(len(outcomes) - len(full)),
    }
    return counts | _step_metrics([each.terms for each in full], [each.applied for each in full]) if full else counts


def _step_metrics(terms: Sequence[LossTerms], applied: Sequence[AppliedUpdate]) -> dict[str, float]:
    names = [name for name in LossTerms._fields if name != "reference_kl" or any(each.reference_kl for each in terms)]
    metrics = {f"train/{name}": _mean([getattr(each, name) for each in terms]) for name in names}
    metrics["train/grad_norm"] = _mean([each.grad_norm for each in applied])
    metrics["train/non_finite"] = 1.0 - _mean([each.finite for each in applied])
    return metrics


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))


def _share(part: Any, whole: Any) -> float:
    return float(part) / max(float(whole), 1.0)


_COUNTERS = ("step", "skipped_in_a_row", "fragment_steps")
_RETURNS = "squared_returns."  # and the task


class ControlLearner:
    """Trains one control policy.

    Args:
        policy: Initial parameters; never donated, never changed.
        config: Losses, optimiser and batch sizes of the learner.
        total_steps: Updates of the run, for the learning rate's course.
        seed: The run's seed; shuffles the minibatches.

    Raises:
        ConfigError: the configuration does not fit the policy; the message names the field and the remedy.
        CheckpointError: the folder of the KL reference cannot be read.
    """

    def __init__(self, policy: ControlPolicy, config: PpoConfig, total_steps: int, seed: int = 0) -> None:
        self._policy = policy
        optimizer = config.optimizer.model_copy(update={"frozen": (*config.optimizer.frozen, *policy.still)})
        self._config = config = config.model_copy(update={"optimizer": optimizer})
        self._total_steps = total_steps
        self._seed = seed
        self._step = 0
        self._skipped_in_a_row = 0
        self._fragment_steps = 0
        self._returns: dict[str, np.ndarray] = {}  # by task: sum of squares and number, for `reward_scale: auto`
        self._state = initial_state(config.optimizer, policy)
        self._start_state = {name: np.asarray(array) for name, array in policy.initial_state(1).items()}
        if config.burn_in and not self._start_state:
            raise ConfigError(f"learner.burn_in is {config.burn_in}, but the policy has no memory: set it to 0")
        if config.value_warmup_updates and not compiled.values_own(config, policy):
            raise ConfigError(
                f"learner.value_arrays is {list(config.value_arrays)}, which is no array of this policy, so that "
                f"nothing would train in the first {config.value_warmup_updates} updates: name some of "
                f"{', '.join(named_arrays(policy))}, or set value_warmup_updates to 0"
            )
        self._reference = ReferencePolicy(config.reference_kl, policy)
        self._prepare = compiled.preparer(config)

    @property
    def policy(self) -> ControlPolicy:
        """The current parameters; they stay valid after later updates."""
        return self._policy

    @property
    def step(self) -> int:
        """The version of the current parameters: how many updates are behind them."""
        return self._step

    def named_arrays(self) -> dict[str, Array]:
        """The current parameters by name, as weights travel."""
        return named_arrays(self._policy)

    def compile(self, fragments: int, fragment_length: int) -> None:
        """Compiles the update ahead of the first batch; optional.

        Args:
            fragments: Of a batch.
            fragment_length: Steps of each.
        """
        for _ in compile_programs(self.programs(fragments, fragment_length)):
            pass

    def programs(self, fragments: int, fragment_length: int) -> Programs:
        """Those of an update, the longest first; arguments as of `compile`."""
        self._check_burn_in(fragment_length)
        config = self._config
        self._fragment_steps = max(self._fragment_steps, fragment_length)
        minibatches = min(config.minibatches, fragments) if self._start_state else 1
        shape = BatchShape(self._fragment_steps, fragments + (fragments % minibatches > 0), FEWEST_FINALS)
        arrays = blank_arrays(shape, self._reading())
        scales = np.ones(shape.fragments, np.float32)
        steps, _ = jax.eval_shape(self._prepare, self._policy, arrays, scales)
        chosen = self._minibatches(arrays, fragments, np.random.default_rng(0))[0]
        batch, rate = compiled.Minibatches(arrays, steps), np.float32(0)
        optimised = self._policy, self._state, self._reference.policy, batch, chosen, rate, rate
        programs = {
            "minibatch": lambda: self._optimise.lower(*optimised).compile(),
            "advantages": lambda: self._prepare.lower(self._policy, arrays, scales).compile(),
        }
        if (statistics := self._policy.statistics) is not None:
            seen = statistics, arrays.observations, arrays.counted
            programs["observations"] = lambda: compiled.observer().lower(*seen).compile()
        return programs

    def update(self, batch: TrainingBatch[FragmentExample], version_step: int) -> dict[str, float]:
        """One update: `epochs` · `minibatches` optimiser steps on one batch.

        Args:
            batch: At least one fragment.
            version_step: The version that the caller believes the parameters to have.

        Returns:
            ``train/…``, ``time/…`` and ``throughput/…`` numbers; see docs/learner.md.

        Raises:
            WeightsError: the parameters have another version.
            ConfigError: the batch is empty, or its fragments are no longer than the burn-in.
            InvalidRolloutError: a fragment is of another policy's form.
            MismatchError: the fleet's log-probabilities under these very weights differ; nothing was applied.
            NonFiniteError: too many updates in a row had a loss or gradient that was not finite.
        """
        fragments = self._fragments(batch, version_step)
        started = time.perf_counter()
        arrays = self._arrays(fragments)
        minibatches = partial(self._minibatches, arrays, len(fragments))
        scales = self._reward_scales(arrays, [fragment.task for fragment in fragments])
        arrays = jax.device_put(arrays)
        placed = time.perf_counter()
        steps, summary = self._prepare(self._policy, arrays, scales)
        summary = jax.device_get(summary)
        check_fleet_mismatch(summary, self._config.mismatch_limit, self._step)
        prepared = time.perf_counter()
        rate = self._config.optimizer.rate_at(self._step, self._total_steps)
        outcomes = self._optimisation(compiled.Minibatches(arrays, steps), minibatches, rate)
        self._observe(arrays)
        ended = time.perf_counter()
        kl_coefficient = self._reference.coefficient(self._step)
        self._step += 1
        self._reference.keep(self._step, self._policy)
        self._count_skipped(outcomes)
        metrics = {
            "train/fragments": float(len(fragments)),
            **rate_metrics(self._config.optimizer, rate),
            "time/place": placed - started,
            "time/prepare": prepared - placed,
            "time/optimise": ended - prepared,
            "throughput/steps_per_s": float(summary.trained_steps) / max(ended - started, 1e-9),
        }
        if self._config.reference_kl is not None:
            metrics["train/reference_kl_coefficient"] = kl_coefficient
        if self._config.reward_scale == "auto":
            tasks = {fragment.task: scale for fragment, scale in zip(fragments, scales, strict=False)}
            metrics |= {f"train/reward_scale/{task}": float(tasks[task]) for task in sorted(tasks)}
        return finite_only(batch_summary_metrics(summary), optimisation_metrics(outcomes), metrics)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Everything but the parameters, by name, as a checkpoint keeps it."""
        counters = {name: np.array(getattr(self, f"_{name}"), np.int64) for name in _COUNTERS}
        returns = {f"{_RETURNS}{task}": sums.copy() for task, sums in self._returns.items()}
        return to_named(self._state) | self._reference.state_arrays() | counters | returns

    def restore_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes `state_arrays` back; the parameters are those the learner was made with.

        Raises:
            CheckpointError: names or shapes do not fit this policy and configuration.
        """
        rest = dict(arrays)
        for name in _COUNTERS:
            setattr(self, f"_{name}", int(rest.pop(name, np.array(0))))
        kept = [name for name in rest if name.startswith(_RETURNS)]
        self._returns = {name.removeprefix(_RETURNS): np.array(rest.pop(name), np.float64) for name in kept}
        rest = self._reference.restore(rest, self._step, self._policy)
        self._state = from_named(self._state, rest, self._config.optimizer.frozen)

    @property
    def optimizer(self) -> OptimizerConfig:
        """Of the optimiser."""
        return self._config.optimizer

    def write_model(self, folder: Path, codec: None = None) -> dict[str, str]:
        """Writes the policy's folder, ``config.json`` and ``model.safetensors``; a control policy has no tokenizer."""
        save_control_policy(folder, self._policy, self._policy.config, self._policy.spaces)
        return {"policy": "control", "dtype": self._policy.config.dtype}

    def snapshot(self) -> LearnerSnapshot:
        """All that a checkpoint needs, as it is now."""
        return LearnerSnapshot.of(self.state_arrays(), copy(self).write_model)

    @property
    def _optimise(self) -> Any:
        return compiled.optimiser(self._config, self._step < self._config.value_warmup_updates)

    def _fragments(self, batch: TrainingBatch[FragmentExample], version_step: int) -> list[SampleFragment]:
        if version_step != self._step:
            raise WeightsError(f"batch {batch.batch_id} is for version {version_step}, the learner holds {self._step}")
        if not batch.examples:
            raise ConfigError(f"batch {batch.batch_id} holds no fragments: replay must never hand out such a one")
        return [example.fragment for example in batch.examples]

    def _check_burn_in(self, steps: int) -> None:
        if steps <= self._config.burn_in:
            raise ConfigError(
                f"learner.burn_in is {self._config.burn_in}, but fragments have {steps} steps, so that nothing is left "
                "to train on: lower it, or raise fleet.fragment_length"
            )

    def _reading(self) -> FragmentReadOptions:
        beyond = self._config.vtrace.beyond_staleness
        return FragmentReadOptions(self._policy.spaces, self._start_state, self._step, beyond)

    def _arrays(self, fragments: Sequence[SampleFragment]) -> FragmentArrays:
        """The batch, in host memory."""
        whole = self._config.minibatches if self._start_state else 1
        shape = BatchShape.holding(fragments, whole, self._fragment_steps)
        self._check_burn_in(shape.steps)
        self._fragment_steps = shape.steps
        return stack_fragments(fragments, shape, self._reading())

    def _minibatches(self, arrays: FragmentArrays, count: int, rng: np.random.Generator) -> np.ndarray:
        """Of one epoch: steps, or of a policy with memory the columns of `count` fragments."""
        if self._start_state:
            return minibatch_columns(count, self._config.minibatches, count, rng)
        return minibatch_steps(arrays.counted, self._config.minibatches, rng)

    def _reward_scales(self, arrays: FragmentArrays, tasks: Sequence[str]) -> np.ndarray:
        """What each fragment's rewards are multiplied by; with ``auto`` the update's returns count from here on."""
        scales = np.ones(arrays.rewards.shape[1], np.float32)
        if self._config.reward_scale != "auto":
            return scales * np.float32(self._config.reward_scale)
        for task, sums in zip(tasks, squared_returns(arrays, self._config.discount), strict=False):
            self._returns[task] = self._returns.get(task, np.zeros(2)) + sums
        for column, task in enumerate(tasks):
            squares, count = self._returns[task]
            scales[column] = np.sqrt(count / squares) if squares > 0 else 1.0
        return scales

    def _optimisation(
        self, batch: compiled.Minibatches, minibatches: Callable[[np.random.Generator], np.ndarray], rate: float
    ) -> list[compiled.MinibatchResult]:
        """All optimiser steps, on an epoch's minibatches drawn anew for each; what came of each, on the host."""
        config, optimise = self._config, self._optimise
        rng = generator(fold(self._seed, "minibatches", self._step))
        scalars = np.float32(rate), np.float32(self._reference.coefficient(self._step))
        outcomes: list[compiled.MinibatchResult] = []
        for _ in range(config.epochs):
            epoch: list[compiled.MinibatchResult] = []
            for chosen in minibatches(rng):
                self._policy, self._state, outcome = optimise(
                    self._policy, self._state, self._reference.policy, batch, chosen, *scalars
                )
                epoch.append(jax.device_get(outcome))  # waits, so that a policy here gets its turns
            outcomes += epoch
            moved = [outcome.terms.approx_kl for outcome in epoch if not outcome.empty]
            if config.target_kl is not None and moved and np.mean(moved) > config.target_kl:
                break
        return outcomes

    def _observe(self, arrays: FragmentArrays) -> None:
        """Statistics of observations are of what was trained on; the steps themselves were taken by those before."""
        if (before := self._policy.statistics) is not None:
            after = compiled.observer()(before, arrays.observations, arrays.counted)
            self._policy = replace(self._policy, statistics=after)

    def _count_skipped(self, outcomes: Sequence[compiled.MinibatchResult]) -> None:
        """An update without a trained step is none of those in a row, and does not end their row."""
        applied = [outcome.applied for outcome in outcomes if not outcome.empty]
        if applied:
            most = self._config.max_non_finite_updates
            self._skipped_in_a_row = skipped_in_a_row(self._skipped_in_a_row, applied, most, "rewards and observations")
