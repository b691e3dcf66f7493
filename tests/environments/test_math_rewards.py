"""Expressions, compared by math-verify: the table of dressings has the numbers (test_rewards_dressings.py)."""

import importlib.util
import json
import sys

import pytest

from penstock.environments import JsonlEnvironment
from penstock.types import ConfigError
from penstock.types.importing import load_attribute

GRADER = "penstock.environments.math_rewards.math_answer"


@pytest.fixture
def rows(tmp_path):
    paths = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    for number, path in enumerate(paths):
        path.write_text(json.dumps({"prompt": f"question {number}", "answer": "18"}))
    return {"path": str(paths[0]), "eval_path": str(paths[1])}


def grade(said, right, **columns):
    pytest.importorskip("math_verify")
    return importlib.import_module("penstock.environments.math_rewards").math_answer([said], [right], **columns)[0]


@pytest.mark.parametrize(
    ("said", "right", "reward"),
    [
        ("#### 2*18/2", "18", 1),
        ("#### 36/2", 18, 1),
        ("#### 17+1", "18", 1),
        ("#### 18 eggs", "18", 1),
        ("#### +18", "#### 18", 1),
        (r"#### \$18", "18", 1),
        ("#### −5", "-5", 1),
        ("#### - 5", "-5", 1),
        (r"\boxed{\frac{36}{2}}", "18", 1),
        (r"\boxed{\frac{2}{4}}", r"$\frac12$", 1),
        (r"\boxed{0.5}", r"\boxed{\frac{1}{2}}", 1),
        (r"\boxed{2\sqrt3}", r"\sqrt{12}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{(1,2)}", "(1, 2)", 1),
        (r"\boxed{1 \text{ or } 2}", r"2 \text{ or } 1", 1),
        (r"\boxed{x=1/3}", "1/3", 1),
        ("#### 18/2", "18", 0),
        ("#### 18e2", "18", 0),
        ("#### 18 * 2", "18", 0),
        ("#### 18 or 19", "18", 0),
        ("#### 18 or 19", "19", 0),
        ("#### −18", "18", 0),
        (r"\boxed{2}", "(1, 2)", 0),
        (r"\boxed{2}", "1/2", 0),
        (r"\boxed{(2,1)}", "(1,2)", 0),
        (r"\boxed{0.3333}", "1/3", 0),
        ("36/2", "18", 0),  # neither boxed nor marked
        (r"\boxed{}", "18", 0),
        (r"\boxed{9^{9^{9^{9}}}}", "18", 0),  # not in a second
        (r"\boxed{" + "1+" * 400 + "1}", "401", 0),
    ],
)
def test_expressions(said, right, reward):
    assert grade(said, right) == reward


def test_a_cut_expression_earns_nothing():
    assert grade("#### 36/2", "18", finish_reason=["length"]) == 0


@pytest.mark.parametrize("said", ["1/2 + 3*4", "__import__('os').getpid()", r"x = \text{__import__('os').getpid()}"])
def test_nothing_that_a_model_wrote_is_evaluated_as_python(said, monkeypatch):
    parser = pytest.importorskip("math_verify.parser")
    evaluated = []
    monkeypatch.setattr(parser, "parse_expr", lambda *given, **options: evaluated.append(given))
    assert grade(f"#### {said}", "1/3") == grade(rf"\boxed{{{said}}}", "1/3") == 0
    assert evaluated == []


def test_it_runs_in_a_process_of_its_own(rows, policy, decoding):
    pytest.importorskip("math_verify")
    environment = JsonlEnvironment(**rows, reward=GRADER)
    try:
        said = [r"\boxed{\frac{36}{2}}", r"\boxed{\frac{37}{2}}"]
        groups, _ = environment.sample(policy(lambda p, j, s: said[j] + "<eos>"), 1, 2, decoding, 0, "train")
    finally:
        environment.close()
    assert groups[0].rewards.tolist() == [1.0, 0.0]


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"math-verify cannot be imported .*pip install 'penstock\[math\]'"):
        load_attribute(GRADER, "reward")


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="math-verify is installed")
def test_a_run_without_the_package_ends_before_it_begins(rows):
    with pytest.raises(ConfigError, match=r"math-verify cannot be imported .*pip install 'penstock\[math\]'"):
        JsonlEnvironment(**rows, reward=GRADER)
