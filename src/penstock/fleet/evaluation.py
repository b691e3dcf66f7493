"""Plays whole episodes with a policy and says how they went, without bias to short ones.

The first N episodes to end would be the short ones: simulators that play long episodes end fewer of them. So every slot
plays a fixed number of episodes, decided beforehand, and all of them are waited for: the slot's first ones, however
long they are; what it plays beyond is left out. An episode that was cut is counted, and the slot's next one stands for
it.

A task none of whose first `MOST_FAULTY` episodes is whole, since faults cut them, ends the evaluation with an error:
its simulators live on, and it would play for ever.

What remains of a slot that is given up goes to the others of its task at once, evenly, and without a look at how far
they are: each counts so many more of its own first ones. Where a task has no slot left the evaluation ends with an
error.

Not covered: which actions a runner takes (sampled or the mode), and where results are stored.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.fleet.config import FleetConfig
from penstock.fleet.episode_statistics import Episode, EpisodeTracker
from penstock.fleet.policy import PolicyRunner, Simulators
from penstock.fleet.rollout_loop import POLL_S, RolloutWorker
from penstock.fleet.steps import StepBatch
from penstock.types import ConfigError, NoProgressError, RunFailed

SLOW_S = 60.0
"""An evaluation that takes longer says how far it is."""

MOST_FAULTY = 100
"""Episodes of a task that faults may cut before the first whole one."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyEvaluation:
    """N whole episodes, by slot, then in the order in which the slot played them.

    Attributes:
        returns: float64 [N], sums of raw rewards.
        discounted_returns: float64 [N], sums of γ^t r_t of the rewards that the policy got.
        lengths: int64 [N], steps.
        slots: int64 [N].
        tasks: N names.
        faulty_episodes: Played besides these, and cut by a fault.
        cut_episodes: Played besides these, and cut by a planned restart of their process.
        episodes: The same as records.
        seconds: That it took.
    """

    returns: np.ndarray
    discounted_returns: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    tasks: tuple[str, ...]
    faulty_episodes: int
    cut_episodes: int
    episodes: tuple[Episode, ...]
    seconds: float


