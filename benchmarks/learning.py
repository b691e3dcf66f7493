"""Does a recipe learn? Trains it with several seeds and compares held-out reward, or return, before and after.

    python -m benchmarks.learning cats --seeds 5
    python -m benchmarks.learning arithmetic --seeds 1 --control
    python -m benchmarks.learning cartpole --seeds 8 --least 475 --within 90
    python -m benchmarks.learning memory --seeds 2 --control model.memory=none

The untrained control answers the same held-out prompts with the same sampling seeds. A seed passes when the gain is
at least ``--gain``, the 95% intervals are disjoint, the result is at least ``--least``, and start-up, evaluations and
training took no longer than ``--within`` seconds; the program exits with 1 unless at least ``--passes`` do.
``--control`` adds a run of each seed with another setting, which must not gain half as much as ``--gain``: by default a
learning rate of zero, warm start included, which must not change one answer.
"""

import argparse
import math
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import penstock
from penstock.overseer.results import Interval, reward_interval
from penstock.types import RolloutBatchStats

STILL = "learner.optimizer.learning_rate=0"


@dataclass(frozen=True)
class Outcome:
    """One lesson of one run."""

    seed: int
    kind: str
    lesson_id: str
    untrained: RolloutBatchStats
    before: RolloutBatchStats
    after: RolloutBatchStats
    training_s: float
    elapsed_s: float
    status: str

    @property
    def gain(self) -> float:
        return self.after.reward_mean - self.untrained.reward_mean

    @property
    def disjoint(self) -> bool:
        return interval(self.after).low > interval(self.untrained).high


def interval(stats: RolloutBatchStats) -> Interval:
    return reward_interval(stats.rewards, stats.prompts)


def run(recipe: str, seed: int, overrides: list[str], kind: str) -> list[Outcome]:
    directory = Path(tempfile.mkdtemp(prefix="penstock-learning-"))
    try:
        config = penstock.load_config(recipe, [f"seed={seed}", *overrides])
        summary = penstock.train(config, directory / "run", recipe=recipe, quiet=True)
    finally:
        shutil.rmtree(directory)
    return [
        Outcome(
            seed,
            kind,
            lesson_id,
            summary.untrained[lesson_id],
            summary.before[lesson_id],
            summary.after[lesson_id],
            summary.training_s,
            summary.elapsed_s,
            summary.lessons[lesson_id],
        )
        for lesson_id in summary.after
    ]


def print_table(recipe: str, outcomes: list[Outcome], console: Console) -> None:
    table = Table(title=f"{recipe}: held-out reward, mean [95% interval]")
    for column in (
        "seed",
        "run",
        "lesson",
        "untrained",
        "warm start",
        "trained",
        "gain",
        "disjoint",
        "train s",
        "all s",
        "status",
    ):
        table.add_column(column)
    for outcome in outcomes:
        stages = (outcome.untrained, outcome.before, outcome.after)
        cells = [f"{s.reward_mean:.3f} [{interval(s).low:.3f}, {interval(s).high:.3f}]" for s in stages]
        if outcome.before == outcome.untrained:
            cells[1] = "–"
        gain, disjoint = f"{outcome.gain:+.3f}", "yes" if outcome.disjoint else "no"
        table.add_row(
            str(outcome.seed), outcome.kind, outcome.lesson_id, *cells, gain, disjoint,
            f"{outcome.training_s:.0f}", f"{outcome.elapsed_s:.0f}", outcome.status,
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value changes to the recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gain", type=float, default=0.4)
    parser.add_argument("--passes", type=int, default=None, help="seeds that must pass; by default all but one in five")
    parser.add_argument("--least", type=float, default=-math.inf, help="reward or return")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds")
    parser.add_argument("--control", nargs="?", const=STILL, metavar="KEY=VALUE")
    options = parser.parse_intermixed_args()
    outcomes: list[Outcome] = []
    for seed in range(options.seeds):
        outcomes += run(options.recipe, seed, options.overrides, "trained")
        if options.control:
            outcomes += run(options.recipe, seed, [*options.overrides, options.control], "control")
    print_table(options.recipe, outcomes, Console(width=150))
    first = [o for o in outcomes if o.kind == "trained" and o.lesson_id == outcomes[0].lesson_id]
    passed = sum(
        o.gain >= options.gain and o.disjoint and o.after.reward_mean >= options.least and o.elapsed_s <= options.within
        for o in first
    )
    needed = options.passes if options.passes is not None else options.seeds - options.seeds // 5
    slowest = max((o.training_s for o in first), default=math.nan)
    print(
        f"{first[0].lesson_id}: {passed} of {len(first)} seeds pass ({needed} needed); slowest training {slowest:.0f} s"
    )
    controls = [o for o in outcomes if o.kind == "control"]
    if options.control == STILL:
        moved = sum(o.after.rewards != o.before.rewards for o in controls)
        print(f"controls whose answers changed: {moved}")
    else:
        moved = sum(o.gain >= options.gain / 2 for o in controls)
        if controls:
            print(f"controls with {options.control} that gained half as much: {moved}")
    return int(passed < needed or moved > 0)


if __name__ == "__main__":
    sys.exit(main())
