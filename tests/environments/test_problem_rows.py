"""Reading JSONL and Parquet."""

import codecs
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from penstock.environments.problem_rows import column, read_rows
from penstock.types import ConfigError

ROWS = [{"q": "a", "n": 1}, {"q": "b", "n": 2}]


def write_jsonl(path, rows=ROWS):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", "utf-8")
    return str(path)


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path):
    jsonl = write_jsonl(tmp_path / "rows.jsonl")
    parquet = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    assert read_rows(jsonl, "path") == read_rows(parquet, "path") == ROWS
    assert read_rows([jsonl, parquet], "path") == ROWS * 2
    assert read_rows(str(tmp_path / "*.jsonl"), "path") == ROWS
    assert read_rows(f"file://{jsonl}", "path") == ROWS
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(codecs.BOM_UTF8 + Path(jsonl).read_bytes())
    assert read_rows(str(marked), "path") == read_rows(marked, "path") == ROWS
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "rows.jsonl.gz").write_bytes(gzip.compress(Path(jsonl).read_bytes()))
    assert read_rows(str(tmp_path / "**" / "*.gz"), "path") == ROWS
    Path(parquet).rename(tmp_path / "ROWS.PARQUET")
    assert read_rows(str(tmp_path / "ROWS.PARQUET"), "path") == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', r"env_args.path '.*rows.jsonl', line 2 is not JSON: Expecting value"),
        ("rows.jsonl", "[1, 2]\n", "line 1 is a list: expected a JSON object"),
        ("rows.jsonl", "\n\n", "holds no rows"),
        ("rows.jsonl", b"\xff\xfe", "is no JSONL in UTF-8, one object a line .*codec can't decode"),
        ("rows.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1 is not JSON: Exceeds the limit"),
        ("rows.jsonl", '{"a": ' + "[" * 100_000, "line 1 is not JSON: maximum recursion depth"),
        (
            "rows.json",
            '[\n  {"a": 1}\n]\n',
            "line 1 is not JSON: Expecting value; it is to be JSONL in UTF-8, one object",
        ),
        ("rows.jsonl.gz", b"\x1f\x8b junk", "rows.jsonl.gz' cannot be read: "),
        ("rows.parquet", "not parquet", "cannot be read as Parquet"),
    ],
)
def test_malformed_files_are_one_line_with_the_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        read_rows(str(path), "env_args.path")


def test_a_missing_file_gets_the_nearest_name(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(ConfigError, match=r"no such file \(did you mean 'train.jsonl'\?\)"):
        read_rows(str(tmp_path / "trian.jsonl"), "env_args.path")
    with pytest.raises(ConfigError, match="no such file"):
        read_rows(str(tmp_path / "nowhere" / "*.jsonl"), "env_args.path")
    with pytest.raises(ConfigError, match=r"is a folder: name its files, such as '.*/\*\.jsonl'$"):
        read_rows(str(tmp_path), "env_args.path")
    with pytest.raises(ConfigError, match=r"env_args.path 'nofs://a.jsonl' cannot be read: Protocol not known: nofs"):
        read_rows("nofs://a.jsonl", "env_args.path")


def test_columns():
    assert column({"q": 0}, "q", "env_args.prompt_column", "row 1") == 0
    with pytest.raises(
        ConfigError,
        match=r"in row 1 .*\(did you mean 'question'\?\): there are question",
    ):
        column({"question": "a"}, "qestion", "env_args.prompt_column", "row 1")
    with pytest.raises(ConfigError, match="this column is null"):
        column({"q": None}, "q", "env_args.prompt_column", "row 1")
