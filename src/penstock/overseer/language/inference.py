"""An inference server in a process of its own: an engine, and a thread that fetches new weights for it.

`InferenceRole` has Penstock's engine and its HTTP API. `ExternalInference` computes nothing: it fetches weights, and
drives a server of another make (`penstock.overseer.language.external`).

Generation goes on while weights are fetched and prepared; the swap, between two dispatches, changes a reference. A
holder of the lease (an evaluation) keeps the server at its version for a limited time.

After each swap the server reads the digests of what it computes with, and tells replay, which knows what the learner
made. Where the two differ it fails: it leaves routing with that, and another takes its place.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, final

import numpy as np
from typing_extensions import override

from penstock.inference import AccessRules, HttpServer, InferenceEngine, create_app
from penstock.inference.server_pool import MODEL_NAME
from penstock.model.language import load_policy
from penstock.overseer.component import POLL_S, Settings, ThreadedComponent, note_served
from penstock.overseer.language.external import ExternalEngine
from penstock.overseer.language.rollout import engine_config, reachable
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Membership
from penstock.types import (
    Completion,
    MismatchError,
    NoProgressError,
    PenstockError,
    Stopped,
    UnreachableError,
    WeightsError,
    WeightVersion,
)
from penstock.weights import WeightClient, open_client

CALL_S = 10.0
"""Longest wait for the replay service's answer to a word about the version."""
MOST_UNVERIFIED = 64
"""Versions whose digests wait for a replay service that does not answer; the oldest are given up, and with them what
was sampled."""


AnyEngine = TypeVar("AnyEngine", InferenceEngine, ExternalEngine)


def serve_weights(
    ctx: ComponentContext,
    engine: InferenceEngine | ExternalEngine,
    version: WeightVersion,
    arrays: Mapping[str, Any],
    limit_s: float,
) -> tuple[WeightVersion, dict[str, str]]:
    """Returns when an engine serves these arrays: its version then, and the digests of what it computes with.

    Args:
        ctx: Of the component; the run's log is told.
        engine: What answers, in this process or driven by it.
        version: Of the arrays.
        arrays: By name, those that train.
        limit_s: Longest wait for an engine of this process; one of another make has limits of its own.
    """
    if isinstance(engine, ExternalEngine):
        digests = engine.set_weights(version, arrays)
        note_served(ctx, version)
        return version, digests
    engine.set_weights(version, arrays)
    # between two dispatches, and before the first there may be programs to compile
    engine.wait_until_served(version, limit_s)
    note_served(ctx, version)
    return engine.digests(limit_s)


