"""Runs to which everything is done that a machine, a network or a reward function does to one, and what became of them.

    python -m benchmarks.chaos [--parts run,drivers,rewards] [--minutes 30] [--faults 100] [--seed 0] [--kinds …]

Three parts, one after another. `run`: the recipe `cats` runs in many processes on this machine while faults of a seeded
schedule are done to it (`schedule` names the kinds), one after another: each is followed until every component runs and
another update was made. Every fault and what was seen of it goes into a file of JSON lines. Then the run goes on until
it is past the bar, and its files are audited: nothing sealed is lost, the ledger closes, the policy is as good as
without faults. `drivers`: two runs side by side, each with a cluster of its own, whose drivers are killed, hung up on
and deprived of their cluster, and resumed. `rewards`: a run whose reward function misbehaves in every way. Exits with 1
where a mark is missed. Only processes that this one started are signalled.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos import auditing, drivers, load, memory, reporting, reward_run
from benchmarks.chaos.inflicting import Inflictor, Machine
from benchmarks.chaos.invariants import some
from benchmarks.chaos.schedule import KINDS, Fault, make_schedule
from benchmarks.chaos.slow_network import Proxy, free_port
from benchmarks.chaos.small_disk import SmallDisk
from benchmarks.chaos.watching import Effect, RunEnded, Watch
from benchmarks.marks import Marks
from penstock.overseer import RunConfig
from penstock.rundir import RunDirectory
from penstock.types import PenstockError

PARTS = ("run", "drivers", "rewards")
START_S = 300.0
"""Longest time until the first update."""
BAR_UPDATES = 20
"""The bar is passed when the mean training reward of so many updates is."""
CHECKPOINTS_MIB = 64
"""Of the disk of checkpoints."""
MARGIN = 0.02
"""And by so much, before the run is stopped."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas: " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=2, help="of all faults to each of two drivers")
    parser.add_argument("--updates", type=int, default=30, help="of the run whose rewards misbehave")
    parser.add_argument("--minutes", type=float, default=30.0, help="no further fault after so long")
    parser.add_argument("--faults", type=int, default=100, help="most faults")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas: " + ", ".join(KINDS))
    parser.add_argument("--each", type=int, default=5, help="least number of faults of each kind that is a success")
    parser.add_argument("--bar", type=float, default=0.9, help="held-out reward that the policy must reach")
    parser.add_argument("--bound", type=float, default=120.0, help="longest time to recover, in seconds")
    parser.add_argument("--calm", type=float, default=60.0, help="longest time without an update while no fault lasts")
    parser.add_argument("--more-minutes", type=float, default=15.0, help="longest time after the faults")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="the recipe's own is 1.5e-3")
    parser.add_argument("--groups", type=int, default=16, help="in a batch, of 8 rollouts each; the recipe's own is 16")
    parser.add_argument("--scratch", type=Path, help="an existing folder for everything; by default a new one")
    parser.add_argument("--out", type=Path, help="a line for each fault; by default runs/chaos-<time>.jsonl")
    options = parser.parse_args(arguments)
    for name, known in (("kinds", KINDS), ("parts", PARTS)):
        given = [word.strip() for word in getattr(options, name).split(",")]
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{name} names {', '.join(unknown)}; known are {', '.join(known)}")
        setattr(options, name, given)
    return options


@dataclass
class Story:
    """What happened.

    Attributes:
        effects: Of each fault.
        corrupted: Rollouts by the file that was damaged with them in it.
        longest_calm_s: The longest time without an update while no fault was being recovered from.
        failure: What ended the faults too early; empty where nothing did.
        minutes: How long the faults took.
    """

    effects: list[Effect] = field(default_factory=list)
    corrupted: dict[str, list[str]] = field(default_factory=dict)
    longest_calm_s: float = 0.0
    failure: str = ""
    minutes: float = 0.0


