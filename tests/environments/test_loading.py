"""Environments by dotted path."""

import sys
from functools import partial

import pytest

from penstock.environments import CatsEnvironment, JsonlEnvironment, SingleTurnEnvironment, load_environment
from penstock.environments.loading import given_environment
from penstock.types import ConfigError, EnvironmentSpec
from penstock.types.importing import load_attribute, name_of_object

CATS = "penstock.environments.cats.CatsEnvironment"


def test_loads_with_arguments():
    environment = load_environment(
        EnvironmentSpec(CATS, {"variant": "named", "animals": ["cat", "hen"], "name": "pets"})
    )
    assert isinstance(environment, CatsEnvironment) and environment.name == "pets"
    assert {example.answer for example in environment.train_examples()} == {"cat", "hen"}
    assert isinstance(load_environment(EnvironmentSpec("penstock.environments.CatsEnvironment")), CatsEnvironment)


@pytest.mark.parametrize(
    ("env_class", "env_args", "message"),
    [
        (
            "penstock.environments.cat.CatsEnvironment",
            {},
            r"no module named .* \(did you mean 'penstock.environments.cats'\?\)",
        ),
        (
            "penstock.environments.cats.CatEnvironment",
            {},
            r"has no 'CatEnvironment' \(did you mean 'CatsEnvironment'\?\)",
        ),
        ("CatsEnvironment", {}, "is not a path: write package.module.Name"),
        ("my_tasks.py", {}, r"'my_tasks.py' is a file, and says nothing of it: write my_tasks.py:Name"),
        ("penstock.environments.cats.EVAL_FRACTION", {}, "is not a subclass of penstock.environments.Environment"),
        (
            "penstock.environments.SingleTurnEnvironment",
            {"name": "x"},
            "is abstract: it does not define score",
        ),
        (
            CATS,
            {"varaint": "named"},
            r"env_args.varaint: .* has no such argument \(did you mean 'variant'\?\): it takes animals",
        ),
        (CATS, {"variant": "dogs"}, "env_args.variant is 'dogs': input should be 'cat' or 'named'"),
        (CATS, {"animals": [1]}, "env_args.animals.0 is 1: input should be a valid string"),
        (CATS, {"animals": ["dog"]}, "env_args.animals is .'dog'.: it takes different single words, 'cat' among them"),
        ("penstock.environments.digits.DigitsEnvironment", {"terms": "many"}, "env_args.terms is 'many'"),
        ("penstock.environments.digits.DigitsEnvironment", {"terms": 0}, "refused env_args: ValueError: terms is 0"),
        ("penstock.environments.jsonl.JsonlEnvironment", {}, "env_args.path is missing: .* requires it"),
        ("nowhere.at.all.Environment", {}, "no module named 'nowhere'"),
        (f"{__name__}.Numbered", {}, "Numbered': its name is 3: it must be text"),
        (f"{__name__}.Quits", {}, "Quits' refused env_args: SystemExit: 3"),
        (f"{__name__}.Bare", {}, r"Bare': its __init__ does not begin with super\(\).__init__\(\): add that"),
        ("missing_file.py:Environment", {}, r"no file .*missing_file\.py"),
    ],
)
def test_bad_input_is_one_clear_line(env_class, env_args, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_environment(EnvironmentSpec(env_class, env_args))
    assert "\n" not in str(error.value)


class Pets(CatsEnvironment):
    def __init__(self) -> None:
        super().__init__(name="pets")


class Numbered(CatsEnvironment):
    def __init__(self) -> None:
        super().__init__(name=3)  # pyright: ignore


class Quits(CatsEnvironment):
    def __init__(self):
        raise SystemExit(3)


class Bare(CatsEnvironment):
    def __init__(self) -> None:
        self.animals = ("cat",)


def test_an_environment_is_given_as_an_instance_or_a_class():
    pets = Pets()
    assert given_environment(pets) is pets
    assert given_environment(Pets).name == "pets" and given_environment(Pets) is not given_environment(Pets)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cats", "^environment 'cats' is neither an environment nor a class of them: .* env_class: tasks.py:MyEnv"),
        (Quits, "^environment Quits cannot be made .* SystemExit: 3 .test_loading.py:.*; give an instance"),
        (dict, "^environment dict is not a subclass of"),
        (SingleTurnEnvironment, "^environment SingleTurnEnvironment is abstract: it does not define score$"),
        (Bare, r"^environment Bare: its __init__ does not begin with super\(\).__init__\(\): add that$"),
        (Bare(), r"^environment Bare: its __init__ does not begin with super\(\).__init__\(\): add that$"),
        (JsonlEnvironment, r"^environment JsonlEnvironment cannot be made without arguments: TypeError: .*'path'; give "
                           r"an instance, environment=JsonlEnvironment\(…\)$"),
    ],
)  # fmt: skip
def test_what_is_no_environment_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        given_environment(given)


def test_the_name_of_an_object_says_that_it_must_be_given_again():
    assert name_of_object(Pets) == name_of_object(Pets()) == f"object:{__name__}.Pets"
    assert name_of_object(partial(print)) == "object:functools.partial"
    with pytest.raises(ConfigError, match=r"^env_class 'object:a.B' was given as a Python object, which no file holds"
                                          r": give it again, from Python by environment=…, or name code"):  # fmt: skip
        load_environment(EnvironmentSpec("object:a.B"))


def test_a_class_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from penstock.environments import Environment\n"
        "class Mine(Environment):\n"
        "    def __init__(self, size: int):\n        super().__init__('mine')\n        self.size = size\n"
        "    def sample(self, *args):\n        return [], {}\n"
    )
    path = f"{tmp_path}/mine.py:Mine"
    assert load_environment(EnvironmentSpec(path, {"size": 3})).size == 3
    with pytest.raises(ConfigError, match="env_args.size is 'x'"):
        load_environment(EnvironmentSpec(path, {"size": "x"}))
    with pytest.raises(ConfigError, match="has no reference solutions: remove learner.warm_start"):
        load_environment(EnvironmentSpec(path, {"size": 3})).reference_examples(1, 0)


def test_a_file_may_import_what_stands_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "words_beside_it.py").write_text("ANIMALS = ['cat', 'eel']\n")
    (tmp_path / "pets.py").write_text(
        "from words_beside_it import ANIMALS\n"
        "from penstock.environments import CatsEnvironment\n"
        "class Pets(CatsEnvironment):\n"
        "    def __init__(self): super().__init__(variant='named', animals=ANIMALS)\n"
    )
    environment = load_environment(EnvironmentSpec(f"{tmp_path}/pets.py:Pets"))
    assert {example.answer for example in environment.train_examples()} == {"cat", "eel"}


def test_modules_beside_the_current_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "beside_module_for_test.py").write_text("VALUE = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_attribute("beside_module_for_test.VALUE", "reward") == 3


def test_an_import_that_fails_says_why(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')\n")
    with pytest.raises(ConfigError, match="importing .*broken.py raised RuntimeError: no licence"):
        load_attribute(f"{tmp_path}/broken.py:f", "reward")
    (tmp_path / "hungry.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ConfigError, match="a_package_that_is_not_there"):
        load_attribute(f"{tmp_path}/hungry.py:f", "reward")


def test_a_script_that_ends_the_process_is_an_error_of_one_line(tmp_path, monkeypatch):
    (tmp_path / "script_for_test.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for path in (f"{tmp_path}/script_for_test.py:f", "script_for_test.f"):
        with pytest.raises(ConfigError, match="raised SystemExit: 0; it ends the process .* under if __name__ == "):
            load_attribute(path, "reward")
