"""The learner: batches in, optimiser steps out, with the numbers of each update.

It holds the parameters, the optimiser's state and the step; what is drawn (which groups share a minibatch) follows from
seed and step alone. An update is `epochs` · `minibatches` optimiser steps, and one new version. Each step adds the
gradients of micro-batches of one fixed shape, waiting for each, so that an engine on the same device gets its turns.
Parameters that were handed out are never donated: `decoder` stays valid for whoever holds it. One thread at a time.

A metric that is undefined for a batch (the drift of older rollouts where there are none) or not finite (the loss of
an update that was skipped) is left out, never zero.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32

from penstock.batch import unpack
from penstock.learner import step as compiled
from penstock.learner.config import LearnerConfig, LossConfig, OptimizerConfig
from penstock.learner.critic import Critic, ValueHead, ValueTargets
from penstock.learner.optimizer import (
    AppliedUpdate,
    OptimizerState,
    applier,
    from_named,
    initial_state,
    learning_rate,
    to_named,
)
from penstock.learner.reference import ReferenceWeights
from penstock.learner.step import LossSums, UpdatePlan, empty_micro_batch, plan_scoring, plan_update
from penstock.model.language import Decoder, named_arrays, save_decoder
from penstock.model.language.hugging_face import PolicyTokenizer
from penstock.model.programs import Programs, compile_programs
from penstock.types import ConfigError, NonFiniteError, RLExample, TrainingBatch, WeightsError, fold, generator


class StepOutcome(NamedTuple):
    """What one optimiser step came to, fetched from the device.

    Attributes:
        sums: Of the forward passes.
        applied: Of the optimiser.
        gradient_s: Seconds of forward and backward passes.
        apply_s: Seconds of the optimiser step.
        row_tokens: Positions of all rows that went through the model, padding included.
    """

    sums: LossSums
    applied: AppliedUpdate
    gradient_s: float
    apply_s: float
    row_tokens: int


def loss_metrics(outcomes: Sequence[StepOutcome], epochs: int = 1, reference: bool = False) -> dict[str, float]:
    """``train/…`` numbers that the forward passes gave: the loss is the mean of the steps', the rest are of all tokens.

    Args:
        outcomes: Of an update's optimiser steps.
        epochs: So often each token was seen.
        reference: Whether the examples had log-probabilities of a reference.
    """
    sums = jax.tree.map(lambda *parts: sum(parts), *(outcome.sums for outcome in outcomes))
    tokens = max(float(sums.tokens), 1.0)
    metrics = {
        "train/loss": float(sums.loss) / len(outcomes),
        "train/tokens": float(sums.tokens) / epochs,
        "train/clip_fraction": float(sums.clipped) / tokens,
        "train/correction_fraction": float(sums.bounded) / tokens,
        "train/ratio_mean": float(sums.ratio) / tokens,
        "train/entropy": float(sums.entropy) / tokens,
    }
    if sums.value_loss:
        metrics["train/value_loss"] = float(sums.value_loss) / len(outcomes)
        metrics["train/value_clip_fraction"] = float(sums.value_clipped) / tokens
    if reference:
        metrics["train/kl_reference"] = float(sums.reference_kl) / tokens
    if sums.stale_tokens:
        metrics["train/staleness_kl"] = float(sums.stale_kl) / float(sums.stale_tokens)
    return metrics


def step_metrics(outcomes: Sequence[StepOutcome], rate: float) -> dict[str, float]:
    """``train/…`` numbers of the optimiser steps: means over them, and how many there were."""
    applied = [outcome.applied for outcome in outcomes]
    return {
        "train/grad_norm": _mean(each.grad_norm for each in applied),
        "train/changed_fraction": _mean(each.changed_fraction for each in applied),
        "train/learning_rate": rate,
        "train/non_finite": _mean(not each.finite for each in applied),
        "train/optimizer_steps": float(len(outcomes)),
    }


def _mean(values: Iterable[Any]) -> float:
    return float(np.mean([float(value) for value in values]))


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Advantages per sequence, and the rewards where the batch's own metrics have them."""
    of_tokens = [example.advantage[example.loss_mask] for example in batch.examples]
    advantages = np.array([found.mean(dtype=np.float64) for found in of_tokens])
    largest = np.array([np.abs(found).max() for found in of_tokens], np.float64)
    metrics = {
        "train/sequences": float(len(advantages)),
        "train/groups": float(len(set(batch.group_ids))),
        "train/advantage_mean": float(advantages.mean()),
        "train/advantage_std": float(advantages.std()),
        "train/advantage_max": float(largest.max()),
        "train/advantage_zero_fraction": float((largest == 0).mean()),
    }
    return metrics | {name: value for name, value in batch.metrics.items() if name.startswith("train/")}


