"""Configuration of lessons: what they are made of, when they unlock, graduate and come back.

Checked here, each error naming the path of keys: a lesson whose key differs from its id, a dependency that does not
exist, dependencies in a circle, sampling floors that cannot all be met.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from penstock.types import SAMPLING_FIELDS, ConfigError, Decoding, EnvironmentSpec, TextCodec
from penstock.types.idle_keys import refuse_idle


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _in_range(value: float | None, info: ValidationInfo) -> float | None:
    """The value of a sampling parameter, which the field is called after."""
    field = SAMPLING_FIELDS[info.field_name or ""]
    if not field.allows(value):
        raise PydanticCustomError("sampling_range", "Input should be {expected}", {"expected": field.expected})
    return value


class EnvironmentConfig(_Frozen):
    """An environment by name; see `penstock.types.EnvironmentSpec`.

    Attributes:
        env_class: Dotted path of the class, or ``path/to/file.py:Class``.
        env_args: Its keyword arguments.
    """

    env_class: str = Field(min_length=1)
    env_args: dict[str, Any] = Field(default_factory=dict)

    @property
    def spec(self) -> EnvironmentSpec:
        """The same as a record."""
        return EnvironmentSpec(self.env_class, self.env_args)


class LessonDependency(_Frozen):
    """What another lesson must have reached.

    Attributes:
        dependency_id: The other lesson.
        reward_threshold: Its smoothed success rate must be at least this, and it must have succeeded at all.
    """

    dependency_id: str
    reward_threshold: float = Field(default=0.0, ge=0, le=1)


class SamplingParams(_Frozen):
    """How a lesson's rollouts are sampled. It has a key for each of `penstock.types.SAMPLING_FIELDS`.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most probable tokens; None keeps all.
        top_p: Keep the smallest set of tokens with this mass; None keeps all.
        min_p: Keep the tokens at least this many times as probable as the most probable one; None keeps all.
        n_prompts: Of an offline batch (`penstock generate`); training is paced by `replay.groups_per_batch`.
        n_generations_per_prompt: Rollouts per group; baselines need two or more.
        max_output_tokens: Most tokens of one response.
        stop_tokens: Texts and token ids that end a response, besides the tokenizer's own stop tokens.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n_prompts: int = Field(default=8, ge=1, le=1_000_000)
    n_generations_per_prompt: int = Field(default=4, ge=1, le=65536)
    max_output_tokens: int = Field(default=512, ge=1)
    stop_tokens: tuple[int | str, ...] | None = None

    @field_validator(*SAMPLING_FIELDS)
    @classmethod
    def _can_sample(cls, value: float | None, info: ValidationInfo) -> float | None:
        return _in_range(value, info)

    @field_validator("stop_tokens")
    @classmethod
    def _can_stop(cls, value: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
        for stop in value or ():
            if stop == "" or (isinstance(stop, int) and stop < 0):
                raise PydanticCustomError(
                    "stop_tokens", "Input should be a list of token ids and texts that are not empty"
                )
        return value

    @property
    def truncation(self) -> dict[str, float]:
        """Of the sampled distribution, as `Decoding.truncation`."""
        return Decoding(**self._sampling).truncation

    @property
    def _sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAMPLING_FIELDS}

    def decoding(self, tokenizer: TextCodec) -> Decoding:
        """The same for the engine: ids beside the tokenizer's own, each text a stop string of its own."""
        stops = self.stop_tokens or ()
        ids = [stop for stop in stops if isinstance(stop, int)]
        return Decoding(
            **self._sampling,
            max_output_tokens=self.max_output_tokens,
            stop_token_ids=tuple(dict.fromkeys((*tokenizer.stop_token_ids, *ids))),
            stop_strings=tuple(stop for stop in stops if isinstance(stop, str)),
        )


PROBLEM_RETRIES = 3
"""Without a value of its own, so often a problem whose group failed is drawn again within its epoch."""


