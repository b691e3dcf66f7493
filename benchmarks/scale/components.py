"""The learner and the inference servers of the simulation: real messages and real weights, no arithmetic."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.overseer.component import POLL_S, Settings, ThreadedComponent
from penstock.overseer.config import RunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.replay import RemoteBatches
from penstock.types import NoProgressError, RetryingCaller, Stopped, UnreachableError, WeightsError, WeightVersion
from penstock.weights import Broadcaster, WeightClient, open_broadcaster, open_client

WEIGHT_BYTES = 25_000_000
CALL_S, START_S = 30.0, 300.0


class SimulatedLearner(ThreadedComponent):
    """Takes batches and commits them at once; its broadcaster is the real one, over Arrow Flight, in this process."""

    def __init__(self, ctx: ComponentContext, settings: Settings) -> None:
        super().__init__(ctx, settings)
        self._replay = ctx.caller("replay-0")
        self._batches = RemoteBatches(self._replay, settings.lineage)
        self._broadcaster: Broadcaster | None = None
        self._arrays = {f"layer.{i}": np.full(WEIGHT_BYTES // 32, i, np.float32) for i in range(8)}
        self._step = 0
        self._trained: Counter[str] = Counter()

    def start(self) -> None:
        """See `Component.start`."""
        self._broadcaster = open_broadcaster(self.config.weights, self.settings.job, self.settings.token, "")
        self._broadcaster.publish(WeightVersion(self.settings.lineage, 0), self._arrays)
        self.state, self.doing = "running", "training"
        self.crew.start("learner.train", self._train)

    def _train(self) -> None:
        assert self._broadcaster is not None  # opened at the start
        try:
            RetryingCaller(self._replay, "replay-0", START_S).call("admit", timeout_s=CALL_S)
            while not self.stopping.is_set():
                try:
                    batch = self._batches.next_batch(self._step, POLL_S)
                except NoProgressError:
                    continue
                self._trained.update(name for example in batch.examples for name in example.rollout_ids)
                self._batches.finish_update(self._step)
                self._step += 1
                self._batches.set_current_step(self._step)
                self._broadcaster.publish(WeightVersion(self.settings.lineage, self._step), self._arrays)
                self.ctx.metrics(self._step, {**batch.metrics, **self._broadcaster.metrics()})
        except Stopped:
            pass  # asked to, between two updates
        self.state, self.doing = "finished", f"done at step {self._step}"

    def finish(self) -> None:
        """Training ends at the next update boundary."""
        self.stopping.set()

    def trained(self) -> dict[str, int]:
        """Rollout → how often it was in a batch."""
        return dict(self._trained)

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        super().stop(timeout_s)
        self._batches.stop()
        if self._broadcaster is not None:
            self._broadcaster.close()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        weights = {} if self._broadcaster is None else {"weights": self._broadcaster.endpoint(), "training": True}
        return ComponentStatus(self.state, self.doing, None, address=weights, facts=self._facts(step=self._step))


class SimulatedServer(ThreadedComponent):
    """Fetches each version and tells the replay buffer, as an inference server does; serves nobody."""

    def __init__(self, ctx: ComponentContext, settings: Settings) -> None:
        super().__init__(ctx, settings)
        self._replay = ctx.caller("replay-0")
        self._client: WeightClient | None = None
        self._held: WeightVersion | None = None
        self._seconds: list[float] = []

    def start(self) -> None:
        """See `Component.start`."""
        self.state = "running"
        self.crew.start(f"{self.name}.weights", self._run)

    def _run(self) -> None:
        while not self.stopping.is_set():
            learner = self.ctx.view.peer("learner-0")
            endpoint = learner.address.get("weights") if learner is not None else None
            if endpoint is None:
                self.view_changed.wait(POLL_S)
                self.view_changed.clear()
                continue
            if self._client is None:
                self._client = open_client(endpoint, self.config.weights, self.settings.token, self.name)
            try:
                self._follow(self._client)
            except (UnreachableError, WeightsError) as failure:  # a newer version meanwhile, or a slow answer
                self.doing = str(failure)
                self.stopping.wait(POLL_S)

    def _follow(self, client: WeightClient) -> None:
        version = client.wait_for(self._held, POLL_S)
        if version is None:
            return
        began = time.monotonic()
        client.fetch(version)
        self._seconds.append(time.monotonic() - began)
        me = self.ctx.identity
        self._replay.call("server_holds", me.name, me.incarnation, version.lineage, version.step, timeout_s=CALL_S)
        self._held, self.doing = version, "serving"

    def fetches(self) -> list[float]:
        """Seconds of each fetch since the last question."""
        found, self._seconds = self._seconds, []
        return found

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        super().stop(timeout_s)
        if self._client is not None:
            self._client.close()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        held = self._held
        address: dict[str, Any] = {}
        if held is not None:
            address = {"url": "http://127.0.0.1:1", "lineage": held.lineage, "step": held.step}
        return ComponentStatus(self.state, self.doing, None, address=address, facts=self._facts())


def make_learner(ctx: ComponentContext, settings: Mapping[str, Any]) -> SimulatedLearner:
    """Factory."""
    return SimulatedLearner(ctx, Settings.of(settings, RunConfig))


def make_server(ctx: ComponentContext, settings: Mapping[str, Any]) -> SimulatedServer:
    """Factory."""
    return SimulatedServer(ctx, Settings.of(settings, RunConfig))