class Chaos:
    """The thread that does faults, then waits until the policy is good, then stops the run."""

    def __init__(self, options: argparse.Namespace, run: load.Run, inflictor: Inflictor, notes: auditing.Notes) -> None:
        self.story = Story()
        self._options = options
        self._run = run
        self._watch = Watch(run)
        self._inflictor = inflictor
        self._notes = notes
        self._draws = random.Random(options.seed)
        self.thread = threading.Thread(target=self._go, name="chaos", daemon=True)

    def _go(self) -> None:
        try:
            self._do_faults()
            self._go_on()
        except RunEnded:
            self.story.failure = "the run ended while it should have gone on"
        except Exception as error:  # the run is stopped in any case, and what was found is printed
            self.story.failure = f"{type(error).__name__}: {error}"
        finally:
            self._run.conductor.stop()

    def _do_faults(self) -> None:
        options, run = self._options, self._run
        if self._watch.wait(lambda: run.updates > 0 and self._watch.all_up(), START_S) is None:
            raise TimeoutError(f"no update within {START_S:g} s of the start")
        started = time.monotonic()
        for fault in make_schedule(options.seed, options.kinds, options.faults):
            self._calm(fault.calm_s)
            if time.monotonic() - started > options.minutes * 60:
                break
            self._do(fault)
        self.story.minutes = (time.monotonic() - started) / 60

    def _do(self, fault: Fault) -> None:
        try:
            effect = self._inflictor.do(fault)
        finally:
            self.story.corrupted = self._inflictor.corrupted
        self.story.effects.append(effect)
        with self._options.out.open("a") as file:
            file.write(json.dumps(effect.record()) + "\n")
        print(reporting.line(effect), flush=True)
        if self._draws.random() < 0.5:
            self._notes.take()

    def _calm(self, seconds: float) -> None:
        """Nothing is done to the run for so long, and the pauses between its updates are measured."""
        self._watch.forget_pauses()
        self._watch.wait(lambda: False, seconds)
        self.story.longest_calm_s = max(self.story.longest_calm_s, self._watch.pause_s)

    def _go_on(self) -> None:
        ends = time.monotonic() + self._options.more_minutes * 60
        while self._run.reward(BAR_UPDATES) < self._options.bar + MARGIN and time.monotonic() < ends:
            self._calm(1.0)
        self._notes.take()


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    options, marks = parse(arguments), Marks()
    options.out = options.out or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    with ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        if "run" in options.parts:
            survive(options, scratch, marks)
        if "drivers" in options.parts:
            print(f"\ntwo runs side by side, {options.rounds} rounds of {', '.join(drivers.EXITS)}", flush=True)
            drivers.endure(scratch / "drivers", options.seed, options.rounds, options.bound, marks)
        if "rewards" in options.parts:
            print(f"\n{options.updates} updates with a reward function that misbehaves", flush=True)
            outcome = reward_run.misbehave(scratch / "rewards", options.updates, options.more_minutes * 60)
            reward_run.add_marks(outcome, marks)
            print(", ".join(f"{kind} {count}" for kind, count in outcome.done.items()))
    return marks.report("\nMarks\n")


def survive(options: argparse.Namespace, scratch: Path, marks: Marks) -> None:
    """The first part."""
    with SmallDisk(scratch / "disk", 128 + int(32 * options.minutes)) as disk:
        with SmallDisk(disk.folder / "run" / "checkpoints", CHECKPOINTS_MIB) as checkpoints:
            if not checkpoints.can_be_full:
                options.kinds = [kind for kind in options.kinds if not kind.startswith("full")]
            print(f"{len(options.kinds)} kinds of faults, seed {options.seed}; {disk.in_words()}", flush=True)
            story, failure, audit, config, directory = run_it(options, scratch, disk, checkpoints)
            print_marks(options, marks, story, failure)
            print_audit(options, marks, audit, config, directory)
    print(f"Every fault is in {options.out}, the overseer's events beside it.")


Outcome = tuple[Story, str, auditing.Audit, RunConfig, RunDirectory]


