"""What the ledger and retention read of stored files: a few columns of each, never the arrays."""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from collections.abc import Callable, Iterable
from itertools import repeat

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.replay.formats import ExperienceFormat
from penstock.replay.history import History, LoggedFate, SealedRollout, StoredBatch
from penstock.rundir import RunDirectory, read_json_lines
from penstock.rundir.live_files import read_live
from penstock.rundir.parquet import read_columns
from penstock.rundir.storage import Storage
from penstock.types import RunDirectoryError, WeightVersion

_SEALED = ("rollout_id", "group_id", "lineage", "newest_weight_step", "complete")


def read_history(
    directory: RunDirectory,
    storage: Storage,
    experience: ExperienceFormat,
    on_damage: Callable[[str, Exception], None] | None = None,
) -> History:
    """What all files say about every rollout; safe while they are written, merged and deleted.

    Args:
        directory: The run's.
        storage: Where its rollouts and batches are.
        experience: Which they are.
        on_damage: Told of files that cannot be read, which do not count then; None makes that an error.

    Raises:
        SchemaVersionError: a newer Penstock wrote a file.
        RunDirectoryError: a file is not one of ours.
    """

    def read_batch(file: pq.ParquetFile, name: str) -> StoredBatch:
        return _stored_batch(file, name, storage.locate(name))

    parts = read_live(storage, experience.folder, lambda file, _: list(_sealed(file)), on_damage)
    batches = read_live(storage, experience.batch_folder, read_batch, on_damage)
    return History(
        started={str(row["ticket_id"]): int(row["rollouts"]) for row in read_json_lines(directory.tickets_path)},
        sealed={sealed.rollout_id: sealed for rows in parts.values() for sealed in rows},
        fates={
            str(row["rollout_id"]): LoggedFate(str(row["fate"]), WeightVersion(int(row["lineage"]), int(row["step"])))
            for row in read_json_lines(directory.fates_path)
        },
        batches=list(batches.values()),
    )


def groups_of_part(file: pq.ParquetFile) -> set[str]:
    """The groups of a part; none for rows of the original form, which have no ids."""
    return set(read_columns(file, ["group_id"]).to_pydict().get("group_id", ()))


def ids_of_part(table: pa.Table, name: str) -> list[str]:
    """Row by row what tells a rollout from every other; rows of the original form are told apart by file and place."""
    if "rollout_id" in table.column_names:
        return table.column("rollout_id").to_pylist()
    return [f"{name} {row}" for row in range(table.num_rows)]


def groups_of_batch(file: pq.ParquetFile) -> set[str]:
    """The groups that a batch trains on."""
    ids = read_columns(file, ["rollout_ids"]).to_pydict().get("rollout_ids", ())
    return {str(rollout_id).rpartition("/")[0] for row in ids for rollout_id in row}


def stem_of(name: str) -> str:
    """A file's name without folder and suffix."""
    return name.rpartition("/")[2].removesuffix(".parquet")


def _sealed(file: pq.ParquetFile) -> Iterable[SealedRollout]:
    columns = read_columns(file, _SEALED).to_pydict()
    if "rollout_id" not in columns:
        return []  # rows of the original form have no ids, so there is no ledger to rebuild
    versions = map(WeightVersion, columns["lineage"], columns["newest_weight_step"])
    complete = columns.get("complete", repeat(True))
    return map(SealedRollout, columns["rollout_id"], columns["group_id"], versions, complete)


def _stored_batch(file: pq.ParquetFile, name: str, where: str) -> StoredBatch:
    columns = read_columns(file, ["lineage", "step", "rollout_ids"]).to_pydict()
    if not columns.get("step"):
        raise RunDirectoryError(f"{where} holds no examples: it is not a batch of this run")
    ids = tuple(str(rollout_id) for row in columns["rollout_ids"] for rollout_id in row)
    return StoredBatch(stem_of(name), WeightVersion(columns["lineage"][0], columns["step"][0]), ids)
