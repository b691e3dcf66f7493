"""Which components a distributed run of a language policy consists of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.overseer.config import RunConfig, lesson_of_worker, rollout_workers
from penstock.overseer.distributed.members import ComponentSpec
from penstock.overseer.distributed.planning import Factories, ProcessPlan
from penstock.overseer.distributed.role_sizes import SpecMaker
from penstock.overseer.distributed.roles.curriculum import make_curriculum
from penstock.overseer.distributed.roles.evaluator import make_evaluator
from penstock.overseer.distributed.roles.inference import make_inference
from penstock.overseer.distributed.roles.learner import make_learner
from penstock.overseer.distributed.roles.replay import make_replay
from penstock.overseer.distributed.roles.rollout import make_rollout
from penstock.overseer.distributed.roles.settings import Settings

FACTORIES: Factories = {
    "learner": make_learner,
    "replay": make_replay,
    "curriculum": make_curriculum,
    "inference": make_inference,
    "rollout": make_rollout,
    "evaluator": make_evaluator,
}


class Plan(ProcessPlan[RunConfig]):
    """Makes the specifications of a run's components.

    Args:
        settings: The run.
        states: The components' states in its checkpoint, if it begins with one.
        factories: By role.
    """

    def __init__(
        self, settings: Settings, states: Mapping[str, Any] | None = None, factories: Factories = FACTORIES
    ) -> None:
        super().__init__(settings, states, factories, ("learner", "inference"))

    def components(self) -> list[ComponentSpec]:
        """All of them, those first that others wait for."""
        config = self.settings.config
        return [
            *(self._spec(role, 0) for role in ("replay", "curriculum", "learner")),
            *(self.inference(index) for index in range(config.inference.servers)),
            *(self.rollout(index) for index in range(rollout_workers(config))),
            self._spec("evaluator", 0, state=self._evaluator_state),
        ]

    def inference(self, index: int) -> ComponentSpec:
        """One inference server."""
        return self._spec("inference", index)

    def rollout(self, index: int) -> ComponentSpec:
        """One rollout worker; those beyond the configured ones generate every lesson."""
        lesson = lesson_of_worker(self.settings.config, index)
        spec = self._spec("rollout", index, lessons=None if lesson is None else [lesson])
        return replace(spec, peer_group=lesson or "")

    def scalable(self) -> list[tuple[str, SpecMaker, int]]:
        """Workers and servers."""
        config = self.settings.config
        per_lesson = isinstance(config.rollout.workers, dict)  # then nobody else would take a lesson's tickets
        least = rollout_workers(config) if per_lesson else 1
        return [("rollout", self.rollout, least), ("inference", self.inference, 1)]