def throughput_metrics(
    tokens: int, outcomes: Sequence[StepOutcome], scoring_s: Mapping[str, float]
) -> dict[str, float]:
    """Seconds and tokens.

    Args:
        tokens: Of all sequences of all optimiser steps, prompts included.
        outcomes: Of these steps.
        scoring_s: Seconds of forward passes before the first, by their metric's name.
    """
    gradient_s, apply_s = sum(each.gradient_s for each in outcomes), sum(each.apply_s for each in outcomes)
    return {
        **scoring_s,
        "time/forward_backward": gradient_s,
        "time/apply": apply_s,
        "throughput/learner_tokens_per_s": tokens / max(gradient_s + apply_s + sum(scoring_s.values()), 1e-9),
        "throughput/row_fill": tokens / sum(each.row_tokens for each in outcomes),
    }


def finite_only(*metrics: Mapping[str, float]) -> dict[str, float]:
    """All of them, without what JSON has no number for."""
    return {name: value for part in metrics for name, value in part.items() if math.isfinite(value)}


def scored_lengths(row_length: int) -> tuple[int, ...]:
    """Tokens of the rows in which sequences are scored, ascending: few lengths, all compiled before they are needed."""
    lengths, length = [], 64
    while length <= row_length // 2:
        lengths.append(length)
        length *= 4
    return (*lengths, row_length)


_SUPERVISED = LossConfig()
"""Only its aggregation matters: the mean over all response tokens."""


