"""`penstock replay`: updates of a run made again from its files, and compared with what the run recorded.

As they were, they come out bit for bit: the same programs on the same batch, from the same parameters and optimiser
state. With another loss (``--set``) or without some rollouts (``--drop``), from the update that was asked for on, the
report shows what would have been. Numbers that are compared are all ``train/…`` that the learner computes; where a
checkpoint of a version is there, its parameters and optimiser state are compared, too. Nothing is written into the
run; `ReplayReport.keep` leaves what was found in the user's cache, for the dashboard.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.overseer.kind import PolicyKind
from penstock.overseer.rerun.stored_run import (
    StoredRun,
    StoredUpdate,
    handed_on,
    ready_learner,
    without_fragments,
)
from penstock.rundir import KeptReplay, RunDirectory, write_replay
from penstock.rundir.replayed_updates import HEADLINE
from penstock.types import ConfigError, TrainingBatch


@dataclass(frozen=True, slots=True)
class ReplayedUpdate:
    """One update that was made again.

    Attributes:
        step: The version that it led to.
        stored: What metrics.jsonl has, by name; None where it has no number.
        recomputed: The same names.
        weights_equal: Whether parameters and optimiser state are those of the version's checkpoint; None: there is
            none, or the update was changed.
        batch_id: The batch that it trained on.
    """

    step: int
    stored: Mapping[str, float | None]
    recomputed: Mapping[str, float | None]
    weights_equal: bool | None = None
    batch_id: str = ""

    @property
    def different(self) -> list[str]:
        """Names of the numbers that are not the same, bit for bit."""
        return [name for name in self.recomputed if self.stored[name] != self.recomputed[name]]

    @property
    def is_recorded(self) -> bool:
        """Whether the run wrote a line of metrics for it."""
        return any(value is not None for value in self.stored.values())

    @property
    def equal(self) -> bool:
        """Whether all that can be compared is the same, and something can."""
        compared = not self.different if self.is_recorded else self.weights_equal is not None
        return compared and self.weights_equal is not False


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        run_dir: Whose updates.
        checkpoint: Where it began.
        updates: Those that were asked for.
        on_the_way: Those between the checkpoint and them, made again as they were.
        changes: What was set.
        dropped: Rollouts that were left out.
        notes: What may explain a difference.
    """

    run_dir: Path
    checkpoint: str
    updates: tuple[ReplayedUpdate, ...]
    on_the_way: tuple[ReplayedUpdate, ...]
    changes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_experiment(self) -> bool:
        """Whether the updates were changed, so that they are meant to differ."""
        return bool(self.changes or self.dropped)

    @property
    def exit_code(self) -> int:
        """0: equal bit for bit, or changed as was asked for; 1: not equal."""
        asked = () if self.is_experiment else self.updates
        return 0 if all(update.equal for update in (*self.on_the_way, *asked)) else 1

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "run_dir": str(self.run_dir),
            "checkpoint": self.checkpoint,
            "set": list(self.changes),
            "drop": list(self.dropped),
            "equal": self.exit_code == 0 and not self.is_experiment,
            "on_the_way": [{"step": update.step, "equal": update.equal} for update in self.on_the_way],
            "updates": [{**asdict(update), "different": update.different} for update in self.updates],
            "notes": list(self.notes),
        }

    def keep(self) -> None:
        """Writes what was found of each update that was asked for where the dashboard shows it; see `KeptReplay`.

        Raises:
            OSError: the user's cache cannot be written.
        """
        for update in self.updates:
            found = KeptReplay(
                time.time(), self.checkpoint, update.stored, update.recomputed, tuple(update.different),
                update.weights_equal, self.changes, self.dropped, self.notes,
            )  # fmt: skip
            write_replay(RunDirectory(self.run_dir), update.batch_id, found)

    def print(self, console: Console) -> None:
        """Prints a line per update, and of those that differ each number that does."""
        told = "".join(f", {word}" for word in self.changes) + "".join(f", without {name}" for name in self.dropped)
        console.print(f"{self.run_dir}: made again from {self.checkpoint}{told}", soft_wrap=True, highlight=False)
        if self.on_the_way:
            first, last = self.on_the_way[0].step, self.on_the_way[-1].step
            differing = [str(update.step) for update in self.on_the_way if not update.equal]
            outcome = f"{', '.join(differing)} not equal" if differing else "equal"
            console.print(f"on the way: updates {first}–{last}, {outcome}", highlight=False)
        console.print(self._overview())
        for update in self.updates:
            if update.different and (update.is_recorded or self.is_experiment):
                console.print(self._numbers(update))
        for note in self.notes if self.exit_code else ():
            console.print(f"{note}: other packages may compute otherwise", highlight=False)

    def _overview(self) -> Table:
        table = Table()
        for column in ("update", *(_short(name) for name in HEADLINE), "numbers", "weights"):
            table.add_column(column)
        for update in self.updates:
            values = [_shown(update.recomputed.get(name)) for name in HEADLINE]
            same = len(update.recomputed) - len(update.different)
            equal = f"{same} of {len(update.recomputed)} equal" if update.is_recorded else "not recorded"
            weights = {True: "equal", False: "different", None: "no checkpoint"}[update.weights_equal]
            table.add_row(str(update.step), *values, equal, "changed" if self.is_experiment else weights)
        return table

    def _numbers(self, update: ReplayedUpdate) -> Table:
        """Side by side."""
        table = Table(title=f"update {update.step}", title_justify="left")
        for column in ("", "stored", "recomputed", "difference"):
            table.add_column(column, justify="left" if not column else "right")
        for name in dict.fromkeys([*(name for name in HEADLINE if name in update.recomputed), *update.different]):
            old, new = update.stored[name], update.recomputed[name]
            by = "" if old is None or new is None else f"{new - old:+.3g}"
            table.add_row(name, _shown(old), _shown(new), by)
        return table


