"""Logs as tables where Arrow's own reader would not do; the views over them are in `test_views`."""

import subprocess
import sys

import pyarrow as pa
import pytest

from penstock.rundir.views import FATE_SCHEMA, read_log_table, read_metric_table
from penstock.types import RunDirectoryError

GOOD = b'{"step": 1, "time": 1.5, "train/loss": 0.25}\n'


def test_lines_that_kill_the_quick_reader_are_refused(tmp_path):
    """Each in a process of its own, because some of them end the process."""
    lines = [b"null\n", b"{} null\n", b"3\n", b"[" * 30_000 + b"]" * 30_000 + b"\n", b'{"a\x80": 1}\n']
    paths = [tmp_path / f"{number}.jsonl" for number, _ in enumerate(lines)]
    for path, line in zip(paths, lines, strict=True):
        path.write_bytes(GOOD + line + GOOD)
    code = (
        "import os, sys, pathlib\n"
        "from penstock.rundir.views import read_metric_table\n"
        "from penstock.types import RunDirectoryError\n"
        "for path in sys.argv[1:]:\n"
        "    if child := os.fork():\n"
        "        assert os.waitpid(child, 0)[1] == 0, path\n"
        "        continue\n"
        "    try: read_metric_table(pathlib.Path(path))\n"
        "    except RunDirectoryError as error: print('refused', error, flush=True)\n"
        "    os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("refused ")]
    assert len(told) == len(paths), done.stdout
    for path, line in zip(paths, told, strict=True):
        assert line.startswith(f"refused {path}, line 2 ")


def test_a_nested_value_takes_the_slow_way_to_the_same_table(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD)
    quick = read_metric_table(path)
    path.write_bytes(GOOD.replace(b"}", b', "lessons": ["a", "b"]}'))
    slow = read_metric_table(path)
    assert slow.drop_columns(["lessons"]) == quick
    assert slow.column("lessons").to_pylist() == [["a", "b"]]


def test_braces_inside_text_are_no_objects(tmp_path):
    path = tmp_path / "fates.jsonl"
    path.write_bytes(b'{"rollout_id": "a/0", "fate": "dropped", "reason": "{[}", "step": 2}\n')
    table = read_log_table(path, FATE_SCHEMA)
    assert table.column("reason").to_pylist() == ["{[}"] and table.schema == FATE_SCHEMA


def test_a_column_of_other_values_is_refused(tmp_path):
    path = tmp_path / "fates.jsonl"
    path.write_bytes(b'{"rollout_id": {"a": 1}}\n')
    with pytest.raises(RunDirectoryError, match="not a JSON object of this log"):
        read_log_table(path, FATE_SCHEMA)
    assert isinstance(read_log_table(tmp_path / "none", FATE_SCHEMA), pa.Table)


def test_a_metric_that_is_a_list_of_nulls_is_a_column_like_any_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "never": null}\n{"step": 2, "time": 2.0, "list": [null, null, null]}\n')
    table = read_metric_table(path)
    assert table.column("never").type == pa.float64() and table.column("never").null_count == 2
    assert table.column("list").to_pylist() == [None, [None, None, None]]
