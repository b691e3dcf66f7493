"""Seconds from the start of a process to the end of its first update, and what Penstock spends them on.

    python -m benchmarks.first_step [--rounds 3] [--trl-python PATH]

Each round starts a fresh Python that runs `penstock.train` on the shape of `benchmarks.steps` (6.3 million float32
parameters, 8 groups of 8 answers of 64 tokens after prompts of 16, at staleness zero), and one that runs TRL's
`GRPOTrainer` on the same, in turn. The clock runs from before the process is started until the update is done: imports,
a model of random weights, compilation, the first batch, the update. Penstock runs twice a round: once with no compiled
programs on disk, and once again, with those that the first run kept. Programs are compiled beside other phases, too,
and are listed where they were done. Neither evaluates the untrained policy. Beyond TRL, Penstock compares engine and
learner, writes a checkpoint and keeps what was generated; all of that counts. Bytecode of what is imported is made
before the first round.

`--trl-python` names the interpreter of an environment with `trl` and `torch`; without it that peer is skipped. Exits
with 1 where the median of Penstock's first runs takes longer than TRL's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.marks import Marks

LIMIT_S = 300.0
"""Longest wait for one process."""
PEER = 1.0
"""Most that Penstock's median may be of TRL's."""
GROUPS, SAMPLES, TOKENS = 8, 8, 64
_PHASES = {
    "starting components": "start of engine and learner, compilation",
    "checking that engines and learner agree": "comparison of engine and learner",
    "training": "checkpoint, first batch, rest of compilation, update",
}
"""What each phase before the first update is, in order, by its name in events.jsonl."""


class Part(NamedTuple):
    """A stretch of a start-up.

    Attributes:
        name: What it is, in words.
        seconds: How long it took.
        inside: Whether it is a share of the one above it.
    """

    name: str
    seconds: float
    inside: bool = False


def parts_of(
    began: float, imported: float, events: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]
) -> list[Part]:
    """Where the seconds of one process went, from its start to the end of its first update.

    Args:
        began: When it was started, seconds since the epoch.
        imported: When it had imported what it says at its top.
        events: Of its run, of events.jsonl.
        metrics: Of metrics.jsonl.
    """
    update = next(row for row in metrics if "train/loss" in row)
    begun: dict[str, float] = {}
    for event in events:
        if event["event"] == "phase" and event["phase"] in _PHASES:
            begun.setdefault(event["phase"], event["time"])
    first = begun["starting components"]
    found = [
        Part("Python and imports", imported - began),
        Part("configuration, model, engine, run directory", first - imported),
    ]
    compiled = [event for event in events if event["event"] == "compiled"]
    ends = [*list(begun.values())[1:], update["time"]]
    for phase, start, end in zip(begun, begun.values(), ends, strict=True):
        found.append(Part(_PHASES[phase], end - start))
        if phase == "training":
            found.append(Part("first batch", update["time/wait_for_batch"], True))
            found.append(Part("update", update["time/update"], True))
        told = [event for event in compiled if start <= event["time"] < end]
        found += [
            Part(f"{each['component']}: {each['program']}, done at {each['time'] - began:.1f} s", each["seconds"], True)
            for each in told
        ]
    return found


def first_step_s(began: float, metrics: Sequence[Mapping[str, Any]]) -> float:
    """Seconds until the first update was done."""
    return next(row["time"] for row in metrics if "train/loss" in row) - began


def child(folder: Path) -> None:
    """The process that is measured: one run of one update."""
    import penstock
    from benchmarks import steps
    from penstock.rundir.parquet import WithoutPandas

    sys.meta_path.insert(0, WithoutPandas())  # only the tests install it

    train, imported = penstock.train, time.time()
    rows = GROUPS * SAMPLES  # at once, as TRL has them
    options = argparse.Namespace(steps=1, groups=GROUPS, samples=SAMPLES, tokens=TOKENS, micro_batch_rows=rows)
    config = steps.configuration(options, 0)
    curriculum = config.curriculum.model_copy(update={"eval_before": False})
    learner = config.learner.model_copy(update={"remat": "products"})  # TRL recomputes nothing either
    config = config.model_copy(update={"steps": 1, "curriculum": curriculum, "learner": learner})
    print(json.dumps({"imported": imported}), flush=True)
    train(config, folder, recipe="first_step", quiet=True)


def started(
    command: Sequence[str], limit_s: float = LIMIT_S, programs: Path | None = None
) -> tuple[float, subprocess.CompletedProcess[str]]:
    """When it was started, and how it ended.

    Args:
        command: What to run.
        limit_s: Longest wait for its end.
        programs: Folder of compiled programs; None for the user's.

    Raises:
        RuntimeError: it did not, for so long.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if programs is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(programs)
    began = time.time()
    try:
        return began, subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command[:3])} …: no end within {limit_s:g} s") from None


