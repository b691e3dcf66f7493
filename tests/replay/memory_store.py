"""An `ExperienceStore` in memory, for buffers whose files are of no matter."""

from collections.abc import Collection, Sequence
from pathlib import Path

from penstock.replay import Ledger, Lineages
from penstock.replay.history import History, LoggedFate, SealedRollout, StoredBatch
from penstock.types import RLExample, RolloutRecord, WeightVersion


class MemoryLog:
    """A `JsonLinesLog` without a file."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def append(self, *rows: dict) -> None:
        self.rows += rows

    def sync(self) -> None:
        pass


class MemoryStore:
    """An `ExperienceStore` without files; it outlives the lives of a run as a disk does."""

    def __init__(self, lineages: Path = Path("/nonexistent/lineages.jsonl")) -> None:
        self.lineages = Lineages(lineages)
        self.sealed: dict[str, RolloutRecord] = {}
        self.batches: list[StoredBatch] = []
        self.tickets, self.fates = MemoryLog(), MemoryLog()
        self.files = 0

    def open_ledger(self, lineage: int = 0) -> Ledger:
        return Ledger(lineage, self.tickets, self.fates)

    def seal(self, records: Sequence[RolloutRecord]) -> None:
        self.files += 1
        self.sealed |= {record.rollout.rollout_id: record for record in records}

    def write_batch(self, batch_id: str, examples: Sequence[RLExample], step: int, lineage: int) -> None:
        ids = tuple(rollout_id for example in examples for rollout_id in example.rollout_ids)
        assert self.sealed.keys() >= set(ids), "a batch holds rollouts that are not durable"
        self.batches.append(StoredBatch(batch_id, WeightVersion(lineage, step), ids))

    def read_records(self, group_ids: Collection[str] | None = None) -> list[RolloutRecord]:
        return [r for r in self.sealed.values() if group_ids is None or r.group_id in group_ids]

    def expendable(self, live_groups: Collection[str], made_before_s: float = 0.0) -> tuple[str, ...]:
        return ()

    def expire(self, names: Collection[str]) -> None:
        assert not names

    def maintain(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def history(self) -> History:
        sealed = [
            SealedRollout(i, r.group_id, WeightVersion(r.rollout.metadata.lineage, r.rollout.newest_weight_step))
            for i, r in list(self.sealed.items())  # the threads of a life that crashed may still seal
        ]
        return History(
            {row["ticket_id"]: row["rollouts"] for row in self.tickets.rows},
            {each.rollout_id: each for each in sealed},
            {
                row["rollout_id"]: LoggedFate(row["fate"], WeightVersion(row["lineage"], row["step"]))
                for row in self.fates.rows
            },
            list(self.batches),
            places={row["ticket_id"]: (row["epoch"], row["position"]) for row in self.tickets.rows if "epoch" in row},
        )
