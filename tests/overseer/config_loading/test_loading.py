import math
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import (
    apply_overrides,
    build_config,
    load_config,
    load_recipe,
    recipe_summaries,
    split_words,
)
from penstock.rundir.yaml_documents import dump_yaml, parse_yaml
from penstock.types import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Optimizer(Section):
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"


class Learner(Section):
    optimizer: Optimizer = Optimizer()
    row_length: int = Field(default=256, ge=1)
    seed_words: list[str] = []


class Lesson(Section):
    lesson_id: str
    dependencies: list[Optimizer] = []
    weight: int | str = 1
    start_threshold: float | None = None


class Run(Section):
    total_steps: int = 10
    password: str | None = Field(default=None, min_length=8, repr=False)
    asynchronous: bool = Field(default=True, alias="async")
    learner: Learner = Learner()
    lessons: dict[str, Lesson] = {}
    source: Optimizer | Lesson | None = None

    @model_validator(mode="after")
    def _steps_reach(self) -> "Run":
        if self.total_steps == 13:
            raise ValueError("total_steps is 13: choose another number")
        return self


def refused(values: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(Run, values)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"total_step": 3}, "unknown key total_step: did you mean total_steps?"),
        ({"asynk": False}, "unknown key asynk: did you mean async?"),
        (
            {"learner": {"optimizer": {"learning_rat": 1}}},
            "unknown key learner.optimizer.learning_rat: did you mean learner.optimizer.learning_rate?",
        ),
        ({"row_length": 4}, "unknown key row_length: did you mean learner.row_length?"),
        (
            {"learner": {"optimizer": {"zzz": 1}}},
            "unknown key learner.optimizer.zzz: remove it; the keys known here are learning_rate, schedule",
        ),
        (
            {"lessons": {"easy": {"lesson_id": "easy", "start_treshold": 1}}},
            "unknown key lessons.easy.start_treshold: did you mean lessons.easy.start_threshold?",
        ),
        (
            {"lessons": {"easy": {"lesson_id": "easy", "dependencies": [{"shedule": "cosine"}]}}},
            "unknown key lessons.easy.dependencies.0.shedule: did you mean lessons.easy.dependencies.0.schedule?",
        ),
        ({"total_steps": "many"}, "total_steps is 'many': it must be a whole number"),
        ({"total_steps": 1.5}, "total_steps is 1.5: it must be a whole number"),
        ({"total_steps": None}, "total_steps is null: it must be a whole number"),
        ({"total_steps": True}, "total_steps is true: it must be a number"),
        ({"async": "perhaps"}, "async is 'perhaps': it must be true or false"),
        (
            {"learner": {"optimizer": {"learning_rate": -1}}},
            "learner.optimizer.learning_rate is -1: it must be greater than 0",
        ),
        ({"learner": {"row_length": 0}}, "learner.row_length is 0: it must be at least 1"),
        ({"learner": 5}, "learner is 5: it must be a section of keys"),
        ({"learner": {"seed_words": "a"}}, "learner.seed_words is 'a': it must be a list"),
        ({"learner": {"seed_words": ["a", 2]}}, "learner.seed_words.1 is 2: it must be text"),
        (
            {"learner": {"seed_words": [Path]}},
            f"learner.seed_words.0 is {Path}: it must be text, as '{Path.__module__}:Path'",
        ),
        (
            {"learner": {"optimizer": {"schedule": "cosin"}}},
            "learner.optimizer.schedule is 'cosin': it must be one of 'constant' or 'cosine' (did you mean 'cosine'?)",
        ),
        ({"lessons": {"easy": {}}}, "lessons.easy.lesson_id is missing: add it"),
        (
            {"lessons": {"easy": {"lesson_id": "easy", "weight": [1]}}},
            "lessons.easy.weight is [1]: it must be a whole number or text",
        ),
        ({"total_steps": 13}, "total_steps is 13: choose another number"),
        (
            {"total_steps": "x", "learner": {"row_length": "y"}},
            "total_steps is 'x': it must be a whole number (and 1 more: learner.row_length)",
        ),
    ],
)
def test_each_mistake_is_one_line_with_key_value_and_remedy(values, message):
    assert refused(values) == message


def test_a_misspelt_required_key_is_named_before_the_missing_one():
    message = refused({"lessons": {"easy": {"lesson_idd": "easy"}}})
    assert message.startswith("unknown key lessons.easy.lesson_idd: did you mean lessons.easy.lesson_id?")


def test_a_union_of_sections_names_the_key_without_type_names():
    message = refused({"source": {"lesson_id": 3}})
    assert "Lesson" not in message and "Optimizer" not in message and "source.lesson_id" in message


def test_half_a_character_in_a_key_is_told():
    values = load_config("cats").model_dump(mode="json", by_alias=True)
    values["rollout"] = {"workers": {"\ud800": 1}}
    with pytest.raises(ConfigError, match=r"^mine\.yaml: a key holds '\\ud800', half a character: write the whole one"):
        build_config(RunConfig, values, "mine.yaml")


