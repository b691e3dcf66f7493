"""Which components a distributed fleet run consists of: learner, replay buffer, rollout workers, evaluator."""

from collections.abc import Mapping
from typing import Any

from penstock.overseer.distributed.members import ComponentSpec
from penstock.overseer.distributed.planning import Factories, ProcessPlan
from penstock.overseer.distributed.role_sizes import SpecMaker
from penstock.overseer.distributed.roles.fleet_evaluator import make_fleet_evaluator
from penstock.overseer.distributed.roles.fleet_learner import make_fleet_learner
from penstock.overseer.distributed.roles.fleet_replay import make_fleet_replay
from penstock.overseer.distributed.roles.fleet_rollout import make_fleet_rollout
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.types import Spaces

FLEET_FACTORIES: Factories = {
    "learner": make_fleet_learner,
    "replay": make_fleet_replay,
    "rollout": make_fleet_rollout,
    "evaluator": make_fleet_evaluator,
}


class FleetPlan(ProcessPlan[FleetRunConfig]):
    """Makes the specifications of a fleet run's components.

    Args:
        settings: The run.
        spaces: What its policy sees and does.
        states: The components' states in its checkpoint, if it begins with one.
        factories: By role.
    """

    def __init__(
        self,
        settings: Settings[FleetRunConfig],
        spaces: Spaces,
        states: Mapping[str, Any] | None = None,
        factories: Factories = FLEET_FACTORIES,
    ) -> None:
        super().__init__(settings, states, factories, ("learner",))
        self._spaces = spaces.to_values()

    def components(self) -> list[ComponentSpec]:
        """All of them, those first that others wait for."""
        workers = range(self.settings.config.fleet.workers)
        return [
            *(self._spec(role, 0) for role in ("replay", "learner")),
            *(self.rollout(index) for index in workers),
            self._spec("evaluator", 0, state=self._evaluator_state),
        ]

    def rollout(self, index: int) -> ComponentSpec:
        """One rollout worker, with simulators of its own."""
        return self._spec("rollout", index)

    def scalable(self) -> list[tuple[str, SpecMaker, int]]:
        """Workers."""
        return [("rollout", self.rollout, 1)]

    def _values(self, **more: Any) -> dict[str, Any]:
        return super()._values(spaces=self._spaces, **more)
