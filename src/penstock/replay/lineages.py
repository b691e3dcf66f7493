"""The lives of a run, and which of their weight versions the present life descends from.

A version is (lineage, step). Every resume starts the next lineage from a checkpoint: it forks from a parent
lineage at a step, and at that step and before its weights *are* the parent's. So two versions hold the same
weights exactly if they lead to the same version when each is followed back past all its forks, and a rollout is
valid in a lineage exactly if its version does that with the lineage's own version of the same step.

``lineages.jsonl`` holds one line per resume, flushed to the disk before the lineage generates anything.
"""

from pathlib import Path

from penstock.rundir import JsonLinesLog
from penstock.rundir.directory import read_forks
from penstock.types import CheckpointError, WeightVersion


class Lineages:
    """The forks of one run.

    Args:
        path: The run's ``lineages.jsonl``; it may be missing: then there is lineage 0 only.

    Raises:
        RunDirectoryError: a line of it is none of ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forks = {lineage: WeightVersion(*fork) for lineage, fork in read_forks(path).items()}

    @property
    def newest(self) -> int:
        """The latest lineage that was begun."""
        return max(self._forks, default=0)

    def begin(self, lineage: int, parent: int, step: int) -> None:
        """Records durably that `lineage` continues from version (`parent`, `step`).

        Raises:
            CheckpointError: the number was used before, or the parent is unknown.
        """
        if lineage in self._forks or lineage <= parent:
            raise CheckpointError(f"lineage {lineage} of {self._path} cannot begin from lineage {parent}")
        self._forks[lineage] = WeightVersion(parent, step)
        log = JsonLinesLog(self._path)
        log.append({"lineage": lineage, "parent": parent, "step": step})
        log.close()

    def survives(self, version: WeightVersion, lineage: int) -> bool:
        """Whether `lineage` has, or will have, exactly these weights at that step."""
        return self._origin(version) == self._origin(WeightVersion(lineage, version.step))

    def _origin(self, version: WeightVersion) -> WeightVersion:
        fork = self._forks.get(version.lineage)
        while fork is not None and version.step <= fork.step:
            version = WeightVersion(fork.lineage, version.step)
            fork = self._forks.get(version.lineage)
        return version
