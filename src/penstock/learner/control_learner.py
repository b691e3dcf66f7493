"""The learner of control policies: fragments in, epochs of PPO's optimiser steps out.

It holds the parameters, the optimiser's state, the step, and the reference of a KL penalty; what is drawn (which
fragments share a minibatch) follows from seed and step alone. Each update looks at the whole batch first, compares
log-probabilities with the fleet's, and only then takes optimiser steps, waiting for each, so that a policy on the same
device gets its turns. Parameters that were handed out are never donated. One thread at a time.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from penstock.learner import control_step as compiled
from penstock.learner.control_config import PpoConfig
from penstock.learner.control_reporting import batch_summary_metrics, check_fleet_mismatch, optimisation_metrics
from penstock.learner.fragment_arrays import (
    FEWEST_FINALS,
    BatchShape,
    FragmentArrays,
    Reading,
    blank_arrays,
    minibatch_columns,
    stack_fragments,
)
from penstock.learner.optimizer import initial_state, learning_rate
from penstock.learner.reference_policy import ReferencePolicy
from penstock.learner.reporting import finite_only
from penstock.learner.state_names import from_named, to_named
from penstock.model.control import ControlPolicy, named_arrays, save_control_policy
from penstock.types import (
    ConfigError,
    FragmentExample,
    NonFiniteError,
    SampleFragment,
    TrainingBatch,
    WeightsError,
    fold,
    generator,
)

_COUNTERS = ("step", "skipped_in_a_row", "fragment_steps")


class ControlLearner:
    """Trains one control policy.

    Args:
        policy: Initial parameters; never donated, never changed.
        config: The learner's.
        total_steps: Updates of the run, for the learning rate's course.
        seed: The run's.

    Raises:
        ConfigError: the configuration does not fit the policy; the message names the field and the remedy.
        CheckpointError: the folder of the KL reference cannot be read.
    """

    def __init__(self, policy: ControlPolicy, config: PpoConfig, total_steps: int, seed: int = 0) -> None:
        self._policy = policy
        self._config = config
        self._total_steps = total_steps
        self._seed = seed
        self._step = 0
        self._skipped_in_a_row = 0
        self._fragment_steps = 0
        self._state = initial_state(config.optimizer, policy)
        self._start_state = {name: np.asarray(array) for name, array in policy.initial_state(1).items()}
        if config.burn_in and not self._start_state:
            raise ConfigError(f"learner.burn_in is {config.burn_in}, but the policy has no memory: set it to 0")
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
        self._check_burn_in(fragment_length)
        config = self._config
        self._fragment_steps = max(self._fragment_steps, fragment_length)
        minibatches = min(config.minibatches, fragments)
        blank = fragments % minibatches > 0
        shape = BatchShape(self._fragment_steps, fragments + blank, FEWEST_FINALS)
        arrays = blank_arrays(shape, self._reading())
        steps = jax.eval_shape(self._prepare, self._policy, arrays).steps
        columns = np.zeros(-(-fragments // minibatches), np.int32)
        batch, rate = compiled.Minibatches(arrays, steps), np.float32(0)
        self._prepare.lower(self._policy, arrays).compile()
        self._optimise.lower(self._policy, self._state, self._reference.policy, batch, columns, rate, rate).compile()

    def update(self, batch: TrainingBatch[FragmentExample], version_step: int) -> dict[str, float]:
        """One update: `epochs` · `minibatches` optimiser steps on one batch.

        Args:
            batch: At least one fragment.
            version_step: The version that the caller believes the parameters to have.

        Returns:
            ``train/…``, ``time/…`` and ``throughput/…`` numbers; see docs/ppo.md.

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
        placed = time.perf_counter()
        steps, summary = self._prepare(self._policy, arrays)
        summary = jax.device_get(summary)
        check_fleet_mismatch(summary, self._config.mismatch_limit, self._step)
        prepared = time.perf_counter()
        rate = learning_rate(self._config.optimizer, self._step, self._total_steps)
        outcomes = self._optimisation(compiled.Minibatches(arrays, steps), len(fragments), rate)
        ended = time.perf_counter()
        kl_coefficient = self._reference.coefficient(self._step)
        self._step += 1
        self._reference.keep(self._step, self._policy)
        self._count_skipped(outcomes)
        metrics = {
            "train/fragments": float(len(fragments)),
            "train/learning_rate": rate,
            "time/place": placed - started,
            "time/prepare": prepared - placed,
            "time/optimise": ended - prepared,
            "throughput/steps_per_s": float(summary.trained_steps) / max(ended - started, 1e-9),
        }
        if self._config.reference_kl is not None:
            metrics["train/reference_kl_coefficient"] = kl_coefficient
        return finite_only(batch_summary_metrics(summary), optimisation_metrics(outcomes), metrics)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Everything but the parameters, by name, as a checkpoint keeps it."""
        counters = {name: np.array(getattr(self, f"_{name}"), np.int64) for name in _COUNTERS}
        return to_named(self._state) | self._reference.state_arrays() | counters

    def restore_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes `state_arrays` back; the parameters are those the learner was made with.

        Raises:
            CheckpointError: names or shapes do not fit this policy and configuration.
        """
        rest = dict(arrays)
        for name in _COUNTERS:
            setattr(self, f"_{name}", int(rest.pop(name, np.array(0))))
        rest = self._reference.restore(rest, self._step, self._policy)
        self._state = from_named(self._state, rest)

    def write_model(self, folder: Path, codec: None = None) -> dict[str, str]:
        """Writes the policy's folder, ``config.json`` and ``model.safetensors``; a control policy has no tokenizer."""
        save_control_policy(folder, self._policy, self._policy.config, self._policy.spaces)
        return {"policy": "control", "dtype": self._policy.config.dtype}

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

    def _reading(self) -> Reading:
        beyond = self._config.vtrace.beyond_staleness
        return Reading(self._policy.spaces, self._start_state, self._step, beyond)

    def _arrays(self, fragments: Sequence[SampleFragment]) -> FragmentArrays:
        """The batch on the device."""
        shape = BatchShape.holding(fragments, self._config.minibatches, self._fragment_steps)
        self._check_burn_in(shape.steps)
        self._fragment_steps = shape.steps
        return jax.device_put(stack_fragments(fragments, shape, self._reading()))

    def _optimisation(self, batch: compiled.Minibatches, count: int, rate: float) -> list[compiled.Outcome]:
        """All optimiser steps; what came of each, on the host."""
        config, optimise = self._config, self._optimise
        rng = generator(fold(self._seed, "minibatches", self._step))
        scalars = np.float32(rate), np.float32(self._reference.coefficient(self._step))
        outcomes: list[compiled.Outcome] = []
        for _ in range(config.epochs):
            epoch: list[compiled.Outcome] = []
            for columns in minibatch_columns(count, config.minibatches, count, rng):
                self._policy, self._state, outcome = optimise(
                    self._policy, self._state, self._reference.policy, batch, columns, *scalars
                )
                epoch.append(jax.device_get(outcome))  # waits, so that a policy here gets its turns
            outcomes += epoch
            moved = [outcome.terms.approx_kl for outcome in epoch if not outcome.empty]
            if config.target_kl is not None and moved and np.mean(moved) > config.target_kl:
                break
        return outcomes

    def _count_skipped(self, outcomes: Sequence[compiled.Outcome]) -> None:
        """An update without a trained step is none of those in a row, and does not end their row."""
        applied = [outcome.applied for outcome in outcomes if not outcome.empty]
        if not applied:
            return
        finite = all(each.finite for each in applied)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self._config.max_non_finite_updates:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} updates in a row had a loss or gradient that was not finite "
                "(learner.max_non_finite_updates): lower the learning rate, or look at rewards and observations"
            )