def evaluate_policy(
    pool: Simulators,
    runner: PolicyRunner,
    episodes: int,
    config: FleetConfig,
    *,
    timeout_s: float = 3600.0,
    on_batch: Sequence[Callable[[StepBatch], None]] = (),
    on_slow: Callable[[str], None] = lambda words: None,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> PolicyEvaluation:
    """Plays `episodes` episodes of each task on a started pool that has not acted yet, and leaves it open.

    Of a task's n slots the i-th plays ⌊episodes / n⌋ of them, and one more where i < episodes mod n; with fewer
    episodes than slots, only the first slots' count.

    Args:
        pool: Simulators; the caller starts and closes it.
        runner: The policy, with weights.
        episodes: Of each task that the pool plays, at least 1: N is this times the tasks.
        config: Batching and the discount.
        timeout_s: For all of it.
        on_batch: Further progress handlers.
        on_slow: Told how far it is after `SLOW_S` seconds, and each time that twice as many are over.
        check: Called a few times a second, also while no simulator answers; what it raises ends the evaluation.
        clock: Monotonic seconds.

    Raises:
        ConfigError: `episodes` is less than 1.
        NoProgressError: they were not over in time; says how many were.
        RunFailed: every simulator of a task was given up before its episodes were over; names task and reason. Or
            faults cut the first `MOST_FAULTY` episodes of a task.
    """
    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: an evaluation plays at least one")
    tally = _Tally(pool.tasks, episodes, config.discount)
    told_s = SLOW_S

    def take(batch: StepBatch) -> None:
        tally.add(batch)
        for handler in on_batch:
            handler(batch)

    worker = RolloutWorker(pool, runner, config, take)
    began = clock()
    while tally.owed > 0:
        check()
        if clock() - began > timeout_s:
            raise NoProgressError(tally.describe_timeout(timeout_s))
        if clock() - began >= told_s:
            on_slow(tally.describe_slowness(told_s))
            told_s *= 2
        worker.run_once(POLL_S)
        tally.give_over(pool.given_up())
    worker.finish()
    return tally.evaluation(clock() - began)


def _quotas(tasks: Sequence[str], episodes: int) -> list[int]:
    """Episodes that each slot is to play: of each task so many, as evenly as can be."""
    quotas = [0] * len(tasks)
    for task in dict.fromkeys(tasks):
        slots = [slot for slot, name in enumerate(tasks) if name == task]
        for number, slot in enumerate(slots):
            quotas[slot] = episodes // len(slots) + (number < episodes % len(slots))
    return quotas


class _Tally:
    """What each slot has played of the episodes that it is to play."""

    def __init__(self, tasks: tuple[str, ...], episodes: int, discount: float) -> None:
        self._tasks, self._episodes = tasks, episodes
        self._tracker = EpisodeTracker(tasks, discount)
        self._quotas = _quotas(tasks, episodes)
        self._next = 0
        self._played: list[list[Episode]] = [[] for _ in tasks]  # whole ones, also beyond the quota, which may grow
        self._given_up: set[int] = set()
        self._faulty = self._cut = self._steps = 0
        self._faulty_first = dict.fromkeys(tasks, 0)  # of each task that has played no whole episode
        self._wanted = sum(self._quotas)

    @property
    def owed(self) -> int:
        """Episodes that are not over."""
        return sum(map(self._remaining, range(len(self._tasks))))

    def add(self, batch: StepBatch) -> None:
        self._steps += int(np.count_nonzero(batch.acted))
        self._tracker.add(batch)
        self._next, ended = self._tracker.since(self._next)
        for episode in ended:
            played = self._played[episode.slot]
            if episode.whole:
                self._faulty_first.pop(episode.task, None)
                if len(played) < self._episodes:  # no slot is ever asked for more
                    played.append(episode)
            elif self._remaining(episode.slot):
                self._faulty += episode.fault
                self._cut += not episode.fault
                self._note_faulty(episode)

    def give_over(self, given_up: Mapping[int, str]) -> None:
        """Shares what slots owe that are given up now among those of their task that are not."""
        new = [slot for slot in given_up if slot not in self._given_up]
        self._given_up.update(new)
        for slot in new:
            left = self._remaining(slot)
            self._quotas[slot] -= left
            heirs = [one for one, task in enumerate(self._tasks) if task == self._tasks[slot] and one not in given_up]
            if left and not heirs:
                raise RunFailed(
                    f"task {self._tasks[slot]!r}: all its simulators were given up before its {self._episodes} "
                    f"episodes were over; the last one: {given_up[slot]}"
                )
            for _ in range(left):
                self._quotas[min(heirs, key=lambda one: self._quotas[one])] += 1

    def describe_timeout(self, timeout_s: float) -> str:
        slots = [slot for slot in range(len(self._tasks)) if self._remaining(slot)]
        return (
            f"{self._wanted - self.owed} of {self._wanted} episodes were over after {timeout_s:g} s"
            f"{self._describe_faults()}; slots that owe some: {slots[:8]}. A task whose episodes may never end needs "
            "kwargs.max_episode_steps; else lower episodes"
        )

    def describe_slowness(self, seconds: float) -> str:
        return (
            f"{self._wanted - self.owed} of {self._wanted} episodes of the evaluation are over after {seconds:g} s and "
            f"{self._steps:,} steps{self._describe_faults()}: a task whose episodes may never end needs "
            "kwargs.max_episode_steps"
        )

    def _describe_faults(self) -> str:
        return f" ({self._faulty} more were cut by faults)" if self._faulty else ""

    def _note_faulty(self, episode: Episode) -> None:
        if not episode.fault or episode.task not in self._faulty_first:
            return
        self._faulty_first[episode.task] += 1
        if self._faulty_first[episode.task] >= MOST_FAULTY:
            raise RunFailed(
                f"task {episode.task!r}: faults cut its first {MOST_FAULTY} episodes, so that none could be counted: "
                "mend its simulator, which raises or dies, sets info['error'], or gives a reward or an observation "
                "that cannot be used (the failures that were told say which)"
            )

    def evaluation(self, seconds: float) -> PolicyEvaluation:
        pairs = zip(self._played, self._quotas, strict=True)
        episodes = [episode for played, quota in pairs for episode in played[:quota]]
        return PolicyEvaluation(
            returns=np.array([episode.reward for episode in episodes], np.float64),
            discounted_returns=np.array([episode.discounted_reward for episode in episodes], np.float64),
            lengths=np.array([episode.length for episode in episodes], np.int64),
            slots=np.array([episode.slot for episode in episodes], np.int64),
            tasks=tuple(episode.task for episode in episodes),
            faulty_episodes=self._faulty,
            cut_episodes=self._cut,
            episodes=tuple(episodes),
            seconds=seconds,
        )

    def _remaining(self, slot: int) -> int:
        return max(0, self._quotas[slot] - len(self._played[slot]))