class Learner:
    """Trains one language policy.

    Args:
        decoder: Initial parameters; never donated, never changed.
        config: Losses, optimiser and batch sizes of the learner.
        total_steps: Updates of the run, for the learning rate's course.
        seed: The run's seed; shuffles the minibatches.
        max_output_tokens: By lesson id, denominators of ``constant`` aggregation; of lessons that are not in it the
            largest, and the row length where it is empty.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: LearnerConfig,
        total_steps: int,
        seed: int = 0,
        max_output_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._total_steps = total_steps
        self._seed = seed
        self._max_output_tokens = max_output_tokens or {}
        self._step = 0
        self._skipped_in_a_row = 0
        self._state = initial_state(config.optimizer, decoder)
        self._reference = ReferenceWeights(config.kl, decoder)
        self._warm_start = _WarmStart(config)
        options = _forward_options(config)
        frozen = config.optimizer.frozen
        self._zeros = compiled.zeros_maker(frozen)
        self._critic = Critic(config, decoder.config.hidden_size)
        sources = _proximal_source(config), config.kl, config.critic
        self._accumulate = compiled.policy_accumulator(config.loss, options, frozen, *sources)
        self._value = compiled.value_scorer(options)
        self._apply = applier(config.optimizer)
        self._score = compiled.scorer(options)

    @property
    def decoder(self) -> Decoder:
        """The current parameters; they stay valid after later updates."""
        return self._decoder

    @property
    def step(self) -> int:
        """The version of the current parameters: how many updates are behind them."""
        return self._step

    def named_arrays(self) -> dict[str, Array]:
        """The current parameters by name, as weights travel."""
        return named_arrays(self._decoder)

    def compile(self) -> None:
        """Compiles the update ahead of the first batch; optional, and safe while an engine is running."""
        for _ in compile_programs(self.programs()):
            pass

    def programs(self) -> Programs:
        """Those of `score` and of an update."""
        return {**self.scoring_programs(), **self.update_programs()}

    def scoring_programs(self) -> Programs:
        """Those of `score`."""
        rows = {n: empty_micro_batch(n, 1) for n in reversed(scored_lengths(self._config.row_length))}
        lowered = {
            f"log-probabilities, {length} tokens": partial(self._score.lower, self._decoder, row)
            for length, row in rows.items()
        }
        return _compiling(lowered)

    def update_programs(self) -> Programs:
        """Those of `update`, the longest first."""
        row_length = self._config.row_length
        batch = empty_micro_batch(row_length, self._config.micro_batch_rows)
        critic = self._critic.head
        so_far = jax.eval_shape(partial(self._zeros, critic=critic), self._decoder)
        scalar = np.float32(0)
        applied = self._decoder, self._state, so_far.gradients, scalar, so_far.sums.loss
        lowered = {
            "gradient": partial(self._accumulate.lower, self._decoder, so_far, batch, critic=critic),
            "optimiser step": partial(self._apply.lower, *applied),
            "empty gradient": partial(self._zeros.lower, self._decoder, critic=critic),
        }
        if critic is not None:
            lowered["values"] = partial(self._value.lower, self._decoder, critic, batch)
            lowered["optimiser step of values"] = partial(self._critic.lower, so_far.critic)
        proximal = self._config.recomputes_proximal
        if proximal or self._config.kl.reference is not None:  # one program scores for both
            lowered[f"{'proximal' if proximal else 'reference'} log-probabilities"] = partial(
                self._score.lower, self._decoder, batch
            )
        return _compiling(lowered)

    def update(self, batch: TrainingBatch, version_step: int) -> dict[str, float]:
        """One update: `epochs` · `minibatches` optimiser steps on one batch.

        Args:
            batch: At least one example.
            version_step: The version that the caller believes the parameters to have.

        Returns:
            ``train/…``, ``time/…`` and ``throughput/…`` numbers; see docs/learner.md.

        Raises:
            WeightsError: the parameters have another version.
            ConfigError: an example is longer than a row.
            NonFiniteError: too many updates in a row had a loss or gradient that was not finite.
        """
        self._check_batch(batch, version_step)
        self._warm_start.discard()
        self._reference.keep(self._decoder)
        config, scoring_s = self._config, dict[str, float]()
        examples = self._with_reference(batch.examples, scoring_s)
        proximal = self._proximal(examples, scoring_s)
        examples, targets, value_metrics = self._with_values(examples, scoring_s)
        rate = learning_rate(config.optimizer, self._step, self._total_steps)
        rng = generator(fold(self._seed, "minibatches", self._step))
        outcomes: list[StepOutcome] = []
        for _ in range(config.epochs):
            for indices in compiled.minibatches_of(examples, config.minibatches, rng):
                part = [examples[index] for index in indices]
                beside = None if proximal is None else [proximal[index] for index in indices]
                wanted = None if targets is None else [targets[index] for index in indices]
                outcomes.append(self._optimiser_step(part, beside, rate, wanted))
        self._step += 1
        self._reference.follow(self._step, self._decoder)
        self._count_skipped([outcome.applied for outcome in outcomes])
        tokens = config.epochs * sum(len(example.tokens) for example in examples)
        return finite_only(
            batch_metrics(replace(batch, examples=tuple(examples))),
            value_metrics,
            loss_metrics(outcomes, config.epochs, _has_reference(examples)),
            step_metrics(outcomes, rate),
            throughput_metrics(tokens, outcomes, scoring_s),
        )

    def score(self, examples: Sequence[RLExample], decoder: Decoder | None = None) -> list[Float32[np.ndarray, " pos"]]:
        """Log-probabilities of every token, by the loss's own forward pass over single rows, as short as they can be.

        Args:
            examples: Of one sequence each, no longer than a row.
            decoder: Whose; None means the current parameters.

        Returns:
            float32 [pos] for each example, aligned with its tokens; 0 at the first, which nothing predicts.
        """
        if not examples:
            return []
        longest = max(len(example.tokens) for example in examples)
        length = next(n for n in scored_lengths(self._config.row_length) if n >= longest)
        scoring = partial(self._score, self._decoder if decoder is None else decoder)
        return self._scored(plan_scoring(examples, length, 1), scoring)

    def reference_logprobs(self, examples: Sequence[RLExample]) -> tuple[int, list[Float32[np.ndarray, " pos"]]]:
        """ℓ_ref by the loss's own forward pass; from any thread, also while an update is made.

        Args:
            examples: Of one sequence each, no longer than a row.

        Returns:
            How often the reference has changed, and float32 [pos] for each example, aligned with its tokens; 0 outside
            the loss mask.

        Raises:
            ConfigError: there is no reference.
        """
        reference = self._reference.current(self._decoder)
        return reference.version, self._scored_sampled(examples, reference.decoder) if examples else []

    def rounding(self, examples: Sequence[RLExample]) -> Float32[np.ndarray, " tokens"] | None:
        """What the model's dtype alone changes: log-probabilities in it less those in float32, of sampled tokens.

        Args:
            examples: Of one sequence each, no longer than a row.

        Returns:
            float32 [tokens]; None of a model that is float32.
        """
        if self._decoder.config.dtype == "float32":
            return None
        arrays = {name: array.astype(np.float32) for name, array in self.named_arrays().items()}
        exact = Decoder.from_arrays(self._decoder.config.model_copy(update={"dtype": "float32"}), arrays)
        scores = zip(examples, self.score(examples), self.score(examples, exact), strict=True)
        return np.concatenate([(own - other)[example.loss_mask] for example, own, other in scores])

    def supervised_update(self, examples: Sequence[RLExample]) -> dict[str, float]:
        """One step of cross-entropy on response tokens (warm start); does not count as an update.

        Its optimiser state is apart from the run's, and discarded at the first `update`.

        Args:
            examples: From `penstock.batch.example_from_pair`.

        Raises:
            ConfigError: no warm start is configured.
        """
        warm_start = self._warm_start
        state = warm_start.begin(self._decoder)
        plan = plan_update(examples, _SUPERVISED, self._config.row_length, self._config.micro_batch_rows, self._step)
        (gradients, _), sums = self._gradients(warm_start.accumulate, plan)
        rate = warm_start.learning_rate()
        self._decoder, warm_start.state, applied = warm_start.apply(
            self._decoder, state, gradients, np.float32(rate), sums.loss
        )
        outcome = StepOutcome(sums, jax.device_get(applied), 0.0, 0.0, 0)
        self._count_skipped([outcome.applied])
        losses = {"train/tokens": float(sums.tokens), "train/loss": float(sums.loss)}
        return finite_only(losses, step_metrics([outcome], rate))

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Everything but the parameters, by name, as a checkpoint keeps it."""
        counters = {"step": self._step, "skipped_in_a_row": self._skipped_in_a_row}
        named = {name: np.array(value, np.int64) for name, value in counters.items()}
        return to_named(self._state) | self._reference.state_arrays() | self._critic.state_arrays() | named

    def restore_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes `state_arrays` back; the parameters are those the learner was made with.

        Raises:
            CheckpointError: names or shapes do not fit this model and optimiser.
        """
        rest = dict(arrays)
        counters = [rest.pop(name, np.array(0)) for name in ("step", "skipped_in_a_row")]
        self._step, self._skipped_in_a_row = (int(counter) for counter in counters)
        rest = self._critic.restore(self._reference.restore(rest, self._step, self._decoder))
        self._state = from_named(self._state, rest, self._config.optimizer.frozen)

    def write_model(self, folder: Path, codec: PolicyTokenizer) -> dict[str, str]:
        """Writes a Hugging Face directory with the tokenizer."""
        save_decoder(self._decoder, folder, codec)
        return {"policy": "language", "dtype": self._decoder.config.dtype}

    def _check_batch(self, batch: TrainingBatch, version_step: int) -> None:
        if version_step != self._step:
            raise WeightsError(f"batch {batch.batch_id} is for version {version_step}, the learner holds {self._step}")
        if not batch.examples:
            raise ConfigError(f"batch {batch.batch_id} holds no examples: replay must never hand out such a one")

    def _with_reference(self, examples: Sequence[RLExample], scoring_s: dict[str, float]) -> Sequence[RLExample]:
        """The examples with ℓ_ref, where the loss reads it; those of a batch that was scored before have it."""
        if not self._config.reads_reference or _has_reference(examples):
            return examples
        started = time.perf_counter()
        scored = zip(examples, self.reference_logprobs(examples)[1], strict=True)
        with_scores = [replace(example, reference_log_probs=logprobs) for example, logprobs in scored]
        scoring_s["time/reference"] = time.perf_counter() - started
        return with_scores

    def _proximal(
        self, examples: Sequence[RLExample], scoring_s: dict[str, float]
    ) -> list[Float32[np.ndarray, " pos"]] | None:
        """ℓ_p of each example's sampled tokens; None where the loss does not read it. Adds the seconds that it took."""
        if not self._config.recomputes_proximal:
            return None
        started = time.perf_counter()
        logprobs = self._scored_sampled(examples, self._decoder)
        scoring_s["time/proximal"] = time.perf_counter() - started
        return logprobs

    def _with_values(
        self, examples: Sequence[RLExample], scoring_s: dict[str, float]
    ) -> tuple[Sequence[RLExample], list[ValueTargets] | None, dict[str, float]]:
        """The examples with advantages over a value head's values, where there is one, and what it learns."""
        head = self._critic.head
        if head is None:
            return examples, None, {}
        started = time.perf_counter()
        rows = self._config.row_length, self._config.micro_batch_rows
        plan = plan_scoring(examples, *rows, every_token=False)
        values = self._scored(plan, partial(self._value, self._decoder, head))
        scoring_s["time/values"] = time.perf_counter() - started
        return self._critic.advantages(examples, values)

    def _scored_sampled(self, examples: Sequence[RLExample], decoder: Decoder) -> list[Float32[np.ndarray, " pos"]]:
        """Log-probabilities of sampled tokens, in micro-batches of an update's shape."""
        rows = self._config.row_length, self._config.micro_batch_rows
        return self._scored(plan_scoring(examples, *rows, every_token=False), partial(self._score, decoder))

    def _scored(self, plan: UpdatePlan, scoring: Callable[[Any], Any]) -> list[Float32[np.ndarray, " pos"]]:
        """What is scored at a plan's entries, aligned with the tokens of its examples; 0 elsewhere."""
        scores = []
        for micro_batch in plan.micro_batches:
            found, count = np.asarray(scoring(micro_batch)), int(micro_batch.count)
            rows = np.zeros(micro_batch.tokens.shape, np.float32)
            rows.reshape(-1)[micro_batch.positions[:count]] = found[:count]
            scores.append(rows)
        return unpack(np.concatenate(scores), plan.placements)

    def _optimiser_step(
        self,
        examples: Sequence[RLExample],
        proximal: Sequence[Float32[np.ndarray, " _"]] | None,
        rate: float,
        targets: Sequence[ValueTargets] | None,
    ) -> StepOutcome:
        config, started = self._config, time.perf_counter()
        plan = plan_update(
            examples,
            config.loss,
            config.row_length,
            config.micro_batch_rows,
            self._step,
            max_tokens=[self._denominator(example) for example in examples],
            proximal_logprobs=proximal,
            value_targets=targets,
        )
        (gradients, of_critic), sums = self._gradients(self._accumulate, plan, self._critic.head)
        differentiated = time.perf_counter()
        self._decoder, self._state, applied = self._apply(
            self._decoder, self._state, gradients, np.float32(rate), sums.loss
        )
        applied = jax.device_get(applied)
        self._critic.step(of_critic, sums.loss if applied.finite else np.float32(np.nan), self._step, self._total_steps)
        times = differentiated - started, time.perf_counter() - differentiated
        return StepOutcome(sums, applied, *times, sum(batch.tokens.size for batch in plan.micro_batches))

    def _denominator(self, example: RLExample) -> int:
        """Of a sequence under ``constant`` aggregation; its lesson is the first part of its group's id."""
        limits = self._max_output_tokens
        if self._config.loss.max_tokens is not None or not limits:
            return self._config.loss.max_tokens or self._config.row_length
        lesson = example.rollout_ids[0].rpartition("/")[0].rsplit("-", 2)[0]
        return limits.get(lesson) or max(limits.values())

    def _gradients(
        self, accumulate: Any, plan: UpdatePlan, critic: ValueHead | None = None
    ) -> tuple[tuple[Any, Any], compiled.LossSums]:
        """Gradients of the policy and a value head (on the device), and sums (on the host), of all micro-batches."""
        so_far = self._zeros(self._decoder, critic=critic)
        for micro_batch in plan.micro_batches:
            so_far = accumulate(self._decoder, so_far, micro_batch, critic=critic)
            so_far.sums.loss.block_until_ready()  # so that an engine on this device gets its turns
        return (so_far.gradients, so_far.critic), jax.device_get(so_far.sums)

    def _count_skipped(self, applied: Sequence[AppliedUpdate]) -> None:
        self._skipped_in_a_row = 0 if all(each.finite for each in applied) else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= self._config.max_non_finite_updates:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} updates in a row had a loss or gradient that was not finite "
                "(learner.max_non_finite_updates): lower the learning rate, or look at the last batch's rewards"
            )


