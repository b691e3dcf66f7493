"""Seconds until held-out reward reaches a bar, beside TRL's trainer, from the same weights on the same problems.

    python -m benchmarks.time_to_reward FOLDER --trl-python PATH [--seeds 5] [--trainer rloo] [--bar 0.7]

`named_animal` by its recipe (asynchronous, a staleness budget of 1), and TRL's `RLOOTrainer` or `GRPOTrainer` on the
weights that the run of the same seed began with: the same training prompts and reward function, 16 prompts of 8 answers
to each optimiser step, one step per batch, Adam with the same coefficients and rate. Every ten updates the policy gives
eight answers to each of the recipe's held-out problems for decisions; the first mean that is at the bar counts, it
is not 0.8 since a policy that takes one of the four animals for another earns just that, for long. What is counted are
the seconds from the start of the process until that is known, with the evaluations of both; Penstock's also has what it
compares and the files that it writes. Neither evaluates before training. Penstock's compiled programs are kept in
FOLDER, as a user's are: the first seed's run makes them. Seeds go in pairs, in turn; each run is in FOLDER's
``outcomes.jsonl`` and is not made again. The ratio is the geometric mean of TRL's seconds by Penstock's, with Student's
95% interval of its logarithm. Exits with 1 where a mark is missed.
"""

import argparse
import inspect
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from benchmarks import campaign
from benchmarks.first_step import last_line, peer, started
from benchmarks.marks import Marks
from penstock.environments import cats
from penstock.rundir import RunDirectory, read_metrics
from penstock.text import Tokenizer
from penstock.types.intervals import mean_interval

RECIPE = "named_animal"
OURS = "Penstock"
EVERY, ANSWERS = 10, 8
"""Updates between evaluations, answers to each problem in one."""
RATIO = 1.3
LIMIT_S = 1800.0
"""Longest wait for one run."""


class Timed(NamedTuple):
    """One run of one system.

    Attributes:
        system: ``Penstock``, or the name of TRL's trainer.
        seed: Of the run, and of the weights that both begin with.
        bar: The reward to be reached.
        rate: Peak learning rate.
        updates: At most.
    """

    system: str
    seed: int
    bar: float
    rate: float
    updates: int


def child(cell: Timed, folder: Path) -> None:
    """The process of Penstock that is measured."""
    overrides = (
        f"seed={cell.seed}", f"steps={cell.updates}", f"curriculum.eval_frequency={EVERY}",
        f"learner.optimizer.learning_rate={cell.rate}", "overseer.keep_every=1000000", "curriculum.eval_before=false",
    )  # fmt: skip
    penstock.train(penstock.load_config(RECIPE, list(overrides)), folder, recipe=RECIPE, quiet=True)


def first_at(bar: float, evaluations: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """The first of these that is at the bar: update, reward, seconds.

    Raises:
        RuntimeError: none is.
    """
    for step, reward, seconds in evaluations:
        if reward >= bar:
            return {"step": step, "reward": reward, "seconds": seconds}
    best = max((reward for _, reward, _ in evaluations), default=math.nan)
    raise RuntimeError(f"no evaluation reached {bar}; the best is {best:.3f}: lower --bar")


def penstock_run(cell: Timed, folder: Path) -> dict[str, Any]:
    """Trains in a process of its own; keeps the weights that it began with."""
    run_dir = folder / f"run-{cell.seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    began, done = started(
        [sys.executable, "-m", "benchmarks.time_to_reward", "--child", json.dumps(cell), str(run_dir)],
        LIMIT_S, folder / "programs",
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"penstock's run failed: {last_line(done.stderr)}")
    rows = read_metrics(run_dir / "metrics.jsonl")
    name = "eval/named/reward_mean"
    found = [(int(row["step"]), row[name], row["time"] - began) for row in rows if name in row and row["step"]]
    start = folder / f"start-{cell.seed}"
    shutil.rmtree(start, ignore_errors=True)
    shutil.copytree(RunDirectory(run_dir).checkpoints / "step-0" / "model", start)
    shutil.rmtree(run_dir)
    return first_at(cell.bar, found) | {"evaluations": found}


