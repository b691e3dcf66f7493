"""Draws the live view of a finished run, as it stood after one of its updates, to an SVG file.

    python scripts/make_live_view_picture.py RUN_DIR STEP docs/live_view.svg

Everything shown is read from the run directory.
"""

import argparse
import io
import time
from pathlib import Path

from rich.console import Console

from penstock.overseer.progress import Progress, Sample
from penstock.overseer.terminal import TerminalView
from penstock.rundir import RunDirectory, read_json_lines, read_metrics

WIDTH, HEIGHT = 96, 34


def progress_at(directory: RunDirectory, step: int) -> Progress:
    config = directory.read_config()
    progress = Progress("penstock · cats", config["steps"], config["replay"]["staleness_budget"], "training")
    rows = [row for row in read_metrics(directory.metrics_path) if row["step"] <= step]
    updates = [row for row in rows if "train/loss" in row]
    now, before = updates[-1], updates[-10]
    shift = time.monotonic() - now["time"]
    for row in rows:
        progress.note_evaluation(row["step"], row)
        if "train/loss" in row:
            progress.note_rollouts(row)
            staleness = row["replay/staleness_mean"]
            progress.note_update(row["step"], row["train/reward_mean"], staleness, row, row["time"] + shift)
    tokens = now["inference/tokens_total"] - before["inference/tokens_total"]
    progress.units_per_s = tokens / (now["time"] - before["time"])
    progress.ledger = {n.removeprefix("replay/ledger/"): int(v) for n, v in now.items() if "/ledger/" in n}
    samples = [row for row in read_json_lines(directory.path / "samples.jsonl") if row["step"] <= step]
    progress.samples.extend(Sample.of(row) for row in samples if row["rollout_id"].endswith("/0"))
    progress.started -= now["time"] - next(iter(read_json_lines(directory.events_path)))["time"]
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    console.print(
        TerminalView(progress_at(RunDirectory.open_existing(options.run_dir), options.step), console).render()
    )
    options.picture.write_text(console.export_svg(title="penstock train cats"))


if __name__ == "__main__":
    main()
