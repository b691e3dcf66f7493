"""Rollouts as training examples for supervised fine-tuning or preference training, and as files of them.

Examples have TRL's conversational form: the prompt is every message before the policy's first; the completion is all
the rest, with what tools and the environment said in between. A rollout without stored turns, or in which the policy
said nothing, gives no example. Texts are streamed file by file: a group lies in one file, so no more than a few groups
are in memory.

Files are JSON lines, Parquet, or a directory that Hugging Face ``datasets`` loads as it is. They are written aside,
flushed, and given their name, unless something has that name by then: what exists is never replaced.
"""

import errno
import json
import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dashboard.groups import GroupFilter, check_lesson, source_of
from penstock.rundir.storage import check_name, flush
from penstock.rundir.views import RunViews
from penstock.text.safe_text import printable
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
            flush(file)
        _publish(aside, path)
        flush(path.parent)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror or error}: choose another place") from error
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


Selection = Literal["all", "best", "pairs"]

_CANDIDATES = """
SELECT rollout_id, group_id, episode_reward AS reward, advantage
FROM rollouts
WHERE ($lesson IS NULL OR lesson_id = $lesson) AND ($fate IS NULL OR state = $fate)
  AND ($step IS NULL OR coalesce(trained_step, fate_step) = $step
       OR rollout_id IN (SELECT rollout_id FROM uses WHERE survives AND step = $step))
ORDER BY group_id, episode_reward DESC, try_cast(regexp_extract(rollout_id, '[0-9]+$') AS BIGINT), rollout_id
"""
_TEXT_COLUMNS = [
    "rollout_id", "group_id", "lesson_id", "env_name", "env_example_id", "weight_step", "finish_reason", "turns",
]  # fmt: skip
_SCAN_ROWS = 1024


@dataclass(frozen=True, slots=True)
class DatasetRequest:
    """What to export.

    Attributes:
        format: `jsonl`, `parquet`, or `hf` for a directory that Hugging Face datasets loads.
        path: Where; must not exist.
        selection: `all` rollouts, the `best` of each group, or `pairs` of best and worst.
        wanted: Which rollouts are considered.
        min_reward: Leaves out rollouts below it; in pairs, pairs whose better one is below it.
        min_margin: Leaves out pairs whose rewards differ by less.
    """

    format: DatasetFormat
    path: Path
    selection: Selection = "all"
    wanted: GroupFilter = field(default_factory=GroupFilter)
    min_reward: float | None = None
    min_margin: float | None = None


@dataclass(slots=True)
class DatasetReport:
    """What comes of an export.

    Attributes:
        path: Where it is.
        considered: Rollouts that the filter let through.
        examples: How many were written so far.
        without_text: Chosen rollouts or pairs that gave no example, for they have no text.
        indistinct: Pairs whose completions or prompts did not fit together: the same text twice, or different prompts.
    """

    path: Path
    considered: int
    examples: int = 0
    without_text: int = 0
    indistinct: int = 0


@dataclass(frozen=True, slots=True)
class _Selection:
    """One example to be: a rollout, or a better and a worse one."""

    group_id: str
    ids: tuple[str, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float | None, ...]


def export_dataset(views: RunViews, request: DatasetRequest) -> DatasetReport:
    """Writes a data set; the path appears only when all of it is there.

    Raises:
        ConfigError: the path exists or cannot be written, or there is nothing to write.
    """
    return views.look(lambda: _export(views, request))


def _export(views: RunViews, request: DatasetRequest) -> DatasetReport:
    wanted = request.wanted
    parameters = {"lesson": wanted.lesson_id, "fate": wanted.state, "step": wanted.step}
    candidates = views.select(_CANDIDATES, parameters).to_dicts()
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in candidates:
        groups[row["group_id"]].append(row)
    choices = [choice for members in groups.values() for choice in _choose(members, request)]
    if not choices:
        check_lesson(views, wanted.lesson_id)
        if not candidates and (source := source_of(views)) is not None:
            raise ConfigError(f"the run has no rollouts of its own: it trains on those of {source}: export those")
        words = f" that match {wanted.words}" if wanted.words else ""
        raise ConfigError(
            f"--select {request.selection} finds nothing among {len(candidates)} rollouts{words}: "
            "loosen --min-reward, --min-margin or the filters"
        )
    report = DatasetReport(request.path, len(candidates))
    is_pairs = request.selection == "pairs"
    examples = _at_least_one(_examples(views, choices, report), report, request)
    write_dataset(request.path, request.format, examples, is_pairs, views.directory.path.name)
    return report


