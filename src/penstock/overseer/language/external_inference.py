"""The components of a run that have an inference server of another make: in many processes, and in one.

Of many, the component's process computes nothing: it fetches weights, and drives the server (`ExternalEngine`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np
from typing_extensions import override

from penstock.model.language import load_policy
from penstock.overseer.component import LOOK_S, Settings, ThreadedComponent
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.language.inference import ServingRole
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.rollout import RolloutManager
from penstock.types import Completion, Stopped, SupersededVersionError, WeightVersion
from penstock.weights import InProcessBroadcaster


@final
class ExternalInference(ServingRole):
    """A server of another make, as a component of a run in many processes."""

    def __init__(self, ctx: ComponentContext, settings: Settings) -> None:
        super().__init__(ctx, settings)
        tokenizer = settings.tokenizer()
        decoder = load_policy(settings.config.model, settings.config.seed, tokenizer)
        self._engine = ExternalEngine(ctx.identity, settings, decoder, tokenizer, ctx.event)

    @override
    def _open(self) -> None:
        self.doing = "waiting for the first weights"

    @override
    def _look_after(self) -> None:
        with suppress(Stopped):
            self._engine.watch()

    @override
    def _serve(self, version: WeightVersion, arrays: Mapping[str, Any]) -> tuple[WeightVersion, dict[str, str]]:
        return version, self._engine.set_weights(version, arrays)

    @override
    def _answers(
        self, version: WeightVersion, prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        return self._engine.canary(version, prompts, max_tokens, timeout_s)

    @override
    def _url(self) -> str | None:
        server = self._engine.server
        return None if server is None else server.url

    @override
    def _numbers(self) -> tuple[float, dict[str, float]]:
        return self._engine.busy_s, self._engine.stats()

    @override
    def _close(self, timeout_s: float) -> None:
        self._engine.stop(timeout_s)


@final
class LocalExternalInference(ThreadedComponent):
    """A server of another make beside a run in one process.

    While the worker does not follow the learner's weights, it does: before and after the training.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        engine: Not given weights yet.
        manager: Hands it new ones.
        weights: Come from here.
        trains: Whether the worker follows the weights.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings,
        engine: ExternalEngine,
        manager: RolloutManager,
        weights: InProcessBroadcaster,
        trains: Callable[[], bool],
    ) -> None:
        super().__init__(ctx, settings)
        self._engine, self._manager, self._weights, self._trains = engine, manager, weights, trains
        self._held: tuple[WeightVersion, str] | None = None

    @override
    def start(self) -> None:
        self.state = "running"
        self.crew.start("inference-0.server", self._run)

    def _run(self) -> None:
        with suppress(Stopped):
            while not self.stopping.wait(LOOK_S):
                self._follow()
                self._engine.watch()

    def _follow(self) -> None:
        """Takes the weights that are offered, unless the worker does."""
        newest = self._weights.latest()
        if newest is None:
            return
        offered = newest, str(self._weights.endpoint()["incarnation"])
        if self._held != offered and not self._trains():
            try:
                self._manager.update_model(newest, self._weights.fetch(newest))
            except SupersededVersionError:
                return
        self._held = offered

    def canary(
        self, version: tuple[int, int], prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        """`ExternalEngine.canary`, for the learner."""
        return self._engine.canary(WeightVersion(*version), prompts, max_tokens, timeout_s)

    def finish(self) -> None:
        """The server goes on: an answer that is waited for still comes."""

    @override
    def stop(self, timeout_s: float) -> None:
        self.stopping.set()
        self._manager.shutdown()
        super().stop(timeout_s)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        stats, held, serving = self._engine.stats(), self._held, self._engine.server is not None
        address: dict[str, Any] = {"digests": True}
        if held is not None and serving and not self._trains():
            address |= {"lineage": held[0].lineage, "step": held[0].step, "weights": held[1]}
        return ComponentStatus(
            self.state,
            self._engine.doing,
            stats.get("inference/tokens_total", 0.0) + self._engine.progress,
            self._engine.busy_s,
            address=address,
            metrics=stats,
            facts=self._facts(),
        )
