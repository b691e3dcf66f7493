"""How whole episodes of training went: rewards, lengths, counts and rates, by task.

Two halves. In a worker, an `EpisodeTracker` reads inference batches, vectorised over slots, and keeps a record of each
episode that ended. In the manager, `EpisodeStatistics` takes records of all workers, as often as they may be
delivered: an episode is named by (worker, incarnation, slot, episode) and counted once, because a slot's episodes come
in order and the highest one counted is remembered.

Reward sums and lengths are the simulator's own (raw rewards); discounted returns are of the rewards that the policy
gets, which a wrapper may have clipped. An episode that a fault cut, or that is not whole for another reason, is only
counted as such.

Not covered: tests. `evaluate_policy` plays whole episodes of one version without bias to short ones, and sums them up
by itself; means over whatever ended lately, as here, mix versions and prefer short episodes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.fleet.steps import StepBatch

MOST_KEPT = 65_536
"""Episodes that a worker keeps for a manager that does not ask; older ones are given up, and counted."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One that ended.

    Attributes:
        slot: Of the worker.
        number: Counts the slot's episodes, with those that were cut.
        task: What was played.
        reward: Sum of raw rewards.
        discounted_reward: Sum of γ^t r_t of the rewards that the policy got.
        length: Steps.
        fault: A fault cut it: the numbers above are not its own.
        cut: It is not whole: a planned restart cut it (`restart_interval_s`), or it began with random steps
            (`decorrelate_steps`). The numbers above are those of the rest.
    """

    slot: int
    number: int
    task: str
    reward: float
    discounted_reward: float
    length: int
    fault: bool = False
    cut: bool = False

    @property
    def whole(self) -> bool:
        """Whether it was played to its own end."""
        return not (self.fault or self.cut)


class EpisodeTracker:
    """Watches a worker's batches. One thread adds, any reads.

    Args:
        tasks: Of each slot.
        discount: γ.
        most_kept: See `MOST_KEPT`.
    """

    def __init__(self, tasks: tuple[str, ...], discount: float, most_kept: int = MOST_KEPT) -> None:
        self._tasks, self._discount, self._most_kept = tasks, discount, most_kept
        self._returns = np.zeros(len(tasks))
        self._factors = np.ones(len(tasks))
        self._numbers = np.zeros(len(tasks), np.int64)
        self._lock = threading.Lock()
        self._kept: deque[Episode] = deque()
        self._first_kept = 0

    def add(self, batch: StepBatch) -> None:
        """Takes a batch in."""
        slots = batch.slots
        self._returns[slots] += self._factors[slots] * batch.rewards
        self._factors[slots] *= self._discount
        begun = batch.first
        if not begun.any():
            return
        ended = np.flatnonzero(begun & batch.acted)
        where = slots[ended]
        episodes = [
            Episode(slot, number, self._tasks[slot], reward, discounted, length, fault, cut)
            for slot, number, reward, discounted, length, fault, cut in zip(
                where.tolist(), self._numbers[where].tolist(), batch.returns[ended].tolist(),
                self._returns[where].tolist(), batch.lengths[ended].tolist(), batch.faults[ended].tolist(),
                batch.cut[ended].tolist(), strict=True,
            )
        ]  # fmt: skip
        self._returns[slots[begun]], self._factors[slots[begun]] = 0.0, 1.0
        self._numbers[where] += 1
        self._keep(episodes)

    def since(self, number: int) -> tuple[int, list[Episode]]:
        """Episodes from the `number`-th of this worker on, and the number to ask with next time.

        Asking with a number acknowledges all before it: they are forgotten.
        """
        with self._lock:
            while self._kept and self._first_kept < number:
                self._kept.popleft()
                self._first_kept += 1
            return self._first_kept + len(self._kept), list(self._kept)

    def _keep(self, episodes: list[Episode]) -> None:
        with self._lock:
            self._kept.extend(episodes)
            while len(self._kept) > self._most_kept:
                self._kept.popleft()
                self._first_kept += 1


@dataclass(slots=True)
class _TaskRecord:
    window: int
    count: int = 0
    faulty: int = 0
    steps: int = 0
    cut: int = 0
    latest: deque[Episode] = field(default_factory=deque[Episode])
    ended_at: deque[float] = field(default_factory=deque[float])

    def add(self, episode: Episode, now: float) -> None:
        if episode.fault:
            self.faulty += 1
            return
        if episode.cut:
            self.cut += 1
            return
        self.count += 1
        self.steps += episode.length
        self.latest.append(episode)
        self.ended_at.append(now)
        if len(self.latest) > self.window:
            self.latest.popleft()
        if len(self.ended_at) > self.window:
            self.ended_at.popleft()

    def metrics(self, now: float) -> dict[str, float]:
        numbers = {
            "episodes": float(self.count), "faulty_episodes": float(self.faulty), "cut_episodes": float(self.cut)
        }  # fmt: skip
        if not self.latest:
            return numbers
        rewards = np.array([episode.reward for episode in self.latest])
        passed_s = now - self.ended_at[0] if self.ended_at else 0.0  # none of this life where all were restored
        return numbers | {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "discounted_reward_mean": float(np.mean([episode.discounted_reward for episode in self.latest])),
            "length_mean": float(np.mean([episode.length for episode in self.latest])),
            "episodes_per_s": len(self.ended_at) / passed_s if passed_s > 0 else 0.0,
        }


class EpisodeStatistics:
    """Merges what workers report. Thread-safe.

    Args:
        window: Episodes per task over which is averaged.
        clock: Monotonic seconds.
    """

    def __init__(self, window: int = 100, clock: Callable[[], float] = time.monotonic) -> None:
        self._window, self._clock = window, clock
        self._lock = threading.Lock()
        self._counted: dict[tuple[str, int, int], int] = {}
        self._records: dict[str, _TaskRecord] = {}

    def add(self, worker_id: str, incarnation: int, episodes: Iterable[Episode]) -> int:
        """Takes episodes of one worker in, in the order in which each slot played them.

        Args:
            worker_id: The rollout worker that played them.
            incarnation: Which life of it.
            episodes: Those that were counted before are passed over.

        Returns:
            How many were counted.
        """
        now, counted = self._clock(), 0
        with self._lock:
            for episode in episodes:
                key = (worker_id, incarnation, episode.slot)
                if episode.number <= self._counted.get(key, -1):
                    continue
                self._counted[key] = episode.number
                record = self._records.setdefault(episode.task, _TaskRecord(self._window))
                record.add(episode, now)
                counted += 1
        return counted

    def count(self, task: str) -> int:
        """Whole episodes of a task so far."""
        with self._lock:
            record = self._records.get(task)
            return 0 if record is None else record.count

    def state(self) -> list[list[Any]]:
        """Counts and the latest episodes, as JSON values; who reported them is not kept, since workers begin anew."""
        with self._lock:
            return [
                [task, record.count, record.faulty, record.steps]
                + [[[each.reward, each.discounted_reward, each.length] for each in record.latest], record.cut]
                for task, record in self._records.items()
            ]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        """Takes `state` back, in place of all that was counted; rates begin anew."""
        with self._lock:
            self._counted.clear()
            self._records.clear()
            for row in state:
                values = row[1:] if isinstance(row[1], str) else row  # older checkpoints said "train" first
                task, count, faulty, steps, latest, *cut = values  # and the oldest did not count those
                record = _TaskRecord(self._window, int(count), int(faulty), int(steps), int(cut[0]) if cut else 0)
                episodes = [Episode(0, 0, task, float(r), float(d), int(length)) for r, d, length in latest]
                record.latest.extend(episodes[-self._window :])
                self._records[task] = record

    def metrics(self) -> dict[str, float]:
        """``fleet/<task>/…``; means over the latest episodes."""
        now = self._clock()
        with self._lock:
            return {
                f"fleet/{task}/{name}": value
                for task, record in self._records.items()
                for name, value in record.metrics(now).items()
            }
