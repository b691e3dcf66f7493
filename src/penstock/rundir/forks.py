"""The forks of a run's lives, read from ``lineages.jsonl``.

A life continues from an older one, so whoever follows forks back reaches lineage 0 in the end. Files in which that is
not so are refused here, once for all who follow them.
"""

from pathlib import Path
from typing import Any

from penstock.rundir.logs import read_json_lines
from penstock.types import RunDirectoryError

NO_FORK = 2**62
"""Later than every step."""


def read_forks(path: Path) -> dict[int, tuple[int, int]]:
    """The parent lineage and the step of every life but the first; nothing where the file is missing.

    Raises:
        RunDirectoryError: a line does not say from which older lineage, and at which step, a lineage begins.
    """
    return dict(_fork(f"{path}, line {number}", row) for number, row in enumerate(read_json_lines(path), start=1))


def _fork(where: str, row: dict[str, Any]) -> tuple[int, tuple[int, int]]:
    lineage, parent, step = (row.get(key) for key in ("lineage", "parent", "step"))
    if not isinstance(lineage, int) or not isinstance(parent, int) or not isinstance(step, int):
        raise RunDirectoryError(f"{where}: lineage, parent and step must be whole numbers, but it is {row}")
    if not 0 <= parent < lineage < 2**31 or abs(step) > NO_FORK:
        raise RunDirectoryError(
            f"{where}: lineage {lineage} cannot begin from lineage {parent} at step {step}: a parent must be older"
        )
    return lineage, (parent, step)
