"""Files and log lines that cannot be read any more: put aside and told, so that they stop nothing.

Of a damaged log the other lines are kept, and the whole original is put aside. What a lost line of ``tickets.jsonl`` or
``fates.jsonl`` said follows from the other files, or does not count. A life whose line in ``lineages.jsonl`` is lost is
taken to continue the one before it, from the version under which its first ticket was admitted: that is the fork, or a
little before it.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from penstock.replay.history import NO_DAMAGE, Damage, ExperienceFormat
from penstock.replay.parts import Inventory
from penstock.rundir import RunDirectory
from penstock.rundir.directory import fork_of
from penstock.rundir.live_files import UNREADABLE, opened_part
from penstock.rundir.logs import to_json
from penstock.rundir.parquet import read_columns
from penstock.rundir.storage import DAMAGED, Storage, write_atomically
from penstock.types import RunDirectoryError

OnDamage = Callable[[str, str], None]
"""Told where a damaged file lies now, and what is wrong with it."""

_Row = dict[str, Any]


def repair_logs(directory: RunDirectory, on_damage: OnDamage) -> None:
    """Puts damaged logs of rollouts aside and what can be read of them in their places; nobody may have them open.

    Metrics and events have another writer, and no resume reads them.

    Args:
        directory: The run's.
        on_damage: Told of each.
    """
    _repair(directory.tickets_path, _is_ticket, on_damage)
    _repair(directory.fates_path, _is_fate, on_damage)
    _repair(directory.lineages_path, _is_fork, on_damage, lambda number: _likely_fork(number, directory.tickets_path))


def _repair(
    path: Path,
    is_sound: Callable[[_Row], bool],
    on_damage: OnDamage,
    in_place_of: Callable[[int], _Row | None] = lambda number: None,
) -> None:
    """Rewrites one log without its unsound lines, where it has any.

    Args:
        path: The log; it may be missing.
        is_sound: Whether a line that is a JSON object says what it should.
        on_damage: Told of it.
        in_place_of: What to write for an unsound line, by its number from 1.
    """
    rows = list(_rows(path, is_sound))
    lost = [number for number, row in enumerate(rows, start=1) if row is None]
    if not lost:
        return
    kept = [in_place_of(number) if row is None else row for number, row in enumerate(rows, start=1)]
    aside = path.parent / DAMAGED / f"{path.name}-{uuid.uuid4().hex[:8]}"
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(path.read_bytes())
    write_atomically(path, "".join(to_json(row) + "\n" for row in kept if row is not None))
    shown = ", ".join(map(str, lost[:5])) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
    on_damage(str(aside), f"line {shown} of {path.name} cannot be read; the others were kept")


def _rows(path: Path, is_sound: Callable[[_Row], bool]) -> Iterator[_Row | None]:
    """The finished lines of a log; None in place of one that is not sound."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # the writer cuts an unfinished one off
                yield _sound_row(line, is_sound)


def _sound_row(line: bytes, is_sound: Callable[[_Row], bool]) -> _Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(_Row, row) if isinstance(row, dict) and is_sound(cast(_Row, row)) else None


def _is_ticket(row: Mapping[str, Any]) -> bool:
    rollouts = row.get("rollouts")
    return isinstance(row.get("ticket_id"), str) and isinstance(rollouts, int) and 0 <= rollouts < 1 << 16


def _is_fate(row: Mapping[str, Any]) -> bool:
    names = all(isinstance(row.get(key), str) for key in ("rollout_id", "fate"))
    return names and all(isinstance(row.get(key), int) for key in ("lineage", "step"))


def _is_fork(row: Mapping[str, Any]) -> bool:
    try:
        fork_of("", row)
    except RunDirectoryError:
        return False
    return True


def _likely_fork(lineage: int, tickets: Path) -> _Row:
    """The fork of a life whose line is lost: one line is written per life, so its number is the line's."""
    mine = (row for row in _rows(tickets, _is_ticket) if row is not None and row.get("lineage") == lineage)
    step = next((step for row in mine if isinstance(step := row.get("admitted_step"), int)), -1)
    return {"lineage": lineage, "parent": lineage - 1, "step": step}


class DamagedFiles:
    """Moves damaged files out of everybody's way.

    Args:
        storage: Where they are.
        experience: Which they are.
        inventory: Of the writer.
        on_damage: Told where each lies now, and what is wrong with it.

    Attributes:
        damage: What was lost with them.
    """

    def __init__(
        self, storage: Storage, experience: ExperienceFormat, inventory: Inventory, on_damage: OnDamage
    ) -> None:
        self.damage = NO_DAMAGE
        self._storage = storage
        self._folder = experience.folder
        self._inventory = inventory
        self._on_damage = on_damage

    def set_aside(self, name: str, error: Exception) -> None:
        """Takes one file away, of rollouts or of a batch."""
        if name.startswith(f"{self._folder}/"):
            ids = self._legible_ids(name)
            self.damage = Damage(self.damage.ids.union(ids or ()), self.damage.more or ids is None)
        place = self._storage.set_aside(name)
        self._inventory.remove(name)
        self._on_damage(place, f"{name} cannot be read: {error}")

    def _legible_ids(self, name: str) -> list[str] | None:
        """The rollouts of a damaged part, where it can still say which they are."""
        try:
            with opened_part(self._storage, name) as file:
                return [str(i) for i in read_columns(file, ["rollout_id"]).column("rollout_id").to_pylist()]
        except UNREADABLE:
            return None
