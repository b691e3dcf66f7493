"""The durable side of replay: sealed groups, training batches, starts and fates, as files of the run directory.

A group is durable once the file that holds it has been renamed into place; files are never changed afterwards.
One process writes; any other may read at any time. docs/formats.md describes the files.
"""

import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from penstock.replay.config import StoreConfig
from penstock.replay.history import History, LoggedFate, SealedRollout, StoredBatch
from penstock.replay.ledger import Ledger
from penstock.replay.lineages import Lineages
from penstock.rundir import (
    JsonLinesLog,
    RunDirectory,
    read_examples,
    read_json_lines,
    read_records,
    read_rows,
    write_examples,
    write_records,
)
from penstock.types import Clock, RLExample, RolloutRecord, RunDirectoryError, WeightVersion


class ExperienceStore(Protocol):
    """What the replay buffer needs of a store; implemented by `RolloutStore`."""

    @property
    def lineages(self) -> Lineages:
        """The run's lives."""
        ...

    def open_ledger(self, lineage: int = 0) -> Ledger:
        """Makes this process the run's writer."""
        ...

    def seal(self, records: Sequence[RolloutRecord]) -> None:
        """Makes whole groups durable."""
        ...

    def write_batch(self, batch_id: str, examples: Sequence[RLExample], step: int, lineage: int) -> None:
        """Makes the batch of update `step` durable."""
        ...

    def read_records(self, group_ids: Collection[str] | None = None) -> list[RolloutRecord]:
        """Sealed rollouts: of some groups, or all."""
        ...

    def history(self) -> History:
        """What the files say about every rollout."""
        ...

    def expendable(self, live_groups: Collection[str]) -> tuple[str, ...]:
        """Files that may be deleted once the checkpoint that is being made is there."""
        ...

    def expire(self, names: Collection[str]) -> None:
        """Deletes files that `expendable` named."""
        ...

    def maintain(self) -> None:
        """One round of compaction."""
        ...


class RolloutStore:
    """Files of one run.

    Args:
        directory: Of the run.
        config: Of the files.
        clock: Stamps names and lines.
    """

    def __init__(
        self, directory: RunDirectory | str | Path, config: StoreConfig = StoreConfig(), clock: Clock = time.time
    ) -> None:
        if not isinstance(directory, RunDirectory):
            directory = RunDirectory(directory)
            directory.rollouts.mkdir(parents=True, exist_ok=True)
            directory.batches.mkdir(exist_ok=True)
        self._directory = directory
        self._compression = config.compression
        self._clock = clock
        self._logs: list[JsonLinesLog] = []
        self.lineages = Lineages(directory.lineages_path)

    def open_ledger(self, lineage: int = 0) -> Ledger:
        """Makes this process the run's writer: a ledger that writes ``tickets.jsonl`` and ``fates.jsonl``.

        What a killed writer left unfinished is deleted. `close` closes the logs.
        """
        self._directory.remove_unfinished()
        tickets = JsonLinesLog(self._directory.tickets_path)
        fates = JsonLinesLog(self._directory.fates_path)
        self._logs += [tickets, fates]
        return Ledger(lineage, tickets, fates, self._clock)

    def close(self) -> None:
        """Flushes and closes the logs."""
        while self._logs:
            self._logs.pop().close()

    def seal(self, records: Sequence[RolloutRecord]) -> None:
        """Writes ``rollouts/part-<uuid>.parquet``; when this returns the rollouts are durable."""
        path = self._directory.rollouts / f"part-{uuid.uuid4().hex}.parquet"
        write_records(path, records, self._compression)

    def write_batch(self, batch_id: str, examples: Sequence[RLExample], step: int, lineage: int) -> None:
        """Writes ``batches/<batch_id>.parquet``."""
        path = self._directory.batches / f"{batch_id}.parquet"
        write_examples(path, examples, batch_id, step, lineage, self._compression)

    def read_records(self, group_ids: Collection[str] | None = None) -> list[RolloutRecord]:
        """Sealed rollouts, file by file; of some groups, or all.

        Raises:
            SchemaVersionError: a newer Penstock wrote a file.
        """
        wanted = None if group_ids is None else set(group_ids)
        records: list[RolloutRecord] = []
        for path in self._parts():
            if wanted is not None and wanted.isdisjoint(_group_ids(path)):
                continue
            for record in read_records(path):
                if wanted is None or record.group_id in wanted:
                    records.append(record)
        return records

    def read_batch(self, batch_id: str) -> list[RLExample]:
        """The examples of one update."""
        return read_examples(self._directory.batches / f"{batch_id}.parquet")

    def history(self) -> History:
        """What the files say about every rollout; safe while the run goes on."""
        return History(
            started={
                str(row["ticket_id"]): int(row["rollouts"]) for row in read_json_lines(self._directory.tickets_path)
            },
            sealed={sealed.rollout_id: sealed for path in self._parts() for sealed in _sealed(path)},
            fates={
                str(row["rollout_id"]): LoggedFate(
                    str(row["fate"]), WeightVersion(int(row["lineage"]), int(row["step"]))
                )
                for row in read_json_lines(self._directory.fates_path)
            },
            batches=[_stored_batch(path) for path in sorted(self._directory.batches.glob("*.parquet"))],
        )

    def expendable(self, live_groups: Collection[str]) -> tuple[str, ...]:
        """Files that may be deleted once the checkpoint that is being made is there."""
        return ()

    def expire(self, names: Collection[str]) -> None:
        """Deletes files that `expendable` named."""

    def maintain(self) -> None:
        """One round of compaction."""

    def _parts(self) -> list[Path]:
        return sorted(self._directory.rollouts.glob("*.parquet"))


def _sealed(path: Path) -> list[SealedRollout]:
    rows = read_rows(path, ["rollout_id", "group_id", "lineage", "newest_weight_step"])
    return [
        SealedRollout(row["rollout_id"], row["group_id"], WeightVersion(row["lineage"], row["newest_weight_step"]))
        for row in rows
        if "rollout_id" in row  # rows of the original form have no ids, so there is no ledger to rebuild
    ]


def _stored_batch(path: Path) -> StoredBatch:
    rows = read_rows(path, ["lineage", "step", "rollout_ids"])
    if not rows:
        raise RunDirectoryError(f"{path} holds no examples: it is not a batch of this run")
    ids = tuple(str(rollout_id) for row in rows for rollout_id in row["rollout_ids"])
    return StoredBatch(path.stem, WeightVersion(rows[0]["lineage"], rows[0]["step"]), ids)


def _group_ids(path: Path) -> set[str]:
    return {str(row["group_id"]) for row in read_rows(path, ["group_id"]) if row}
