"""Two sides by turns: while one plays, all processes of the other are stopped, so that both meet the same machine.

Where a measurement of one side comes minutes after the other's, a shared machine's moods decide the ratio. Here both
sides live at once, and every second the one is stopped (SIGSTOP) and the other goes on (SIGCONT); their counts are read
while they play, at the beginning and at the end of each turn. A side is a process that answers every line of its
standard input with a line of JSON (`answer_lines`), numbers that only grow and a list of the other processes that it
consists of.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from benchmarks.fleet.counting import rates
from benchmarks.fleet.running import ROOT, START_S, Failed
from benchmarks.fleet.workloads import Workload
from penstock.environments.simulators.processes import die_with_parent

ANSWER_S = 30.0
"""Longest time for an answer of a side that plays."""

TURN_S = 1.0
AT_S, PROCESSES = "at_s", "processes"
PRICED = {"steps": "step_s", "resets": "reset_s"}
"""What costs processor time, and under which name that is counted."""
Counts = dict[str, Any]


def answer_lines(counts: Callable[[], Counts]) -> None:
    """The playing side's part: answers until its input ends; whoever asks takes it along in death, stopped or not.

    Args:
        counts: Numbers that only grow, AT_S one of them, and under PROCESSES the process ids of all but this one.
    """
    die_with_parent(os.getppid())
    for _ in sys.stdin:
        print(json.dumps(counts()), flush=True)


class Side:
    """One side: a process and those that it names.

    Args:
        command: Starts it.
        start_s: Longest time until its first answer.

    Raises:
        Failed: it did not answer.
    """

    def __init__(self, command: list[str], start_s: float) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
        )
        self._others: list[int] = []
        try:
            self.ask(start_s)
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        """Of all processes that it consists of."""
        return [*self._others, self._process.pid]

    def ask(self, limit_s: float = ANSWER_S) -> Counts:
        """What it counted until now.

        Raises:
            Failed: it ended, or said nothing within `limit_s`.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"a side ended with {process.wait(ANSWER_S)}") from None
        if not select.select([process.stdout], [], [], limit_s)[0]:
            raise Failed(f"a side said nothing within {limit_s:g} s")
        line = process.stdout.readline()
        if not line:
            raise Failed(f"a side ended with {process.wait(ANSWER_S)}")
        counts = json.loads(line)
        self._others = counts.pop(PROCESSES)
        return counts

    def play(self, seconds: float) -> Counts:
        """Lets it go on so long.

        Returns:
            By how much its counts grew, and under AT_S in how many seconds.

        Raises:
            Failed: as `ask`.
        """
        self._signal(signal.SIGCONT)
        before = self.ask()
        time.sleep(seconds)
        after = self.ask()
        self.stop()
        return {name: after[name] - before[name] for name in before}

    def stop(self) -> None:
        """Until it plays again."""
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Closes its input, and kills what is left of it afterwards.

        Raises:
            Failed: it ended with an error, or not in time.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
            code = self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"a side did not end within {ANSWER_S:g} s") from None
        finally:
            self._kill()
        if code != 0:
            raise Failed(f"a side ended with {code}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait(ANSWER_S)

    def _signal(self, what: signal.Signals) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, what)


def alternate(sides: list[Side], turns: int, turn_s: float, warm_up_s: float) -> list[list[Counts]]:
    """All sides by turns, each in turn the first.

    Args:
        sides: That play; all are stopped at first, and at the end.
        turns: Of each.
        turn_s: Length of a turn.
        warm_up_s: Each plays so long before, uncounted.

    Returns:
        For each turn what each side counted, in the order of `sides`.
    """
    for side in sides:
        side.stop()
    for side in sides:
        side.play(warm_up_s)
    found: list[list[Counts]] = []
    for turn in range(turns):
        order = sides if turn % 2 == 0 else sides[::-1]
        played = {id(side): side.play(turn_s) for side in order}
        found.append([played[id(side)] for side in sides])
    return found


def compare(workload: Workload, seconds: float, warm_up_s: float) -> tuple[dict[str, float], dict[str, float]]:
    """Our fleet beside independent processes, by turns.

    Args:
        workload: Its simulators are all of one kind.
        seconds: Of each side, in turns of TURN_S.
        warm_up_s: Of each, before.

    Returns:
        The fleet's rates, with `steps_ratio` and `work_ratio` to the independent processes; and theirs, with the
        processor time of a step and of a reset. Work is steps and resets, priced at that time: episodes end by chance,
        and where a reset takes hundreds of steps' time a rate of steps alone is mostly luck.

    Raises:
        Failed: a side failed.
    """
    modules = [f"benchmarks.fleet.{name}" for name in ("own", "independent")]
    with (
        Side([sys.executable, "-m", modules[0], workload.name], START_S) as fleet,
        Side([sys.executable, "-m", modules[1], workload.name], START_S) as alone,
    ):
        turns = alternate([fleet, alone], max(round(seconds / TURN_S), 1), TURN_S, warm_up_s)
    return ratios(*(_total(side) for side in zip(*turns, strict=True)))


def ratios(fleet: Counts, alone: Counts) -> tuple[dict[str, float], dict[str, float]]:
    """See `compare`; of what both counted."""
    prices = {name: alone[spent] / alone[name] if alone[name] else 0.0 for name, spent in PRICED.items()}

    def work_per_s(counts: Counts) -> float:
        return sum(counts[name] * price for name, price in prices.items()) / counts[AT_S]

    found = {"steps_per_s": alone["steps"] / alone[AT_S], "step_s": prices["steps"], "reset_s": prices["resets"]}
    ours = rates(fleet)
    ours["steps_ratio"] = ours["steps_per_s"] / found["steps_per_s"]
    ours["work_ratio"] = work_per_s(fleet) / work_per_s(alone)
    return ours, found


def _total(turns: Iterable[Counts]) -> Counts:
    turns = list(turns)
    return {name: sum(turn[name] for turn in turns) for name in turns[0]}
