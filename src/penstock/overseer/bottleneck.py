"""Which part of a run sets its pace, in a sentence, from how idle each part was during an update.

A pure function of numbers. The learner is the goal of all others: while it is busy, it sets the pace itself. While it
waits, somebody that it waits for does: the inference servers where they are busy, else the replay buffer, else the
rollout workers, who wait for both. Else nobody has enough to do, and the admission of groups is too tight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Part = Literal["learner", "inference", "replay", "rollout", "admission", "staleness", "simulators"]
"""`admission`: too few groups are admitted; `staleness`: at a budget of zero generation and learner take turns;
`simulators`: of a fleet."""

BUSY = 0.10
"""A learner with less idle time than this sets the pace."""
BUSY_SUPPLIER = 0.25
"""Whoever supplies it is called busy below this."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What sets the pace.

    Attributes:
        part: Which part of the run; None where nothing is known of the learner.
        words: The sentence, with its share and what helps.
    """

    part: Part | None = None
    words: str = ""


def find_bottleneck(
    idle: Mapping[str, float], gauges: Mapping[str, float], local: bool = False
) -> tuple[Bottleneck, dict[str, float]]:
    """Names the bottleneck of one update.

    Args:
        idle: Role → share of the update in which it waited for others, between 0 and 1; roles may be missing.
        gauges: ``staleness_budget``, where known.
        local: Whether all runs in one process, which has one engine and one rollout worker.

    Returns:
        The bottleneck, and the metrics ``time/idle/<role>``.
    """
    shares = {f"time/idle/{role}": share for role, share in sorted(idle.items())}
    if "learner" not in idle:
        return Bottleneck(), shares
    learner = idle["learner"]
    if learner < BUSY:
        remedy = "give it a faster device" if local else "give it faster devices (roles.learner)"
        words = f"learner busy {1 - learner:.0%}: it sets the pace: {remedy}, or train on shorter rollouts"
        return Bottleneck("learner", words), shares
    part, why = _why_it_waits(idle, gauges, local)
    return Bottleneck(part, f"learner idle {learner:.0%}: {why}"), shares


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


def _why_it_waits(idle: Mapping[str, float], gauges: Mapping[str, float], local: bool) -> tuple[Part, str]:
    inference, replay, rollout = (idle.get(role, 1.0) for role in ("inference", "replay", "rollout"))
    if gauges.get("staleness_budget") == 0:
        return "staleness", "at staleness zero it takes turns with generation: raise replay.staleness_budget"
    if inference < BUSY_SUPPLIER:
        remedy = "raise inference.max_slots, or add servers (runtime: ray, inference.servers)"
        if not local:
            remedy = "add inference servers (inference.servers)"
        return "inference", f"generation is busy {1 - inference:.0%}: {remedy}"
    if replay < BUSY_SUPPLIER:
        remedy = "give it a core and a fast disk of its own (roles.replay), or larger groups"
        return "replay", f"the replay buffer is busy {1 - replay:.0%}: {remedy}"
    if rollout < BUSY_SUPPLIER:
        return "rollout", f"rollout workers are busy {1 - rollout:.0%}: add rollout workers (rollout.workers)"
    remedy = "admit more groups (replay.staleness_budget, replay.groups_per_batch)"
    return "admission", f"generation has not enough to do: {remedy}"