class ServingRole(ThreadedComponent, Generic[AnyEngine]):
    """Serves the newest weights that it could fetch, by an engine that a subclass makes.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        engine: What answers, in this process or driven by it.
    """

    def __init__(self, ctx: ComponentContext, settings: Settings, engine: AnyEngine) -> None:
        super().__init__(ctx, settings)
        self._engine = engine
        self._replay = ctx.caller("replay-0")
        self._client: WeightClient | None = None
        self._endpoint: Mapping[str, Any] = {}
        self._swap = threading.Lock()
        self._held: WeightVersion | None = None
        self._held_from = ""  # incarnation of the broadcaster that it was fetched from
        self._leased_until = 0.0
        self._leased_to = -1  # incarnation of the evaluator
        self._held_back = False  # by a lease, until it has looked for newer weights after that
        self._told: tuple[WeightVersion, bool, Identity] | None = None
        self._digests: dict[WeightVersion, dict[str, str]] = {}  # what was served and is not verified; the last stays
        self._verified_by: Identity | None = None
        self._verified = threading.Event()  # what it serves is what the learner made
        self._swap_s = 0.0
        self._failing_since: float | None = None

    # --- the engine ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Starts it; returns when it may be given weights."""
        raise NotImplementedError

    def _look_after(self) -> None:
        """Raises what it failed with."""
        raise NotImplementedError

    def _url(self) -> str | None:
        """Where clients find it; None while they may not ask."""
        raise NotImplementedError

    def _close(self, timeout_s: float) -> None:
        """Ends it."""
        raise NotImplementedError

    # --- weights -------------------------------------------------------------------------------------------------

    @override
    def start(self) -> None:
        self.crew.start(f"{self.name}.weights", self._run)

    def _run(self) -> None:
        self._open()
        self.activity.begin()
        self.state = "running"
        while not self.stopping.is_set():
            self._look_after()
            self._follow()

    def _follow(self) -> None:
        """One look for newer weights; waits a little where there are none."""
        client = self._connected()
        if client is None or self._leased:
            self.doing = "waiting for the learner" if client is None else "held at its version"
            self._failing_since = None
            self.view_changed.wait(POLL_S)
            self.view_changed.clear()
        else:
            if self._failing_since is None:
                self.doing = self._at_what()
            try:
                source = str(self._endpoint["incarnation"])
                # Another broadcaster may offer other weights under the version held, so anything of it is news.
                version = client.wait_for(self._held if source == self._held_from else None, POLL_S)
                if version is not None:
                    self._take(version, client.fetch(version), source)
                elif client.failure is not None:
                    raise UnreachableError(client.failure)
                self._failing_since = None
                self._catch_up()
            except (UnreachableError, WeightsError) as failure:  # a restart, or a newer version meanwhile
                self._note(failure)
                self.stopping.wait(POLL_S)
        self._tell_replay()

    def _note(self, failure: PenstockError) -> None:
        """Fetching may fail for a while; a server that cannot at all is of no use."""
        self.doing = f"{self._at_what()}; weights: {failure}"
        now, limit_s = time.monotonic(), self.config.overseer.no_progress_s / 2
        self._failing_since = self._failing_since or now
        if now - self._failing_since > limit_s:
            raise NoProgressError(f"no weights could be fetched for {limit_s:g} s: {failure}") from failure

    def _at_what(self) -> str:
        return "serving" if self._held else "waiting for the first weights"

    def _connected(self) -> WeightClient | None:
        """The client of the living learner's broadcaster, if that has announced one."""
        learner = self.ctx.view.peer("learner-0")
        endpoint = learner.address.get("weights") if learner is not None else None
        if endpoint is None:
            return None
        if self._client is None:
            self._client = open_client(endpoint, self.config.weights, self.settings.token, self.name)
        elif endpoint != self._endpoint:
            self._client.connect(endpoint)
        self._endpoint = endpoint
        return self._client

    def _take(self, version: WeightVersion, arrays: Mapping[str, Any], source: str) -> None:
        with self._swap:
            if self._leased:
                return  # the lease began during the fetch
            self._verified.clear()
            started = time.perf_counter()
            limit_s = self.config.weights.fetch_timeout_s
            served, digests = serve_weights(self.ctx, self._engine, version, arrays, limit_s)
            self._digests.pop(served, None)  # told anew, behind the others
            self._digests[served] = digests
            self._verified_by = None
            self._swap_s = time.perf_counter() - started
            self._held, self._held_from = version, source

    def _catch_up(self) -> None:
        """It has looked for newer weights, and has them."""
        with self._swap:
            self._held_back &= self._leased  # a lease may have begun meanwhile

    def _tell_replay(self) -> None:
        """The ticket issuer paces by the oldest version that any server holds and is free to leave.

        Raises:
            MismatchError: this server serves other arrays than the learner made.
        """
        replay, held_back = self.ctx.view.peer("replay-0"), self._held_back
        if replay is None or self._held is None or self._held.lineage != self.ctx.view.lineage:
            return
        try:
            self._tell_digests(replay.identity)
            if self._told == (self._held, held_back, replay.identity):
                return
            me, held = self.ctx.identity, self._held
            told = me.name, me.incarnation, held.lineage, held.step, held_back
            self._replay.call("server_holds", *told, timeout_s=CALL_S)
        except UnreachableError:
            return  # told again soon, to this incarnation or the next
        self._told = (held, held_back, replay.identity)

    def _tell_digests(self, replay: Identity) -> None:
        """Every version that was served, in order, until it is known to be what the learner made."""
        if self._verified_by == replay:
            return
        assert self._held is not None  # or there is nothing to tell
        self._digests = {v: told for v, told in self._digests.items() if v.lineage == self._held.lineage}
        try:
            for version, digests in list(self._digests.items()):
                told = str(self.ctx.identity), version.lineage, version.step, digests
                if not self._replay.call("tell_digests", *told, timeout_s=CALL_S):
                    continue
                if version == self._held:
                    self._verified_by = replay
                    self._verified.set()
                else:
                    del self._digests[version]
        except MismatchError as mismatch:
            self.ctx.event("weights_differ", reason=str(mismatch))
            raise
        for version in list(self._digests)[:-MOST_UNVERIFIED]:
            del self._digests[version]

    # --- what others call ----------------------------------------------------------------------------------------

    def look(self, view: Membership) -> None:
        """Ends the lease of an evaluator that died."""
        evaluator = view.peer("evaluator-0")
        if evaluator is None or evaluator.identity.incarnation != self._leased_to:
            self.release()
        super().look(view)

    @property
    def _leased(self) -> bool:
        return time.monotonic() < self._leased_until

    def hold(self, seconds: float, evaluator: int) -> WeightVersion | None:
        """Keeps the present version for so long at most, while that incarnation of the evaluator lives.

        Asked again in time, it keeps it for longer.

        Returns:
            The version; None before the first.
        """
        with self._swap:
            self._leased_until, self._leased_to = time.monotonic() + seconds, evaluator
            self._held_back = True
            return self._held

    def canary(
        self, version: tuple[int, int], prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        """`InferenceEngine.canary`, for the learner.

        None while an evaluation holds the server at its version, nor of weights that are not known to be what the
        learner made: that is another fault, which has its own remedy.
        """
        limit = time.monotonic() + timeout_s
        if self._leased:
            return []
        answers = self._engine.canary(WeightVersion(*version), prompts, max_tokens, timeout_s)
        return answers if self._verified.wait(max(0.0, limit - time.monotonic())) else []

    def release(self) -> None:
        """Ends the lease."""
        self._leased_until = 0.0

    def _has_work(self) -> bool:
        stats = self._engine.stats()
        return self._leased or bool(stats.get("inference/running") or stats.get("inference/waiting"))

    @property
    @override
    def _worked(self) -> bool:
        return self._held is not None  # a server of another make is first asked what it can do to serve these

    @override
    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        if self._client is not None:
            self._client.close()
        self._close(timeout_s)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        stats, address = self._engine.stats(), dict[str, Any]()
        held, url = self._held, self._url()
        if held is not None and url and self.state in ("running", "drained") and not self.stopping.is_set():
            address = {"url": url, "lineage": held.lineage, "step": held.step}
            address |= {"weights": self._held_from, "held_back": self._held_back, "draining": self.draining}
            address["digests"] = True
        client = {} if self._client is None else self._client.metrics()
        lived_s, busy_s = busy_s + idle_s, self._engine.busy_s
        progress = stats.get("inference/tokens_total") if stats.get("inference/running") else None
        return ComponentStatus(
            self.state,
            self.doing,
            float(self.compiled) if self.state == "starting" else progress,
            busy_s,
            max(0.0, lived_s - busy_s),
            address,
            {**stats, **client, "weights/swap_s": self._swap_s},
            self._facts(version=None if held is None else [held.lineage, held.step]),
            worked=self._worked,
        )


@final
class InferenceRole(ServingRole[InferenceEngine]):
    """An engine of Penstock's own, and its server."""

    def __init__(self, ctx: ComponentContext, settings: Settings) -> None:
        config = settings.config
        tokenizer = settings.tokenizer()
        decoder = load_policy(config.model, config.seed, tokenizer)
        served = engine_config(config)
        engine = InferenceEngine(decoder, WeightVersion(-1, 0), tokenizer, served, str(ctx.identity))
        super().__init__(ctx, settings, engine)
        app = create_app(engine, tokenizer, MODEL_NAME, AccessRules(settings.token, max_waiting=served.max_waiting))
        self._server = HttpServer(app, served.host, tls_cert=served.tls_cert, tls_key=served.tls_key)

    @override
    def _open(self) -> None:
        self.doing = "compiling"
        self._engine.start()
        self._server.start()
        for program in self._engine.compiling(self.config.overseer.start_limit_s):
            self.note_compiled(program)

    @override
    def _look_after(self) -> None:
        self._engine.raise_if_failed()
        self._server.raise_if_failed()

    @override
    def _url(self) -> str:
        return reachable(self._server.url)

    @override
    def _close(self, timeout_s: float) -> None:
        self._server.stop()
        self._engine.stop(timeout_s)


@final
class ExternalInference(ServingRole[ExternalEngine]):
    """A server of another make; the learner has it sleep and wake."""

    def __init__(self, ctx: ComponentContext, settings: Settings) -> None:
        tokenizer = settings.tokenizer()
        decoder = load_policy(settings.config.model, settings.config.seed, tokenizer)
        engine = ExternalEngine(ctx.identity, settings, decoder, tokenizer, ctx.event)
        super().__init__(ctx, settings, engine)
        self.sleep, self.wake = engine.sleep, engine.wake

    @override
    def _open(self) -> None:
        self.doing = "waiting for the first weights"

    @override
    def _look_after(self) -> None:
        with suppress(Stopped):
            self._engine.watch()

    @override
    def _url(self) -> str | None:
        server = self._engine.server
        return None if server is None else server.url

    @override
    def _close(self, timeout_s: float) -> None:
        self._engine.stop(timeout_s)
