"""Pacing against dropping: what is generated in vain, and what that does to the data that is trained.

    python -m benchmarks.pacing [--updates 300] [--budgets 0,1,2,4,8] [--loads 1,2]

A run on a virtual clock with the production `TicketIssuer` and `ReplayBuffer` (without files): workers that generate
groups of a fast and of a slow lesson, ten times as long, drawn evenly, and a learner that updates in a fixed time. A
rollout takes time in proportion to its tokens, whose number is log-normal; a group takes as long as its longest.

*paced*: a worker needs a ticket for each group, and waits where there is none. *drop-only*: workers generate all the
time, and freshness drops what is too old when it arrives or waits (open admission); its learner takes the oldest
groups first, or draws by recency. Model, durations, freshness limit and buffer are the same. A *load* of 2 means that
the workers could make twice what the learner uses.

What is reported is about one cohort: the groups begun between the warm-up and the end, each followed to its fate.
Waste is the share of their tokens whose rollouts ended stale, evicted, aborted or rolled back. Exits with 1 if a paced
run wastes 2% or more, or trains slow prompts in another share than they were generated (one point of difference).
"""

import argparse
import heapq
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.virtual_workers import GROUP_SIZE, GROUPS, POLICIES, SLOTS, Generated, mean_group_s
from penstock.types import RolloutBatch, Ticket

WASTED = {"stale_step", "stale_time", "evicted", "aborted", "rolled_back"}
MOST_WASTE, TOLERANCE = 0.02, 0.01
WARM_UP = 40
"""Updates before the cohort begins: several times the longest generation."""


@dataclass
class Report:
    """One row."""

    policy: str
    budget: int
    load: float
    waste: float
    slow_generated: float
    slow_trained: float
    reward_generated: float
    reward_trained: float
    tokens_generated: float
    tokens_trained: float
    learner_idle: float
    workers_idle: float

    @property
    def reached(self) -> bool:
        """Whether a paced run keeps what pacing promises."""
        even = abs(self.slow_trained - self.slow_generated) <= TOLERANCE
        return self.policy != "paced" or (self.waste < MOST_WASTE and even)


