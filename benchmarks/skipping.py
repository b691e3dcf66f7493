"""What it saves that sequences without an advantage are not computed: a recipe with and without, in turn.

    python -m benchmarks.skipping [RECIPE] [KEY=VALUE ...] [--rounds 2] [--least 0.4]

Each round trains the recipe twice with one seed, first with every sequence computed. What is compared are the
learner's seconds, of forward and backward passes and optimiser steps, over all updates of all rounds. Exits with 1 if
the share saved is smaller than `--least`.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import penstock
from benchmarks.marks import Marks
from benchmarks.updates import update_rows
from penstock.learner import LearnerConfig


class Spent(NamedTuple):
    """Of one run: the learner's seconds, the share of sequences that were skipped, the reward held out."""

    seconds: float
    skipped: float
    reward: float


def spent(recipe: str, overrides: list[str], everything: bool, folder: Path) -> Spent:
    """Trains; `everything` computes all sequences."""
    always = mock.patch.object(LearnerConfig, "needs_every_sequence", property(lambda _: True))
    config = penstock.load_config(recipe, overrides)
    with always if everything else mock.MagicMock():
        summary = penstock.train(config, run_dir=folder, quiet=True)
    rows = update_rows(folder)
    seconds = sum(row["time/forward_backward"] + row["time/apply"] for row in rows)
    skipped = sum(row["train/skipped_sequences"] for row in rows) / sum(row["train/sequences"] for row in rows)
    after = [stats.reward_mean for stats in summary.after.values()]
    return Spent(seconds, skipped, sum(after) / max(len(after), 1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cats")
    parser.add_argument("overrides", nargs="*", help="key=value changes to the recipe")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.4, help="share of the seconds")
    options = parser.parse_intermixed_args(arguments)
    marks, found = Marks(), {True: list[Spent](), False: list[Spent]()}
    with tempfile.TemporaryDirectory(prefix="penstock-skipping-") as folder:
        for number in range(options.rounds):
            for everything, runs in found.items():
                runs.append(
                    spent(options.recipe, options.overrides, everything, Path(folder) / f"{number}-{everything}")
                )
    totals = {everything: sum(run.seconds for run in runs) for everything, runs in found.items()}
    for everything, runs in found.items():
        name = "everything computed" if everything else "without advantage skipped"
        each = ", ".join(f"{run.seconds:.1f} s (reward {run.reward:.3f}, skipped {run.skipped:.0%})" for run in runs)
        print(f"  {name:<28}{totals[everything]:7.1f} s  {each}")
    marks.at_least("share of the learner's seconds that is saved", 1 - totals[False] / totals[True], options.least)
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
