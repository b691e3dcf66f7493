"""Many runs of recipes, each in a process of its own on one core; what is a line of a file already is not run again.

A cell is one run to be made: its name, recipe, seed and changes. Its outcome is appended to the file as soon as it is
there, so that a campaign that was killed goes on where it was: start it again with the same ``--results``. A line that
was being written then counts as not written. Cells run side by side on as many cores as ``--jobs`` says; none shares
its core with another.

    python -m benchmarks.campaign '["rloo", "cats", 0, ["steps=20"]]'

makes one run and prints its outcome, which is what the processes of a campaign do.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

LIMIT_S = 900.0
"""Longest wait for one run."""
MEANS = ("train/clip_fraction", "train/correction_fraction", "train/staleness_kl", "replay/staleness_mean")
"""Metrics whose mean over all updates is kept."""

Measure = Callable[[Any, int], dict[str, Any]]
"""Makes a cell's run on a core, which is named by its number, and gives the outcome."""


class Cell(NamedTuple):
    """One run.

    Attributes:
        name: What it stands for, beside others.
        recipe: What is trained.
        seed: Of the run.
        overrides: key=value changes to the recipe.
    """

    name: str
    recipe: str
    seed: int
    overrides: tuple[str, ...]


class Outcomes:
    """By cell, in a file of JSON lines that only grows; without a path, in memory alone.

    Args:
        path: Of the file; it need not exist.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        text = path.read_text("utf-8") if path is not None and path.exists() else ""
        whole, _, torn = text.rpartition("\n")
        for line in whole.splitlines():
            row = json.loads(line)
            self._found[json.dumps(row["cell"])] = row["outcome"]
        if torn and path is not None:
            path.write_text(whole + "\n" * bool(whole), "utf-8")

    def __contains__(self, cell: NamedTuple) -> bool:
        return json.dumps(cell) in self._found

    def __getitem__(self, cell: NamedTuple) -> dict[str, Any]:
        return self._found[json.dumps(cell)]

    def add(self, cell: NamedTuple, outcome: dict[str, Any]) -> None:
        """Keeps it, on the disk before it returns."""
        self._found[json.dumps(cell)] = outcome
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"cell": cell, "outcome": outcome}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def go_through(cells: Sequence[NamedTuple], measure: Measure, path: Path | None = None, jobs: int = 1) -> Outcomes:
    """Makes the runs that have no outcome yet, in order, `jobs` at a time, and says how each ended.

    Args:
        cells: All of the campaign's.
        measure: Raises `RuntimeError` for a run that failed; it is made again when the campaign is started again.
        path: Of the outcomes.
        jobs: At most as many as there are cores.

    Raises:
        RuntimeError: a run failed; the others have been made, and are kept.
    """
    outcomes = Outcomes(path)
    missing = [cell for cell in cells if cell not in outcomes]
    done = len(cells) - len(missing)
    free: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:jobs]:
        free.put(core)

    def made(cell: NamedTuple) -> dict[str, Any]:
        core = free.get()
        try:
            return measure(cell, core)
        finally:
            free.put(core)

    failures: list[str] = []
    with ThreadPoolExecutor(free.qsize()) as pool:
        waiting = {pool.submit(made, cell): cell for cell in missing}
        for number, future in enumerate(as_completed(waiting), done + 1):
            try:
                outcomes.add(waiting[future], future.result())
                said = ""
            except RuntimeError as error:
                failures.append(str(error))
                said = f" failed: {error}"
            print(f"{number} of {len(cells)}: {_told(waiting[future])}{said}", file=sys.stderr, flush=True)
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(cells)} runs failed, the first: {failures[0]}")
    return outcomes


def _told(cell: NamedTuple) -> str:
    return " ".join(str(value) for value in cell if isinstance(value, str | int))


def on_core(command: Sequence[str], core: int, limit_s: float = LIMIT_S) -> str:
    """The last line that a command printed, which ran on that core alone, with one thread in XLA.

    Raises:
        RuntimeError: it failed, or took too long; the reason.
    """
    environment = {**os.environ, "PJRT_NPROC": "1", "OMP_NUM_THREADS": "1"}
    chosen = ["taskset", "-c", str(core), *command]
    try:
        done = subprocess.run(chosen, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)}: no end within {limit_s:g} s") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {said}")
    return done.stdout.splitlines()[-1]


def trained_on_core(cell: Cell, core: int) -> dict[str, Any]:
    """`trained` in a process of its own."""
    return json.loads(on_core([sys.executable, "-m", "benchmarks.campaign", json.dumps(cell)], core))


def trained(cell: Cell) -> dict[str, Any]:
    """Trains; the outcome has held-out results, seconds, and numbers of all updates together."""
    import penstock
    from benchmarks.updates import update_rows
    from penstock.overseer.results import write_stats

    directory = Path(tempfile.mkdtemp(prefix="penstock-campaign-"))
    try:
        config = penstock.load_config(cell.recipe, [f"seed={cell.seed}", *cell.overrides])
        summary = penstock.train(config, directory / "run", recipe=cell.recipe, quiet=True)
        rows = update_rows(directory / "run")
    finally:
        shutil.rmtree(directory)
    results = {name: write_stats(getattr(summary, name)) for name in ("untrained", "before", "after")}
    return {
        **results,
        "training_s": summary.training_s,
        "elapsed_s": summary.elapsed_s,
        "processor_s": time.process_time(),
        "lessons": dict(summary.lessons),
        "updates": numbers_of(rows),
    }


def numbers_of(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of a run's updates: sums, means, the fewest optimiser steps of one, and the reward in training by update."""
    if not rows:
        return {}
    means = {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in MEANS}
    return {
        **means,
        "optimizer_steps": min(row["train/optimizer_steps"] for row in rows),
        "tokens": sum(row.get("train/tokens", 0.0) for row in rows),
        "rewards": [row["train/reward_mean"] for row in rows if "train/reward_mean" in row],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that every campaign has."""
    parser.add_argument("--results", type=Path, help="JSON lines; runs that are in it are not made again")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on a core of its own")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", help="JSON: name, recipe, seed and overrides of one run")
    name, recipe, seed, overrides = json.loads(parser.parse_args().cell)
    print(json.dumps(trained(Cell(name, recipe, seed, tuple(overrides)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
