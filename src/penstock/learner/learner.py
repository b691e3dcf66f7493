"""The learner: batches in, optimiser steps out, with the numbers of each update.

It holds the parameters, the optimiser's state and the step; what is drawn (which groups share a minibatch) follows from
seed and step alone. An update is `epochs` · `minibatches` optimiser steps, and one new version. Each step adds the
gradients of micro-batches of few fixed shapes, waiting for each, so that an engine on the same device gets its turns.
Parameters that were handed out are never donated: `decoder` stays valid for whoever holds it. One thread at a time.
While the device computes, the host packs what comes after it, the next optimiser step's rows or the next update's where
its batch is known, and hands them to the device: one step ahead, never more.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32

from penstock.batch import RowShape, longest_sample, minibatches_of
from penstock.learner import step as compiled
from penstock.learner.config import LearnerConfig, LossConfig, OptimizerConfig, ProximalSource
from penstock.learner.critic import Critic, ValueHead, ValueTargets
from penstock.learner.metrics import (
    StepOutcome,
    batch_metrics,
    finite_only,
    loss_metrics,
    rate_metrics,
    row_tokens_of,
    skipped_in_a_row,
    step_metrics,
    throughput_metrics,
)
from penstock.learner.micro_batches import (
    MicroBatch,
    Minibatch,
    PackedBeside,
    UpdatePlan,
    empty_micro_batch,
    has_advantage,
    plan_scoring,
    plan_update,
    score_plan,
    scored_lengths,
)
from penstock.learner.optimizer import (
    AppliedUpdate,
    OptimizerState,
    WarmStart,
    applier,
    beside_base,
    from_named,
    initial_state,
    join_frozen,
    lower_moments,
    split_frozen,
    to_named,
)
from penstock.learner.reference import ReferenceWeights
from penstock.learner.snapshot import LearnerSnapshot
from penstock.learner.step import GradientSums, LossSums, PlannedStep
from penstock.model.language import Decoder, named_arrays, save_decoder
from penstock.model.language.adapter import base_digest
from penstock.model.language.attention_choice import check_attention, platform_named
from penstock.model.language.config import ADAPTER
from penstock.model.language.hugging_face import PolicyTokenizer, save_adapter
from penstock.model.programs import Programs, compile_programs
from penstock.types import ConfigError, RLExample, TrainingBatch, WeightsError, fold, generator

_SUPERVISED = LossConfig()
"""Only its aggregation matters: the mean over all response tokens."""

_NO_SUMS = np.zeros(len(LossSums._fields), np.float32)
"""`LossSums` before the first micro-batch."""


class Learner:
    """Trains one language policy.

    Args:
        decoder: Initial parameters; never donated, never changed. Shapes in their place make a learner whose programs
            can be lowered and compiled, and nothing else; those of no device are for JAX's default one.
        config: Losses, optimiser and batch sizes of the learner.
        total_steps: Updates of the run, for the learning rate's course.
        seed: The run's seed; shuffles the minibatches.
        max_output_tokens: By lesson id, denominators of ``constant`` aggregation; of lessons that are not in it the
            largest, and the row length where it is empty.

    Attributes:
        coming: Gives the batch of a later update where it is known, without waiting; asked while an update is computed.
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
        own = beside_base(config.optimizer, decoder.config)
        self._config = config = config.model_copy(update={"optimizer": own})
        self._base_digest, self._total_steps, self._seed = "", total_steps, seed
        self._max_output_tokens = max_output_tokens or {}
        self.coming: Callable[[int], TrainingBatch | None] = lambda step: None
        self._ahead: tuple[str, UpdatePlan] | None = None  # of the batch with that id
        self._coming_id = ""
        self._step, self._skipped_in_a_row = 0, 0
        options = _forward_options(config, decoder)
        self._state = initial_state(config.optimizer, decoder)
        self._reference = ReferenceWeights(config.kl, decoder)
        frozen = config.optimizer.frozen
        self._warm_start = WarmStart(config, compiled.supervised_accumulator(options, frozen))
        self._zeros = compiled.zeros_maker(frozen)
        self._critic = Critic(config, decoder.config.hidden_size)
        sources = _proximal_source(config), config.kl, config.critic
        self._accumulate = compiled.policy_accumulator(config.loss, options, frozen, *sources)
        self._value = compiled.value_scorer(options)
        self._apply = applier(config.optimizer, options.platform, options.dtype)
        self._ahead_of_device = 0 if options.platform == "cpu" else 1  # micro-batches beside that it is at
        self._score, self._score_entropy = compiled.scorer(options), compiled.scorer(options, "entropy")

    @property
    def decoder(self) -> Decoder:
        """The current parameters; they stay valid after later updates."""
        return self._decoder

    @property
    def step(self) -> int:
        """The version of the current parameters: how many updates are behind them."""
        return self._step

    @property
    def optimizer(self) -> OptimizerConfig:
        """Of the optimiser; its `frozen` is all that does not train, the base of an adapter, too."""
        return self._config.optimizer

    def named_arrays(self) -> dict[str, Array]:
        """The current parameters by name, as weights travel."""
        return named_arrays(self._decoder)

    def compile(self) -> None:
        """Compiles the update ahead of the first batch; optional, and safe while an engine is running."""
        list(compile_programs(self.programs()))

    def programs(self) -> Programs:
        """Those of `score` and of an update."""
        return {**self.scoring_programs(), **self.update_programs()}

    def first_programs(self) -> Programs:
        """What making such a learner and announcing its weights need; small ones."""
        moments = {} if self.optimizer.offload else {"moments": partial(lower_moments, self.optimizer, self._decoder)}
        return _compiling({**moments, **self._decoder.lower_digests()})

    def scoring_programs(self) -> Programs:
        """Those of `score`."""
        rows = {n: empty_micro_batch(self._config.row_shape(n)) for n in reversed(self._scored_lengths)}
        lowered = {
            f"log-probabilities, {length} tokens": partial(self._score.lower, self._decoder, row)
            for length, row in rows.items()
        }
        return _compiling(lowered)

    def update_programs(self) -> Programs:
        """Those of `update`, the gradient last: several processors compile the parts of a large program."""
        return _compiling(self.lowered_update())

    def lowered_update(self) -> dict[str, "partial[Any]"]:
        """What lowers each program of `update`: a compiled function's `lower` with all of its arguments."""
        critic = self._critic.head
        so_far = jax.eval_shape(partial(self._zeros, critic=critic), self._decoder)
        scalar = np.float32(0)
        trained, _ = split_frozen(self.optimizer.frozen, self._decoder)
        applied = trained, self._state, so_far.policy, scalar, scalar
        accumulate = partial(self._accumulate.lower, self._decoder, so_far)
        lowered = {
            "optimiser step": partial(self._apply.lower, *applied),
            "empty gradient": partial(self._zeros.lower, self._decoder, critic=critic),
            **self._of_shapes("gradient", lambda batch: partial(accumulate, batch, critic=critic)),
        }
        if critic is not None:
            lowered |= self._of_shapes("values", lambda batch: partial(self._value.lower, self._decoder, critic, batch))
            lowered["optimiser step of values"] = partial(self._critic.lower, so_far.critic)
        proximal = self._config.recomputes_proximal
        if proximal or self._config.kl.reference is not None:  # one program scores for both
            name = f"{'proximal' if proximal else 'reference'} log-probabilities"
            lowered |= self._of_shapes(name, lambda batch: partial(self._score.lower, self._decoder, batch))
        return lowered

    def _of_shapes(self, name: str, lower: Callable[[MicroBatch], Any]) -> dict[str, Any]:
        """A program for each shape of rows, the longest first; one alone needs no length in its name."""
        shapes = self._config.row_shapes
        names = [name] if len(shapes) == 1 else [f"{name}, rows of {shape.length}" for shape in shapes]
        return {own: lower(empty_micro_batch(shape)) for own, shape in reversed(list(zip(names, shapes, strict=True)))}

    @property
    def _scored_lengths(self) -> tuple[int, ...]:
        return scored_lengths(*(shape.length for shape in self._config.row_shapes))

    def update(self, batch: TrainingBatch, version_step: int, left_out: Collection[str] = ()) -> dict[str, float]:
        """One update: `epochs` · `minibatches` optimiser steps on one batch.

        Args:
            batch: At least one example.
            version_step: The version that the caller believes the parameters to have.
            left_out: Ids of rollouts whose loss counts nothing; who shares a minibatch, and every denominator, stays as
                it is with them.

        Returns:
            ``train/…``, ``time/…`` and ``throughput/…`` numbers; see docs/learner.md.

        Raises:
            WeightsError: the parameters have another version.
            ConfigError: an example is longer than a row.
            NonFiniteError: too many updates in a row had a loss or gradient that was not finite.
        """
        rate, outcomes, scoring_s = self._rate(), list[StepOutcome](), dict[str, float]()
        first = None if left_out else self._taken_ahead(batch)
        whole, value_metrics = self._prepared(batch, version_step, scoring_s, first)
        makers = [partial(self._planned, each, left_out) for each in self._minibatches(whole, self._step)]
        scores_first = self._config.recomputes_proximal or self._critic.head is not None  # forward passes alone
        plan = None if scores_first else first
        for following in [*makers[1:], self._plan_coming]:
            outcome, plan = self._optimiser_step(plan or makers[len(outcomes)](), rate, following)
            outcomes.append(outcome)
        self._ahead = None if plan is None else (self._coming_id, plan)
        self._end_update()
        self._count_skipped([outcome.applied for outcome in outcomes])
        return finite_only(
            batch_metrics(replace(batch, examples=tuple(whole.examples))),
            value_metrics,
            loss_metrics(outcomes, _has_reference(whole.examples)),
            step_metrics(outcomes),
            rate_metrics(self._config.optimizer, rate),
            throughput_metrics(outcomes, scoring_s),
            {"train/skipped_sequences": float(len(self._uncomputed(whole.examples)))},
            {"throughput/packed_ahead": float(first is not None)},
        )

    def planned_steps(self, batch: TrainingBatch, version_step: int) -> Iterator[PlannedStep]:
        """The optimiser steps of an update, each before it is applied; with the last of them the update is made.

        Args:
            batch: As of `update`, like what it raises.
            version_step: The version that the caller believes the parameters to have.
        """
        rate, (whole, _) = self._rate(), self._prepared(batch, version_step, {})
        for minibatch in self._minibatches(whole, self._step):
            plan = self._planned(minibatch, ())
            gradients, sums = self._gradients(self._accumulate, plan.micro_batches, self._critic.head)
            gradient_of = partial(self._gradient_of, minibatch)
            yield PlannedStep(self._decoder, self._state, minibatch.examples, gradients.policy, rate, gradient_of)
            self._applied(gradients, rate, sums)
        self._end_update()

    def _gradient_of(self, minibatch: Minibatch, rollout_id: str, start: int, stop: int) -> Any:
        longest = {example.rollout_ids[0]: longest_sample(example) for example in minibatch.examples}
        length = next(n for n in self._scored_lengths if n >= longest[rollout_id])
        plan = self._plan(
            minibatch, [self._config.row_shape(length)], longest.keys() - {rollout_id}, span=(start, stop)
        )
        gradients, _ = self._gradients(self._accumulate, plan.micro_batches, self._critic.head)
        return gradients.policy

    def score(
        self, examples: Sequence[RLExample], decoder: Decoder | None = None, entropy: bool = False
    ) -> list[Float32[np.ndarray, " pos"]]:
        """Log-probabilities of every token, by the loss's own forward pass over single rows, as short as they can be.

        Args:
            examples: Of a rollout each, no sample longer than a row.
            decoder: Whose; None means the current parameters.
            entropy: Give that of what each token was drawn from, in nats, in place of its log-probability.

        Returns:
            float32 [pos] for each example, aligned with its tokens; 0 at a sample's first, which nothing predicts.
        """
        length = next(n for n in self._scored_lengths if n >= max(map(longest_sample, examples), default=0))
        scorer, decoder = self._score_entropy if entropy else self._score, decoder or self._decoder
        return score_plan(plan_scoring(examples, [self._config.row_shape(length)]), partial(scorer, decoder))

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
        scorer = partial(self._score, reference.decoder)
        return reference.version, score_plan(self._sampled_plan(examples), scorer) if examples else []

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
        plan = plan_update(examples, _SUPERVISED, self._config.row_shapes, self._step)
        gradients, sums = self._gradients(warm_start.accumulate, plan.micro_batches)
        rate = warm_start.learning_rate()
        warm_start.state, applied = self._step_by(warm_start.apply, state, gradients, rate, sums)
        outcome = StepOutcome(sums, applied, 0.0, 0.0, 0, 0, 0)
        self._count_skipped([outcome.applied])
        losses = {"train/tokens": float(sums.tokens), "train/loss": float(sums.loss)}
        return finite_only(losses, step_metrics([outcome]), rate_metrics(self._config.optimizer, rate))

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
        """Writes a Hugging Face directory with the tokenizer; of a policy that is an adapter, one as PEFT has it."""
        decoder, config = self._decoder, self._decoder.config
        header = {"policy": "language", "dtype": config.dtype}
        if config.lora is None:
            save_decoder(decoder, folder, codec)
            return header
        save_adapter(decoder, folder, codec, self._known_base())
        return header | {"adapter_dtype": str(config.lora.dtype)}

    def _known_base(self) -> str:
        """The digest of an adapter's base, which never changes; empty where there is none."""
        if not self._base_digest and self._decoder.config.lora is not None:
            arrays = self.named_arrays().items()
            self._base_digest = base_digest({name: each for name, each in arrays if not name.startswith(ADAPTER)})
        return self._base_digest

    def snapshot(self) -> LearnerSnapshot:
        """All that a checkpoint needs, as it is now."""
        self._known_base()  # once, and not by every copy
        return LearnerSnapshot.of(self.state_arrays(), copy(self).write_model)

    def _check_batch(self, batch: TrainingBatch, version_step: int) -> None:
        if version_step != self._step:
            raise WeightsError(f"batch {batch.batch_id} is for version {version_step}, the learner holds {self._step}")
        if not batch.examples:
            raise ConfigError(f"batch {batch.batch_id} holds no examples: replay must never hand out such a one")

    def _uncomputed(self, examples: Sequence[RLExample]) -> set[str]:
        """Ids of those that take no part in forward passes, without an advantage; they count all the same."""
        if self._config.needs_every_sequence:
            return set()
        return {example.rollout_ids[0] for example in examples if not has_advantage(example)}

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
        self, examples: Sequence[RLExample], scoring_s: dict[str, float], plan: UpdatePlan | None
    ) -> list[Float32[np.ndarray, " pos"] | None] | None:
        """ℓ_p of the sampled tokens of each example that is computed; None where it is not read. Adds the seconds."""
        if not self._config.recomputes_proximal:
            return None
        started = time.perf_counter()
        without = self._uncomputed(examples)
        computed = [index for index, example in enumerate(examples) if example.rollout_ids[0] not in without]
        plan = plan or self._sampled_plan([examples[index] for index in computed])
        logprobs = dict(zip(computed, score_plan(plan, partial(self._score, self._decoder)), strict=True))
        scoring_s["time/proximal"] = time.perf_counter() - started
        return [logprobs.get(index) for index in range(len(examples))]

    def _with_values(
        self, examples: Sequence[RLExample], scoring_s: dict[str, float], plan: UpdatePlan | None
    ) -> tuple[Sequence[RLExample], list[ValueTargets] | None, dict[str, float]]:
        """The examples with advantages over a value head's values, where there is one, and what it learns."""
        head = self._critic.head
        if head is None:
            return examples, None, {}
        started = time.perf_counter()
        values = score_plan(plan or self._sampled_plan(examples), partial(self._value, self._decoder, head))
        scoring_s["time/values"] = time.perf_counter() - started
        return self._critic.advantages(examples, values)

    def _sampled_plan(self, examples: Sequence[RLExample]) -> UpdatePlan:
        """Micro-batches of an update's shapes that score sampled tokens."""
        return plan_scoring(examples, self._config.row_shapes, every_token=False)

    def _rate(self) -> float:
        return self._config.optimizer.rate_at(self._step, self._total_steps)

    def _prepared(
        self, batch: TrainingBatch, version_step: int, scoring_s: dict[str, float], first: UpdatePlan | None = None
    ) -> tuple[Minibatch, dict[str, float]]:
        """All that forward passes of their own tell of a batch, and the value head's metrics; as `update` begins.

        The first of them is of the plan `first`, where that is given.
        """
        self._check_batch(batch, version_step)
        self._warm_start.discard()
        self._reference.keep(self._decoder)
        examples = self._with_reference(batch.examples, scoring_s)
        proximal = self._proximal(examples, scoring_s, first)
        examples, targets, metrics = self._with_values(examples, scoring_s, first if proximal is None else None)
        return Minibatch(examples, proximal, targets), metrics

    # --- what is packed ahead --------------------------------------------------------------------------------------

    def _taken_ahead(self, batch: TrainingBatch) -> UpdatePlan | None:
        """What was packed of this batch; whatever else there is, is let go."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == batch.batch_id and batch.step == self._step else None

    def _plan_coming(self) -> UpdatePlan | None:
        """Of the next update's first forward passes; None where its batch is not known, or must be scored before."""
        batch = self.coming(self._step + 1)
        if batch is None or (self._config.reads_reference and not _has_reference(batch.examples)):
            return None
        self._coming_id = batch.batch_id
        if self._config.recomputes_proximal:
            without = self._uncomputed(batch.examples)
            return self._sampled_plan([each for each in batch.examples if each.rollout_ids[0] not in without])
        if self._critic.head is not None:
            return self._sampled_plan(batch.examples)
        first = next(self._minibatches(Minibatch(batch.examples, None, None), batch.step))
        return self._planned(first, (), batch.step)

    def _minibatches(self, whole: Minibatch, step: int) -> Iterator[Minibatch]:
        """Of every optimiser step of update `step`, drawn by seed and step."""
        rng = generator(fold(self._seed, "minibatches", step))
        for _ in range(self._config.epochs):
            for indices in minibatches_of(whole.examples, self._config.minibatches, rng):
                yield whole.chosen(indices)

    def _end_update(self) -> None:
        self._step += 1
        self._reference.follow(self._step, self._decoder)

    def _optimiser_step(
        self, plan: UpdatePlan, rate: float, following: Callable[[], UpdatePlan | None]
    ) -> tuple[StepOutcome, UpdatePlan | None]:
        """One step; and what comes after it, packed and on the device, where it could be made meanwhile."""
        started, beside = time.perf_counter(), PackedBeside(following)
        gradients, sums = self._gradients(self._accumulate, plan.micro_batches, self._critic.head, beside.try_to_make)
        differentiated = time.perf_counter()
        applied = self._applied(gradients, rate, sums)
        times = differentiated - started, time.perf_counter() - differentiated
        tokens = sum(placement.stop - placement.start for placement in plan.placements)
        return StepOutcome(sums, applied, *times, tokens, *row_tokens_of(plan)), beside.plan

    def _applied(self, gradients: GradientSums, rate: float, sums: LossSums) -> AppliedUpdate:
        """What the optimiser made of a step's gradients; parameters and states are new afterwards."""
        self._state, applied = self._step_by(self._apply, self._state, gradients, rate, sums)
        loss = sums.loss if applied.finite else np.float32(np.nan)
        self._critic.step(gradients.critic, loss, self._step, self._total_steps)
        return applied

    def _step_by(
        self, apply: Any, state: OptimizerState, gradients: GradientSums, rate: float, sums: LossSums
    ) -> tuple[OptimizerState, AppliedUpdate]:
        """Replaces what trains; arrays that are frozen stay the very same, and are not copied either."""
        trained, rest = split_frozen(self.optimizer.frozen, self._decoder)
        state, trained, applied = apply(trained, state, gradients.policy, np.float32(rate), sums.loss)
        self._decoder = join_frozen(trained, rest)
        return state, AppliedUpdate._make(np.asarray(applied))

    def _planned(self, minibatch: Minibatch, left_out: Collection[str], step: int | None = None) -> UpdatePlan:
        """Micro-batches of an update's shapes, without those that need no forward pass; of this update or another."""
        return self._plan(minibatch, self._config.row_shapes, {*left_out, *self._uncomputed(minibatch.examples)}, step)

    def _plan(
        self,
        minibatch: Minibatch,
        shapes: Sequence[RowShape],
        left_out: Collection[str],
        step: int | None = None,
        span: tuple[int, int] | None = None,
    ) -> UpdatePlan:
        """Micro-batches of an optimiser step, of these shapes."""
        return plan_update(
            minibatch.examples,
            self._config.loss,
            shapes,
            self._step if step is None else step,
            max_tokens=[self._denominator(example) for example in minibatch.examples],
            proximal_logprobs=minibatch.proximal,
            value_targets=minibatch.targets,
            left_out=left_out,
            span=span,
        )

    def _denominator(self, example: RLExample) -> int:
        """Of a sequence under ``constant`` aggregation; its lesson is the first part of its group's id."""
        limits = self._max_output_tokens
        if self._config.loss.max_tokens is not None or not limits:
            return self._config.loss.max_tokens or self._config.row_length
        lesson = example.rollout_ids[0].rpartition("/")[0].rsplit("-", 2)[0]
        return limits.get(lesson) or max(limits.values())

    def _gradients(
        self,
        accumulate: Any,
        micro_batches: Sequence[MicroBatch],
        critic: ValueHead | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> tuple[GradientSums, LossSums]:
        """Gradients (on the device) and sums (on the host) of all micro-batches.

        `meanwhile` is called once the device has begun with each of them.
        """
        so_far, sums, begun = self._zeros(self._decoder, critic=critic), _NO_SUMS, deque[jax.Array]()
        for micro_batch in micro_batches:
            so_far, of_micro_batch = accumulate(self._decoder, so_far, micro_batch, critic=critic)
            begun.append(of_micro_batch)
            meanwhile()
            if len(begun) > self._ahead_of_device:  # so that an engine on this device gets its turns
                sums = sums + np.asarray(begun.popleft())  # which waits for it
        return so_far, LossSums._make(sum(map(np.asarray, begun), sums))

    def _count_skipped(self, applied: Sequence[AppliedUpdate]) -> None:
        most = self._config.max_non_finite_updates
        self._skipped_in_a_row = skipped_in_a_row(self._skipped_in_a_row, applied, most, "the last batch's rewards")


def _has_reference(examples: Sequence[RLExample]) -> bool:
    return all(example.reference_log_probs is not None for example in examples)


def _compiling(lowered: Mapping[str, Callable[[], Any]]) -> Programs:
    return {name: lambda lower=lower: lower().compile() for name, lower in lowered.items()}


def _proximal_source(config: LearnerConfig) -> ProximalSource:
    return "behaviour" if config.proximal == "behaviour" else "stored" if config.recomputes_proximal else "current"


def _forward_options(config: LearnerConfig, decoder: Decoder) -> compiled.ForwardOptions:
    """For the device that holds the parameters, present or described.

    Raises:
        ConfigError: the configured attention cannot act there, or nothing can be taken off it.
    """
    placed = decoder.embedding.sharding  # None of shapes that are of no device
    device = min(placed.device_set if placed else jax.devices(), key=lambda each: each.id)
    platform, capability = platform_named(device.platform), getattr(device, "compute_capability", None)
    capability = None if capability is None else float(capability)
    check_attention(config.attention, platform, decoder.config, capability)
    config.check_host_memory(platform)
    tile, dtype = config.head_tile(platform), decoder.config.dtype
    return compiled.ForwardOptions(config.remat, tile, config.attention, platform, dtype)
