"""Lessons as configuration."""

import pytest
from pydantic import ValidationError

from penstock.curriculum import CurriculumConfig, LessonConfig, SamplingParams
from penstock.types import ConfigError, EnvironmentSpec

from .conftest import lesson


def config(lessons, **fields):
    return CurriculumConfig.model_validate({"lessons": lessons, **fields})


def test_defaults_are_the_fields_own():
    made = config({"cats": {"environment": {"env_class": "a.B"}}})
    cats = made.lessons["cats"]
    assert cats.lesson_id == "cats" and cats.environment.spec == EnvironmentSpec("a.B", {})
    assert (cats.start_threshold, cats.stop_threshold, cats.plateau_window, cats.plateau_threshold) == (0, 1, 50, 0.01)
    assert (cats.success_threshold, cats.regression_ratio, cats.require_plateau) == (0.5, 0.85, True)
    params = cats.sampling_params
    assert (params.temperature, params.top_k, params.n_prompts, params.n_generations_per_prompt) == (1.0, None, 8, 4)
    assert params.max_output_tokens == 512 and params.stop_tokens is None
    assert (made.eval_frequency, made.eval_n_examples, made.micro_eval_frequency, made.micro_eval_n_examples) == (
        100,
        64,
        10,
        4,
    )
    assert (made.minimum_sample_probability, made.rehearsal_probability) == (0.1, 0.02)
    assert made.temperature == 1.0 and made.when_complete == "continue"


class Tokens:
    stop_token_ids = (2, 7)


def test_stop_strings_stay_apart_and_ids_join_the_tokenizers():
    decoding = SamplingParams(stop_tokens=("\n\n", 9, "END", 2), top_k=5, max_output_tokens=8).decoding(Tokens())
    assert decoding.stop_strings == ("\n\n", "END")
    assert decoding.stop_token_ids == (2, 7, 9)
    assert (decoding.top_k, decoding.max_output_tokens, decoding.temperature) == (5, 8, 1.0)
    assert SamplingParams().decoding(Tokens()).stop_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("lessons", "fields", "message"),
    [
        (
            {"a": lesson(lesson_id="b")},
            {},
            "curriculum.lessons.a.lesson_id is 'b': it must equal its key 'a', or be left out",
        ),
        (
            {"a": lesson(), "b": lesson(["c"])},
            {},
            "curriculum.lessons.b.dependencies.0.dependency_id is 'c': no such lesson; there are a, b",
        ),
        ({"x": lesson(), "a": lesson(["a"])}, {}, "curriculum.lessons.a.dependencies form a circle: a → a; remove one"),
        (
            {"x": lesson(), "a": lesson(["x", "c"]), "b": lesson(["a"]), "c": lesson(["b"])},
            {},
            "curriculum.lessons.a.dependencies form a circle: a → c → b → a; remove one",
        ),
        ({"a": lesson(start_threshold=0.5)}, {}, "every lesson has dependencies or a start_threshold"),
        (
            {"a": lesson(), "b": lesson(start_threshold=0.5)},
            {"eval_frequency": 0},
            "lessons.b.start_threshold is 0.5, but curriculum.eval_frequency is 0: without evaluations it never",
        ),
        (
            {f"l{i}": lesson() for i in range(11)},
            {},
            "is 0.1 for each of 11 lessons, together more than 1: lower it to 0.0909 or less",
        ),
        (
            {"a": lesson(), "b": lesson()},
            {"rehearsal_probability": 0.95},
            "rehearsal_probability is 0.95 for each of up to 1 graduated lessons: .* lower it to 0.9 or less",
        ),
    ],
)
def test_lessons_that_do_not_fit_together(lessons, fields, message):
    with pytest.raises(ConfigError, match=message):
        config(lessons, **fields)


def test_a_diamond_of_dependencies_is_no_circle():
    lessons = {"a": lesson(), "b": lesson(["a"]), "c": lesson(["a"]), "d": lesson(["b", "c"])}
    assert list(config(lessons).lessons) == ["a", "b", "c", "d"]


def test_many_layers_of_dependencies_are_checked_quickly():
    lessons = {"root": lesson()}
    for layer in range(40):
        above = [key for key in lessons if key.startswith(f"{layer - 1}-")] or ["root"]
        lessons |= {f"{layer}-{i}": lesson(above) for i in range(3)}
    assert len(config(lessons, minimum_sample_probability=0, rehearsal_probability=0).lessons) == 121


