"""What the supervisor says of all components together, for people and for the watchdog."""

from collections.abc import Collection
from typing import Any

from penstock.overseer.distributed.members import Member

MOST_NAMED = 6
"""Of those who owe progress, so many are named."""


def who_owes_progress(members: Collection[Member], now_s: float) -> str:
    """In words: those who work and get nowhere, the longest silent first, then those who do not live."""
    owing = sorted((m for m in members if m.stuck_s(now_s) > 0), key=lambda m: -m.stuck_s(now_s))
    said = [f"{m.in_words(now_s)} without progress for {m.stuck_s(now_s):.0f} s" for m in owing]
    said += [m.in_words(now_s) for m in members if m.phase != "living"]
    if said:
        return _some(said)
    return "nobody owes progress, all wait for one another: " + _some([m.in_words(now_s) for m in members])


def counters(members: Collection[Member], now_s: float) -> dict[str, float]:
    """Incarnation → its progress, of all that ever owed some, or the seconds that it has been starting for.

    A start is movement, since it has a limit of its own.
    """
    starting = {str(m.identity): now_s - m.started_at for m in members if m.is_starting}
    return {str(m.identity): m.progress for m in members if m.progress is not None} | starting


def describe(members: Collection[Member], now_s: float) -> dict[str, dict[str, Any]]:
    """Name → how it is, as JSON values, in the order of roles and indexes."""
    ordered = sorted(members, key=lambda member: (member.spec.role, member.spec.index))
    return {member.name: member.describe(now_s) for member in ordered}


def _some(sentences: list[str]) -> str:
    more = len(sentences) - MOST_NAMED
    return "; ".join(sentences[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
