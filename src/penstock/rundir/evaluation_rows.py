"""What evaluations leave: ``evaluations/<label>-<lineage>-<step>.parquet``, one row per rollout of a held-out problem.

Rows are those of rollouts (`rollout_rows`) with two columns more. They lie apart from what is trained: no ticket stands
behind them, they have no fate, no ledger counts them, and no limit of the store deletes them. One file holds one
evaluation of every lesson and appears when that is over; the same evaluation made again, by the successor of a process
that died, takes its place. The files are in the run directory, wherever ``replay.store.url`` sends what is trained.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from penstock.rundir.directory import RunDirectory
from penstock.rundir.parquet import versioned, write_parquet
from penstock.rundir.rollout_rows import ROLLOUT_SCHEMA, table_from_records
from penstock.types import RolloutBatch, RolloutRecord

EVALUATION_SCHEMA = versioned(
    [
        *ROLLOUT_SCHEMA,
        pa.field("mode", pa.string(), nullable=False),
        pa.field("evaluation", pa.string(), nullable=False),
    ]
)


def table_from_evaluation(batches: Sequence[RolloutBatch], label: str) -> pa.Table:
    """The rows of one evaluation.

    Args:
        batches: What each lesson's gave.
        label: Which evaluation: `eval` or `micro_eval` of those during training, else when it was made.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    records = [
        RolloutRecord(rollout, group.group_id, group_key=group.key)
        for batch in batches
        for group in batch.groups
        for rollout in group.rollouts
    ]
    rows = table_from_records(records)
    named = [pa.array([text] * len(records), pa.string()) for text in ("eval", label)]
    return pa.Table.from_arrays([*rows.columns, *named], schema=EVALUATION_SCHEMA)


def write_evaluation(
    directory: RunDirectory, batches: Sequence[RolloutBatch], label: str, lineage: int, step: int
) -> Path | None:
    """Writes an evaluation, durably and whole; returns where, or None where there was no rollout.

    Args:
        directory: Of the run; the folder is made with the first evaluation.
        batches: What each lesson's gave.
        label: See `table_from_evaluation`.
        lineage: Of the weights that were evaluated.
        step: Number of the version that was evaluated.

    Raises:
        OSError: it cannot be written.
        InvalidRolloutError: a rollout has no metadata.
    """
    table = table_from_evaluation(batches, label)
    if not table.num_rows:
        return None
    path = directory.evaluations / f"{label}-{lineage}-{step}.parquet"
    path.parent.mkdir(exist_ok=True)  # not its parents: a run directory that is gone is not made anew
    write_parquet(path, table)
    return path
