"""Which fault is done when: drawn from a seed, in rounds that hold every kind once."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SIGNALLED = ("rollout", "inference", "replay", "curriculum", "learner")
"""Roles whose processes are killed and stopped."""

KINDS = (
    *(f"kill {role}" for role in SIGNALLED),
    *(f"stop {role}" for role in SIGNALLED),
    "corrupt checkpoint",
    "corrupt rollouts",
    "full disk",
    "full checkpoints",
    "out of memory",
    "slow network",
    "broadcaster restart",
    "clock jump",
)
"""All faults. `stop` is SIGSTOP, which only the heartbeat's limit ends; a disk of checkpoints alone is full once one
is half written; out of memory, Ray ends workers of its choice."""

LONGEST_CALM_S = 4.0
"""Most time between the end of one fault's recovery and the next fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to be done.

    Attributes:
        number: From 1.
        kind: One of `KINDS`.
        calm_s: Wait before it, after the recovery from the one before.
        choice: From [0, 1); says which component, which file, how long, how far.
    """

    number: int
    kind: str
    calm_s: float
    choice: float


def make_schedule(seed: int, kinds: Sequence[str], count: int) -> list[Fault]:
    """The first `count` faults of a seed: round after round of all kinds, each in an order of its own."""
    draws = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += draws.sample(kinds, len(kinds))
    return [
        Fault(number, kind, draws.random() * LONGEST_CALM_S, draws.random())
        for number, kind in enumerate(order[:count], start=1)
    ]
