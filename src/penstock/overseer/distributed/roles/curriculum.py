"""The curriculum in a process of its own: it applies the log that the replay buffer keeps."""

from collections.abc import Mapping
from typing import Any

from penstock.curriculum import CurriculumService
from penstock.overseer.config import RunConfig
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import Condition
from penstock.overseer.distributed.roles.activity import Handling
from penstock.overseer.distributed.roles.base import ThreadedComponent
from penstock.overseer.distributed.roles.settings import Settings


class CurriculumRole(ThreadedComponent):
    """Runs one `CurriculumService`."""

    def __init__(self, around: Surroundings, settings: Settings) -> None:
        super().__init__(around, settings)
        self._service = CurriculumService(settings.config.curriculum)
        self._handling = Handling(self.activity)
        self.apply = self._handling.of(self._service.apply)

    def start(self) -> None:
        """See `Component.start`."""
        self.activity.begin()
        self.state, self.doing = "running", "serving"

    def _describe(self, busy_s: float, idle_s: float) -> Condition:
        progress = float(self._handling.done) if self._handling.under_way else None
        return Condition(self.state, self.doing, progress, busy_s, idle_s, facts=self._facts(**self._service.status()))


def make_curriculum(around: Surroundings, settings: Mapping[str, Any]) -> CurriculumRole:
    """Factory of the curriculum."""
    return CurriculumRole(around, Settings.of(settings, RunConfig))
