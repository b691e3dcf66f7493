"""Does a recipe learn? Trains it with several seeds and compares held-out reward, or return, before and after.

    python -m benchmarks.learning cats --seeds 5
    python -m benchmarks.learning arithmetic --seed-list 0 3 7 --lessons medium
    python -m benchmarks.learning arithmetic --seeds 1 --control
    python -m benchmarks.learning cartpole --seeds 8 --least 475 --within 90
    python -m benchmarks.learning memory --seeds 2 --control model.memory=none
    python -m benchmarks.learning arithmetic --presets all --seeds 3 [--results presets.jsonl] [--jobs 2]

What is trained is compared with what the reinforcement learning began with, on the same held-out prompts with the same
sampling seeds: after a warm start, where there is one, so that nothing it taught counts as a gain. A lesson passes with
a seed when the gain (after − before) is at least ``--gain``, its 95% interval, of the differences prompt by prompt, is
above 0, and the result is at least ``--least``; every lesson is judged, or those of ``--lessons``, and a seed passes
when all of them do and start-up, evaluations and training took no longer than ``--within`` seconds. The program exits
with 1 unless at least ``--passes`` seeds do. ``--control`` adds a run of each seed with another setting, of which no
lesson may gain half as much as ``--gain``: by default a learning rate of zero, warm start included, which must not
change one answer.

With ``--presets`` each of those named trains with each seed, in a process of its own on one core, with two optimiser
steps per update where nothing else is said, since a clip can act from the second on; all have the same marks, and a
preset passes as a recipe does. What the recipe starts with, its warm start too, is made once for each seed, and all
presets go on from there. Runs and starts are kept in ``--results`` and beside it, and not made again
(`benchmarks.campaign`). Of `arithmetic` the lesson *medium* is judged, with large batches, four steps per update and
everything but the last norm frozen, since 40 updates of whatever loss then teach something (docs/performance.md);
changes, marks and lessons that are given take the place of these.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich.console import Console
from rich.table import Table

import penstock
from benchmarks import campaign
from benchmarks.campaign import Cell
from penstock.learner.config import Preset
from penstock.overseer.results import read_stats
from penstock.types import RolloutBatchStats
from penstock.types.intervals import Interval, difference_interval, reward_interval

STILL = "learner.optimizer.learning_rate=0"
SEVERAL = "learner.minibatches=2"
"""What every preset runs with, unless steps of an update are given."""


class Comparison(NamedTuple):
    """How presets are compared: changes to the recipe, and what is judged."""

    changes: tuple[str, ...] = ()
    lessons: tuple[str, ...] | None = None
    least: float = -math.inf
    gain: float = 0.4


COMPARED = {
    "arithmetic": Comparison(
        (
            "steps=40", "learner.minibatches=4", 'learner.optimizer.frozen=[embedding,"layers.*"]',
            "learner.optimizer.learning_rate=2e-2", "learner.optimizer.warmup_steps=3", "replay.groups_per_batch=32",
            "inference.max_slots=256", "replay.store.buffer_size=256", "curriculum.eval_frequency=0",
        ), ("medium",), least=0.35, gain=0.1,
    ),
}  # fmt: skip
"""By recipe; others are compared as they are."""
NEEDS = {
    "ppo": ("learner.critic.learning_rate=1e-3",),
    "gspo": ("learner.loss.clip_epsilon_low=3e-3", "learner.loss.clip_epsilon_high=4e-3"),
}
"""What a preset has to be told of small models and short answers.

The default rate of a value head is for wide models. GSPO's clip is for answers of a thousand tokens: its ratio is a
mean over them, which of ten varies ten times as much.
"""


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
    updates: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def gain(self) -> float:
        """After minus before."""
        return self.compared[0]

    @property
    def compared(self) -> tuple[float, Interval]:
        """The gain, with its interval."""
        return difference_interval(by_prompt(self.after), by_prompt(self.before))

    def passes(self, gain: float, least: float) -> bool:
        """Whether it was learned."""
        value, (low, _) = self.compared
        return value >= gain and low > 0 and self.after.reward_mean >= least


def by_prompt(stats: RolloutBatchStats) -> dict[str, list[float]]:
    """Rewards of each held-out problem, in order."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for prompt, reward in zip(stats.prompts, stats.rewards, strict=True):
        rewards[prompt].append(reward)
    return rewards


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