def test_the_source_stands_before_the_message():
    with pytest.raises(ConfigError, match=r"^recipe cats: unknown key total_step: "):
        build_config(Run, {"total_step": 1}, source="recipe cats")


def test_a_long_value_is_cut():
    assert len(refused({"total_steps": "x" * 5000})) < 200


def test_a_secret_is_not_printed():
    assert refused({"password": "abc"}) == "password is (hidden): it must be text of at least 8 characters"


def test_a_valid_config_is_built():
    run = build_config(Run, {"async": "no", "lessons": {"easy": {"lesson_id": "easy"}}})
    assert run.asynchronous is False and run.lessons["easy"].weight == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("3.", 3.0), ("7", 7), ("-7", -7),
        ("1_000", 1000), ("0x1f", 31), ("true", True), ("False", False), ("no", "no"), ("on", "on"),
        ("null", None), ("~", None), ("", None), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
        ("[1, 2.0, a]", [1, 2.0, "a"]), ("{a: 1e1}", {"a": 10.0}), ("'1'", "1"), ("1e", "1e"), ("e5", "e5"),
        ("cat", "cat"), (".inf", math.inf), ('"\\n"', "\n"), ("010", "010"),
    ],
)  # fmt: skip
def test_override_values_are_read_as_users_write_them(text, value):
    result = apply_overrides({}, [f"key={text}"])["key"]
    assert result == value and type(result) is type(value)


def test_yaml_written_is_read_back_as_the_same_values():
    values = {
        "floats": [1e-3, 1e-7, 1e22, 0.1, 3.0, math.inf],
        "words": ["no", "1e-3", "1:30", "null", "~", "", "0x1f", "1_000", "010", "2024-01-01", "a: b", "é\n\n x", "#"],
        "rest": {"none": None, "yes": True, "number": -5, "empty": {}, "list": []},
    }  # fmt: skip
    assert parse_yaml(dump_yaml(values), "text") == values


def test_overrides_set_nested_keys_make_sections_and_leave_the_recipe_alone():
    recipe = {"learner": {"optimizer": {"learning_rate": 0.1, "beta": 1}}, "stages": [{"n": 1}, {"n": 2}], "off": None}
    result = apply_overrides(
        recipe, ["learner.optimizer.learning_rate=2e-3", "a.b=x=y", "stages.1.n=5", "off.on=1", "stages.0={}"]
    )
    assert result == {
        "learner": {"optimizer": {"learning_rate": 2e-3, "beta": 1}},
        "stages": [{}, {"n": 5}],
        "off": {"on": 1},
        "a": {"b": "x=y"},
    }
    assert recipe["stages"] == [{"n": 1}, {"n": 2}] and recipe["off"] is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("total_steps", "override 'total_steps' is not of the form key=value"),
        ("=3", "override '=3' is not of the form key=value"),
        ("a..b=3", "override 'a..b=3' is not of the form key=value"),
        ("steps.most=3", r"override 'steps.most=3': steps is 5, which has no keys: remove .most from the path"),
        ("stages.2.n=3", "stages.2 does not exist: the list has 2 entries"),
        ("stages.x=3", "stages.x does not exist: the list has 2 entries"),
        ("a=[1", r"override 'a=\[1', line 1, column \d+: not valid YAML"),
    ],
)
def test_a_bad_override_is_refused_by_name(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        apply_overrides({"steps": 5, "stages": [1, 2]}, [override])
    assert "\n" not in str(caught.value)


def test_a_mapping_is_laid_over_the_recipe_whatever_part_of_its_paths_is_dotted():
    recipe = {"learner": {"optimizer": {"learning_rate": 0.1, "beta": 1}}, "stages": [{"n": 1}, {"n": 2}], "off": None}
    wanted = {"learner": {"optimizer": {"learning_rate": 2e-3, "beta": 1}}, "stages": [{"n": 1}, {"n": 5}], "off": {}}
    for rate in (
        {"learner.optimizer.learning_rate": 2e-3},
        {"learner": {"optimizer": {"learning_rate": 2e-3}}},
        {"learner": {"optimizer.learning_rate": np.float32(2e-3)}},
        {"learner.optimizer": {"learning_rate": 2e-3}},
    ):
        result = apply_overrides(recipe, {**rate, "stages.1.n": 5, "off": {}, "learner.optimizer.beta": 1})
        learned = result["learner"]["optimizer"].pop("learning_rate")
        assert type(learned) is float and learned == pytest.approx(2e-3)
        assert result == {**wanted, "learner": {"optimizer": {"beta": 1}}}
    assert recipe["off"] is None and recipe["stages"] == [{"n": 1}, {"n": 2}]
    assert apply_overrides({"roles": {"a": 1}, "path": 0}, {"roles": {}, "path": Path("x")}) == {
        "roles": {"a": 1}, "path": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"a..b": 3}, "override 'a..b' is no key: write for example {\"learner.optimizer.learning_rate\": 1e-3}"),
        ({3: 4}, "override 3 is no key: write for example"),
        ({"steps": {"most": 3}}, "override 'steps.most: 3': steps is 5, which has no keys: remove .most from the path"),
        (5, "overrides is 5: give a mapping of keys to values, or key=value words"),
        ([3], "overrides is [3]: give a mapping of keys to values, or key=value words"),
        ({"stages.2.n": 3}, "override 'stages.2.n: 3': stages.2 does not exist: the list has 2 entries"),
    ],
)
def test_a_bad_name_in_a_mapping_is_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"steps": 5, "stages": [1, 2]}, overrides)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_config_is_loaded_with_words_a_mapping_or_from_another_config():
    words = load_config("cats", ["steps=3", "learner.optimizer.learning_rate=2e-3", "async=false"])
    assert words.steps == 3 and words.replay.staleness_budget == 0
    mapping = {"steps": 3, "learner": {"optimizer": {"learning_rate": 2e-3}}, "asynchronous": False}
    assert load_config("cats", mapping) == words
    assert load_config(load_config("cats", "async=false"), mapping) == words
    assert load_config(words) == words and load_config(words, {"steps": 4}).steps == 4
    with pytest.raises(ConfigError, match=r"^unknown key lr: did you mean learner.optimizer.learning_rate"):
        load_config(words, {"lr": 1e-3})
    with pytest.raises(ConfigError, match="^config is a dict: give a recipe's name, a YAML path, or what load_config"):
        load_config({"steps": 3})  # type: ignore[arg-type]


