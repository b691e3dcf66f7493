"""`penstock env new NAME`: what it writes is tested, trains and evaluates as it is, and never replaces anything."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import penstock  # noqa: F401  (a fixture)

from penstock.environments import load_environment
from penstock.environments.scaffold import KINDS, new_environment
from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, EnvironmentSpec

SHORT = ["steps=2", "curriculum.eval_frequency=0", "curriculum.eval_n_examples=4"]


def test_what_is_written_and_said(penstock, tmp_path):  # noqa: F811
    done = penstock("env", "new", "count_vowels")
    assert (done.returncode, done.stderr) == (0, "")
    said = [line.split()[0] for line in done.stdout.splitlines()]
    assert said == [
        "count_vowels/count_vowels.py",
        "count_vowels/test_count_vowels.py",
        "count_vowels/count_vowels.yaml",
    ]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(said)
    assert done.stdout.splitlines()[2].endswith(" train count_vowels/count_vowels.yaml")
    texts = [(tmp_path / path).read_text("utf-8") for path in said]
    assert "class CountVowelsEnvironment(" in texts[0] and not any("$" in text for text in texts)
    again = penstock("env", "new", "count_vowels")
    assert again.returncode == 2 and "count_vowels cannot be made: File exists" in again.stderr
    assert [(tmp_path / path).read_text("utf-8") for path in said] == texts


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("spell-it", r"NAME 'spell-it' names no module: use small letters"),
        ("class", r"names no module"),
        ("Spell", r"names no module"),
        ("../away", r"names no module"),
        ("random", r"NAME 'random' is the name of an installed module: choose another, such as my_random"),
        ("numpy", r"is the name of an installed module"),
    ],
)
def test_names_that_would_not_do(name, line, tmp_path):
    with pytest.raises(ConfigError, match=line):
        new_environment(name, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^kind 'multiturn': .*\(did you mean 'multi-turn'\?\); there are single-turn"
    ):
        new_environment("mine", tmp_path / "mine", "multiturn")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_form_of_ours(kind, tmp_path):
    made = new_environment("count_vowels", tmp_path / "count_vowels", kind)
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    for words in (["check", "--isolated", "--select", "E,F,I"], ["format", "--isolated", "--check"]):
        shown = subprocess.run(
            [*ruff, *words, "--line-length", "120", *map(str, made[:2])], capture_output=True, text=True, timeout=280
        )
        assert shown.returncode == 0, shown.stdout + shown.stderr


def test_one_of_one_turn_is_an_environment(tmp_path):
    made = new_environment("count_vowels", tmp_path / "count_vowels")
    spec = EnvironmentSpec(f"{made[0]}:CountVowelsEnvironment", {"held_out": 4})
    environment = load_environment(spec)
    context = ScriptedContext(Tokenizer.load("penstock"), lambda prompt, _: prompt.split()[0][::-1])
    groups = [
        group
        for mode in ("eval", "report")
        for group in environment.sample(context, 2, 1, Decoding(max_output_tokens=8), 0, mode)[0]
    ]
    assert sorted(group.key for group in groups) == [f"count_vowels:{word}" for word in ("ant", "bee", "cat", "cow")]
    assert all(group.rewards.tolist() == [1.0] for group in groups)


@pytest.mark.parametrize(("kind", "tools"), [("multi-turn", []), ("tool", ["add"])])
def test_those_of_several_turns_have_solutions_that_earn_most(kind, tools, tmp_path):
    made = new_environment("count_vowels", tmp_path / "count_vowels", kind)
    environment = load_environment(EnvironmentSpec(f"{made[0]}:CountVowelsEnvironment", {"max_turns": 8}))
    assert [tool.__name__ for tool in getattr(environment, "tools", [])] == tools
    (first,) = [each for each in environment.train_examples() if each.answer == "25"][:1]
    said = environment.solution(first)
    left = list(said)
    context = ScriptedContext(Tokenizer.load("penstock"), lambda prompt, _: left.pop(0))
    number = environment.train_examples().index(first)
    groups, _ = environment.sample_problems(context, [number], 1, Decoding(max_output_tokens=112), 0)
    assert groups[0].rewards.tolist() == [pytest.approx(1.0 if tools else 1 - 0.05 * (len(said) - 1))] and left == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passed"), [("single-turn", 4), ("multi-turn", 6), ("tool", 5)])
def test_its_test_passes(kind, passed, tmp_path):
    new_environment("count_vowels", tmp_path / "count_vowels", kind)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "count_vowels"]
    tested = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert tested.returncode == 0 and f"{passed} passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_recipe_trains_and_evaluates(kind, penstock, tmp_path):  # noqa: F811
    name = f"mine_{kind.replace('-', '_')}"  # which no other test of this process has imported
    assert penstock("env", "new", name, "--kind", kind).returncode == 0
    recipe = f"{name}/{name}.yaml"
    short = SHORT if kind == "single-turn" else [*SHORT, "learner.warm_start.steps=2"]
    done = penstock("train", recipe, *short, "--run-dir", "runs/one", "--quiet")
    assert done.returncode == 0, done.stderr
    shown = penstock("eval", "runs/one/checkpoints/step-2", "--recipe", recipe, "--n", "4", "--json")
    assert shown.returncode == 0 and f'"{name}"' in shown.stdout, shown.stderr
