"""Updates of whole runs made again from their files: equal bit for bit, or not?

    python -m benchmarks.rerun FOLDER [--updates 50] [--kinds language tools control]

Trains three recipes in FOLDER: `named_animal` in many processes under Ray, asynchronous, one of whose rollout workers
is killed on the way; `calculator`, whose rollouts call a tool; `cartpole`, a control policy. Then

- `penstock replay` makes all their updates again: every number and every checkpoint must be equal;
- ``--set`` puts five other losses on an update of the first: each must act, and be refused nothing;
- where no checkpoint before an update is left it must end with exit code 2, naming the nearest and
  `overseer.keep_every`.

Runs that are complete are not made again, so that a killed program goes on. Exits with 1 where a mark is missed. Needs
the extra ``ray``.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.marks import Marks
from penstock.rundir import RunDirectory, read_events, read_metrics, read_status

KEPT = ("overseer.checkpoint_every=10", "overseer.keep_every=10")
KINDS: dict[str, tuple[str, ...]] = {
    "language": ("named_animal", "runtime=ray", "rollout.workers=2", "overseer.backoff_s=0.2"),
    "tools": ("calculator", "replay.groups_per_batch=8"),
    "control": ("cartpole",),
}
"""By kind: recipe and changes."""
LOSSES = ("grpo", "dr_grpo", "dapo", "cispo", "reinforce_pp")
"""Presets that the first run's update is made with; its own is rloo."""
VICTIM = "rollout-1"
LIMIT_S = 1800.0
"""Longest wait for one command."""


def command(*words: object) -> list[str]:
    """Of `penstock`, by this interpreter."""
    return [sys.executable, "-m", "penstock", *map(str, words)]


def updates_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics of the updates that were made."""
    path = folder / "metrics.jsonl"
    return [row for row in read_metrics(path) if "train/optimizer_steps" in row] if path.exists() else []


def is_complete(folder: Path, updates: int) -> bool:
    """Whether the run is over and made so many."""
    status = read_status(folder / "status.json") if (folder / "status.json").exists() else None
    return bool(status and status.get("state") == "finished" and len(updates_of(folder)) >= updates)


def make_run(kind: str, folder: Path, updates: int) -> None:
    """Trains; the worker of a run under Ray is killed in the middle.

    Raises:
        RuntimeError: it failed, or there was nobody to kill.
    """
    if is_complete(folder, updates):
        return
    shutil.rmtree(folder, ignore_errors=True)
    recipe, *changes = KINDS[kind]
    words = command("train", recipe, f"steps={updates}", "--run-dir", folder, *KEPT, *changes)
    log = folder.with_suffix(".log")
    with log.open("w") as said:
        run = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
        try:
            if "runtime=ray" in changes:
                kill_worker(run, folder, updates // 2)
            code = run.wait(LIMIT_S)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(60)
    if code != 0 or not is_complete(folder, updates):
        raise RuntimeError(f"{' '.join(words)}: exit code {code}; it said {log}")


def kill_worker(run: "subprocess.Popen[bytes]", folder: Path, after: int) -> None:
    """SIGKILL for one rollout worker once so many updates are made."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            run.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        else:
            raise RuntimeError(f"the run ended before {VICTIM} could be killed; it said {folder.with_suffix('.log')}")
        if len(updates_of(folder)) >= after:
            os.kill(read_status(folder / "status.json")["components"][VICTIM]["pid"], signal.SIGKILL)
            return
    raise RuntimeError(f"{folder} made no {after} updates within {LIMIT_S:g} s")


def replayed(folder: Path, *words: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and complaint of `penstock replay`."""
    done = subprocess.run(command("replay", folder, *words, "--json"), capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}, done.stderr.strip()


def check_equal(kind: str, folder: Path, updates: int, marks: Marks) -> None:
    """All updates again; says what was compared."""
    code, report, complaint = replayed(folder, "--step", 1, "--until", updates)
    made = report.get("updates", [])
    same = sum(not update["different"] and update["weights_equal"] is not False for update in made)
    numbers = sum(len(update["recomputed"]) for update in made)
    weights = sum(update["weights_equal"] is True for update in made)
    lag = [row.get("replay/staleness_mean", 0.0) for row in updates_of(folder)]
    print(
        f"{kind}: exit code {code}; {same} of {len(made)} updates equal, {numbers} numbers and the weights of "
        f"{weights} checkpoints; mean staleness {sum(lag) / len(lag):.2f}; restarts: {restarts(folder)} " + complaint
    )
    marks.at_least(f"{kind}: updates that are equal bit for bit", same if code == 0 else 0, updates)
    marks.at_least(f"{kind}: checkpoints whose weights are equal", weights, updates // 10)


def restarts(folder: Path) -> int:
    """How often a component of the run was started again."""
    events = [event for event in read_events(folder / "events.jsonl") if event["event"] == "component_start"]
    return len(events) - len({event["component"] for event in events})


def check_losses(folder: Path, step: int, marks: Marks) -> None:
    """Other losses on one update's data."""
    acted = 0
    for preset in LOSSES:
        code, report, complaint = replayed(folder, "--step", step, "--set", f"learner.loss.preset={preset}")
        (update,) = report.get("updates") or [None]
        changed = bool(update and update["stored"]["train/loss"] != update["recomputed"]["train/loss"])
        acted += code == 0 and changed
        stored, new = (update[side]["train/loss"] if update else math.nan for side in ("stored", "recomputed"))
        print(
            f"  --set learner.loss.preset={preset:<13} exit code {code}; loss {stored:.6f}, then {new:.6f} {complaint}"
        )
    marks.at_least("losses that act on the same data", acted, len(LOSSES))


def check_gone(folder: Path, marks: Marks) -> None:
    """An update before every checkpoint that is left, in a copy of the run."""
    copy = folder.with_name(f"{folder.name}-without-beginning")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    try:
        shutil.rmtree(RunDirectory(copy).checkpoints / "step-0")
        code, _, complaint = replayed(copy, "--step", 5)
    finally:
        shutil.rmtree(copy)
    print(f"  without the checkpoint before it: exit code {code}; {complaint}")
    named = "the nearest is step-10" in complaint and "overseer.keep_every" in complaint
    marks.at_least("without a checkpoint: exit code 2 with the remedy", float(code == 2 and named), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs; made where it is missing")
    parser.add_argument("--updates", type=int, default=50, help="of each run; 20 at least")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args(arguments)
    if options.updates < 20:
        parser.error(f"--updates is {options.updates}: two checkpoints, one each ten updates, are the least")
    options.folder.mkdir(parents=True, exist_ok=True)
    marks = Marks()
    for kind in options.kinds:
        folder = options.folder / kind
        make_run(kind, folder, options.updates)
        check_equal(kind, folder, options.updates, marks)
        if kind == "language":
            marks.at_least("workers killed and started again", restarts(folder), 1)
            check_losses(folder, options.updates // 2, marks)
            check_gone(folder, marks)
    return marks.report("\nMarks\n")


if __name__ == "__main__":
    sys.exit(main())
