"""Updates of a control run: a line of metrics each, how fast the fleet goes, and what sets its pace.

Rollout workers in processes of their own report their counters now and then, and updates may come far more often. Rates
are therefore over the last seconds and not over an update, and from one report to another. The learner is the goal of
all others: while it is busy it sets the pace itself. While it waits, inference does where it is busy; otherwise the
simulators do.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

from penstock.overseer.metrics import BUSY, BUSY_SUPPLIER, Bottleneck
from penstock.overseer.run_log import RunLog
from penstock.overseer.terminal import step_line

COUNTERS = ("fleet/steps_total", "fleet/blocked_s")
"""What only grows, but where the replay buffer of many processes is begun anew, and counts from there."""


WINDOW_S = 5.0
"""Rates are over so long, or over the time between the last two tellings where that is longer."""


class ThroughputTrend:
    """Compares updates with those before.

    Args:
        clock: Monotonic seconds.

    Attributes:
        bottleneck: Of the last update.
        steps_per_s: Of all simulators, lately; None where it is not known yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = {name: _Rate() for name in COUNTERS}
        self.bottleneck = Bottleneck()
        self.steps_per_s: float | None = None

    def note(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes an update in.

        Args:
            metrics: Its own, with its times, and the fleet's.

        Returns:
            ``fleet/steps_per_s``, where it is known; ``time/idle/<role>``: shares between 0 and 1, the learner's of
            the update, inference's lately. Empty where the update took no time.
        """
        waited_s = metrics.get("time/wait_for_batch", 0.0)
        worked = ("time/update", "time/checkpoint", "weights/publish_s")
        whole_s = waited_s + sum(metrics.get(name, 0.0) for name in worked)
        now_s = self._clock()
        rates = {name: rate.note(metrics.get(name, 0.0), now_s, whole_s) for name, rate in self._rates.items()}
        if whole_s <= 0:
            return {}
        self.steps_per_s = rates["fleet/steps_total"]
        batches_per_s = (self.steps_per_s or 0.0) / max(metrics.get("fleet/batch_slots_mean", 1.0), 1.0)
        workers = max(metrics.get("fleet/workers", 1.0), 1.0)
        inference = min(1.0, batches_per_s * metrics.get("fleet/inference_p50_s", 0.0) / workers)
        idle = waited_s / whole_s
        self.bottleneck = find_bottleneck(idle, inference, metrics.get("fleet/step_p50_s", 0.0))
        known = {} if self.steps_per_s is None else {"fleet/steps_per_s": self.steps_per_s}
        return known | {
            "time/idle/learner": idle,
            "time/idle/inference": 1.0 - inference,
            "fleet/blocked_fraction": min(1.0, (rates["fleet/blocked_s"] or 0.0) / workers),
        }


class _Rate:
    """Of a counter that is told of now and then."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, float]] = deque()  # when, and how much: each time that it had grown
        self._rate: float | None = None

    def note(self, total: float, now_s: float, since_s: float) -> float | None:
        """Takes a value of the counter in, that may have been told before.

        Args:
            total: The counter, as it was told last.
            now_s: On a monotonic clock.
            since_s: So long ago it was zero, where this is the first value.

        Returns:
            Its growth per second: between the oldest telling of the window and the newest. Where nothing was told for
            a whole window, until now. None: it has not grown yet.
        """
        told = self._told
        if not told:
            told.append((now_s - since_s, 0.0))
        if total < told[-1][1]:  # it begins anew; what it was is the best guess for a moment
            told.clear()
            told.append((now_s, total))
        elif total > told[-1][1]:
            told.append((now_s, total))
        while len(told) > 2 and told[1][0] <= now_s - WINDOW_S:
            told.popleft()
        (first_s, first), (last_s, last) = told[0], told[-1]
        until_s = last_s if now_s - last_s <= WINDOW_S else now_s
        if until_s > first_s and (len(told) > 1 or self._rate is not None):
            self._rate = (last - first) / (until_s - first_s)
        return self._rate


def find_bottleneck(learner_idle: float, inference_busy: float, step_s: float) -> Bottleneck:
    """Which part sets the pace, and what helps.

    Args:
        learner_idle: Share of an update in which the learner waited.
        inference_busy: Share of it in which a worker's policy decided.
        step_s: Median seconds that a process takes for its simulators' step.
    """
    if learner_idle < BUSY:
        words = (
            f"learner busy {1 - learner_idle:.0%}: it sets the pace: train fewer epochs (learner.epochs), a smaller "
            "network, or on a faster device"
        )
        return Bottleneck("learner", words)
    if inference_busy > 1 - BUSY_SUPPLIER:
        words = (
            f"learner idle {learner_idle:.0%}: inference is busy {inference_busy:.0%}: raise fleet.batch_size, or "
            "shrink the network (model)"
        )
        return Bottleneck("inference", words)
    words = (
        f"learner idle {learner_idle:.0%}: simulators set the pace, {1000 * step_s:.3g} ms for a process's step: more "
        "of them (fleet.envs_per_worker) or more cores"
    )
    return Bottleneck("simulators", words)


class FleetUpdates:
    """Writes one line per update.

    Args:
        log: The run's single writer.
        tasks: Of the fleet.

    Attributes:
        step: The learner's version, as far as it was told.
        metrics: Of the last update.
    """

    def __init__(self, log: RunLog, tasks: Collection[str]) -> None:
        self.step = log.step
        self.metrics: dict[str, float] = {}
        self._log = log
        self._tasks = tasks
        self._pace = ThroughputTrend()

    @property
    def bottleneck(self) -> str:
        """What set the pace lately, in words."""
        return self._pace.bottleneck.words

    @property
    def steps_per_s(self) -> float | None:
        """Simulator steps per second, lately; None where that is not known yet."""
        return self._pace.steps_per_s

    def begin_at(self, step: int) -> None:
        """The learner begins with that version."""
        self.step = self._log.step = step

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """One update.

        Args:
            step: The version reached.
            metrics: The learner's, and the fleet's.
        """
        values = {**metrics}
        values |= self._pace.note(values)
        self._log.step = step
        self.metrics = values
        self._log.bottleneck(self._pace.bottleneck.part, self._pace.bottleneck.words)
        self._log.metrics(step, values)
        self.step = step  # whoever sees it finds its metrics
        rewards = {task: values[name] for task in self._tasks if (name := f"fleet/{task}/reward_mean") in values}
        progress = self._log.progress
        progress.step = step
        progress.reward = rewards
        if rewards:
            progress.rewards.append(sum(rewards.values()) / len(rewards))
        progress.units_per_s = self._pace.steps_per_s
        progress.staleness = values.get("train/step_staleness_mean", 0.0)
        progress.step_s = sum(values.get(name, 0.0) for name in ("time/wait_for_batch", "time/update"))
        progress.lines.append(step_line(progress))
