"""What is printed: a line for every fault, and a table by kind."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.watching import Effect


def line(effect: Effect) -> str:
    """One fault, as soon as it is over."""
    deaths = sum(told.startswith("component_death") for told in effect.events)
    rewinds = sum(told.startswith("rewind") for told in effect.events)
    seen = f"{deaths} deaths, {rewinds} rewinds, no update for {effect.paused_s:.1f} s"
    return (
        f"{effect.at_s:7.1f} s  {effect.number:>3} {effect.kind:<20}{effect.target:<14} up {_s(effect.up_s)}, "
        f"update {_s(effect.update_s)}; {seen}; {effect.did}"
    )


def _s(seconds: float | None) -> str:
    return "  never" if seconds is None else f"{seconds:5.1f} s"


@dataclass(frozen=True, slots=True)
class Row:
    """All faults of one kind.

    Attributes:
        kind: Which.
        count: How many.
        recovered: How many the run recovered from within the bound.
        median_s: Time to recover, until the next update; None where there was no recovery.
        worst_s: The longest.
        up_s: Median time until every component ran.
        paused_s: Median of the longest time without an update.
    """

    kind: str
    count: int
    recovered: int
    median_s: float | None
    worst_s: float | None
    up_s: float | None
    paused_s: float


def rows(effects: Sequence[Effect]) -> list[Row]:
    """By kind, in the order of their first faults' names."""
    kinds = sorted({effect.kind for effect in effects})
    return [_row(kind, [effect for effect in effects if effect.kind == kind]) for kind in kinds]


def _row(kind: str, effects: Sequence[Effect]) -> Row:
    times = [effect.update_s for effect in effects if effect.update_s is not None]
    ups = [effect.up_s for effect in effects if effect.up_s is not None]
    return Row(
        kind,
        len(effects),
        len(times),
        statistics.median(times) if times else None,
        max(times, default=None),
        statistics.median(ups) if ups else None,
        statistics.median(effect.paused_s for effect in effects),
    )


def table(found: Sequence[Row]) -> str:
    """The rows, with their heads."""
    head = (
        f"  {'kind':<22}{'count':>6}{'recovered':>11}{'median s':>10}{'worst s':>10}{'all up s':>10}{'no update s':>13}"
    )
    lines = [
        f"  {row.kind:<22}{row.count:>6}{row.recovered:>11}{_number(row.median_s)}{_number(row.worst_s)}"
        f"{_number(row.up_s)}{row.paused_s:>13.1f}"
        for row in found
    ]
    return "\n".join([head, *lines])


def _number(seconds: float | None) -> str:
    return f"{'–':>10}" if seconds is None else f"{seconds:>10.1f}"