def run_it(options: argparse.Namespace, scratch: Path, disk: SmallDisk, checkpoints: SmallDisk) -> Outcome:
    """The run with all faults, to its end: its story, how it failed, what its files say."""
    clock_folder = scratch / "clocks"
    clock_folder.mkdir()
    weights_port, failure = free_port(), ""
    with Proxy(weights_port) as proxy, memory.watched():
        config = load.configuration(options.learning_rate, options.groups, weights_port, proxy.port)
        with load.wired(config, disk.folder / "run", clock_folder) as run:
            notes = auditing.Notes(run.directory)
            inflictor = Inflictor(run, Watch(run), Machine(disk, checkpoints, proxy, clock_folder), options.bound)
            chaos = Chaos(options, run, inflictor, notes)
            chaos.thread.start()
            try:
                run.oversee()
            except Exception as error:  # whatever it is, what the files say of the run is told all the same
                failure = f"{type(error).__name__}: {error}"
            finally:
                run.ended.set()
            chaos.thread.join(options.bound)
            shutil.copy(run.directory.events_path, options.out.with_suffix(".events.jsonl"))
            told = run.conductor.status()["ledger"]
        audit = auditing.audit(run.directory, notes.sealed, chaos.story.corrupted, told)
        print(f"\n{notes.times} looks at sealed files noted {len(notes.sealed):,} rollouts; "
              f"{run.updates} updates, {run.conductor.lineage + 1} lineages")  # fmt: skip
    return chaos.story, failure, audit, config, run.directory


def print_marks(options: argparse.Namespace, marks: Marks, story: Story, failure: str) -> None:
    """Of the faults."""
    found = reporting.rows(story.effects)
    print(f"\n{len(story.effects)} faults in {story.minutes:.1f} minutes\n" + reporting.table(found))
    counts = Counter(effect.kind for effect in story.effects)
    marks.add("the run came to its end in good order", failure or story.failure, not failure and not story.failure)
    few = [f"{kind} {counts[kind]}" for kind in options.kinds if counts[kind] < options.each]
    marks.add(f"at least {options.each} faults of each kind", ", ".join(few), not few)
    idle = [f"{effect.number} {effect.kind}" for effect in story.effects if not effect.struck]
    marks.add("every fault struck", ", ".join(idle), not idle)
    unnamed = [f"{effect.number}" for effect in story.effects if effect.kind == "out of memory" and not named(effect)]
    marks.add("a death for want of memory is called that", ", ".join(unnamed), not unnamed)
    alone = [told for effect in story.effects[1:] for told in effect.before if told.startswith("component_death")]
    marks.add("no death without a fault", "; ".join(alone), not alone)
    stuck = [f"{effect.number} {effect.kind}" for effect in story.effects if not effect.recovered]
    worst = max((row.worst_s or 0.0 for row in found), default=0.0)
    marks.add(f"every recovery within {options.bound:g} s", ", ".join(stuck) or f"{worst:.1f} s at most", not stuck)
    calm = story.longest_calm_s
    marks.add(f"an update every {options.calm:g} s where there is no fault", f"{calm:.1f} s", calm <= options.calm)


def named(effect: Effect) -> bool:
    """Whether the overseer says why the components were ended."""
    return any("ran out of memory" in told for told in effect.events)


def print_audit(options: argparse.Namespace, marks: Marks, audit: auditing.Audit, config, directory) -> None:
    """Of the files and the policy."""
    marks.add("the files can be read", audit.unreadable, not audit.unreadable)
    books = audit.books
    if books is not None:
        said = f"{books.started:,} started: " + ", ".join(f"{n:,} {state}" for state, n in sorted(books.states.items()))
        marks.add("the ledger closes, from the files alone", said, books.closed)
        told = sum(n for state, n in audit.told.items() if state != "started")
        marks.add("so does the ledger that the run told last", f"{told:,}", 0 < told == audit.told.get("started", 0))
    marks.add("no rule of a run's files is broken", "; ".join(audit.violations), not audit.violations)
    marks.add("no sealed rollout is lost", some(audit.lost), not audit.lost)
    marks.add("files damaged on purpose are put aside", ", ".join(audit.not_aside), not audit.not_aside)
    marks.add("their rollouts are settled", some(audit.unsettled), not audit.unsettled)
    try:
        checkpoint, reward = auditing.held_out_reward(directory, config, 64)
    except PenstockError as error:
        marks.add(f"held-out reward of {options.bar:g}", str(error), False)
    else:
        marks.add(f"held-out reward of {options.bar:g}", f"{reward:.3f} at {checkpoint.name}", reward >= options.bar)


if __name__ == "__main__":
    sys.exit(main())
