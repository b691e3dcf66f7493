"""What plans of distributed runs have in common: specifications of components, by role."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Generic

from penstock.overseer.config import RoleConfig
from penstock.overseer.distributed.component import Factory
from penstock.overseer.distributed.members import ComponentSpec
from penstock.overseer.distributed.role_sizes import SpecMaker
from penstock.overseer.distributed.roles.settings import AnyConfig, Settings

Factories = Mapping[str, Factory]
ESSENTIAL = ("learner", "replay")
"""Their loss takes the run back to its newest checkpoint."""
ESSENTIAL_NAMES = tuple(f"{role}-0" for role in ESSENTIAL)


def processor_environment(resources: RoleConfig) -> dict[str, str]:
    """Environment of a process that takes no accelerator's memory, and shares its machine's processors with others.

    XLA computes with as many threads as CPUs are reserved, at least one: by default it has one for each processor, and
    to hand a small policy's decision around takes longer than the decision.
    """
    return {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": str(max(1, math.ceil(resources.num_cpus)))}


class ProcessPlan(Generic[AnyConfig]):
    """Makes the specifications of a run's components; a subclass knows which there are.

    Args:
        settings: The run.
        states: The components' states in its checkpoint, if it begins with one.
        factories: By role.
        accelerated: Roles that may take an accelerator; others see none unless their ``env`` says so.
    """

    def __init__(
        self,
        settings: Settings[AnyConfig],
        states: Mapping[str, Any] | None,
        factories: Factories,
        accelerated: Collection[str],
    ) -> None:
        self.settings = settings
        self.states = states
        self._factories = factories
        self._accelerated = accelerated

    def components(self) -> list[ComponentSpec]:
        """All of them, those first that others wait for."""
        raise NotImplementedError

    def scalable(self) -> list[tuple[str, SpecMaker, int]]:
        """Roles whose number may change: what makes one by its index, and how few there may be."""
        raise NotImplementedError

    def go_back(self, settings: Settings[AnyConfig], states: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
        """The run goes on from a checkpoint: by name, the new settings of those that start anew for that."""
        self.settings, self.states = settings, states
        essential = {name: self._values() for name in ESSENTIAL_NAMES}
        return {**essential, "evaluator-0": self._values(state=self._evaluator_state)}

    @property
    def _evaluator_state(self) -> Mapping[str, Any] | None:
        return None if self.states is None else self.states["evaluator"]

    def _values(self, **more: Any) -> dict[str, Any]:
        """What a component is told."""
        return {**self.settings.dump(), **more}

    def _spec(self, role: str, index: int, **more: Any) -> ComponentSpec:
        resources = self.settings.config.roles.get(role, RoleConfig())
        if role not in self._accelerated:
            resources = resources.model_copy(update={"env": {**processor_environment(resources), **resources.env}})
        return ComponentSpec(role, index, self._factories[role], self._values(**more), resources, role in ESSENTIAL)