def test_what_python_calls_asynchronous_is_async_in_words_too():
    assert load_config("cats", ["asynchronous=false"]) == load_config("cats", ["async=false"])


def test_arrays_are_lists_of_numbers():
    arrays = {"inference.windows": np.array([64, 128]), "inference.prefill_lengths": (np.array([16]), np.int64(64))}
    inference = {"windows": [64, 128], "prefill_lengths": [[16], 64]}
    assert apply_overrides({}, arrays) == {"inference": inference}


def test_overrides_that_can_be_read_only_once_are_refused():
    with pytest.raises(ConfigError, match="overrides is <generator .*give a mapping of keys to values, or key=value"):
        load_config("cats", (word for word in ["steps=3"]))  # type: ignore[arg-type]


def test_a_word_may_be_longer_than_the_name_of_a_file():
    word = f"tracking.wandb.project={'x' * 400}"
    assert split_words(["cats", word]) == (["cats"], [word])
    with pytest.raises(ConfigError, match="no recipe named 'xxx"):
        load_recipe("x" * 400)
    with pytest.raises(ConfigError, match=r"cannot read 'a\\x00b.yaml'"):
        load_recipe("a\0b.yaml")


def test_paths_in_a_mapping_count_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = {"model": {"path": Path("mine"), "init": None}}
    assert load_config("cats", changed).model.path == str(tmp_path / "mine")
    assert load_config(load_config("cats"), changed).model.path == str(tmp_path / "mine")


def test_an_unknown_recipe_is_answered_with_the_nearest_and_the_list():
    names = list(recipe_summaries())
    wrong = names[0] + "s"
    with pytest.raises(ConfigError) as caught:
        load_recipe(wrong)
    message = str(caught.value)
    assert f"no recipe named {wrong!r} (did you mean {names[0]!r}?)" in message
    assert all(name in message for name in names)


def test_packaged_recipes_have_a_summary_and_load_by_name():
    for name, summary in recipe_summaries().items():
        assert summary, f"{name}.yaml must begin with a comment that says what it is"
        assert isinstance(load_recipe(name), dict)


def test_a_path_is_read(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\ntotal_steps: 1e1\n")
    assert load_recipe(path) == {"total_steps": 10.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3, column 2: not valid YAML"),
        ("a: 1\n\tb: 2\n", "line 2, column 1: not valid YAML"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4, column 3: not valid YAML: the key 'c' is written twice"),
        ("a: 1\n2: 3\n", "line 2, column 1: not valid YAML: keys must be text"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4: not valid YAML"),
        ("", "is empty: a recipe is a YAML mapping"),
        ("- 1\n", "is a list: a recipe is a YAML mapping"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path):
    (tmp_path / "words.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"no file .*word\.yaml \(did you mean 'words\.yaml'\?\)"):
        load_recipe(tmp_path / "word.yaml")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read .*binary.yaml"):
        load_recipe(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_recipe(f"{tmp_path}/")


def test_references_that_would_be_huge_or_endless_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    assert load_recipe(path) == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    path.write_text("a: &a [1]\n" + "".join(f"{b}: &{b} [{'*' + a}{(', *' + a) * 9}]\n" for a, b in pairwise("abcdef")))
    with pytest.raises(ConfigError, match="line 6, column 4: not valid YAML: it has more than 100000 entries when"):
        load_recipe(path)
    path.write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError, match="line 1, column 4: not valid YAML: it refers to itself"):
        load_recipe(path)
    path.write_text("[" * 9999)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_recipe(path)
