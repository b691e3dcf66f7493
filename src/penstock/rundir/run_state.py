"""What a run says of itself, for queries: which of its updates still count, and which one is next.

A broken status.json says nothing, since it is only a note on the moment: everything else of the run can be read without
it. Broken ``lineages.jsonl`` are refused, for without it nobody knows which updates count.
"""

import math
from typing import Any

import pyarrow as pa

from penstock.rundir.directory import RunDirectory
from penstock.rundir.forks import NO_FORK, read_forks
from penstock.rundir.logs import read_status


def known_status(directory: RunDirectory) -> dict[str, Any] | None:
    """The last status.json; None before the first, and an empty one where the file is broken."""
    status = read_status(directory.status_path)
    return {} if status is None and directory.status_path.exists() else status


def next_step(directory: RunDirectory) -> int | None:
    """The update that is next, as status.json says; None where it does not."""
    step = (known_status(directory) or {}).get("step")
    if not isinstance(step, int | float) or not math.isfinite(step) or abs(step) > NO_FORK:
        return None
    return int(step)


def horizons(directory: RunDirectory) -> pa.Table:
    """For the newest life of the run and those it descends from: the update from which on theirs do not count.

    Update u makes version u + 1, which survives a fork at step f where u + 1 ≤ f.

    Raises:
        RunDirectoryError: a line of ``lineages.jsonl`` is no fork.
    """
    forks = read_forks(directory.lineages_path)
    lineage, before = max(forks, default=0), NO_FORK
    found = {lineage: before}
    while lineage in forks:  # parents are older, so this ends
        lineage, step = forks[lineage]
        before = min(before, step)
        found[lineage] = before
    return pa.table({"lineage": pa.array(found.keys(), pa.int32()), "before": pa.array(found.values(), pa.int64())})
