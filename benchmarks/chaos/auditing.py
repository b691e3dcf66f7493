"""After the faults: what the run's files alone say of every rollout, and how good the policy became."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from benchmarks.chaos import file_damage
from benchmarks.chaos.invariants import Books, books, violations
from penstock.learner import newest_good_checkpoint
from penstock.overseer import RunConfig, evaluate
from penstock.replay import RolloutStore
from penstock.rundir import RunDirectory
from penstock.rundir.storage import DAMAGED
from penstock.types import RunDirectoryError


class Notes:
    """Notes, now and then, which rollouts are sealed; what was noted once must never be gone.

    Args:
        directory: Of the run.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.sealed: set[str] = set()
        self.times = 0
        self._directory = directory
        self._read: set[str] = set()

    def take(self) -> None:
        """Reads the files that are new; one that is merged away or damaged meanwhile counts the next time, or never."""
        self.times += 1
        for part in sorted(self._directory.rollouts.glob("*.parquet")):
            if part.name not in self._read:
                try:
                    self.sealed.update(file_damage.ids_in(part))
                except (OSError, pa.ArrowException):
                    continue
                self._read.add(part.name)


@dataclass(frozen=True)
class Audit:
    """What was found.

    Attributes:
        books: See there.
        told: The ledger that the run itself told last.
        sealed: Rollouts in files that can be read.
        lost: Rollouts that were noted and are in no file, nor in one that was damaged on purpose.
        unsettled: Rollouts of files damaged on purpose that neither are settled nor were saved into another file.
        not_aside: Files damaged on purpose that are not in ``damaged/``.
        violations: See `benchmarks.chaos.invariants`.
        unreadable: Why the files cannot be read; empty where they can.
    """

    books: Books | None
    told: dict[str, int]
    sealed: int = 0
    lost: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    not_aside: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    unreadable: str = ""


def audit(directory: RunDirectory, noted: set[str], corrupted: dict[str, list[str]], told: dict[str, int]) -> Audit:
    """Reads the files of a run that has ended.

    Args:
        directory: The run's.
        noted: Rollouts that were sealed at some time.
        corrupted: Rollouts by the name of the file of theirs that was damaged on purpose.
        told: The run's own ledger at its end.
    """
    try:
        history = RolloutStore(directory).history()
    except RunDirectoryError as error:
        return Audit(None, told, unreadable=str(error))
    found = books(history)
    damaged = {rollout_id for ids in corrupted.values() for rollout_id in ids}
    aside = {path.name for path in (directory.path / DAMAGED).rglob("*.parquet")}
    settled = {"rolled_back", "trained"}
    return Audit(
        found,
        told,
        len(history.sealed),
        tuple(sorted(noted - history.sealed.keys() - damaged)),
        tuple(sorted(i for i in damaged - history.sealed.keys() if found.of.get(i) not in settled)),
        tuple(sorted(corrupted.keys() - aside)),
        tuple(violations(directory, damaged)),
    )


def held_out_reward(directory: RunDirectory, config: RunConfig, n: int) -> tuple[Path, float]:
    """The newest whole checkpoint, and its mean reward on `n` held-out prompts."""
    told: list[str] = []
    checkpoint = newest_good_checkpoint(directory.checkpoints, lambda path, reason: told.append(reason))
    if checkpoint is None:
        raise RunDirectoryError(f"{directory.checkpoints} has no whole checkpoint: {'; '.join(told)}")
    local = config.model_copy(update={"runtime": "local"})
    report = evaluate(checkpoint, local, n=n)
    return checkpoint, report.lessons["cats"].reward_mean.value
