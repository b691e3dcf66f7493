"""What was promised of a benchmark, beside what was found."""

from dataclasses import dataclass, field


@dataclass
class Marks:
    """Lines to print at the end, and how many marks were missed."""

    lines: list[str] = field(default_factory=list)
    missed: int = 0

    def at_most(self, name: str, found: float, limit: float) -> None:
        self._add(name, found, f"at most {limit:g}", found <= limit)

    def at_least(self, name: str, found: float, limit: float) -> None:
        self._add(name, found, f"at least {limit:g}", found >= limit)

    def _add(self, name: str, found: float, wanted: str, reached: bool) -> None:
        self.lines.append(f"  {name:<58}{found:>8.2f}  {wanted:<13} {'reached' if reached else 'MISSED'}")
        self.missed += not reached