def cell_of(recipe: str, overrides: Sequence[str], preset: str, seed: int) -> Cell:
    """The run of a preset."""
    given = any(word.startswith(("learner.minibatches=", "learner.epochs=")) for word in overrides)
    words = [f"learner.loss.preset={preset}", *[SEVERAL] * (not given), *NEEDS.get(preset, ()), *overrides]
    return Cell(preset, recipe, seed, tuple(words))


def outcomes_of(cell: Cell, found: Mapping[str, Any]) -> list[Outcome]:
    """One per lesson."""
    untrained, before, after = (read_stats(found[name]) for name in ("untrained", "before", "after"))
    times = found["training_s"], found["elapsed_s"]
    return [
        Outcome(
            cell.seed, cell.name, lesson_id, untrained[lesson_id], before[lesson_id], after[lesson_id], *times,
            found["lessons"][lesson_id], found["updates"],
        )
        for lesson_id in after
    ]  # fmt: skip


def shared_start(recipe: str, seed: int, folder: Path) -> list[str]:
    """Makes a recipe's warm start, unless it is there, and gives the changes by which a run goes on from it."""
    start = folder / "checkpoints" / "step-0"
    if not start.exists():
        shutil.rmtree(folder, ignore_errors=True)
        words = [f"seed={seed}", "steps=1", STILL, "overseer.checkpoint_every=1", "overseer.keep_every=1"]
        core = min(os.sched_getaffinity(0))
        campaign.on_core([sys.executable, "-m", "penstock", "train", recipe, *words, "--run-dir", str(folder)], core)
    return [f"model.initial_checkpoint={start}", "learner.warm_start=null"]