def _short(name: str) -> str:
    return name.rpartition("/")[2].replace("_", " ")


def _shown(value: float | None) -> str:
    return "—" if value is None else f"{value:.9g}"


def replay_updates(
    run_dir: Path | str,
    step: int,
    until: int | None = None,
    changes: Sequence[str] = (),
    drop: Sequence[str] = (),
    trust: bool = False,
) -> ReplayReport:
    """Makes updates of a run again, from the newest checkpoint before them and the run's batch files.

    Without inference, simulators or Ray, and without writing anything. Updates between the checkpoint and `step` are
    made on the way, as they were.

    Args:
        run_dir: A run directory of any kind of policy; the run may go on.
        step: The first update, named by the version that it led to, as in metrics.jsonl.
        until: The last one; by default the first.
        changes: ``learner.loss.preset=grpo`` and the like, which hold from `step` on. Where the estimator changes,
            advantages are computed anew from the stored rewards.
        drop: Ids of rollouts (fragments) without which update `step` and those after it are made.
        trust: Believe what others than the user may have written into the run directory.

    Raises:
        ConfigError: no run, no such update or rollout, a change outside of the learner's section, or data that have
            expired.
        CheckpointError: no checkpoint before `step` is left.
    """
    run = StoredRun(run_dir, trust)
    last = step if until is None else until
    if last < step:
        raise ConfigError(f"--until is {last}, before --step {step}: give a later update, or leave it out")
    checkpoint = run.checkpoint_before(step)
    walk = UpdateWalk(run, checkpoint, (step, last), changes, drop)
    made = [walk.make(update) for update in walk.updates]
    if missing := sorted(set(drop) - walk.met):
        asked = f"update {step}" if last == step else f"updates {step} to {last}"
        raise ConfigError(
            f"--drop {missing[0]}: {asked} trained on no such rollout: penstock rollouts --step {step - 1} lists them"
        )
    return ReplayReport(
        run.directory.path,
        f"step-{checkpoint}",
        tuple(update for update in made if update.step >= step),
        tuple(update for update in made if update.step < step),
        tuple(changes),
        tuple(drop),
        tuple(run.notes(walk.updates[-1])),
    )


class UpdateWalk:
    """A learner that is led from a checkpoint through the updates that followed.

    Args:
        run: The run whose updates they are.
        checkpoint: The version that it begins with, a step.
        asked: First and last of the updates that are wanted, steps; what lies before the first is made as it was.
        changes: What is set from the first on.
        drop: Rollouts that are left out from there on.

    Attributes:
        updates: All that follow the checkpoint, in order.
        met: Which of the rollouts to drop were in a batch.
        learner: At the update boundary; None before the first.
    """

    def __init__(
        self,
        run: StoredRun,
        checkpoint: int,
        asked: tuple[int, int],
        changes: Sequence[str] = (),
        drop: Collection[str] = (),
    ) -> None:
        self._run = run
        self._first, self._changes, self._drop = asked[0], tuple(changes), frozenset(drop)
        self._kept = run.checkpoints
        self.updates = run.updates(checkpoint, *asked)
        self.kind: PolicyKind = run.kind(self._kept[checkpoint])
        self.met: set[str] = set()
        self.learner: Any = None
        self._start = run.start(self._kept[checkpoint])
        self._learner_config: Any = None

    def prepare(self, update: StoredUpdate) -> TrainingBatch[Any]:
        """Has the learner ready for the next update, and reads its batch."""
        config = self._run.config_at(update, self._changes if update.step >= self._first else ())
        if self.learner is None or config != self._learner_config:
            start = self._start if self.learner is None else handed_on(self.learner, self._start)
            self.learner, self._learner_config = ready_learner(self.kind, config, start), config
        return self._run.batch(update, config)

    def make(self, update: StoredUpdate) -> ReplayedUpdate:
        """Makes the next update, and compares it."""
        batch, version = self.prepare(update), update.stored.version.step
        ids = {rollout_id for example in batch.examples for rollout_id in example.rollout_ids}
        asked = update.step >= self._first
        left_out = ids & self._drop if asked else set[str]()
        self.met |= left_out
        if left_out == ids:
            raise ConfigError(f"--drop names every rollout of update {update.step}: leave one in it at least")
        if self._run.is_language:
            metrics = self.learner.update(batch, version, left_out) if left_out else self.learner.update(batch, version)
        else:
            metrics = self.learner.update(without_fragments(batch, left_out), version)
        numbers = {name: value for name, value in metrics.items() if name.startswith("train/")}
        exact = not (asked and (self._changes or self._drop))
        return ReplayedUpdate(
            update.step,
            {name: update.metrics.get(name) for name in numbers},
            numbers,
            self._weights_equal(update.step) if exact else None,
            update.stored.batch_id,
        )

    def _weights_equal(self, step: int) -> bool | None:
        path = self._kept.get(step)
        if path is None or not path.is_dir():
            return None
        kept = self.kind.make_learner(self._learner_config, self._run.start(path))
        return _same(kept.state_arrays(), self.learner.state_arrays()) and _same(
            kept.named_arrays(), self.learner.named_arrays()
        )


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(
        np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes() for name in one
    )
