"""The rollout manager: environments, generation, evaluation and curriculum updates.

It works alone (offline evaluation: an engine with fixed weights and no worker) or under a `RolloutWorker`.
It attaches what environments must not know: metadata, ids and lesson. The versions that the engine recorded
per token win over any version the caller passes. It owns its `InferenceContext`; where it also owns the
engine behind it (`RolloutManager.from_configs`), `shutdown` stops that too.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsInt, get_args

import numpy as np

from penstock.curriculum import Curriculum, CurriculumConfig, CurriculumEvent, LessonConfig
from penstock.environments import Environment, load_environment, validate_groups, validate_metrics
from penstock.environments.base import pair_of
from penstock.inference.agents import AgentEndpoint
from penstock.inference.config import EngineConfig
from penstock.types import (
    AgentSession,
    Clock,
    Completion,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    EnvironmentSpec,
    InferenceContext,
    InvalidRolloutError,
    Mode,
    PenstockError,
    Rollout,
    RolloutBatch,
    RolloutBatchStats,
    RolloutGroup,
    RolloutMetadata,
    Stopped,
    TextCodec,
    WeightVersion,
    as_seed,
    fold,
)
from penstock.types.errors import errors_of_user_code

if TYPE_CHECKING:
    from penstock.model.language import Decoder
    from penstock.text import Tokenizer

logger = logging.getLogger(__name__)

EvalType = Literal["eval", "micro_eval", "report"]
"""A full evaluation, by which the curriculum decides; a quick look; a full one for the record, by which nothing is."""
WeightsSetter = Callable[[WeightVersion, Mapping[str, Any]], None]


class RolloutManager:
    """Generates rollouts of any lesson and evaluates lessons.

    Args:
        curriculum: Names the lessons; `evaluate_lesson` and `update_training_stats` feed it.
        context: Where responses come from.
        seed: The run's seed; evaluation prompts derive from it, so they are the same at every evaluation.
        lineage: The run's lineage, stamped on rollouts.
        environments: By lesson, where they are loaded already; the others are at their first use.
        set_weights: Gives the engine new weights; None where the engine's weights are fixed.
        stop_engine: Called by `shutdown`; None where somebody else owns the engine.
        on_curriculum_event: Called with lessons that unlock, graduate or come back.
        clock: Unix seconds.
        agents: Where agents ask the policy; None where nobody opened that. `shutdown` closes it.

    Attributes:
        lineage: Stamped on rollouts; the owner of a manager that outlives a lineage sets the next.
    """

    def __init__(
        self,
        curriculum: Curriculum,
        context: InferenceContext,
        seed: int,
        lineage: int = 0,
        environments: Mapping[str, Environment] | None = None,
        set_weights: WeightsSetter | None = None,
        stop_engine: Callable[[], None] | None = None,
        on_curriculum_event: Callable[[CurriculumEvent], None] = lambda event: None,
        clock: Clock = time.time,
        agents: AgentEndpoint | None = None,
    ) -> None:
        self._agents = agents
        self.curriculum = curriculum
        self.context = context
        self._seed = seed
        self.lineage = lineage
        self._set_weights = set_weights
        self._stop_engine = stop_engine
        self._on_curriculum_event = on_curriculum_event
        self._clock = clock
        self._environments = dict(environments or {})
        self._lock = threading.Lock()

    @classmethod
    def from_configs(
        cls,
        environments: Mapping[str, Environment | EnvironmentSpec],
        curriculum: CurriculumConfig,
        inference: EngineConfig,
        tokenizer: "Tokenizer | Path | str",
        initial_model: "Decoder | Path | str",
        seed: int = 0,
        *,
        weight_step: int = 0,
        start_timeout_s: float = 600.0,
        stop_timeout_s: float = 30.0,
    ) -> Self:
        """A manager with an engine of its own, which serves when this returns and ends with `shutdown`.

        Args:
            environments: By lesson, in place of those that the curriculum names.
            curriculum: The lessons, and how they are evaluated.
            inference: Of the engine.
            tokenizer: The policy's, or a directory that has it, or its name.
            initial_model: The policy, or a checkpoint: a Hugging Face directory or a run's ``checkpoints/step-<n>``.
            seed: As of a run; evaluations of the same seed ask the same.
            weight_step: Version of the initial model, which stands on what it answers.
            start_timeout_s: Longest wait for the engine's next program while it compiles.
            stop_timeout_s: Longest wait for its thread to end.

        Raises:
            ConfigError: an environment is for no lesson, or model and tokenizer do not fit.
            CheckpointError: the checkpoint cannot be read.
            NoProgressError: the engine did not start in time.
        """
        # Imported here: rollout workers have no engine, and load no JAX.
        from penstock.inference import EngineContext, InferenceEngine
        from penstock.text import Tokenizer

        foreign = sorted(environments.keys() - curriculum.lessons.keys())
        if foreign:
            known = ", ".join(curriculum.lessons)
            raise ConfigError(f"environments has {foreign[0]!r}, which is no lesson: the curriculum's are {known}")
        codec = Tokenizer.load(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        decoder = _load_model(initial_model, seed, codec) if isinstance(initial_model, str | Path) else initial_model
        alike = inference.model_copy(update={"forgets": True})
        engine = InferenceEngine(decoder, WeightVersion(0, weight_step), codec, alike)
        manager = cls(
            Curriculum(curriculum),
            EngineContext(engine, codec, ordered=True),
            seed,
            environments={
                lesson: load_environment(one) if isinstance(one, EnvironmentSpec) else one
                for lesson, one in environments.items()
            },
            set_weights=engine.set_weights,
            stop_engine=partial(engine.stop, stop_timeout_s),
            agents=AgentEndpoint.of(inference, codec),
        )
        engine.start()
        try:
            engine.wait_until_ready(start_timeout_s)
        except BaseException:
            manager.shutdown()
            raise
        return manager

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.shutdown()

    def lesson(self, lesson_id: str) -> LessonConfig:
        """The lesson's configuration.

        Raises:
            ConfigError: the curriculum has no such lesson.
        """
        lessons = self.curriculum.config.lessons
        if lesson_id not in lessons:
            raise ConfigError(f"lesson {lesson_id!r} is not in the curriculum: its lessons are {', '.join(lessons)}")
        return lessons[lesson_id]

    def group_size(self, lesson_id: str) -> int:
        """Rollouts per training group of a lesson."""
        return self.lesson(lesson_id).sampling_params.n_generations_per_prompt

    def environment(self, lesson_id: str) -> Environment:
        """The lesson's environment, made at its first use and kept."""
        with self._lock:
            if lesson_id not in self._environments:
                self._environments[lesson_id] = load_environment(self.lesson(lesson_id).environment.spec)
            return self._environments[lesson_id]

    def sample_batch(
        self,
        lesson_id: str,
        n_examples: int,
        n_generations: int,
        mode: Mode = "train",
        rng: SupportsInt | np.ndarray = 0,
        weight_step: int = 0,
        worker_id: str = "local",
        *,
        group_ids: Sequence[str] | str | None = None,
        context: InferenceContext | None = None,
        decoding: Decoding | None = None,
        problems: Sequence[int] | None = None,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Generates groups of one lesson.

        Args:
            lesson_id: Id of the lesson, which names its environment.
            n_examples: Number of prompts.
            n_generations: Responses per prompt.
            mode: Which of the environment's disjoint example sets.
            rng: Selects the examples and the sampling noise: a number, or a JAX key.
            weight_step: Stamp for rollouts whose environment did not pass on the engine's versions.
            worker_id: The rollout worker, for the rollouts' metadata.
            group_ids: One id per group, or what all of them begin with, whose position follows; by default made from
                mode, lesson and `rng`.
            context: Instead of the manager's own.
            decoding: Instead of the lesson's.
            problems: Numbers of the training problems, `n_examples` of them, where `rng` is not to select them.

        Returns:
            The batch, possibly of no groups, which is warned of, and the environment's metrics.

        Raises:
            ConfigError: the curriculum has no such lesson.
            EnvironmentFailure: the environment raised, or returned something malformed.
        """
        rng = as_seed(rng)
        names = group_ids or f"{mode}-{lesson_id}-{rng}"
        lesson = self.lesson(lesson_id)
        environment = self.environment(lesson_id)
        decoding = decoding or lesson.sampling_params.decoding(self.context.tokenizer)
        asked = _NotedContext(context or self.context, self._agents)
        called = f"environment {lesson.environment.env_class} of lesson {lesson_id!r}"
        with errors_of_user_code(EnvironmentFailure, f"{called} raised"):
            if problems is None:
                sampled = environment.sample(asked, n_examples, n_generations, decoding, rng, mode)
            else:
                sampled = environment.sample_problems(asked, problems, n_generations, decoding, rng)
            found, numbers = pair_of(sampled, environment.name)
            groups = validate_groups(found, n_examples, n_generations, environment.name)
            metrics = validate_metrics(numbers, environment.name)
        if n_examples and not groups:
            logger.warning("%s gave no group for %d examples: the batch is empty", called, n_examples)
        if isinstance(names, str):
            names = [f"{names}-{position}" for position in range(len(groups))]
        if len(names) != len(groups):
            raise EnvironmentFailure(f"{called} returned {len(groups)} groups where {len(names)} were asked for")
        stamped = [
            self._stamp(group, group_id, lesson_id, weight_step, worker_id, asked)
            for group, group_id in zip(groups, names, strict=True)
        ]
        return RolloutBatch.of(tuple(stamped)), metrics

    def _stamp(
        self,
        group: RolloutGroup,
        group_id: str,
        lesson_id: str,
        weight_step: int,
        worker_id: str,
        asked: "_NotedContext",
    ) -> RolloutGroup:
        now, engines = self._clock(), tuple(asked.engines)
        members = _members(group)
        ages_s = [asked.age_s(rollout) for rollout in members]
        rollouts = tuple(
            rollout.with_metadata(
                RolloutMetadata(
                    worker_id, now - age_s, _oldest_step(rollout, weight_step), self.lineage, engines=engines
                ),
                f"{group_id}/{position}",
                lesson_id,
                {"generate_s": max(0.0, asked.whole_s - age_s)},
            )
            for position, (rollout, age_s) in enumerate(zip(members, ages_s, strict=True))
        )
        return replace(group, rollouts=rollouts, group_id=group_id)

    def evaluate_lesson(
        self,
        lesson_id: str,
        n_examples: int | None = None,
        eval_type: EvalType = "eval",
        weight_step: int = 0,
        worker_id: str = "evaluator",
        n_generations: int = 1,
        rng: SupportsInt | np.ndarray | None = None,
        label: str | None = None,
    ) -> tuple[RolloutBatchStats, RolloutBatch]:
        """Evaluates a lesson on held-out examples, the same ones at every call with the same type.

        Only `eval` updates the curriculum; a `micro_eval` looks without touching it. A `report` is about held-out
        examples that neither of them sees, so that what was decided by these does not flatter it
        (`Environment.reports_apart`). Groups are named ``<label>-<lesson>-<lineage>-<weight_step>-<position>``, so that
        those of two evaluations differ.

        Args:
            lesson_id: Id of the lesson, which names its environment.
            n_examples: Number of prompts; by default as the curriculum's configuration says for `eval_type`.
            eval_type: What it is for; see `EvalType`.
            weight_step: Which version is evaluated.
            worker_id: Stamped on the rollouts.
            n_generations: Responses per prompt.
            rng: Selects examples and sampling noise of each lesson, a number or a JAX key; by default the run's seed.
            label: Names the evaluation among others of the same step; by default `eval_type`.

        Raises:
            ConfigError: `eval_type` is another word, or the curriculum has no such lesson.
            EnvironmentFailure: the environment failed altogether, or for every single prompt: there is no result.
            Stopped: the engine was stopped meanwhile; half an evaluation counts for nothing.
        """
        config = self.curriculum.config
        if eval_type not in get_args(EvalType):
            raise ConfigError(f"eval_type is {eval_type!r}: it must be one of {', '.join(get_args(EvalType))}")
        if n_examples is None:
            n_examples = config.micro_eval_n_examples if eval_type == "micro_eval" else config.eval_n_examples
        lesson = self.lesson(lesson_id)
        decoding = replace(lesson.sampling_params.decoding(self.context.tokenizer), temperature=config.temperature)
        seed = fold(self._seed if rng is None else as_seed(rng), "evaluation", lesson_id)
        prefix = f"{label or eval_type}-{lesson_id}-{self.lineage}-{weight_step}"
        mode: Mode = "report" if eval_type == "report" and self.environment(lesson_id).reports_apart else "eval"
        asked = (lesson_id, n_examples, n_generations, mode, seed, weight_step, worker_id)
        try:
            batch, metrics = self.sample_batch(*asked, group_ids=prefix, decoding=decoding)
        except (EnvironmentFailure, InvalidRolloutError) as failure:
            raise EnvironmentFailure(f"{n_examples} groups failed, all that were asked for: {failure}") from failure
        if any(rollout.finish_reason == "aborted" for rollout in batch.rollouts()):
            raise Stopped(f"the evaluation of lesson {lesson_id!r} was cut short")
        if n_examples and not batch.groups:
            raise EnvironmentFailure(f"the environment of lesson {lesson_id!r} gave no group for {n_examples} prompts")
        stats = RolloutBatchStats.of(lesson_id, batch, lesson.success_threshold, metrics)
        stats = replace(stats, reports=mode == "report")
        if eval_type == "eval":
            for event in self.curriculum.update_evaluation(stats, weight_step):
                self._on_curriculum_event(event)
        return stats, batch

    def evaluate_curriculum(
        self,
        eval_type: EvalType = "eval",
        weight_step: int = 0,
        lessons: Sequence[str] | None = None,
        eval_n_examples: int | None = None,
        worker_id: str = "evaluator",
        rng: SupportsInt | np.ndarray | None = None,
    ) -> dict[str, tuple[RolloutBatchStats, RolloutBatch]]:
        """`evaluate_lesson` for every lesson, or for those named; `eval_n_examples` are the prompts of each."""
        chosen = lessons if lessons is not None else list(self.curriculum.config.lessons)
        return {
            lesson_id: self.evaluate_lesson(lesson_id, eval_n_examples, eval_type, weight_step, worker_id, rng=rng)
            for lesson_id in chosen
        }

    def update_training_stats(self, group: RolloutGroup) -> None:
        """Feeds one training group, filtered or not, to the curriculum."""
        lesson_id = group.rollouts[0].lesson_id
        threshold = self.lesson(lesson_id).success_threshold
        stats = RolloutBatchStats.of(lesson_id, RolloutBatch.of((group,)), threshold)
        for event in self.curriculum.update_training(stats):
            self._on_curriculum_event(event)

    def update_model(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Gives the engine new weights; when it returns, every later dispatch uses them."""
        if self._set_weights is None:
            raise PenstockError("this RolloutManager's engine has fixed weights: update_model is for training")
        self._set_weights(version, arrays)

    def shutdown(self, close_environments: bool = True) -> None:
        """Ends the engine where it owns one, and closes the environments unless their owner goes on with them."""
        with self._lock:
            environments, self._environments = self._environments, {}
        with ExitStack() as closing:  # all of them, whatever one raises; the engine last
            if self._stop_engine is not None:
                closing.callback(self._stop_engine)
            for environment in environments.values() if close_environments else ():
                closing.callback(_close, environment)
            if self._agents is not None:
                closing.callback(self._agents.close)


def _load_model(path: Path | str, seed: int, codec: "Tokenizer") -> "Decoder":
    from penstock.inference.serving import model_directory
    from penstock.model.language import PolicyConfig, load_policy

    return load_policy(PolicyConfig(path=str(model_directory(str(path)))), seed, codec)


def _close(environment: Environment) -> None:
    """One that would end the process must not: what was trained is yet to be told."""
    try:
        environment.close()
    except SystemExit as error:
        raise EnvironmentFailure(f"{type(environment).__name__}.close raised SystemExit: {error}") from error


class _NotedContext:
    """Notes which engines answer an environment, and when, which it need not pass on. Implements `AgentContext`.

    Args:
        context: The one that is asked.
        agents: Where agents ask it.

    Attributes:
        engines: Their names, in the order of their first answers.
    """

    def __init__(self, context: InferenceContext, agents: AgentEndpoint | None = None) -> None:
        self._context, self._agents = context, agents
        self.engines: dict[str, None] = {}
        self._finished: list[Completion] = []
        self._began_s = time.monotonic()

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's."""
        return self._context.tokenizer

    @property
    def ordered(self) -> bool:
        """The context's own."""
        return self._context.ordered

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """As the context's own."""
        answers = self._context.generate(prompts, n, decoding, seeds)
        self.engines |= dict.fromkeys(done.engine for answer in answers for done in answer if done.engine)
        self._finished += [done for answer in answers for done in answer if done.finished_s is not None]
        return answers

    def session(self, decoding: Decoding, seed: int) -> AgentSession:
        """Opens the endpoint for one rollout."""
        if self._agents is None:
            raise ConfigError("inference.endpoint is false: set it to true, so that agents can ask the policy")
        return self._agents.open(self, decoding, seed)

    @cached_property
    def whole_s(self) -> float:
        """Seconds until all was answered, which is when this is read first."""
        return time.monotonic() - self._began_s

    def age_s(self, rollout: Rollout) -> float:
        """Seconds since the last response in a rollout; 0 where nobody said when that was finished.

        It is the longest response whose tokens and log-probabilities are the last that the policy sampled there. Ages
        are as of `whole_s`; each response is of one rollout.
        """
        last = next((done for done in self._finished if done.response_logprobs is rollout.response_logprobs), None)
        if last is None:  # not an answer as it came: one of several, or copied
            sampled = rollout.response_mask
            tokens, logprobs = rollout.response_tokens[sampled], rollout.response_logprobs[sampled]
            ends = [done for done in self._finished if _ends_with(tokens, logprobs, done)]
            last = max(ends, key=lambda done: len(done.response_tokens), default=None)
        if last is None or last.finished_s is None:
            return 0.0
        self._finished = [done for done in self._finished if done is not last]
        return max(0.0, self._began_s + self.whole_s - last.finished_s)


def _ends_with(tokens: np.ndarray, logprobs: np.ndarray, done: Completion) -> bool:
    """Whether the tokens that a policy sampled end with a response of it."""
    count = len(done.response_tokens)
    if not 0 < count <= len(tokens) or tokens[-1] != done.response_tokens[-1]:
        return False
    return np.array_equal(tokens[-count:], done.response_tokens) and np.array_equal(
        logprobs[-count:], done.response_logprobs
    )


def _members(group: RolloutGroup) -> list[Rollout]:
    return [rollout if isinstance(rollout, Rollout) else rollout.unpacked() for rollout in group.rollouts]


def _oldest_step(rollout: Rollout, default: int) -> int:
    if rollout.oldest_weight_step is not None:
        return rollout.oldest_weight_step
    steps = rollout.response_weight_steps
    if steps is not None and rollout.sampled_tokens:
        return int(steps[rollout.response_mask].min())
    return default
