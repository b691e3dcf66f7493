"""Environments by dotted path."""

import sys

import pytest

from penstock.environments import CatsEnvironment, load_environment
from penstock.types import ConfigError, EnvironmentSpec
from penstock.types.importing import load_attribute

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
        ("penstock.environments.cats.EVAL_FRACTION", {}, "is not a subclass of penstock.environments.Environment"),
        (
            "penstock.environments.SingleTurnEnvironment",
            {"name": "x"},
            "is abstract: it does not define eval_examples, score",
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
        ("missing_file.py:Environment", {}, r"no file .*missing_file\.py"),
    ],
)
def test_bad_input_is_one_clear_line(env_class, env_args, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_environment(EnvironmentSpec(env_class, env_args))
    assert "\n" not in str(error.value)


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
