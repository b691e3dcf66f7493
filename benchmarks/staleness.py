"""What staleness costs, and what each off-policy correction gives back: held-out reward beside that of fresh rollouts.

    python -m benchmarks.staleness --results staleness.jsonl [--jobs 2] [--seeds 5]
    python -m benchmarks.staleness learner.optimizer.learning_rate=8e-3 --budgets 8 --corrections none truncate

One cell trains at a staleness budget of 0, and one for each budget and correction, all with the same seeds, so that
they are compared pair by pair: the same initial weights, problems and sampling seeds. Each run is a process of its own
on one core; what is in ``--results`` is not made again. A difference is of held-out reward after the last update, with
Student's 95% interval over the seeds; so is that of the reward in training, whose mean over all updates says how soon
it was learned. Rollouts lag behind by what the run itself made of the budget: the table has the mean. Exits with 1
where a run needed more than three minutes of a core.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import campaign
from benchmarks.campaign import Cell
from benchmarks.marks import Marks
from penstock.overseer.results import read_stats
from penstock.types.intervals import Interval, mean_interval

FRESH = "S = 0"
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("learner.loss.correction.kind=none",),
    "truncate": ("learner.loss.correction.kind=truncate",),
    "mask": ("learner.loss.correction.kind=mask",),
    "sequence": ("learner.loss.correction.kind=truncate", "learner.loss.correction.scope=sequence"),
}
"""``sequence`` truncates one weight for all of a sequence's tokens; the others are of each token."""
SETTINGS = ("steps=160", "learner.optimizer.learning_rate=2e-3", "learner.row_length=64")
"""Of `named_animal`: half the updates at twice the rate, in rows that waste less, so that a run takes half a minute."""
LONGEST_S = 180.0
"""A run's processor seconds, at most; on a core that it has to itself they are its seconds."""


def cells_of(options: argparse.Namespace) -> dict[str, list[Cell]]:
    """Of each row of the table, one cell per seed."""
    rows: dict[str, tuple[str, ...]] = {FRESH: ("replay.staleness_budget=0",)}
    for budget in options.budgets:
        for name in options.corrections:
            rows[f"S = {budget}, {name}"] = (f"replay.staleness_budget={budget}", *CORRECTIONS[name])
    return {
        name: [
            Cell(name, "named_animal", seed, (*SETTINGS, *words, *options.overrides)) for seed in range(options.seeds)
        ]
        for name, words in rows.items()
    }


def held_out(outcome: Mapping[str, Any]) -> float:
    """Mean reward after training, of all lessons."""
    return statistics.fmean(stats.reward_mean for stats in read_stats(outcome["after"]).values())


def in_training(outcome: Mapping[str, Any]) -> float:
    """Mean over all updates."""
    return statistics.fmean(outcome["updates"]["rewards"])


def compared(values: Sequence[float], fresh: Sequence[float]) -> tuple[float, Interval]:
    """Mean difference, pair by pair, and its interval."""
    differences = [value - other for value, other in zip(values, fresh, strict=True)]
    return statistics.fmean(differences), mean_interval(differences)


def verdict(interval: Interval) -> str:
    """What the interval says of 0."""
    return "worse" if interval.high < 0 else "better" if interval.low > 0 else "contains 0"


def table_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """One row per cell, its outcomes by seed."""
    table = Table(title="named_animal: held-out reward, and difference to fresh rollouts with its 95% interval")
    for column in ("", "lag", "held out (seeds)", "difference", "", "in training", "", "staleness KL", "bounded"):
        table.add_column(column)
    fresh = found[FRESH]
    for name, outcomes in found.items():
        means = [held_out(outcome) for outcome in outcomes]
        cells = [f"{statistics.fmean(means):.3f} ({' '.join(f'{mean:.2f}' for mean in means)})"]
        for measure in (held_out, in_training):
            value, around = compared(*([measure(outcome) for outcome in each] for each in (outcomes, fresh)))
            cells += ["–", ""] if name == FRESH else [f"{value:+.3f} {around}", verdict(around)]
        lag, kl, bounded = (
            statistics.fmean(outcome["updates"][key] for outcome in outcomes)
            for key in ("replay/staleness_mean", "train/staleness_kl", "train/correction_fraction")
        )
        table.add_row(name, f"{lag:.1f}", *cells, f"{kl:.4f}", f"{bounded:.1%}")
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="key=value changes to all runs")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 4, 8], help="in updates, above 0")
    parser.add_argument("--corrections", nargs="+", choices=list(CORRECTIONS), default=list(CORRECTIONS))
    parser.add_argument("--seeds", type=int, default=5, help="so many: 0, 1, 2, …; two at least")
    campaign.add_options(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.seeds < 2 or min(options.budgets) < 1:
        parser.error("--seeds takes 2 at least, for an interval; --budgets what is above 0, which is run anyway")
    rows = cells_of(options)
    every = [cell for of_one_seed in zip(*rows.values(), strict=True) for cell in of_one_seed]
    outcomes = campaign.go_through(every, campaign.trained_on_core, options.results, options.jobs)
    found = {name: [outcomes[cell] for cell in cells] for name, cells in rows.items()}
    Console(width=170).print(table_of(found))
    print(
        "lag: updates between sampling and training; bounded: share of the tokens whose weight the correction changed"
    )
    marks = Marks()
    longest = max(outcome["processor_s"] for each in found.values() for outcome in each)
    marks.at_most("processor seconds of the longest run", longest, LONGEST_S)
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
