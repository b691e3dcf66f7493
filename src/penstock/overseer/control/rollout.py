"""A rollout worker of a control run as a component, with its simulators as child processes.

It starts its simulators at once, and rolls out from the moment the learner trains. Weights come from the learner's
broadcaster beside the rollout, fragments go to the replay buffer, and twice a second it reports there. Films are
written into the run directory, which must be on its machine where films are wanted. What breaks in a simulator is the
worker's own business; whatever else goes wrong ends the component. Its next incarnation has other seeds, and its
fragments have ids of their own.
"""

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from penstock.fleet import RolloutWorkerWrapper
from penstock.model.control import named_arrays
from penstock.overseer.component import POLL_S, AnyConfig, RunClock, Settings, ThreadedComponent
from penstock.overseer.control.policies import make_policy, make_worker_runner
from penstock.overseer.control.simulators import filmed_pool, worker_pool
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.run_log import simulators_told
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.replay import FRAGMENTS, RemoteSink
from penstock.types import Spaces, Stopped, UnreachableError, WeightVersion
from penstock.weights import WeightClient, merged_arrays, open_client


class FollowedWeights:
    """Implements `penstock.types.WeightSource` over a client that follows the learner's broadcaster. Thread-safe.

    Args:
        ctx: Knows the view.
        settings: The run, with its config, directory and lineage.
        base: All arrays of the policy, as JAX has them. What is fetched gets their dtypes, and those that do not travel
            since they do not train are taken from here.
        in_training: Nothing is there unless the learner trains: a worker begins with the training.
    """

    def __init__(
        self,
        ctx: ComponentContext,
        settings: Settings[AnyConfig],
        base: Mapping[str, Any],
        *,
        in_training: bool = False,
    ) -> None:
        self._ctx, self._base = ctx, base
        self._config = settings.config.weights
        self._token = settings.token
        self._in_training = in_training
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._client: WeightClient | None = None

    @property
    def training(self) -> bool:
        """Whether a learner lives that trains."""
        learner = self._ctx.view.peer("learner-0")
        return learner is not None and bool(learner.address.get("training"))

    @property
    def failure(self) -> str | None:
        """Why the living learner's weights cannot be reached; None where they can, or nobody asked yet."""
        client = self._client
        return None if client is None else client.failure

    def latest(self) -> WeightVersion | None:
        """The newest version that the living learner offers; None where there is none."""
        with self._lock:
            client = self._connected()
            return None if client is None else client.latest()

    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        """A version newer than that, once there is one; None after `timeout_s`, and where there is no learner.

        Raises:
            Stopped: it was closed.
        """
        with self._lock:
            client = self._connected()
            if client is not None:
                return client.wait_for(newer_than, timeout_s)
        if self._closed.wait(timeout_s):
            raise Stopped("the weights were closed")
        return None

    def fetch(self, version: WeightVersion) -> Mapping[str, Any]:
        """All arrays of a version by name, those that do not travel included.

        Raises:
            UnreachableError: there is no learner at present.
            WeightsError: the version is superseded or unknown, or its arrays do not fit the policy.
        """
        with self._lock:
            client = self._connected()
            if client is None:
                raise UnreachableError("there is no learner to fetch weights from at present")
            return merged_arrays(self._base, client.fetch(version))

    def metrics(self) -> dict[str, float]:
        """The client's, as ``weights/<name>``."""
        client = self._client
        return {} if client is None else client.metrics()

    def close(self) -> None:
        """Ends every wait; fetched arrays stay valid."""
        self._closed.set()
        client = self._client
        if client is not None:
            client.close()

    def _connected(self) -> WeightClient | None:
        if self._closed.is_set():
            raise Stopped("the weights were closed")
        learner = self._ctx.view.peer("learner-0")
        endpoint = None if learner is None else learner.address.get("weights")
        if endpoint is None or (self._in_training and not self.training):
            return None
        if self._client is None:
            self._client = open_client(endpoint, self._config, self._token, self._ctx.identity.name)
        else:
            self._client.connect(endpoint)
        return self._client


CALL_S = 10.0
"""Longest wait for an answer to a report; the next one follows in any case."""
FIRST_WEIGHTS_S = 24 * 3600.0
"""Longest wait for the training to begin: evaluations come before it, which have limits of their own."""


