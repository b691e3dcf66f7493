"""Rollout files through our functions, against pyarrow alone on the same rows with the same settings.

Like is compared with like: a finished table is written and flushed to the disk, rows are made into a table and that
is written, a file is read into a table. Ours also checks versions, writes aside and renames. What it costs to make the
table of records, and records of the table, is printed beside it. Rounds are interleaved; medians.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.replay.workload import ROUND, Workload
from penstock.rundir import (
    read_parquet,
    read_records,
    records_from_table,
    table_from_records,
    write_parquet,
    write_records,
)
from penstock.types import Decoding, RolloutRecord
from penstock.types.generation import STAGES

PLAIN = (
    "lesson_id", "env_name", "env_example_id", "oldest_weight_step", "episode_reward", "finish_reason",
    "prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "response_mask", "response_weight_steps",
    "sample_starts",
)  # fmt: skip
"""Columns that are attributes of a rollout under the same name."""


def make_records(workload: Workload, rows: int) -> list[RolloutRecord]:
    """Records whose tokens and log-probabilities do not repeat, lest they compress better than any real ones."""
    rng = np.random.default_rng(0)
    length = workload.shape.response
    rollouts = [
        replace(
            workload.rollout(number, time.time()),
            prompt_tokens=rng.integers(0, 50_000, workload.shape.prompt, np.int32),
            response_tokens=rng.integers(0, 50_000, length, np.int32),
            response_logprobs=-rng.exponential(1.0, length).astype(np.float32),
            timings={"generate_s": 0.5, **dict.fromkeys(STAGES, 0.1), "tool_s": 0.1, "reward_s": 0.1},
        )
        for number in range(rows)
    ]
    return [
        RolloutRecord(rollout, rollout.group_id, f"{rollout.env_name}:{rollout.env_example_id}") for rollout in rollouts
    ]


def measure(workload: Workload, rows: int, repeats: int) -> dict[str, float]:
    """Median seconds by what was done, for so many rows."""
    records = make_records(workload, rows)
    table = table_from_records(records)
    with tempfile.TemporaryDirectory(prefix="penstock-parquet-") as folder:
        ours, theirs = Path(folder) / "ours.parquet", Path(folder) / "theirs.parquet"
        operations: dict[str, Callable[[], Any]] = {
            "pyarrow: write a table": lambda: write_alone(table, theirs, flush=False),
            "pyarrow: write and flush": lambda: write_alone(table, theirs, flush=True),
            "write a table": lambda: write_parquet(ours, table),
            "pyarrow: write records, flush": lambda: write_alone(
                pa.Table.from_pylist([plain_row(record) for record in records], table.schema), theirs, flush=True
            ),
            "write records": lambda: write_records(ours, records),
            "pyarrow: read a table": lambda: pq.read_table(theirs),
            "read a table": lambda: read_parquet(ours),
            "read records": lambda: read_records(ours),
            "make records of a table": lambda: records_from_table(table),
            "make a table of records": lambda: table_from_records(records),
        }
        seconds: dict[str, list[float]] = {name: [] for name in operations}
        for _ in range(repeats + 1):
            for name, operation in operations.items():
                began = time.perf_counter()
                operation()
                seconds[name].append(time.perf_counter() - began)
        check_files(ours, theirs, records)
        write_alone(table, theirs, flush=False)
        check_files(ours, theirs, records)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def plain_row(record: RolloutRecord) -> dict[str, Any]:
    """What one would give pyarrow without us: a dictionary, with the rollout's own arrays."""
    rollout, metadata = record.rollout, record.rollout.metadata
    assert metadata is not None and rollout.response_weight_steps is not None
    return {
        "schema_version": metadata.schema_version,
        "rollout_id": rollout.rollout_id,
        "group_id": record.group_id,
        "group_key": record.group_key,
        "worker_id": metadata.worker_id,
        "timestamp": metadata.timestamp,
        "lineage": metadata.lineage,
        "weight_step": metadata.weight_step,
        "newest_weight_step": int(rollout.response_weight_steps.max()),
        "turns": [asdict(turn) for turn in rollout.turns],
        "decoding": vars_of(rollout.decoding),
        "timings": list(rollout.timings.items()),
        **{name: getattr(rollout, name) for name in PLAIN},
    }


def vars_of(decoding: Decoding) -> dict[str, Any]:
    return {name: getattr(decoding, name) for name in Decoding.__slots__}


def settings(table: pa.Table) -> dict[str, Any]:
    """Those of our files, spelled for pyarrow; `check_files` compares what came of them."""
    strings = [field.name for field in table.schema if pa.types.is_string(field.type)]
    floats = [
        f"{field.name}.list.element"
        for field in table.schema
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]
    return {"compression": "zstd", "use_dictionary": strings, "use_byte_stream_split": floats}


def write_alone(table: pa.Table, path: Path, flush: bool) -> None:
    """Pyarrow without us."""
    with path.open("wb") as file:
        pq.write_table(table, file, **settings(table))
        if flush:
            file.flush()
            os.fsync(file.fileno())


def layout(path: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """Codec and encodings of every column chunk."""
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    chunks = [group.column(index) for group in groups for index in range(metadata.num_columns)]
    return [(chunk.path_in_schema, chunk.compression, chunk.encodings) for chunk in chunks]


def check_files(ours: Path, theirs: Path, records: list[RolloutRecord]) -> None:
    """Both hold the same rows in the same form, and the records read back are those written."""
    table = read_parquet(ours)
    assert table.equals(pq.read_table(theirs)) and layout(ours) == layout(theirs)
    for record, again in zip(records, records_from_table(table), strict=True):
        assert again.group_id == record.group_id and again.rollout.rollout_id == record.rollout.rollout_id
        for name in ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards"):
            assert np.array_equal(getattr(record.rollout, name), getattr(again.rollout, name)), name


def print_parquet(seconds: dict[str, float], workload: Workload, rows: int) -> None:
    print(f"\nParquet, {rows:,} rows of {workload.shape.tokens} tokens, zstd ({rows // ROUND} rounds' worth)")
    for name, value in seconds.items():
        megabytes = rows * workload.shape.array_bytes / 1e6
        print(f"  {name:<31}{rows / value:>10,.0f} rows/s{megabytes / value:>8,.0f} MB/s")
