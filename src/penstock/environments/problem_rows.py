"""Problems in files: rows of JSONL or Parquet, and the examples that are made of them.

Paths may be fsspec URLs and may hold ``*``; all rows are read into memory, and errors name the file, the line and the
column.
"""

import glob
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.environments.base import Prompt
from penstock.environments.example_environment import Example, hashed_id, split_by_hash
from penstock.types import ConfigError
from penstock.types.importing import nearest

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


def read_rows(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], field: str) -> list[Row]:
    """The rows of one or more files, in order.

    Args:
        paths: Files ending in ``.parquet``, or else read as one JSON object a line, in UTF-8; what ends in ``.gz``,
            ``.bz2`` or ``.xz`` is decompressed.
        field: The config field, for the message.

    Raises:
        ConfigError: a file is missing, unreadable or malformed, or there are no rows.
    """
    rows: list[Row] = []
    for path in _expanded([paths] if isinstance(paths, str | os.PathLike) else paths, field):
        rows.extend(_read_parquet(path, field) if path.lower().endswith(".parquet") else _read_jsonl(path, field))
    if not rows:
        raise ConfigError(f"{field} {paths!r} holds no rows")
    return rows


def column(row: Row, name: str, field: str, source: str, remedy: str = "") -> Any:
    """A row's value; `remedy` is what else may help where there is none.

    Raises:
        ConfigError: the row has no such column, or null in it.
    """
    if row.get(name) is None:
        known = ", ".join(row)
        problem = "is null" if name in row else f"does not exist{nearest(name, row)}: there are {known}"
        raise ConfigError(f"{field} {name!r}: in {source} this column {problem}{remedy}")
    return row[name]


def _expanded(paths: Sequence[str | os.PathLike[str]], field: str) -> list[str]:
    found: list[str] = []
    for path in [os.fspath(path) for path in paths]:
        if "://" in path:
            found.append(path)
            continue
        local = str(Path(path).expanduser())
        matches = sorted(glob.glob(local, recursive=True)) if "*" in local else [local]
        if Path(local).is_dir():
            raise ConfigError(
                f"{field} {path!r} is a folder: name its files, such as {os.path.join(path, '*.jsonl')!r}"
            )
        if not matches or not Path(matches[0]).is_file():
            folder = Path(local).parent
            siblings = [other.name for other in folder.glob("*")] if folder.is_dir() else []
            raise ConfigError(f"{field} {path!r}: no such file{nearest(Path(local).name, siblings)}")
        found.extend(matches)
    return found


def _read_jsonl(path: str, field: str) -> list[Row]:
    import fsspec

    try:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            return list(_parsed(file, path, field))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field} {path!r} is no {_FORM}: {error}") from error
    except ConfigError:
        raise
    except Exception as error:  # file systems of URLs have their own errors, and compressions theirs
        raise ConfigError(f"{field} {path!r} cannot be read: {error or type(error).__name__}") from error


_FORM = "JSONL in UTF-8, one object a line (Parquet is what ends in .parquet)"


def _parsed(lines: Any, path: str, field: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # its syntax; a number of too many digits; too deep
            said = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{field} {path!r}, line {number} is not JSON: {said}; it is to be {_FORM}") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{field} {path!r}, line {number} is a {type(row).__name__}: expected a JSON object; it is to "
                f"be {_FORM}"
            )
        yield row


def _read_parquet(path: str, field: str) -> list[Row]:
    import fsspec
    import pyarrow.parquet

    try:
        with fsspec.open(path, "rb") as file:
            return pyarrow.parquet.read_table(file).to_pylist()
    except Exception as error:  # as above, and Arrow's
        raise ConfigError(f"{field} {path!r} cannot be read as Parquet: {error or type(error).__name__}") from error


def examples_of(
    rows: Sequence[Row], path: str, prompt_column: str, answer_column: str | None, prompt_format: str | None = None
) -> list[Example]:
    """One example per row; equal rows are told apart by number, and a column that only others have is None.

    Args:
        rows: Of a data set.
        path: Where they were read, for messages.
        prompt_column: Holds the prompt: text, or chat messages.
        answer_column: Holds the reference answer; None where there is none.
        prompt_format: Makes the prompt from a row's columns instead.
    """
    seen: Counter[str] = Counter()
    examples: list[Example] = []
    names: dict[str, None] = {name: None for row in rows for name in row}
    for number, row in enumerate(rows, start=1):
        source = f"row {number} of {path}"
        prompt = _prompt(row, source, prompt_column, prompt_format)
        answer = ""
        if answer_column:
            without = "; set it to null where the problems have none"
            answer = column(row, answer_column, "env_args.answer_column", source, without)
        example_id = hashed_id(json.dumps([prompt, answer], sort_keys=True, default=str), seen)
        columns = row if len(row) == len(names) else {**names, **row}
        examples.append(Example(example_id, prompt, str(answer), columns))
    answered = sum(not isinstance(e.prompt, str) and e.prompt[-1].get("role") == "assistant" for e in examples)
    if answered:
        logger.warning(
            "%s: %d of %d prompts end with a message of the assistant, after which the policy is asked for "
            "another: where that is the answer, take it out, and give it as answer_column",
            path, answered, len(examples),
        )  # fmt: skip
    return examples


def _prompt(row: Row, source: str, name: str, prompt_format: str | None) -> Prompt:
    if prompt_format is not None:
        try:
            return prompt_format.format(**row)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"env_args.prompt_format {prompt_format!r} does not fit {source}: {error!r}; "
                f"its columns are {', '.join(row)}; a brace that is meant as one is written twice"
            ) from error
    prompt = column(row, name, "env_args.prompt_column", source)
    if isinstance(prompt, str) or _are_messages(prompt):
        return prompt
    raise ConfigError(
        f"env_args.prompt_column {name!r}: {source} holds {prompt!r:.60} ({type(prompt).__name__}): "
        "expected text, or a list of messages with role and content"
    )


def split_by_prompt(examples: list[Example], fraction: float, path: str) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples; rows with equal prompts stay together.

    Raises:
        ConfigError: one of the two would be empty.
    """
    train, held_out = split_by_hash(examples, fraction, prompt_key)
    if not train or not held_out:
        raise ConfigError(f"env_args.path {path!r} has only one distinct prompt: add rows, or give env_args.eval_path")
    return train, held_out


def prompt_key(example: Example) -> str:
    """Equal for equal prompts."""
    return json.dumps(example.prompt, sort_keys=True, default=str)


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and "role" in message and "content" in message for message in prompt)
    )