class _WarmStart:
    """The supervised phase's own optimiser; empty before and after."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self.state: OptimizerState | None = None
        self._steps_done = 0
        if config.warm_start is not None:
            self._optimizer: OptimizerConfig = config.warm_start.optimizer(config.optimizer)
            self.accumulate = compiled.supervised_accumulator(_forward_options(config), config.optimizer.frozen)
            self.apply = applier(self._optimizer)

    def begin(self, decoder: Decoder) -> OptimizerState:
        if self._config.warm_start is None:
            raise ConfigError("supervised_update needs learner.warm_start: steps, batch_size, learning_rate")
        return initial_state(self._optimizer, decoder) if self.state is None else self.state

    def learning_rate(self) -> float:
        assert self._config.warm_start is not None
        self._steps_done += 1
        return learning_rate(self._optimizer, self._steps_done - 1, self._config.warm_start.steps)

    def discard(self) -> None:
        self.state = None


def _has_reference(examples: Sequence[RLExample]) -> bool:
    return all(example.reference_log_probs is not None for example in examples)


def _compiling(lowered: Mapping[str, Callable[[], Any]]) -> Programs:
    return {name: lambda lower=lower: lower().compile() for name, lower in lowered.items()}


def _proximal_source(config: LearnerConfig) -> compiled.ProximalSource:
    if config.proximal == "behaviour":
        return "behaviour"
    return "stored" if config.recomputes_proximal else "current"


def _forward_options(config: LearnerConfig) -> compiled.ForwardOptions:
    return compiled.ForwardOptions(config.remat, config.head_tile_tokens)
