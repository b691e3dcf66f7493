"""The forks of a run's lives, read from ``lineages.jsonl``.

A life continues from an earlier one, so whoever follows forks back reaches lineage 0 in the end. Files in which that is
not so are refused here, once for all who follow them.
"""

from pathlib import Path
from typing import Any

from penstock.rundir.logs import read_json_lines
from penstock.types import RunDirectoryError


def read_forks(path: Path) -> dict[int, tuple[int, int]]:
    """The parent lineage and step of every life but the first; nothing where the file is missing.

    Raises:
        RunDirectoryError: a line does not say from which earlier lineage and which step a lineage continues.
    """
    return dict(_fork(path, number, row) for number, row in enumerate(read_json_lines(path), start=1))


def _fork(path: Path, number: int, row: dict[str, Any]) -> tuple[int, tuple[int, int]]:
    lineage, parent, step = (row.get(key) for key in ("lineage", "parent", "step"))
    if isinstance(lineage, int) and isinstance(parent, int) and isinstance(step, int) and 0 <= parent < lineage:
        return lineage, (parent, step)
    raise RunDirectoryError(
        f"{path}, line {number} is {row}: a lineage continues from an earlier one; "
        "restore the file from a copy, or remove the line if no resume wrote it"
    )