def run_presets(options: argparse.Namespace, seeds: Sequence[int]) -> list[Outcome]:
    """Of every preset that is named with every seed, those of one seed after one another."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="penstock-learning-") as passing:
        starts = options.results.with_suffix("") if options.results else Path(passing)
        for seed in seeds:
            words = [
                *options.overrides,
                *shared_start(options.recipe, seed, starts / f"{Path(options.recipe).stem}-{seed}"),
            ]
            cells += [cell_of(options.recipe, words, name, seed) for name in presets_of(options)]
        found = campaign.go_through(cells, campaign.trained_on_core, options.results, options.jobs)
    return [outcome for cell in cells for outcome in outcomes_of(cell, found[cell])]


def presets_of(options: argparse.Namespace) -> list[str]:
    """Those that are asked for."""
    return list(get_args(Preset)) if "all" in options.presets else list(options.presets)


def print_presets(recipe: str, outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table(title=f"{recipe}: held-out reward by preset, mean [95% interval]")
    names = ("preset", "seed", "lesson", "before", "trained", "gain", "steps", "clipped", "tokens", "train s")
    for name in names:
        table.add_column(name)
    for outcome in sorted(outcomes, key=lambda outcome: (get_args(Preset).index(outcome.kind), outcome.seed)):
        value, around = outcome.compared
        stages = (f"{s.reward_mean:.3f} {interval(s)}" for s in (outcome.before, outcome.after))
        table.add_row(
            outcome.kind, str(outcome.seed), outcome.lesson_id, *stages, f"{value:+.3f} {around}",
            f"{outcome.updates['optimizer_steps']:.0f}", f"{outcome.updates['train/clip_fraction']:.4f}",
            f"{outcome.updates['tokens']:,.0f}", f"{outcome.training_s:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print("steps: the fewest of an update; clipped: share of the tokens, mean of all updates")


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
        "train s",
        "all s",
        "status",
    ):
        table.add_column(column)
    for outcome in outcomes:
        stages = (outcome.untrained, outcome.before, outcome.after)
        cells = [f"{s.reward_mean:.3f} {interval(s)}" for s in stages]
        if outcome.before == outcome.untrained:
            cells[1] = "–"
        value, around = outcome.compared
        table.add_row(
            str(outcome.seed), outcome.kind, outcome.lesson_id, *cells, f"{value:+.3f} {around}",
            f"{outcome.training_s:.0f}", f"{outcome.elapsed_s:.0f}", outcome.status,
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value changes to the recipe")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=int, default=5, help="so many: 0, 1, 2, …")
    seeds.add_argument("--seed-list", type=int, nargs="+", metavar="SEED", help="these")
    parser.add_argument("--lessons", nargs="+", help="judge these only; by default every lesson")
    parser.add_argument("--gain", type=float, help="by default 0.4")
    parser.add_argument("--passes", type=int, default=None, help="seeds that must pass; by default all but one in five")
    parser.add_argument("--least", type=float, help="reward or return; by default any")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds")
    parser.add_argument("--control", nargs="?", const=STILL, metavar="KEY=VALUE")
    parser.add_argument("--presets", nargs="+", choices=("all", *get_args(Preset)), metavar="PRESET", help="or all")
    campaign.add_options(parser)
    options = parser.parse_intermixed_args()
    chosen: list[int] = options.seed_list or list(range(options.seeds))
    if options.control and options.presets:
        parser.error("--control compares a recipe with itself: leave --presets out")
    if not options.presets and (options.results or options.jobs != 1):
        parser.error("--results and --jobs are of --presets: give it, or leave them out")
    of_start = [word for word in options.overrides if word.startswith(("model.", "learner.warm_start"))]
    if options.presets and of_start:
        parser.error(
            f"--presets goes on from what the recipe itself starts with: put {of_start[0]} into one of your own"
        )
    usual = COMPARED.get(options.recipe, Comparison()) if options.presets else Comparison()
    options.overrides = [*usual.changes, *options.overrides]
    options.lessons = options.lessons or usual.lessons
    options.least = usual.least if options.least is None else options.least
    options.gain = usual.gain if options.gain is None else options.gain
    outcomes: list[Outcome] = run_presets(options, chosen) if options.presets else []
    for seed in () if options.presets else chosen:
        outcomes += run(options.recipe, seed, options.overrides, "trained")
        if options.control:
            outcomes += run(options.recipe, seed, [*options.overrides, options.control], "control")
    show = print_presets if options.presets else print_table
    show(options.recipe, outcomes, Console(width=150))
    known = list(dict.fromkeys(outcome.lesson_id for outcome in outcomes))
    unknown = sorted(set(options.lessons or ()) - set(known))
    if unknown:
        parser.error(f"--lessons {unknown[0]}: the recipe's are {', '.join(known)}")
    judged = [outcome for outcome in outcomes if outcome.lesson_id in (options.lessons or known)]
    needed = options.passes if options.passes is not None else len(chosen) - len(chosen) // 5
    kinds = presets_of(options) if options.presets else ["trained"]
    failed = [kind for kind in kinds if not enough(judged, chosen, needed, options, kind)]
    moved = count_moved(judged, options)
    return int(bool(failed) or moved > 0)


def enough(
    judged: Sequence[Outcome], seeds: Sequence[int], needed: int, options: argparse.Namespace, kind: str
) -> bool:
    """Whether so many seeds learned; says so."""
    own = [outcome for outcome in judged if outcome.kind == kind]
    if options.presets:
        print(f"\n{kind}")
    passed = count_passes(own, seeds, options)
    print(f"{passed} of {len(seeds)} seeds pass ({needed} needed)")
    return passed >= needed


def count_passes(trained: Sequence[Outcome], seeds: Sequence[int], options: argparse.Namespace) -> int:
    """How many seeds learned every lesson that is judged, in time; says how many learned each."""
    learned = {(o.lesson_id, o.seed): o.passes(options.gain, options.least) for o in trained}
    for lesson_id in dict.fromkeys(outcome.lesson_id for outcome in trained):
        count = sum(learned[lesson_id, seed] for seed in seeds)
        print(f"{lesson_id}: learned with {count} of {len(seeds)} seeds")
    late = {outcome.seed for outcome in trained if outcome.elapsed_s > options.within}
    slowest = max((outcome.training_s for outcome in trained), default=math.nan)
    print(f"slowest training {slowest:.0f} s; {len(late)} of {len(seeds)} seeds took longer than {options.within:g} s")
    return sum(
        seed not in late and all(passes for (_, other), passes in learned.items() if other == seed) for seed in seeds
    )


def count_moved(judged: Sequence[Outcome], options: argparse.Namespace) -> int:
    """How many lessons a control learned though it should not have; says so."""
    controls = [outcome for outcome in judged if outcome.kind == "control"]
    if options.control == STILL:
        moved = sum(outcome.after.rewards != outcome.before.rewards for outcome in controls)
        print(f"controls whose answers changed: {moved}")
    else:
        moved = sum(outcome.gain >= options.gain / 2 for outcome in controls)
        if controls:
            print(f"controls with {options.control} that gained half as much: {moved}")
    return moved


if __name__ == "__main__":
    sys.exit(main())
