"""An `ExperienceStore` that keeps nothing, so that a measurement shows the buffer's own work and no disk's."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from penstock.replay import Ledger, Lineages
from penstock.replay.history import History
from penstock.types import RLExample, RolloutRecord


class FateLog:
    """Takes a ledger's lines as a `JsonLinesLog` does; keeps the last fate of every rollout."""

    def __init__(self) -> None:
        self.fates: dict[str, str] = {}

    def append(self, *rows: dict[str, Any]) -> None:
        self.fates.update((row["rollout_id"], row["fate"]) for row in rows)

    def sync(self) -> None:
        pass


class NoFiles:
    """A store whose every operation does nothing.

    Args:
        fate_log: Told the fates; None lets them go too.
    """

    def __init__(self, fate_log: FateLog | None = None) -> None:
        self.lineages = Lineages(Path(os.devnull) / "none")
        self._fate_log = fate_log

    def open_ledger(self, lineage: int = 0) -> Ledger:
        return Ledger(lineage, None, self._fate_log)  # pyright: ignore[reportArgumentType]  # it has the two methods

    def seal(self, records: Sequence[RolloutRecord]) -> None:
        pass

    def write_batch(self, batch_id: str, examples: Sequence[RLExample], step: int, lineage: int) -> None:
        pass

    def read_records(self, group_ids: Collection[str] | None = None) -> list[RolloutRecord]:
        return []

    def history(self) -> History:
        return History({}, {}, {}, [])

    def expendable(self, live_groups: Collection[str], made_before_s: float = 0.0) -> tuple[str, ...]:
        return ()

    def expire(self, names: Collection[str]) -> None:
        pass

    def maintain(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}