def _at_least_one(
    examples: Iterator[dict[str, Any]], report: DatasetReport, request: DatasetRequest
) -> Iterator[dict[str, Any]]:
    """Fails at its end where there was none, so that no empty data set is left."""
    yield from examples
    if not report.examples:
        raise ConfigError(
            f"--select {request.selection} finds no example: of what it chose, {report.without_text:,} have no text"
            + (f" and {report.indistinct:,} are pairs of equal texts or different prompts" if report.indistinct else "")
            + ": choose others by --select, --step, --lesson or --fate"
        )


def _choose(members: Sequence[Mapping[str, Any]], request: DatasetRequest) -> list[_Selection]:
    """Which examples a group gives; its members come best first."""
    best, worst = members[0], members[-1]
    if request.selection == "pairs":
        margin = best["reward"] - worst["reward"]
        fits = margin > 0 and margin >= (request.min_margin or 0) and _good(best, request)
        return [_choice(best, worst)] if fits else []
    considered = members[:1] if request.selection == "best" else members
    return [_choice(member) for member in considered if _good(member, request)]


def _good(member: Mapping[str, Any], request: DatasetRequest) -> bool:
    return request.min_reward is None or member["reward"] >= request.min_reward


def _choice(*members: Mapping[str, Any]) -> _Selection:
    return _Selection(
        members[0]["group_id"],
        tuple(member["rollout_id"] for member in members),
        tuple(member["reward"] for member in members),
        tuple(member["advantage"] for member in members),
    )


def _examples(views: RunViews, choices: Sequence[_Selection], report: DatasetReport) -> Iterator[dict[str, Any]]:
    """Joins choices with their texts, in the order of the files."""
    pending: dict[str, list[_Selection]] = defaultdict(list)
    for choice in choices:
        for rollout_id in choice.ids:
            pending[rollout_id].append(choice)
    texts: dict[str, dict[str, Any]] = {}
    for batch in views.files.scan_rollouts(_TEXT_COLUMNS, _SCAN_ROWS):
        ids = batch.column("rollout_id").to_pylist()
        wanted = pa.array([rollout_id in pending for rollout_id in ids], pa.bool_())
        for row in batch.filter(wanted).to_pylist():
            texts[row["rollout_id"]] = row
            for choice in pending[row["rollout_id"]]:
                if all(rollout_id in texts for rollout_id in choice.ids):
                    yield from _example(choice, [texts[rollout_id] for rollout_id in choice.ids], report)
                    for rollout_id in choice.ids:
                        del texts[rollout_id]


def _example(choice: _Selection, rows: Sequence[Mapping[str, Any]], report: DatasetReport) -> Iterator[dict[str, Any]]:
    """The example of a choice, or none."""
    parted = [_parted(row["turns"]) for row in rows]
    if any(part is None for part in parted):
        report.without_text += 1
        return
    (prompt, completion), *rest = [part for part in parted if part is not None]
    first = rows[0]
    origin = {key: first[key] for key in ("lesson_id", "env_name", "env_example_id")}
    if not rest:
        report.examples += 1
        yield {
            "prompt": prompt,
            "completion": completion,
            "reward": choice.rewards[0],
            "advantage": choice.advantages[0],
            "rollout_id": choice.ids[0],
            "group_id": choice.group_id,
            **origin,
            "weight_step": first["weight_step"],
            "finish_reason": first["finish_reason"],
        }
        return
    (other_prompt, rejected) = rest[0]
    if other_prompt != prompt or rejected == completion:
        report.indistinct += 1
        return
    report.examples += 1
    yield {
        "prompt": prompt,
        "chosen": completion,
        "rejected": rejected,
        "reward_chosen": choice.rewards[0],
        "reward_rejected": choice.rewards[1],
        "rollout_id_chosen": choice.ids[0],
        "rollout_id_rejected": choice.ids[1],
        "group_id": choice.group_id,
        **origin,
    }


Messages = list[dict[str, str]]


def _parted(turns: Sequence[Mapping[str, Any]] | None) -> tuple[Messages, Messages] | None:
    """Messages before the policy's first one, and the others; None where it said nothing."""
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns or ()]
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    return (messages[:first], messages[first:]) if first else None
