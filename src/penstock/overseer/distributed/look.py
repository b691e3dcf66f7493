"""All components at one moment, as other threads than the conductor's may read them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.overseer.distributed.numbers import merge
from penstock.overseer.distributed.records import Report


@dataclass(frozen=True, slots=True)
class Look:
    """How all components were when the conductor last looked.

    Attributes:
        components: For status.json.
        counters: For the watchdog.
        owes: Who owes progress, in words.
        reports: The newest of each, by name.
    """

    components: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    owes: str = "no component was started yet"
    reports: Mapping[str, Report] = field(default_factory=dict[str, Report])

    def facts(self, name: str) -> Mapping[str, Any]:
        """What a component says of itself; nothing where it has not answered."""
        report = self.reports.get(name)
        return report.condition.facts if report is not None else {}

    def numbers(self) -> dict[str, float]:
        """The metrics of all."""
        return merge(self.reports.values())

    @property
    def failed_groups(self) -> int:
        """Groups whose environment or reward function failed, as far as living workers know."""
        return sum(facts["groups"]["failed"] for facts in self._of_workers())

    @property
    def last_failure(self) -> str:
        """What one of them said."""
        return next((facts["last_failure"] for facts in self._of_workers() if facts["last_failure"]), "")

    def _of_workers(self) -> list[Mapping[str, Any]]:
        found = [report.condition.facts for report in self.reports.values() if report.identity.role == "rollout"]
        return [facts for facts in found if "groups" in facts]