class LessonConfig(_Frozen):
    """One lesson.

    Attributes:
        lesson_id: Its key among the lessons; may be left out.
        environment: What is practised.
        dependencies: What must be reached first.
        start_threshold: Success rate that an evaluation of this lesson itself must have shown before it unlocks.
        stop_threshold: Evaluation success rate from which it may graduate.
        plateau_window: How many results (mean rewards of training groups) a plateau looks at.
        plateau_threshold: Largest relative change over the window that is still a plateau.
        require_plateau: Whether lessons that depend on this one also wait for its plateau.
        success_threshold: A rollout with at least this reward is a success.
        regression_ratio: A graduated lesson comes back when an evaluation falls under this share of its graduation
            level.
        sampling_params: How its rollouts are sampled.
        order: How its training problems are drawn: each once per epoch in a new random order (`shuffle`) or as they are
            numbered (`sequential`), or each time any of them (`iid`), as environments do that make problems without an
            end.
        problem_retries: So often a problem whose group failed is drawn again within its epoch.
    """

    lesson_id: str = ""
    environment: EnvironmentConfig
    dependencies: tuple[LessonDependency, ...] = ()
    start_threshold: float = Field(default=0.0, ge=0, le=1)
    stop_threshold: float = Field(default=1.0, ge=0, le=1)
    plateau_window: int = Field(default=50, ge=3)
    plateau_threshold: float = Field(default=0.01, gt=0)
    require_plateau: bool = True
    success_threshold: float = 0.5
    regression_ratio: float = Field(default=0.85, ge=0, le=1)
    sampling_params: SamplingParams = SamplingParams()
    order: Literal["shuffle", "sequential", "iid"] = "shuffle"
    problem_retries: int = Field(default=PROBLEM_RETRIES, ge=0)

    @model_validator(mode="after")
    def _retries_need_epochs(self) -> Self:
        if self.order == "iid" and self.problem_retries != PROBLEM_RETRIES:
            raise PydanticCustomError(
                "retries_without_epochs",
                "problem_retries is {retries}, but order is 'iid', which has no epochs: leave one of them out",
                {"retries": self.problem_retries},
            )
        return self


class CurriculumConfig(_Frozen):
    """All lessons, and how they share the rollouts.

    Attributes:
        lessons: By id.
        minimum_sample_probability: No active lesson is sampled less often.
        rehearsal_probability: Each graduated lesson keeps this.
        when_complete: Whether a run stops when every lesson has graduated, or goes on rehearsing.
        eval_frequency: Full evaluation every so many steps; 0 never.
        eval_n_examples: Prompts per lesson in a full evaluation.
        eval_before: Evaluate the untrained policy too, and what a warm start has made of it.
        micro_eval_frequency: A quick look every so many steps, which changes nothing; 0 never.
        micro_eval_n_examples: Prompts per lesson in it.
        micro_eval_lessons: Which lessons it looks at: `all`, or the one that the newest group was drawn from.
        temperature: Of evaluations; 0 is greedy.
    """

    lessons: dict[str, LessonConfig] = Field(min_length=1)
    minimum_sample_probability: float = Field(default=0.1, ge=0, le=1)
    rehearsal_probability: float = Field(default=0.02, ge=0, le=1)
    when_complete: Literal["stop", "continue"] = "continue"
    eval_frequency: int = Field(default=100, ge=0)
    eval_n_examples: int = Field(default=64, ge=1, le=1_000_000)
    eval_before: bool = True
    micro_eval_frequency: int = Field(default=10, ge=0)
    micro_eval_n_examples: int = Field(default=4, ge=1, le=1_000_000)
    micro_eval_lessons: Literal["all", "sampled"] = "all"
    temperature: float = Field(default=1.0, ge=0)

    @field_validator("temperature")
    @classmethod
    def _can_sample(cls, value: float, info: ValidationInfo) -> float | None:
        return _in_range(value, info)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_ids(cls, values: Any) -> Any:
        """Fills in ids that were left out."""
        if not isinstance(values, Mapping):
            return values
        given = cast(Mapping[str, Any], values)
        if not isinstance(given.get("lessons"), Mapping):
            return given
        lessons = cast(Mapping[str, Any], given["lessons"])
        return {**given, "lessons": {key: _with_id(key, lesson) for key, lesson in lessons.items()}}

    @model_validator(mode="after")
    def _lessons_fit(self) -> Self:
        for key, lesson in self.lessons.items():
            _check_id(key, lesson)
            _check_dependencies(key, lesson, self.lessons)
        cleared: set[str] = set()
        for key in self.lessons:
            _check_circles(self.lessons, (key,), cleared)
        _check_startable(self.lessons)
        _check_floors(self)
        if not self.eval_frequency:
            _check_undecided(self)
        if not self.micro_eval_frequency:
            keys = ("micro_eval_n_examples", "micro_eval_lessons")
            refuse_idle(self, keys, "micro_eval_frequency is 0: there are no such evaluations")
        return self