class FleetRolloutRole(ThreadedComponent[FleetRunConfig]):
    """Runs one `RolloutWorkerWrapper`.

    Args:
        ctx: What its host gives it.
        settings: The run, with its config, directory and lineage.
        spaces: What the policy sees and does.
    """

    def __init__(self, ctx: ComponentContext, settings: Settings[FleetRunConfig], spaces: Spaces) -> None:
        super().__init__(ctx, settings)
        config, me, lineage = settings.config, ctx.identity, settings.lineage
        self._replay = ctx.caller("replay-0")
        self._clock = RunClock(ctx)
        self._sink = RemoteSink(
            self._replay,
            me.name,
            me.incarnation,
            None,
            experience=FRAGMENTS,
            full_limit_s=config.replay.max_waiting_s,
        )
        policy = make_policy(config, spaces)
        self._feed = FollowedWeights(ctx, settings, named_arrays(policy), in_training=True)
        before = WeightVersion(lineage, 0)  # of no weights: it waits for the first
        self._runner = make_worker_runner(policy, config, me.index, before, me.incarnation)
        name = f"{me.name}.{lineage}"  # every life of a run has fragments of its own
        on_event = simulators_told(ctx)
        pool = worker_pool(config, me.index, lineage, me.incarnation, on_event)
        filmed = filmed_pool(pool, config, settings.directory, f"{name}-{me.incarnation}", on_event)
        if filmed is not None:
            for draft in settings.directory.videos.glob(f".{name}-*.tmp"):
                draft.unlink(missing_ok=True)  # of an earlier incarnation, whose process is gone
        self._worker = RolloutWorkerWrapper(
            name,
            me.incarnation,
            config.fleet,
            filmed or pool,
            self._runner,
            self._sink,
            self._feed,
            on_event=on_event,
            on_batch=(filmed.note,) if filmed else (),
            first_weights_timeout_s=FIRST_WEIGHTS_S,
            stamp=self._clock.now,
        )
        self._next_episode = 0
        self._began: float | None = None
        self._draining = False

    @override
    def start(self) -> None:
        self.crew.start(f"{self.name}.clock", partial(self._clock.follow, self.stopping))
        self.crew.start(f"{self.name}.reports", self._run)

    def _run(self) -> None:
        self.doing = "compiling"
        self._runner.compile()
        if self.stopping.is_set():
            return
        self._worker.start()
        self.state, self.doing = "running", "waiting for the learner to train"
        while not self.stopping.wait(POLL_S):
            self._tell()
            if self._draining and not self._feed.training:
                self._sink.stop()  # nobody takes what it would still send

    def _tell(self) -> None:
        me, report = self.ctx.identity, self._worker.report(self._next_episode)
        if report.condition.steps and self._began is None:
            self._began, self.doing = time.monotonic(), "rolling out"
        try:
            self._replay.call("take_report", me.name, me.incarnation, report, timeout_s=CALL_S)
        except UnreachableError:
            return  # told again soon, to this incarnation or the next
        self._next_episode = report.next_episode

    def drain(self) -> None:
        """Acts no more, and sends what is complete while the learner trains."""
        self._draining = True
        self.crew.start(f"{self.name}.drain", self._drain)

    def _drain(self) -> None:
        self.doing = "sending what is complete"
        self._worker.stop(self.config.overseer.stop_timeout_s / 2)
        self._tell()
        self.doing, self.state = "done", "drained"

    @override
    def stop(self, timeout_s: float) -> None:
        self.stopping.set()
        self._sink.stop()
        self._feed.close()
        self._worker.stop(timeout_s / 2)
        super().stop(timeout_s / 2)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        condition, version = self._worker.condition(), self._runner.version
        facts = self._facts(version=[version.lineage, version.step], steps=condition.steps)
        if condition.failure:
            return ComponentStatus("failed", self.doing, error=condition.failure, facts=facts)
        if condition.state == "ended" and not (self._draining or self.stopping.is_set()):
            return ComponentStatus("failed", self.doing, error="the worker ended before it was told to", facts=facts)
        working = condition.state == "running" and self.state == "running" and not self._sink.waiting
        lived_s = 0.0 if self._began is None else time.monotonic() - self._began
        blocked_s = min(lived_s, self._worker.metrics().get("fleet/blocked_s", 0.0))
        return ComponentStatus(
            self.state,
            self._at_what(),
            float(condition.steps) if working else None,
            lived_s - blocked_s,
            blocked_s,
            metrics=self._feed.metrics() | {"weights/swap_s": self._worker.swap_s},
            facts=facts,
        )

    def _at_what(self) -> str:
        doing = "waiting for room in the replay buffer" if self._sink.waiting else self.doing
        return f"{doing}; weights: {self._feed.failure}" if self._feed.failure else doing


def make_fleet_rollout(ctx: ComponentContext, settings: Mapping[str, Any]) -> FleetRolloutRole:
    """Factory of a fleet's rollout worker; `settings` has the ``spaces``, too."""
    return FleetRolloutRole(ctx, Settings.of(settings, FleetRunConfig), Spaces.from_values(settings["spaces"]))
