"""Which part of a run sets its pace, in a sentence, from how idle each part was during an update.

A pure function of numbers. The learner is the goal of all others: while it is busy, it sets the pace itself. While it
waits, the busiest of those that it waits for does: the inference servers, else the rollout workers, else nobody has
enough to do, and the admission of groups is too tight.
"""

from collections.abc import Mapping

BUSY = 0.10
"""A learner with less idle time than this sets the pace."""
BUSY_SUPPLIER = 0.25
"""Whoever supplies it is called busy below this."""


def find_bottleneck(
    idle: Mapping[str, float], gauges: Mapping[str, float], local: bool = False
) -> tuple[str, dict[str, float]]:
    """Names the bottleneck of one update.

    Args:
        idle: Role → share of the update in which it waited for others, between 0 and 1; roles may be missing.
        gauges: ``staleness_budget``, where known.
        local: Whether all runs in one process, which has one engine and one rollout worker.

    Returns:
        The sentence, empty where nothing is known of the learner, and the metrics ``time/idle/<role>``.
    """
    shares = {f"time/idle/{role}": share for role, share in sorted(idle.items())}
    if "learner" not in idle:
        return "", shares
    learner = idle["learner"]
    if learner < BUSY:
        remedy = "give it a faster device" if local else "give it faster devices (roles.learner)"
        return f"learner busy {1 - learner:.0%}: it sets the pace: {remedy}, or train on shorter rollouts", shares
    return f"learner idle {learner:.0%}: {_why_it_waits(idle, gauges, local)}", shares


def idle_shares(metrics: Mapping[str, float], engine_busy_s: float) -> dict[str, float]:
    """How idle learner and engine of one process were during an update.

    Args:
        metrics: The update's, with its times.
        engine_busy_s: Seconds in which the engine computed since the update before.

    Returns:
        Role → share of the update's whole time; empty where that is nothing.
    """
    waited_s = metrics.get("time/wait_for_batch", 0.0)
    worked = ("time/update", "time/checkpoint", "weights/publish_s")
    whole_s = waited_s + sum(metrics.get(name, 0.0) for name in worked)
    if whole_s <= 0:
        return {}
    return {"learner": waited_s / whole_s, "inference": min(1.0, max(0.0, 1.0 - engine_busy_s / whole_s))}


def _why_it_waits(idle: Mapping[str, float], gauges: Mapping[str, float], local: bool) -> str:
    inference, rollout = idle.get("inference", 1.0), idle.get("rollout", 1.0)
    if gauges.get("staleness_budget") == 0:
        return "at staleness zero it takes turns with generation: raise replay.staleness_budget"
    if inference < BUSY_SUPPLIER:
        remedy = "raise inference.max_slots, or add servers (runtime: ray, inference.servers)"
        if not local:
            remedy = "add inference servers (inference.servers)"
        return f"generation is busy {1 - inference:.0%}: {remedy}"
    if rollout < BUSY_SUPPLIER:
        return f"rollout workers are busy {1 - rollout:.0%}: add rollout workers (rollout.workers)"
    return "generation has not enough to do: admit more groups (replay.staleness_budget, replay.groups_per_batch)"
