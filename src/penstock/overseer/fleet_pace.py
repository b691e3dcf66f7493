"""How fast a fleet run goes, and what sets its pace, from one update's metrics to the next. Pure arithmetic.

The learner is the goal of all others: while it is busy it sets the pace itself. While it waits, inference does where it
is busy; otherwise the simulators do.
"""

from collections.abc import Mapping

from penstock.overseer.bottleneck import BUSY, BUSY_SUPPLIER, Bottleneck

COUNTERS = ("fleet/steps_total", "fleet/blocked_s")
"""What only grows, but where the replay buffer of many processes is begun anew, and counts from there."""


class FleetPace:
    """Compares each update with the one before."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self.bottleneck = Bottleneck()
        self.steps_per_s = 0.0

    def note(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes an update in.

        Args:
            metrics: Its own, with its times, and the fleet's.

        Returns:
            ``fleet/steps_per_s`` and ``time/idle/<role>``: shares of the update between 0 and 1. Empty where the
            update took no time.
        """
        waited_s = metrics.get("time/wait_for_batch", 0.0)
        worked = ("time/update", "time/checkpoint", "weights/publish_s")
        whole_s = waited_s + sum(metrics.get(name, 0.0) for name in worked)
        made = {name: max(0.0, metrics.get(name, 0.0) - self._before.get(name, 0.0)) for name in COUNTERS}
        self._before = {name: metrics.get(name, 0.0) for name in COUNTERS}
        if whole_s <= 0:
            return {}
        self.steps_per_s = made["fleet/steps_total"] / whole_s
        batches = made["fleet/steps_total"] / max(metrics.get("fleet/batch_slots_mean", 1.0), 1.0)
        workers = max(metrics.get("fleet/workers", 1.0), 1.0)
        inference = min(1.0, batches * metrics.get("fleet/inference_p50_s", 0.0) / whole_s / workers)
        idle = waited_s / whole_s
        self.bottleneck = find_bottleneck(idle, inference, metrics.get("fleet/step_p50_s", 0.0))
        return {
            "fleet/steps_per_s": self.steps_per_s,
            "time/idle/learner": idle,
            "time/idle/inference": 1.0 - inference,
            "fleet/blocked_fraction": min(1.0, made["fleet/blocked_s"] / whole_s / workers),
        }


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
