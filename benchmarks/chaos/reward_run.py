"""A run whose reward function misbehaves: none of its rollouts may get another one's reward, and the run must end.

The reward follows from the text alone, so that it is computed anew for every rollout that was stored.
"""

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from benchmarks.chaos import misbehaving
from benchmarks.chaos.invariants import violations
from benchmarks.marks import Marks
from penstock.rundir import RunDirectory, read_parquet

GROUPS, SIZE = 8, 4
PEAK_BYTES = 1 << 30
"""Of the run's own process, which has some 400 MB without that."""
LOOK_S = 0.1
GONE_S = 10.0
REWARD_TIMEOUT_S = 2.0


@dataclass
class Outcome:
    """What became of the run.

    Attributes:
        code: Its exit code; None where it had to be killed.
        took_s: How long it ran.
        peak_bytes: The most memory that its own process had.
        done: How often the reward function misbehaved in which way.
        rollouts: That were stored.
        wrong: Those whose reward is not that of their text.
        left: Processes that reward functions started and that outlived the run.
        said: The last that was printed.
        broken: Rules of the files that do not hold.
    """

    code: int | None = None
    took_s: float = 0.0
    peak_bytes: int = 0
    done: Counter[str] = field(default_factory=Counter[str])
    rollouts: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    said: str = ""
    broken: list[str] = field(default_factory=list)


def misbehave(folder: Path, updates: int, bound_s: float) -> Outcome:
    """Trains so many updates, and looks at what is there afterwards.

    Args:
        folder: Made for everything.
        updates: Each of `GROUPS` groups.
        bound_s: Longest time for the run.
    """
    folder.mkdir(parents=True)
    recipe = _write_recipe(folder, updates)
    outcome, directory = Outcome(), RunDirectory(folder / "run")
    _train(recipe, directory, bound_s, outcome)
    outcome.done = Counter((folder / "misbehaving.log").read_text().splitlines())
    for row in _rows(directory):
        outcome.rollouts += 1
        if row["episode_reward"] != misbehaving.of(row["turns"][-1]["content"]):
            outcome.wrong.append(row["rollout_id"])
    outcome.broken = violations(directory)
    return outcome


def add_marks(outcome: Outcome, marks: Marks) -> None:
    """What was promised of it."""
    ended = f"exit code {outcome.code} after {outcome.took_s:.0f} s"
    marks.add("a run of misbehaving rewards ends by itself", ended + outcome.said, outcome.code == 0)
    never = sorted(misbehaving.KINDS.keys() - outcome.done.keys())
    total = f"{sum(outcome.done.values())} times in {len(outcome.done)} ways"
    marks.add("rewards misbehaved in every way", ", ".join(never) or total, not never)
    wrong = f"{len(outcome.wrong)} of {outcome.rollouts:,}"
    marks.add("every rollout has its own reward", wrong, not outcome.wrong and outcome.rollouts > 0)
    marks.add("no rule of its files is broken", "; ".join(outcome.broken), not outcome.broken)
    marks.add("nothing that rewards started is left", str(len(outcome.left)), not outcome.left)
    peak = f"{outcome.peak_bytes / 1e6:,.0f} MB at most"
    marks.add("their output does not fill the memory", peak, outcome.peak_bytes <= PEAK_BYTES)


def _write_recipe(folder: Path, updates: int) -> Path:
    """A tiny policy, whose groups are scored by a copy of the function that writes its log there."""
    function = Path(shutil.copy(misbehaving.__file__, folder / "misbehaving.py"))
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": f"Say {word}.", "answer": ""}) + "\n" for word in range(64)))
    arguments = {
        "path": str(problems), "reward": f"{function}:checksum", "reward_timeout_s": REWARD_TIMEOUT_S,
        "reward_processes": 4,
    }  # fmt: skip
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2}  # fmt: skip
    lesson = {
        "environment": {"env_class": "penstock.environments.jsonl.JsonlEnvironment", "env_args": arguments},
        "sampling_params": {"n_generations_per_prompt": SIZE, "max_output_tokens": 8},
    }
    recipe = {
        "steps": updates,
        "model": {"init": sizes},
        "curriculum": {
            "lessons": {"words": lesson}, "eval_frequency": 0, "micro_eval_frequency": 0, "eval_n_examples": 1,
        },
        "inference": {"max_slots": 64, "max_seq_len": 64},
        "replay": {
            "groups_per_batch": GROUPS, "max_failed_groups_per_batch": 1_000_000,
            "max_filtered_groups_per_batch": 1_000_000,
        },
        "learner": {"row_length": 128, "micro_batch_rows": 8},
        "overseer": {"checkpoint_every": 5},
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _train(recipe: Path, directory: RunDirectory, bound_s: float, outcome: Outcome) -> None:
    out, started = recipe.with_suffix(".out"), time.monotonic()
    with out.open("wb") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "penstock", "train", "-q", str(recipe), f"--run-dir={directory.path}"],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=recipe.parent,
        )  # fmt: skip
    try:
        itself = psutil.Process(run.pid)
        while run.poll() is None and time.monotonic() - started < bound_s:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                outcome.peak_bytes = max(outcome.peak_bytes, itself.memory_info().rss)
            time.sleep(LOOK_S)
        outcome.code = run.poll()
    finally:
        for child in [*_descendants(run.pid), run]:
            child.kill()
        run.wait(GONE_S)
    outcome.took_s = time.monotonic() - started
    if outcome.code != 0:
        outcome.said = f": {out.read_text(errors='replace')[-600:]}".replace("\n", " | ")
    outcome.left = _end_what_is_left(recipe.parent)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end_what_is_left(folder: Path) -> list[int]:
    """Ends what the function left behind, forked children of its process too; returns which those were."""
    function = f"{folder / 'misbehaving.py'}:"
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or []) == ["sleep", str(misbehaving.SLEEP_S)]
        or any(word.startswith(function) for word in words)
    ]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in left]


def _rows(directory: RunDirectory) -> list[dict]:
    columns = ["rollout_id", "episode_reward", "turns"]
    return [row for part in directory.rollouts.glob("*.parquet") for row in read_parquet(part, columns).to_pylist()]