def penstock_round(folder: Path, programs: Path) -> tuple[float, list[Part]]:
    """Seconds to the first step, and their parts; compiled programs are kept in a folder.

    Raises:
        RuntimeError: the run failed, or did something else than one update.
    """
    from penstock.rundir import read_events, read_metrics, read_status

    command = [sys.executable, "-m", "benchmarks.first_step", "--child", str(folder)]
    began, done = started(command, programs=programs)
    if done.returncode != 0:
        raise RuntimeError(f"penstock's run failed: {last_line(done.stderr)}")
    status = read_status(folder / "status.json") or {"ledger": {"trained": 0}}
    trained = status["ledger"]["trained"]
    if trained != GROUPS * SAMPLES:
        raise RuntimeError(f"penstock's run trained {trained} rollouts and not {GROUPS * SAMPLES}")
    metrics, events = read_metrics(folder / "metrics.jsonl"), read_events(folder / "events.jsonl")
    imported = json.loads(done.stdout.splitlines()[0])["imported"]
    return first_step_s(began, metrics), parts_of(began, imported, events, metrics)


def trl_round(python: str) -> tuple[float, str]:
    """Seconds to the first step, and what is to be said of it.

    Raises:
        RuntimeError: it cannot be measured; the reason.
    """
    from benchmarks import steps

    told = peer(
        python, trainer="grpo", steps=1, groups=GROUPS, samples=SAMPLES, tokens=TOKENS,
        prompt_tokens=steps.PROMPT_TOKENS, shape=steps.SHAPE,
    )  # fmt: skip
    began, imported, begun, stepped = told["began"], told["imported"], told["begun"], told["steps"][0]
    words = (
        f"TRL {told['version']}, {told['parameters']:,} parameters: imports {imported - began:.2f} s, "
        f"model and trainer {begun - imported:.2f} s, step {stepped - begun:.2f} s"
    )
    return stepped - began, words


def peer(python: str, limit_s: float = LIMIT_S, **what: Any) -> dict[str, Any]:
    """What `trl_peer.py` told in a process of its own, and when that `began`.

    Args:
        python: The interpreter.
        limit_s: Longest wait for it.
        what: Its `main`'s arguments.

    Raises:
        RuntimeError: it cannot be run; the reason.
    """
    try:
        began, done = started([python, str(Path(__file__).with_name("trl_peer.py")), json.dumps(what)], limit_s)
    except OSError as error:
        raise RuntimeError(f"{python} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        missing = next((name for name in ("torch", "trl") if f"No module named '{name}'" in done.stderr), None)
        raise RuntimeError(f"no {missing} for {python}" if missing else f"it failed: {last_line(done.stderr)}")
    return {"began": began, **json.loads(done.stdout.splitlines()[-1])}


def last_line(text: str) -> str:
    """Of what a process said."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def show(parts: Sequence[Part]) -> str:
    """One line per part."""
    return "\n".join(f"{'    ' if part.inside else '  '}{part.name:<74}{part.seconds:7.2f} s" for part in parts)


def compare(ours: Sequence[float], again: Sequence[float], theirs: Sequence[float], marks: Marks) -> list[str]:
    """Medians and rounds of each; the mark is on the ratio of first runs."""
    found = {"Penstock": ours, "Penstock again": again, "TRL": theirs}
    lines = [
        f"{name:<16}{statistics.median(each):7.2f} s  ({', '.join(f'{seconds:.2f}' for seconds in each)})"
        for name, each in found.items()
        if each
    ]
    if theirs:
        marks.at_most("Penstock's median / TRL's", statistics.median(ours) / statistics.median(theirs), PEER)
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl-python", help="interpreter that has trl and torch")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(options.child)
        return 0
    marks, ours, again, theirs = Marks(), [], [], []
    rounds: list[tuple[float, list[Part]]] = []
    skipped, said = "" if options.trl_python else "--trl-python names an interpreter that has it", ""
    with tempfile.TemporaryDirectory(prefix="penstock-first-step-") as folder:
        for number in range(options.rounds + 1):
            programs = Path(folder) / f"programs-{number}"
            seconds, parts = penstock_round(Path(folder) / f"run-{number}", programs)
            once_more, _ = penstock_round(Path(folder) / f"again-{number}", programs)
            if not skipped:
                try:
                    peer_s, said = trl_round(options.trl_python)
                except RuntimeError as error:
                    skipped = str(error)
                else:
                    theirs += [peer_s] * (number > 0)
            if number:  # the first made bytecode, and read files that later ones find in memory
                rounds.append((seconds, parts))
                ours.append(seconds)
                again.append(once_more)
    print("Seconds from the start of the process to the end of the first update, median (rounds)")
    print("\n".join(f"  {line}" for line in compare(ours, again, theirs, marks)))
    print(f"  {said}" if theirs else f"  TRL skipped: {skipped}")
    middle, parts = sorted(rounds)[(len(rounds) - 1) // 2]
    print(f"\nPenstock's {middle:.2f} s\n{show(parts)}")
    if marks.lines:
        print("\nMarks\n" + "\n".join(marks.lines))
    return 1 if marks.missed else 0


if __name__ == "__main__":
    sys.exit(main())
