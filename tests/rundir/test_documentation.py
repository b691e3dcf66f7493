"""docs/run_directory.md describes every column of the files, and no other, and events that no other page does."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.rundir import (
    EVALUATION_SCHEMA,
    EXAMPLE_SCHEMA,
    FRAGMENT_SCHEMA,
    FRAGMENT_USE_SCHEMA,
    ROLLOUT_SCHEMA,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run_directory.md"


@pytest.mark.parametrize(
    ("heading", "schema"),
    [
        ("### rollouts/", ROLLOUT_SCHEMA),
        ("### evaluations/", pa.schema(list(EVALUATION_SCHEMA)[len(ROLLOUT_SCHEMA) :])),
        ("### fragments/", FRAGMENT_SCHEMA),
        ("### batches/", EXAMPLE_SCHEMA),
        ("#### Batches of fragments", FRAGMENT_USE_SCHEMA),
    ],
)
def test_the_tables_are_the_schemas(heading, schema):
    section = PAGE.read_text().partition(heading)[2].partition("\n### ")[0].partition("\n#### Batches")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert [name for name, _ in rows] == schema.names
    for (name, text), field in zip(rows, schema, strict=True):
        assert ("null" in text) == field.nullable, name
        kind = text.replace("&lt;", "<").replace("&gt;", ">").split(" [")[0].split(", null")[0]
        assert re.sub(r"\bitem: ", "", str(field.type)).startswith(kind.rstrip(">")), (name, field.type)


def test_every_event_is_named_on_a_page():
    code = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    told = set(re.findall(r"event\(\s*\"(\w+)\"", code))
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert len(told) > 60
    assert sorted(event for event in told if f"`{event}`" not in pages) == []
