"""Draws the live view of a finished run, as it stood after one of its updates, to an SVG file.

    python scripts/make_live_view_picture.py RUN_DIR STEP docs/live_view.svg

Everything shown is read from the run directory.
"""

import argparse
import io
from pathlib import Path

from rich.console import Console

from penstock.overseer.terminal import Progress, Sample, TerminalView
from penstock.rundir import RunDirectory, read_json_lines, read_metrics

WIDTH = 96


def progress_at(directory: RunDirectory, step: int) -> Progress:
    config = directory.read_config()
    rows = [row for row in read_metrics(directory.metrics_path) if "train/loss" in row and row["step"] <= step]
    now = rows[-1]
    progress = Progress("penstock · cats", config["steps"], config["replay"]["staleness_budget"], "training", step)
    progress.rewards.extend(row["train/reward_mean"] for row in rows)
    progress.units_per_s = now["inference/tokens_per_s"]
    progress.step_s = now["time/wait_for_batch"] + now["time/update"]
    progress.staleness = now["replay/staleness_mean"]
    ledger = {name.removeprefix("replay/ledger/"): int(value) for name, value in now.items() if "/ledger/" in name}
    progress.ledger = ledger
    samples = [row for row in read_json_lines(directory.path / "samples.jsonl") if row["step"] <= step]
    for sample in [row for row in samples if row["rollout_id"].endswith("/0")][-3:]:
        asked, answered = (turn["content"] for turn in sample["turns"])
        progress.samples.append(Sample(asked, answered, sample["reward"], sample["lesson_id"]))
    progress.started -= now["time"] - next(iter(read_json_lines(directory.events_path)))["time"]
    return progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(
        TerminalView(progress_at(RunDirectory.open_existing(options.run_dir), options.step), console).render()
    )
    options.picture.write_text(console.export_svg(title="penstock train cats"))


if __name__ == "__main__":
    main()
