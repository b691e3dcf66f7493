"""docs/architecture.md: the functions of its walks and the files that it names exist, and its tree is complete."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "penstock"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
STATION = r"`([\w/]+\.py)`: `([\w.]+)`"
MOST_ROWS = 12


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the rows of a section's table."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


WALKS = {heading: rows_of(heading) for heading in ("A rollout", "A weight version")}
STATIONS = sorted({station for rows in WALKS.values() for row in rows for station in re.findall(STATION, row[0])})


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_is_short_and_leads_in_each_row_from_one_function_to_another(heading):
    rows = WALKS[heading]
    assert 0 < len(rows) <= MOST_ROWS
    for row in rows:
        assert len(row) == 3 and all(row)
        start, arrow, end = row[0].partition(" → ")
        assert arrow and len(re.findall(STATION, start)) == 1 and re.findall(STATION, end), row[0]


@pytest.mark.parametrize(("file", "function"), STATIONS)
def test_the_functions_of_the_walks_are_where_the_page_says(file, function):
    module = importlib.import_module("penstock." + file.removesuffix(".py").replace("/", "."))
    found = attrgetter(function)(module)
    assert callable(found) and found.__module__ == module.__name__


def test_the_files_and_folders_that_the_page_names_exist():
    named = {name for name in re.findall(r"`(?:python )?([\w/.]+)`", PAGE) if "/" in name or name.endswith(".py")}
    anywhere = {"__init__.py", "config.py"}  # of any package
    missing = [name for name in named - anywhere if not ((PACKAGE / name).exists() or (ROOT / name).exists())]
    assert len(named) > 50 and missing == []


def test_the_tree_names_every_folder_once():
    named = [row[0].strip("`/") for row in rows_of("The tree")]
    on_disk = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("__init__.py")} - {"."}
    assert sorted(named) == sorted(on_disk | {"recipes"})


def test_what_a_change_touches_is_named_by_files():
    rows = rows_of("Where do I change …")
    assert len(rows) >= 10 and all("`" in row[1] for row in rows)
