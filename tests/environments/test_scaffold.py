"""`penstock env new NAME`: what it writes is tested, trains and evaluates as it is, and never replaces anything."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import penstock  # noqa: F401  (a fixture)

from penstock.environments import load_environment
from penstock.environments.scaffold import new_environment
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


def test_it_is_an_environment_and_has_the_form_of_ours(tmp_path):
    made = new_environment("count_vowels", tmp_path / "count_vowels")
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    for words in (["check", "--isolated", "--select", "E,F,I"], ["format", "--isolated", "--check"]):
        shown = subprocess.run(
            [*ruff, *words, "--line-length", "120", *map(str, made[:2])], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0, shown.stdout + shown.stderr
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


@pytest.mark.slow
def test_its_test_passes(tmp_path):
    new_environment("count_vowels", tmp_path / "count_vowels")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "count_vowels"]
    tested = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert tested.returncode == 0 and "4 passed" in tested.stdout, tested.stdout + tested.stderr


@pytest.mark.slow
def test_its_recipe_trains_and_evaluates(penstock, tmp_path):  # noqa: F811
    assert penstock("env", "new", "count_vowels").returncode == 0
    recipe = "count_vowels/count_vowels.yaml"
    done = penstock("train", recipe, *SHORT, "--run-dir", "runs/one", "--quiet")
    assert done.returncode == 0, done.stderr
    shown = penstock("eval", "runs/one/checkpoints/step-2", "--recipe", recipe, "--n", "4", "--json")
    assert shown.returncode == 0 and '"count_vowels"' in shown.stdout, shown.stderr