@pytest.mark.parametrize(
    ("lessons", "where"),
    [
        ({}, ("lessons",)),
        ({"a": {}}, ("lessons", "a", "environment")),
        ({"a": lesson(stop_treshold=1)}, ("lessons", "a", "stop_treshold")),
        ({"a": lesson(plateau_window=2)}, ("lessons", "a", "plateau_window")),
        ({"a": lesson(success_threshold=float("nan"))}, ("lessons", "a", "success_threshold")),
        (
            {"a": lesson(sampling_params={"max_output_tokens": 0})},
            ("lessons", "a", "sampling_params", "max_output_tokens"),
        ),
        ({"a": lesson(sampling_params={"stop_tokens": ["x", ""]})}, ("lessons", "a", "sampling_params", "stop_tokens")),
        ({"a": lesson(sampling_params={"stop_tokens": [-5]})}, ("lessons", "a", "sampling_params", "stop_tokens")),
        ({"a": 3}, ("lessons", "a")),
        (3, ("lessons",)),
    ],
)
def test_wrong_fields_are_located(lessons, where):
    with pytest.raises(ValidationError) as error:
        config(lessons)
    assert error.value.errors()[0]["loc"] == where


def test_micro_evaluations_of_the_sampled_lesson_need_micro_evaluations():
    lessons = {"cats": {"environment": {"env_class": "penstock.environments.cats.CatsEnvironment"}}}
    asked = {"lessons": lessons, "micro_eval_lessons": "sampled"}
    assert CurriculumConfig.model_validate(asked).micro_eval_lessons == "sampled"
    with pytest.raises(ValidationError, match='micro_eval_lessons is "sampled", which has no effect: micro_eval_freq'):
        CurriculumConfig.model_validate({**asked, "micro_eval_frequency": 0})


def test_prompts_of_micro_evaluations_that_there_are_none_of_are_refused():
    lessons = {"cats": {"environment": {"env_class": "penstock.environments.cats.CatsEnvironment"}}}
    with pytest.raises(
        ValidationError, match="micro_eval_n_examples is 8, which has no effect: micro_eval_frequency is 0"
    ):
        CurriculumConfig.model_validate({"lessons": lessons, "micro_eval_frequency": 0, "micro_eval_n_examples": 8})
    CurriculumConfig.model_validate({"lessons": lessons, "micro_eval_frequency": 0, "micro_eval_n_examples": 4})


def test_problems_come_by_epochs_unless_the_order_is_iid_which_takes_no_retries():
    lesson = {"environment": {"env_class": "a.B"}}
    plain = LessonConfig.model_validate(lesson)
    assert (plain.order, plain.problem_retries) == ("shuffle", 3)
    assert LessonConfig.model_validate(lesson | {"order": "iid"}).order == "iid"
    assert LessonConfig.model_validate(lesson | {"order": "sequential", "problem_retries": 0}).problem_retries == 0
    with pytest.raises(ValidationError, match="problem_retries is 5, but order is 'iid', which has no epochs"):
        LessonConfig.model_validate(lesson | {"order": "iid", "problem_retries": 5})
    with pytest.raises(ValidationError, match="order"):
        LessonConfig.model_validate(lesson | {"order": "random"})


@pytest.mark.parametrize("share", [-0.1, 1.5])
@pytest.mark.parametrize("field", ["start_threshold", "stop_threshold", "regression_ratio"])
def test_shares_of_a_lesson_lie_between_0_and_1(field, share):
    with pytest.raises(ValidationError) as error:
        config({"a": lesson(), "b": lesson(**{field: share})})
    assert error.value.errors()[0]["loc"] == ("lessons", "b", field)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_shares_of_the_curriculum_and_its_dependencies_lie_between_0_and_1(share):
    for field in ("minimum_sample_probability", "rehearsal_probability"):
        with pytest.raises(ValidationError) as error:
            config({"a": lesson()}, **{field: share})
        assert error.value.errors()[0]["loc"] == (field,)
    with pytest.raises(ValidationError) as error:
        config({"a": lesson(dependencies=[{"dependency_id": "b", "reward_threshold": share}])})
    assert error.value.errors()[0]["loc"] == ("lessons", "a", "dependencies", 0, "reward_threshold")


def test_floors_may_add_up_to_exactly_1():
    made = config({f"l{i}": lesson() for i in range(10)}, rehearsal_probability=0.1)
    assert (len(made.lessons), made.minimum_sample_probability, made.rehearsal_probability) == (10, 0.1, 0.1)


def test_greedy_evaluations_and_dependencies_without_a_threshold_are_allowed():
    made = config(
        {"a": lesson(), "b": lesson(dependencies=[{"dependency_id": "a", "reward_threshold": 0}])}, temperature=0
    )
    assert made.temperature == 0 and made.lessons["b"].dependencies[0].reward_threshold == 0


def test_prompts_of_an_offline_batch_are_at_least_one():
    assert SamplingParams(n_prompts=1).n_prompts == 1
    with pytest.raises(ValidationError, match="n_prompts"):
        SamplingParams(n_prompts=0)


def test_stopping_when_complete_needs_evaluations():
    with pytest.raises(ValidationError, match='when_complete is "stop", which has no effect: eval_frequency is 0'):
        config({"a": lesson()}, eval_frequency=0, when_complete="stop")
