"""docs/rollouts.md is true: its views have the columns it names, and its queries run."""

import re
from pathlib import Path

import pytest

from penstock.rundir import EXAMPLE_SCHEMA, FRAGMENT_SCHEMA, ROLLOUT_SCHEMA
from penstock.rundir.views import VIEWS

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text("utf-8")
OWN = {
    "rollouts": ROLLOUT_SCHEMA.names,
    "evaluations": ROLLOUT_SCHEMA.names,
    "batches": EXAMPLE_SCHEMA.names,
    "fragments": FRAGMENT_SCHEMA.names,
}


def documented() -> dict[str, list[str]]:
    section = PAGE.partition("| View |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    return {name: OWN.get(name, []) + re.findall(r"`(\w+)`", columns) for name, columns in rows}


def test_every_view_is_described():
    assert tuple(documented()) == VIEWS


@pytest.mark.parametrize("name", VIEWS)
def test_the_columns_are_those_of_the_view(views, name):
    assert views.select(f"SELECT * FROM {name} LIMIT 0").columns == documented()[name]


@pytest.mark.parametrize("sql", re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL))
def test_the_queries_give_rows(views, sql):
    assert views.select(sql).table.num_rows > 0
