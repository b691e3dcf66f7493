"""What was promised of a benchmark, beside what was found."""

from dataclasses import dataclass, field


@dataclass
class Marks:
    """Lines to print at the end, and how many marks were missed."""

    lines: list[str] = field(default_factory=list)
    missed: int = 0

    def at_most(self, name: str, found: float, limit: float) -> None:
        self._compare(name, found, f"at most {limit:g}", found <= limit)

    def at_least(self, name: str, found: float, limit: float) -> None:
        self._compare(name, found, f"at least {limit:g}", found >= limit)

    def add(self, name: str, found: str, reached: bool) -> None:
        """A mark that words describe."""
        self.lines.append(f"  {name:<52} {'reached' if reached else 'MISSED':<8} {found}")
        self.missed += not reached

    def report(self, title: str = "") -> int:
        """Prints the lines; returns the exit status."""
        print(title + "\n".join(self.lines), flush=True)
        return 1 if self.missed else 0

    def _compare(self, name: str, found: float, wanted: str, reached: bool) -> None:
        self.lines.append(f"  {name:<58}{found:>8.2f}  {wanted:<13} {'reached' if reached else 'MISSED'}")
        self.missed += not reached
