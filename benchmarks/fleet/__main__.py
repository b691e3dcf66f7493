"""Simulator fleets: steps per second of whole fleets, with policy, fragments and monitoring, beside peers.

    python -m benchmarks.fleet [--quick] [--only sleep32,zero] [--rounds 3] [--seconds 3] [--peers VENV ...] [--faults]

Each measurement is a process of its own, one at a time; a round measures every workload with our fleet and with its
peers, one after the other, so that a change of the machine hits all alike; our fleet and independent processes play by
turns of a second (`benchmarks.fleet.alternating`). Rows are medians of the rounds. `benchmarks/fleet/peers/README.md`
says how the peers' environments are made, and what each does less or more than we do. The policy averages frames to
16 x 16 and has two layers of 64, so that fleets are measured and not the matrix product; the Nature CNN is apart.
`--faults` adds `python -m benchmarks.fleet.faults`. Exits with 1 where a mark is missed or one of our own measurements
failed.
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fleet import alternating, faults, running
from benchmarks.fleet.workloads import WORKLOADS, Workload
from benchmarks.marks import Marks

OURS, INDEPENDENT = "penstock", "independent processes"
RATIOS = {"independent_steps": "steps_ratio", "independent_work": "work_ratio"}


@dataclass
class Rounds:
    """What the rounds of one workload found, by who played it."""

    workload: Workload
    found: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)

    def median(self, player: str, name: str) -> float:
        return statistics.median(one[name] for one in self.found[player])

    def ratio(self, player: str) -> float | None:
        """To the ideal; None where there is none, or nothing to compare with."""
        match self.workload.ideal:
            case "steps_per_s":
                ideal = self.workload.ideal_steps_per_s
                return self.median(player, "steps_per_s") / ideal if ideal else None
            case "others_during_reset" if player == OURS:
                return statistics.median(one["others_during"] / one["others_otherwise"] for one in self.found[player])
            case "independent_steps" | "independent_work" as name if player == OURS:
                return self.median(player, RATIOS[name])
            case "independent_steps" if self.found[INDEPENDENT]:
                return self.median(player, "steps_per_s") / self.median(INDEPENDENT, "steps_per_s")
            case _:
                return None

    def mark(self, marks: Marks) -> None:
        """Adds this workload's."""
        name, least = self.workload.name, self.workload.least
        if not self.found[OURS]:
            marks.at_least(f"{name}: measured at all ({self.failures.get(OURS, '')[:20]})", 0, 1)
        elif not self.workload.marks_ratio:
            marks.at_least(f"{name}: steps/s", self.median(OURS, "steps_per_s"), least)
        else:
            marks.at_least(f"{name}: {self.workload.ideal.replace('_', ' ')}, ratio", self.ratio(OURS) or 0.0, least)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads: " + ", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=2, help="rounds in which peers play, too")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured of each, after a second of warm-up")
    parser.add_argument("--peers", type=Path, action="append", default=[], help="virtual environment with peers")
    parser.add_argument("--faults", action="store_true", help="the fault tests, too")
    parser.add_argument("--quick", action="store_true", help="one round of a second; no figure to quote")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    if unknown := sorted(set(options.only) - set(WORKLOADS)):
        parser.error(f"--only names {', '.join(unknown)}; known are {', '.join(WORKLOADS)}")
    options.warm_up_s = 1.0
    if options.quick:
        options.rounds, options.peer_rounds, options.seconds, options.warm_up_s = 1, 1, 1.0, 0.3
    return options


def play_round(rounds: Rounds, pythons: dict[str, str], options: argparse.Namespace) -> None:
    """Everybody once; a failure is kept and said."""
    workload = rounds.workload
    warm_up_s = options.warm_up_s
    seconds = max(workload.least_seconds, options.seconds * workload.seconds_factor)
    if workload.ideal in RATIOS:
        players = {(OURS, INDEPENDENT): lambda: alternating.compare(workload, seconds, warm_up_s)}
    else:
        players = {(OURS,): lambda: [running.own(workload, seconds, warm_up_s)]}
    for name in workload.peers:
        if (
            name in pythons
            and len(rounds.found[name]) < running.PEERS[name].most_rounds
            and name not in rounds.failures
        ):
            players[name,] = lambda name=name: [running.peer(name, pythons[name], workload, seconds, warm_up_s)]
    for names, measure in players.items():
        try:
            for name, found in zip(names, measure(), strict=True):
                rounds.found[name].append(found)
        except running.Failed as failure:
            rounds.failures[names[0]] = str(failure)


def print_rounds(rounds: Rounds, pythons: dict[str, str]) -> None:
    """A line for everybody who played."""
    workload = rounds.workload
    print(f"\n{workload.name}: {workload.words}")
    for player in (OURS, INDEPENDENT, *workload.peers):
        words = running.PEERS[player].words if player in running.PEERS else player
        if found := rounds.found[player]:
            print(f"  {words:<38}{_numbers(rounds, player)}  ({len(found)} rounds)")
        if player in rounds.failures:
            print(f"  {words:<38}FAILED: {rounds.failures[player]}")
        elif player in running.PEERS and player not in pythons:
            print(f"  {words:<38}not installed: skipped")


def _numbers(rounds: Rounds, player: str) -> str:
    ratio = rounds.ratio(player)
    words = f"{rounds.median(player, 'steps_per_s'):>10,.0f} steps/s  "
    words += f"{'' if ratio is None else f'{ratio:.3f} of the ideal':<20}"
    if player == INDEPENDENT:
        step_s, reset_s = (rounds.median(player, name) for name in ("step_s", "reset_s"))
        return words + f"step {step_s * 1e3:.2f} ms, reset {reset_s * 1e3:.1f} ms"
    words += f"main process {rounds.median(player, 'main_cpu'):>5.0%} of a core"
    if player == OURS:
        words += f", simulators {rounds.median(player, 'simulators_cpu'):.0%}"
        words += f"; {rounds.median(player, 'batch_slots_mean'):.1f} in a batch"
        if rounds.workload.ideal in RATIOS:
            steps, work = (rounds.median(player, name) for name in RATIOS.values())
            words += f"; {steps:.3f} of independent processes' steps, {work:.3f} of their work"
    return words


def print_networks(seconds: float) -> None:
    """The Nature CNN beside a matrix product."""
    found = running.run([sys.executable, "-m", "benchmarks.fleet.networks", str(seconds)], running.START_S)
    network, product = found["network_flops_per_s"], found["product_flops_per_s"]
    print(
        f"\nNature CNN: {found['decisions_per_s']:,.0f} decisions/s of 84 x 84 x 4 in batches of 32, "
        f"{network / 1e9:.1f} GFLOP/s, {network / product:.2f} of the matrix product's {product / 1e9:.1f}"
    )


def main(arguments: list[str] | None = None) -> int:
    options, marks = parse(arguments), Marks()
    pythons = running.pythons_of(options.peers)
    every = [Rounds(WORKLOADS[name]) for name in options.only]
    print(f"{os.cpu_count()} cores, {options.rounds} rounds of {options.seconds:g} s; a policy of 16 x 16 and 64, 64")
    for number in range(options.rounds):
        for rounds in every:
            play_round(rounds, pythons if number < options.peer_rounds else {}, options)
            print(f"round {number + 1}: {rounds.workload.name}", file=sys.stderr, flush=True)
    for rounds in every:
        print_rounds(rounds, pythons)
        rounds.mark(marks)
    print_networks(options.seconds / 2)
    if options.faults:
        faults.run_all(marks, options.seconds)
    return marks.report("\nMarks\n")


if __name__ == "__main__":
    sys.exit(main())
