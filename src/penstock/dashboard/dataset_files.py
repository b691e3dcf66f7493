"""Data sets as files: JSON lines, Parquet, or a directory that Hugging Face ``datasets`` loads as it is.

Written aside, flushed, and given its name, unless something has that name by then: what exists is never replaced.
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dashboard.safe_text import printable
from penstock.rundir.atomic import check_name
from penstock.types import ConfigError

DatasetFormat = Literal["jsonl", "parquet", "hf"]

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_ORIGIN = [("lesson_id", pa.string()), ("env_name", pa.string()), ("env_example_id", pa.string())]
SFT_SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("completion", _MESSAGES),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        *_ORIGIN,
        ("weight_step", pa.int32()),
        ("finish_reason", pa.string()),
    ]
)
PAIR_SCHEMA = pa.schema(
    [
        ("prompt", _MESSAGES),
        ("chosen", _MESSAGES),
        ("rejected", _MESSAGES),
        ("reward_chosen", pa.float64()),
        ("reward_rejected", pa.float64()),
        ("rollout_id_chosen", pa.string()),
        ("rollout_id_rejected", pa.string()),
        ("group_id", pa.string()),
        *_ORIGIN,
    ]
)

_ROWS_AT_ONCE = 1000
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_PARQUET_NAME = "data/train-00000-of-00001.parquet"
_DTYPES = {pa.string(): "string", pa.float64(): "float64", pa.int32(): "int32"}


def write_dataset(
    path: Path, format: DatasetFormat, examples: Iterable[Mapping[str, Any]], is_pairs: bool, name: str
) -> None:
    """Writes examples.

    Args:
        path: Must not exist; its folder must.
        format: Of the files.
        examples: Rows of `SFT_SCHEMA`, or of `PAIR_SCHEMA`.
        is_pairs: Which of the two.
        name: What the examples come from, for the card.

    Raises:
        ConfigError: the path exists, or cannot be written.
    """
    schema = PAIR_SCHEMA if is_pairs else SFT_SCHEMA
    with _new(path) as aside:
        if format == "jsonl":
            _write_json_lines(aside, examples)
        elif format == "parquet":
            _write_parquet(aside, schema, examples)
        else:
            file = aside / _PARQUET_NAME
            for folder in (aside, file.parent):
                folder.mkdir()
            rows = _write_parquet(file, schema, examples)
            (aside / "README.md").write_text(_card(schema, rows, file.stat().st_size, is_pairs, name), "utf-8")


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends without an error."""
    check_name(path, "--out")
    if os.path.lexists(path):
        raise _taken(path)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield aside
        for file in [aside, *aside.rglob("*")]:
            _flush(file)
        _publish(aside, path)
        _flush(path.parent)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error}") from error
    finally:
        with suppress(OSError):  # it was never made
            shutil.rmtree(aside, ignore_errors=True) if aside.is_dir() else aside.unlink(missing_ok=True)


def _publish(aside: Path, path: Path) -> None:
    """Gives a file or folder its name, but not that of another file, or of a folder that is not empty."""
    if aside.is_dir():
        os.rename(aside, path)
        return
    try:
        os.link(aside, path)  # unlike a rename, it replaces nothing; the other name goes away at the end
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))  # takes the name, or fails
        os.replace(aside, path)


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"--out {path} exists already and is not overwritten: choose another path")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json_lines(path: Path, examples: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(example, ensure_ascii=False) + "\n")


def _write_parquet(path: Path, schema: pa.Schema, examples: Iterable[Mapping[str, Any]]) -> int:
    rows, remaining = 0, iter(examples)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk := list(islice(remaining, _ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
            rows += len(chunk)
    return rows


def _card(schema: pa.Schema, rows: int, bytes_: int, is_pairs: bool, name: str) -> str:
    """README.md with the front matter by which ``datasets`` knows features and splits."""
    import yaml

    front = {
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}],
        "dataset_info": {
            "features": [_feature(field) for field in schema],
            "splits": [{"name": "train", "num_bytes": bytes_, "num_examples": rows}],
            "download_size": bytes_,
            "dataset_size": bytes_,
        },
        "tags": ["reinforcement-learning", "penstock"],
    }
    kind = "preference pairs (`prompt`, `chosen`, `rejected`)" if is_pairs else "examples (`prompt`, `completion`)"
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# Rollouts of {printable(name)}\n\n"
        f"{rows} {kind} in TRL's conversational form, with their rewards, written by `penstock rollouts --export hf`.\n"
    )


def _feature(field: pa.Field) -> dict[str, Any]:
    if field.type == _MESSAGES:
        return {"name": field.name, "list": [{"name": key, "dtype": "string"} for key in ("role", "content")]}
    return {"name": field.name, "dtype": _DTYPES[field.type]}
