"""The table of attacks in docs/security.md: every row has its test, and every test of an attack its row."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?P<attack>[^|]+) \| (?P<expected>[^|]+) \| (?P<tests>`[^|]+`) \|$")
LEAST = 60


def rows() -> list[tuple[str, str, list[str]]]:
    """Attack, what is expected, and the tests that show it, as pytest names them."""
    section = (ROOT / "docs" / "security.md").read_text("utf-8").partition("\n## Attacks\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    malformed = [line for line in lines if not ROW.match(line)]
    assert malformed == []
    matches = [match for line in lines if (match := ROW.match(line))]
    return [(match["attack"], match["expected"], re.findall(r"`([^`]+)`", match["tests"])) for match in matches]


@cache
def attack_tests(file: Path) -> set[str]:
    """Names of a file's test functions that carry the marker, by themselves or through the whole module's."""
    tree = ast.parse(file.read_text("utf-8"))
    whole = any(
        isinstance(node, ast.Assign)
        and "pytestmark" in ast.unparse(node.targets[0])
        and "mark.attack" in ast.unparse(node)
        for node in tree.body
    )
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {
        function.name
        for function in functions
        if whole or any("mark.attack" in ast.unparse(decorator) for decorator in function.decorator_list)
    }


def test_there_are_enough_attacks_and_each_stands_once():
    attacks = [attack for attack, _, _ in rows()]
    assert len(attacks) >= LEAST
    assert len({*attacks}) == len(attacks)


@pytest.mark.parametrize("name", sorted({name for _, _, tests in rows() for name in tests}))
def test_every_row_names_a_test_that_make_test_slow_runs(name):
    file, _, function = name.partition("::")
    assert (ROOT / file).is_file(), file
    assert function in attack_tests(ROOT / file)


def test_every_test_of_an_attack_has_its_row():
    listed = {name for _, _, tests in rows() for name in tests}
    marked = {
        f"{file.relative_to(ROOT)}::{function}"
        for file in (ROOT / "tests").rglob("test_*.py")
        for function in attack_tests(file)
    }
    assert marked - listed == set()