def _with_id(key: str, lesson: Any) -> Any:
    if not isinstance(lesson, Mapping):
        return lesson
    fields = cast(Mapping[str, Any], lesson)
    return {**fields, "lesson_id": fields.get("lesson_id") or key}


def _check_id(key: str, lesson: LessonConfig) -> None:
    if lesson.lesson_id != key:
        raise ConfigError(
            f"curriculum.lessons.{key}.lesson_id is {lesson.lesson_id!r}: it must equal its key {key!r}, or be left out"
        )


def _check_dependencies(key: str, lesson: LessonConfig, lessons: Mapping[str, LessonConfig]) -> None:
    for position, dependency in enumerate(lesson.dependencies):
        if dependency.dependency_id not in lessons:
            raise ConfigError(
                f"curriculum.lessons.{key}.dependencies.{position}.dependency_id is "
                f"{dependency.dependency_id!r}: no such lesson; there are {', '.join(lessons)}"
            )


def _check_circles(lessons: Mapping[str, LessonConfig], path: tuple[str, ...], cleared: set[str]) -> None:
    """Follows dependencies from the path's end; `cleared` collects lessons that lead into no circle."""
    for dependency in lessons[path[-1]].dependencies:
        following = dependency.dependency_id
        if following in path:
            circle = " → ".join((*path[path.index(following) :], following))
            raise ConfigError(f"curriculum.lessons.{following}.dependencies form a circle: {circle}; remove one")
        if following not in cleared:
            _check_circles(lessons, (*path, following), cleared)
    cleared.add(path[-1])


def _check_startable(lessons: Mapping[str, LessonConfig]) -> None:
    if not any(not lesson.dependencies and lesson.start_threshold == 0 for lesson in lessons.values()):
        raise ConfigError(
            "curriculum.lessons: every lesson has dependencies or a start_threshold, so none could ever begin; "
            "leave both out of at least one"
        )


def _check_undecided(config: CurriculumConfig) -> None:
    """What only full evaluations decide never happens without any."""
    for key, lesson in config.lessons.items():
        if lesson.start_threshold > 0:
            raise ConfigError(
                f"curriculum.lessons.{key}.start_threshold is {lesson.start_threshold:g}, but "
                "curriculum.eval_frequency is 0: without evaluations it never unlocks; set a frequency, or leave it out"
            )
    refuse_idle(config, ("when_complete",), "eval_frequency is 0: without evaluations no lesson graduates")


def _check_floors(config: CurriculumConfig) -> None:
    """Floors must fit whatever share of the lessons is active or graduated; the extremes decide."""
    n, floor, rehearsal = len(config.lessons), config.minimum_sample_probability, config.rehearsal_probability
    if n * floor > 1 + 1e-9:
        raise ConfigError(
            f"curriculum.minimum_sample_probability is {floor} for each of {n} lessons, together more than 1: "
            f"lower it to {1 / n:.3g} or less"
        )
    if floor + (n - 1) * rehearsal > 1 + 1e-9:
        raise ConfigError(
            f"curriculum.rehearsal_probability is {rehearsal} for each of up to {n - 1} graduated lessons: beside "
            f"minimum_sample_probability {floor} that is more than 1; lower it to {(1 - floor) / (n - 1):.3g} or less"
        )
