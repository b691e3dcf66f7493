"""Plays whole episodes with a policy and says how they went, without bias to short ones.

The first N episodes to end would be the short ones: simulators that play long episodes end fewer of them. So every slot
owes a fixed number of episodes, decided beforehand, and all of them are waited for; what a slot plays beyond is left
out. An episode that a fault cut is played again, in the slot's next one, and counted.

Not covered: which actions a runner takes (sampled or the mode), and where results are stored.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.fleet.arrivals import StepBatch
from penstock.fleet.config import FleetConfig
from penstock.fleet.episode_statistics import Episode, EpisodeTracker
from penstock.fleet.rollout_worker import POLL_S, RolloutWorker
from penstock.fleet.runner import PolicyRunner, Simulators
from penstock.types import ConfigError, NoProgressError


@dataclass(frozen=True, slots=True, eq=False)
class PolicyEvaluation:
    """N whole episodes, by slot, then in the order in which the slot played them.

    Attributes:
        returns: float64 [N], sums of raw rewards.
        lengths: int64 [N], steps.
        slots: int64 [N].
        tasks: N names.
        faulty_episodes: Played besides these, and cut by a fault.
        episodes: The same as records, for `EpisodeStatistics`.
    """

    returns: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    tasks: tuple[str, ...]
    faulty_episodes: int
    episodes: tuple[Episode, ...]


def evaluate_policy(
    pool: Simulators,
    runner: PolicyRunner,
    episodes: int,
    config: FleetConfig,
    *,
    timeout_s: float = 3600.0,
    on_batch: Sequence[Callable[[StepBatch], None]] = (),
    clock: Callable[[], float] = time.monotonic,
) -> PolicyEvaluation:
    """Plays `episodes` episodes on a started pool that has not acted yet, and leaves it open.

    Slot i of n plays ⌊N / n⌋ of them, and one more where i < N mod n; with fewer episodes than slots, only the first
    slots' count.

    Args:
        pool: Simulators; the caller starts and closes it.
        runner: The policy, with weights.
        episodes: N, at least 1.
        config: Batching and the discount.
        timeout_s: For all of it.
        on_batch: Further progress handlers.
        clock: Monotonic seconds.

    Raises:
        ConfigError: `episodes` is less than 1.
        NoProgressError: they were not over in time; says how many were.
        RunFailed: every simulator is quarantined.
    """
    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: an evaluation plays at least one")
    quota = _quota(episodes, pool.num_slots)
    tally = _Tally(pool.tasks, quota, config.discount)

    def take(batch: StepBatch) -> None:
        tally.add(batch)
        for handler in on_batch:
            handler(batch)

    worker = RolloutWorker(pool, runner, config, take)
    deadline = clock() + timeout_s
    while tally.owed > 0:
        if clock() > deadline:
            raise NoProgressError(
                f"{episodes - tally.owed} of {episodes} episodes were over after {timeout_s:g} s; slots that owe some: "
                f"{tally.slots_that_owe()[:8]}"
            )
        worker.run_once(POLL_S)
    worker.finish()
    return tally.evaluation()


def _quota(episodes: int, slots: int) -> list[int]:
    each, more = divmod(episodes, slots)
    return [each + (slot < more) for slot in range(slots)]


class _Tally:
    """What each slot played of what it owes."""

    def __init__(self, tasks: tuple[str, ...], quota: list[int], discount: float) -> None:
        self._tracker = EpisodeTracker(tasks, discount)
        self._quota = quota
        self._next = 0
        self._played: list[list[Episode]] = [[] for _ in quota]
        self._faulty = 0
        self.owed = sum(quota)

    def add(self, batch: StepBatch) -> None:
        self._tracker.add(batch)
        self._next, ended = self._tracker.since(self._next)
        for episode in ended:
            played = self._played[episode.slot]
            if len(played) == self._quota[episode.slot]:
                continue
            if episode.fault:
                self._faulty += 1
            else:
                played.append(episode)
                self.owed -= 1

    def slots_that_owe(self) -> list[int]:
        return [slot for slot, played in enumerate(self._played) if len(played) < self._quota[slot]]

    def evaluation(self) -> PolicyEvaluation:
        episodes = [episode for played in self._played for episode in played]
        return PolicyEvaluation(
            returns=np.array([episode.reward for episode in episodes], np.float64),
            lengths=np.array([episode.length for episode in episodes], np.int64),
            slots=np.array([episode.slot for episode in episodes], np.int64),
            tasks=tuple(episode.task for episode in episodes),
            faulty_episodes=self._faulty,
            episodes=tuple(episodes),
        )