@dataclass
class Simulation:
    """One policy in one world; `run` gives its row."""

    policy_name: str
    budget: int
    load: float
    updates: int
    seed: int = 0
    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _cohort: dict[str, Generated] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)
    _busy: int = 0
    _step: int = 0
    _learning: bool = False
    _idle_since: float = 0.0
    _idle_s: float = 0.0
    _busy_s: float = 0.0
    _window: tuple[float, float] = (0.0, 0.0)

    def run(self) -> Report:
        """Follows the cohort to its last fate."""
        self._policy = POLICIES[self.policy_name](self.budget, self.seed, lambda: self.now)
        self._update_s = self.load * mean_group_s() * GROUPS / SLOTS
        end = WARM_UP + self.updates
        while self._step < end or self._open:
            self._start_work()
            self._start_update()
            self._start_work()
            self.now, _, happens = heapq.heappop(self._events)
            happens()
        self._policy.buffer.check_ledger()
        self._policy.buffer.close()
        return self._report()

    def _measuring(self) -> bool:
        return WARM_UP <= self._step < WARM_UP + self.updates

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happens))

    def _start_work(self) -> None:
        for ticket in self._policy.begin(SLOTS - self._busy) if self._busy < SLOTS else ():
            generated = Generated.of(ticket.lesson_id, ticket.seed)
            if self._measuring():
                self._cohort[ticket.ticket_id] = generated
                self._open.add(ticket.ticket_id)
                self._busy_s += generated.seconds
            self._busy += 1
            version = self._step
            self._after(generated.seconds, lambda g=generated, t=ticket, v=version: self._deliver(g, t, v))

    def _deliver(self, generated: Generated, ticket: Ticket, version: int) -> None:
        self._busy -= 1
        self._policy.buffer.add_batches([RolloutBatch.of((generated.group(ticket, version, self.now),))])

    def _start_update(self) -> None:
        if self._learning or (batch := self._policy.batch(self._step)) is None:
            return
        assert len(batch.group_ids) == GROUPS, batch.group_ids
        self._learning = True
        if self._measuring():
            self._idle_s += self.now - self._idle_since
        self._after(self._update_s, self._finish_update)

    def _finish_update(self) -> None:
        self._policy.finish(self._step)
        self._learning, self._idle_since = False, self.now
        self._step += 1
        fates = self._policy.fates
        self._open = {name for name in self._open if any(f"{name}/{i}" not in fates for i in range(GROUP_SIZE))}
        if self._step == WARM_UP:
            self._window = (self.now, self.now)
        elif self._step <= WARM_UP + self.updates:
            self._window = (self._window[0], self.now)

    def _report(self) -> Report:
        fates = self._policy.fates
        rows = [
            (group.lesson_id == "slow", tokens, reward, fates[f"{group_id}/{i}"])
            for group_id, group in self._cohort.items()
            for i, (tokens, reward) in enumerate(zip(group.tokens, group.rewards, strict=True))
        ]
        trained = [row for row in rows if row[3] == "trained"]
        wasted = sum(row[1] for row in rows if row[3] in WASTED)
        window_s = self._window[1] - self._window[0]
        slow, tokens, rewards = ([_mean(row[i] for row in some) for some in (rows, trained)] for i in range(3))
        return Report(
            policy=self.policy_name,
            budget=self.budget,
            load=self.load,
            waste=wasted / sum(row[1] for row in rows),
            slow_generated=slow[0],
            slow_trained=slow[1],
            reward_generated=rewards[0],
            reward_trained=rewards[1],
            tokens_generated=tokens[0],
            tokens_trained=tokens[1],
            learner_idle=self._idle_s / window_s,
            workers_idle=max(0.0, 1 - self._busy_s / (SLOTS * window_s)),
        )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def print_table(reports: list[Report], updates: int) -> None:
    print(f"Groups begun during {updates} updates of {GROUPS} groups, followed to their fates (begun > trained)")
    print(f"{'load':>4}{'S':>3}  {'policy':<24}{'wasted':>7}{'slow prompts':>16}{'mean reward':>15}{'mean tokens':>14}"
          f"{'idle: learner':>15}{'workers':>9}")  # fmt: skip
    for r in reports:
        shares = f"{r.slow_generated:.1%} > {r.slow_trained:.1%}"
        rewards = f"{r.reward_generated:.2f} > {r.reward_trained:.2f}"
        tokens = f"{r.tokens_generated:.0f} > {r.tokens_trained:.0f}"
        print(f"{r.load:>4g}{r.budget:>3}  {r.policy:<24}{r.waste:>7.1%}{shares:>16}{rewards:>15}{tokens:>14}"
              f"{r.learner_idle:>15.0%}{r.workers_idle:>9.0%}")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--budgets", default="0,1,2,4,8", help="staleness budgets")
    parser.add_argument("--loads", default="1,2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    reports = [
        Simulation(policy, int(budget), float(load), options.updates, options.seed).run()
        for load in options.loads.split(",")
        for budget in options.budgets.split(",")
        for policy in POLICIES
    ]
    print_table(reports, options.updates)
    paced = [report for report in reports if report.policy == "paced"]
    worst = max(report.waste for report in paced)
    bias = max(abs(report.slow_trained - report.slow_generated) for report in paced)
    print(f"paced: at most {worst:.2%} of the tokens wasted (mark: under {MOST_WASTE:.0%}); share of slow prompts "
          f"trained within {bias:.2%} of the share begun (mark: {TOLERANCE:.0%})")  # fmt: skip
    missed = [report for report in reports if not report.reached]
    print("The marks are reached." if not missed else f"MISSED in {len(missed)} of {len(paced)} paced runs.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
