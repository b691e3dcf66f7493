"""What it saves that sequences without an advantage are not computed: a recipe's updates with and without, in turn.

    python -m benchmarks.skipping [RECIPE] [KEY=VALUE ...] [--rounds 2] [--least 0.4] [--whole-runs]

Each round trains the recipe and then makes all of its updates again, from the batches that it trained on, in two
learners: one that leaves such sequences out and one that computes them, each update in both, first in the one and first
in the other. What is compared are the learner's seconds, of forward and backward passes and optimiser steps, over all
updates of all rounds. With `--whole-runs` each round trains the recipe twice in place of that, so that an asynchronous
one has other rollouts each time, and what the learner waits beside generation counts, too. Exits with 1 if the share
saved is smaller than `--least`.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import penstock
from benchmarks.marks import Marks
from benchmarks.updates import update_rows
from penstock.learner import Learner, LearnerConfig
from penstock.overseer.config import RunConfig
from penstock.types import TrainingBatch


class Spent(NamedTuple):
    """Of one run: the learner's seconds, the share of sequences that were skipped, the reward held out."""

    seconds: float
    skipped: float
    reward: float


Pair = dict[bool, Spent]
"""By whether everything was computed."""


def trained(config: RunConfig, everything: bool, folder: Path) -> Spent:
    """Of a run; `everything` computes all sequences."""
    always = mock.patch.object(LearnerConfig, "needs_every_sequence", property(lambda _: True))
    with always if everything else mock.MagicMock():
        summary = penstock.train(config, run_dir=folder, quiet=True)
    after = [stats.reward_mean for stats in summary.after.values()]
    return _spent(update_rows(folder), sum(after) / max(len(after), 1))


def in_two_runs(config: RunConfig, folder: Path) -> Pair:
    """One after the other."""
    return {everything: trained(config, everything, folder / str(everything)) for everything in (True, False)}


def in_two_learners(config: RunConfig, folder: Path) -> Pair:
    """Of one run's batches, update by update."""
    learners, batches, update = list[Any](), list[TrainingBatch](), Learner.update

    def noted(learner: Learner, batch: TrainingBatch, *given: Any) -> dict[str, float]:
        if not batches:
            limits = {name: each.sampling_params.max_output_tokens for name, each in config.curriculum.lessons.items()}
            made = (Learner(learner.decoder, config.learner, config.steps, config.seed, limits) for _ in range(2))
            learners.extend(made)
        batches.append(batch)
        return update(learner, batch, *given)

    with mock.patch.object(Learner, "update", noted):
        run = trained(config, everything=False, folder=folder / "run")
    rows: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    skipping, whole = learners
    whole._uncomputed = lambda examples: set()  # of all sequences none
    for number, batch in enumerate(batches):
        for everything in (True, False) if number % 2 else (False, True):
            rows[everything].append((whole if everything else skipping).update(batch, number))
    return {everything: _spent(each, run.reward) for everything, each in rows.items()}


def _spent(rows: list[dict[str, float]], reward: float) -> Spent:
    seconds = sum(row["time/forward_backward"] + row["time/apply"] for row in rows)
    skipped = sum(row["train/skipped_sequences"] for row in rows) / sum(row["train/sequences"] for row in rows)
    return Spent(seconds, skipped, reward)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cats")
    parser.add_argument("overrides", nargs="*", help="key=value changes to the recipe")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.4, help="share of the seconds")
    parser.add_argument("--whole-runs", action="store_true", help="two runs a round, in place of one run's batches")
    options = parser.parse_intermixed_args(arguments)
    measure: Callable[[RunConfig, Path], Pair] = in_two_runs if options.whole_runs else in_two_learners
    config = penstock.load_config(options.recipe, options.overrides)
    assert isinstance(config, RunConfig), "of a language policy"
    with tempfile.TemporaryDirectory(prefix="penstock-skipping-") as folder:
        pairs = [measure(config, Path(folder) / str(number)) for number in range(options.rounds)]
    marks, totals = (
        Marks(),
        {everything: sum(pair[everything].seconds for pair in pairs) for everything in (True, False)},
    )
    for everything, total in totals.items():
        name = "everything computed" if everything else "without advantage skipped"
        runs = [pair[everything] for pair in pairs]
        each = ", ".join(f"{run.seconds:.1f} s (reward {run.reward:.3f}, skipped {run.skipped:.0%})" for run in runs)
        print(f"  {name:<28}{total:7.1f} s  {each}")
    marks.at_least("share of the learner's seconds that is saved", 1 - totals[False] / totals[True], options.least)
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