def task_of(start: Path, bar: float) -> dict[str, Any]:
    """What TRL's side needs to know of the recipe."""
    environment = cats.CatsEnvironment(variant="named")
    tokenizer = Tokenizer.load(start)
    train, held_out = ([(e.prompt, e.answer) for e in environment._pools[mode]] for mode in ("train", "eval"))
    source = (
        f"import re\nfrom collections.abc import Sequence\nANIMALS = {cats.ANIMALS}\n"
        f"NATURAL_WORDS = {cats.NATURAL_WORDS}\n{inspect.getsource(cats._mentions)}\n"
        f"{inspect.getsource(cats.score_answer)}\n"
        "def score(text, animal, ended):\n"
        "    return score_answer(text, animal, [other for other in ANIMALS if other != animal], ended)\n"
    )
    prompts = {question: tokenizer.render(question).tolist() for question, _ in (*train, *held_out)}
    return {
        "model": str(start), "train": train, "held_out": held_out, "prompts": prompts, "source": source, "bar": bar,
        "every": EVERY, "answers": ANSWERS, "tokens": 8,
    }  # fmt: skip


def trl_run(cell: Timed, folder: Path, python: str) -> dict[str, Any]:
    """TRL's trainer from the weights of the same seed, until the bar is reached."""
    optimizer = {
        "warmup_steps": 5,
        "lr_scheduler_type": "constant_with_warmup",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
    }
    told = peer(
        python, LIMIT_S, trainer=cell.system, steps=cell.updates, groups=16, samples=8, tokens=8, seed=cell.seed,
        learning_rate=cell.rate, optimizer=optimizer, task=task_of(folder / f"start-{cell.seed}", cell.bar),
    )  # fmt: skip
    found = [(step, reward, stamp - told["began"]) for step, reward, stamp in told["held_out"]]
    return first_at(cell.bar, found) | {"evaluations": found, "version": told["version"]}


def compare(found: dict[str, list[dict[str, Any]]], theirs: str, marks: Marks) -> list[str]:
    """A line per system; the mark is on the ratio of seconds."""
    lines = [
        f"  {name:<10}" + "  ".join(f"{one['seconds']:6.1f} s ({one['step']} updates)" for one in outcomes)
        for name, outcomes in found.items()
    ]
    pairs = zip(found[theirs], found[OURS], strict=True)
    logs = [math.log(their["seconds"] / our["seconds"]) for their, our in pairs]
    low, high = (math.exp(limit) for limit in mean_interval(logs))
    ratio = math.exp(statistics.fmean(logs))
    lines.append(f"  TRL's / Penstock's seconds: {ratio:.2f} [{low:.2f}, {high:.2f}]")
    marks.at_least("TRL's / Penstock's seconds to the bar", ratio, RATIO)
    marks.at_least("the lower end of its 95% interval", low, 1.0)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of outcomes and initial weights")
    parser.add_argument("--trl-python", help="interpreter that has trl and torch")
    parser.add_argument("--trainer", choices=("rloo", "grpo"), default="rloo")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bar", type=float, default=0.7)
    parser.add_argument("--updates", type=int, default=320, help="of a run, at most")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate of Penstock")
    parser.add_argument("--trl-rate", type=float, help="of TRL; by default the same")
    parser.add_argument("--child", nargs=2, metavar=("CELL", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(Timed(*json.loads(options.child[0])), Path(options.child[1]))
        return 0
    if options.folder is None or options.trl_python is None or options.seeds < 2:
        parser.error(
            "FOLDER and --trl-python, an interpreter that has trl and torch, are needed, and two --seeds at least"
        )
    theirs_rate = options.rate if options.trl_rate is None else options.trl_rate
    cells = {
        system: [Timed(system, seed, options.bar, rate, options.updates) for seed in range(options.seeds)]
        for system, rate in ((OURS, options.rate), (options.trainer, theirs_rate))
    }
    trl = partial(trl_run, folder=options.folder, python=options.trl_python)

    def measure(cell: Timed, _core: int) -> dict[str, Any]:
        return penstock_run(cell, options.folder) if cell.system == OURS else trl(cell)

    options.folder.mkdir(parents=True, exist_ok=True)
    in_turn = [cell for pair in zip(*cells.values(), strict=True) for cell in pair]
    outcomes = campaign.go_through(in_turn, measure, options.folder / "outcomes.jsonl")
    marks = Marks()
    found = {system: [outcomes[cell] for cell in own] for system, own in cells.items()}
    print(f"Seconds from the start of the process to a held-out reward of {options.bar}, by seed")
    print("\n".join([*compare(found, options.trainer, marks), "\nMarks", *marks.lines]))
    return 1 if marks.missed else 0


if __name__ == "__main__":
    sys.exit(main())
