"""Which components a distributed run consists of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.overseer.config import RoleConfig, lesson_of_worker, rollout_workers
from penstock.overseer.distributed.component import Factory
from penstock.overseer.distributed.members import ComponentSpec
from penstock.overseer.distributed.roles.curriculum import make_curriculum
from penstock.overseer.distributed.roles.evaluator import make_evaluator
from penstock.overseer.distributed.roles.inference import make_inference
from penstock.overseer.distributed.roles.learner import make_learner
from penstock.overseer.distributed.roles.replay import make_replay
from penstock.overseer.distributed.roles.rollout import make_rollout
from penstock.overseer.distributed.roles.settings import Settings

NO_JAX_DEVICE = {"JAX_PLATFORMS": "cpu"}
"""Only the learner and the engines may take an accelerator's memory."""

Factories = Mapping[str, Factory]
FACTORIES: Factories = {
    "learner": make_learner,
    "replay": make_replay,
    "curriculum": make_curriculum,
    "inference": make_inference,
    "rollout": make_rollout,
    "evaluator": make_evaluator,
}
ESSENTIAL = ("learner", "replay")
"""Their loss takes the run back to its newest checkpoint."""
ESSENTIAL_NAMES = tuple(f"{role}-0" for role in ESSENTIAL)


class Plan:
    """Makes the specifications of a run's components.

    Args:
        settings: The run.
        states: The components' states in its checkpoint, if it begins with one.
        factories: By role.
    """

    def __init__(
        self, settings: Settings, states: Mapping[str, Any] | None = None, factories: Factories = FACTORIES
    ) -> None:
        self.settings = settings
        self.states = states
        self._factories = factories

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

    def go_back(self, settings: Settings, states: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
        """The run goes on from a checkpoint: by name, the new settings of those that start anew for that."""
        self.settings, self.states = settings, states
        essential = dict.fromkeys(ESSENTIAL_NAMES, settings.dump())
        return {**essential, "evaluator-0": {**settings.dump(), "state": self._evaluator_state}}

    @property
    def _evaluator_state(self) -> Mapping[str, Any] | None:
        return None if self.states is None else self.states["evaluator"]

    def _spec(self, role: str, index: int, **more: Any) -> ComponentSpec:
        resources = self.settings.config.roles.get(role, RoleConfig())
        if role not in ("learner", "inference"):
            resources = resources.model_copy(update={"env": {**NO_JAX_DEVICE, **resources.env}})
        return ComponentSpec(
            role, index, self._factories[role], {**self.settings.dump(), **more}, resources, role in ESSENTIAL
        )
