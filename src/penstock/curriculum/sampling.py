"""How often each lesson is sampled: most where success is neither certain nor out of reach."""

import math
from collections.abc import Mapping, Sequence

import numpy as np


def lesson_weight(success: float | None, rollouts: int) -> float:
    """The weight w = 4 s (1 − s) · (1 + exp(−0.01 · N)): largest at s = ½, and larger while a lesson is young.

    Args:
        success: s, the smoothed success rate; ½ while None.
        rollouts: N so far.
    """
    s = 0.5 if success is None else success
    return 4.0 * s * (1.0 - s) * (1.0 + math.exp(-0.01 * rollouts))


def lesson_probabilities(
    active: Mapping[str, float], graduated: Sequence[str], minimum: float, rehearsal: float
) -> dict[str, float]:
    """Sampling probabilities; they sum to 1.

    Each graduated lesson has `rehearsal`, and each of the K active ones
    p = minimum + (1 − K · minimum − reserved) · w / Σw, by equal shares where all weights are 0. Without active
    lessons the graduated ones share evenly.

    Args:
        active: Weights w of the active lessons.
        graduated: The graduated lessons.
        minimum: No active lesson's probability is lower.
        rehearsal: Of each graduated lesson; its sum is what is reserved.

    Returns:
        Lesson to probability; empty where there are no lessons at all.
    """
    if not active:
        return {lesson: 1.0 / len(graduated) for lesson in graduated}
    free = max(0.0, 1.0 - len(active) * minimum - len(graduated) * rehearsal)  # floors may fill it up to rounding
    total = sum(active.values())
    shares = {lesson: weight / total if total > 0 else 1.0 / len(active) for lesson, weight in active.items()}
    return {lesson: minimum + free * share for lesson, share in shares.items()} | dict.fromkeys(graduated, rehearsal)


def choose(probabilities: Mapping[str, float], rng: np.random.Generator) -> str:
    """One lesson by its probability; which one depends on the generator, and on the lessons' order."""
    point = rng.random() * sum(probabilities.values())
    reached = 0.0
    for lesson, probability in probabilities.items():
        reached += probability
        if point < reached:
            return lesson
    return max(probabilities, key=lambda lesson: probabilities[lesson])  # rounding left the point at the very end
