"""An inference server tells which weights it serves only once it serves them, and speaks TLS where the run does."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.inference import RemoteContext
from penstock.model.arrays import named_leaves
from penstock.model.language.decoder import stack_names
from penstock.overseer import load_config
from penstock.overseer.component import Settings
from penstock.overseer.language.inference import InferenceRole
from penstock.overseer.language.rollout import make_pool, servers_of
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.rundir import RunDirectory
from penstock.types import (
    CompiledProgram,
    Decoding,
    MismatchError,
    NoProgressError,
    UnreachableError,
    WeightVersion,
)
from penstock.weights import Broadcaster, open_broadcaster
from tests.certificates import write_certificate
from tests.inference.fake_servers import FakeServer, Reply, answer
from tests.waiting import wait_until

LIMIT_S = 280.0
TOKEN = "0" * 64
VERSION = WeightVersion(0, 0)
SMALL = [
    "runtime=ray", "inference.max_slots=2", "inference.max_seq_len=32", "inference.prefill_lengths=[16]",
    "inference.prefill_rows=1", "weights.fetch_timeout_s=20",
]  # fmt: skip


class Around:
    """A host that knows a learner's broadcaster, and nobody else."""

    identity = Identity("inference", 0, 0)

    def __init__(self) -> None:
        self.view = Membership()
        self.others: tuple[Peer, ...] = ()
        self.told: list[tuple[Any, ...]] = []
        self.digests: list[tuple[Any, ...]] = []
        self.verdict: Callable[[], bool] = lambda: True
        self.events: list[dict[str, Any]] = []
        self.kinds: list[str] = []

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        self.kinds.append(kind)
        self.events.append(fields)

    def follow(self, role: InferenceRole, broadcaster: Broadcaster) -> None:
        address = {"weights": broadcaster.endpoint()}
        self.view = Membership(self.view.number + 1, 0, (Peer(Identity("learner", 0, 0), address), *self.others))
        role.look(self.view)

    def caller(self, name: str) -> "Around":
        return self

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if self.view.peer("replay-0") is None:
            raise UnreachableError(f"{method}: nobody is there")
        if method == "tell_digests":
            self.digests.append(args)
            return self.verdict()
        self.told.append((method, *args))


class Engine:
    """Stands for the engine; a swap takes as long as the test wants."""

    busy_s = 0.0

    def __init__(self) -> None:
        self.served: list[float] = []
        self.may_swap, self.swapping = threading.Event(), threading.Event()
        self.running: Callable[[], int] = lambda: 0

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    def raise_if_failed(self) -> None: ...

    def compiling(self, timeout_s: float) -> list[CompiledProgram]:
        return []

    def stats(self) -> dict[str, float]:
        return {"inference/running": self.running(), "inference/waiting": 0.0, "inference/tokens_total": 0.0}

    def set_weights(self, version: WeightVersion, weights: Mapping[str, Any]) -> None:
        self.next, self.version = float(weights["final_norm"][0]), version

    def wait_until_served(self, version: WeightVersion, timeout_s: float) -> None:
        self.swapping.set()
        if not self.may_swap.wait(LIMIT_S):
            raise NoProgressError("the test never let the engine swap")
        self.served.append(self.next)

    def canary(self, version: WeightVersion, prompts: Any, max_tokens: int, timeout_s: float) -> list[str]:
        return [f"an answer of version {version.step}"]

    def digests(self, timeout_s: float) -> tuple[WeightVersion, dict[str, str]]:
        return self.version, {"final_norm": f"{self.served[-1]:g}"}


class Api(FakeServer):
    """Stands for the HTTP server; answers when it may."""

    def __init__(self) -> None:
        super().__init__(self.wait_and_answer)
        self.open, self.may_answer = 0, threading.Event()

    def wait_and_answer(self, body: dict[str, Any]) -> Reply:
        self.open += 1
        assert self.may_answer.wait(LIMIT_S)
        self.open -= 1
        return answer(body)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def raise_if_failed(self) -> None: ...


@pytest.fixture
def api():
    api = Api()
    yield api
    api.close()


def make_role(tmp_path, ctx, overrides=()):
    config = load_config("cats", [*SMALL, "overseer.heartbeat_s=0.1", *overrides])
    role: Any = InferenceRole(ctx, Settings(config, RunDirectory(tmp_path), TOKEN))
    role.shapes = role._engine._shapes
    return role


@pytest.fixture
def role(tmp_path):
    role: Any = make_role(tmp_path, Around())
    role._engine = Engine()
    yield role
    role._engine.may_swap.set()
    role.stop(LIMIT_S)


@pytest.fixture
def broadcast(tmp_path):
    opened = []

    def broadcast(role, value, frozen=(), step=0):
        broadcaster = open_broadcaster(role.config.weights, "job", TOKEN, str(tmp_path))
        opened.append(broadcaster)
        shapes = {name: shape for name, shape in role.shapes.items() if name not in frozen}
        arrays = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        arrays["final_norm"][:] = value
        broadcaster.publish(WeightVersion(0, step), arrays)
        role.ctx.follow(role, broadcaster)
        return broadcaster.endpoint()["incarnation"]

    yield broadcast
    for broadcaster in opened:
        broadcaster.close()


def told(role):
    return role.condition().address.get("weights")


def test_the_same_version_of_another_broadcaster_is_told_only_once_it_is_served(role, broadcast):
    """As after a warm start: whoever asks a server that tells the new incarnation must get the new weights."""
    engine = role._engine
    engine.may_swap.set()
    first = broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role) == first)
    engine.may_swap.clear()
    engine.swapping.clear()
    second = broadcast(role, 2.0)
    assert engine.swapping.wait(LIMIT_S)
    assert (told(role), engine.served) == (first, [1.0])
    engine.may_swap.set()
    wait_until(lambda: told(role) == second)
    assert engine.served == [1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [pytest.param((), marks=pytest.mark.slow), ("embedding",)])
def test_the_first_weights_are_let_go_after_the_first_swap_but_for_those_that_never_travel(tmp_path, broadcast, frozen):
    role = make_role(tmp_path, Around())
    weights = role._engine._batch.runner.weights
    named = named_leaves(weights.ends) | stack_names(named_leaves(weights.layers[0]))
    first = {name: weakref.ref(array) for name, array in named.items()}
    del weights, named
    try:
        incarnation = broadcast(role, 1.0, frozen)
        role.start()
        wait_until(lambda: told(role) == incarnation, "served", LIMIT_S)
        gc.collect()
        assert {name for name, array in first.items() if array() is not None} == set(frozen)
        again = broadcast(role, 2.0, frozen)
        wait_until(lambda: told(role) == again, "served", LIMIT_S)
    finally:
        role.stop(LIMIT_S)


def test_the_seconds_of_a_swap_are_told(role, broadcast):
    engine = role._engine
    first = broadcast(role, 1.0)
    role.start()
    assert engine.swapping.wait(LIMIT_S)
    time.sleep(0.2)
    engine.may_swap.set()
    wait_until(lambda: told(role) == first)
    assert 0.2 <= role.condition().metrics["weights/swap_s"] < LIMIT_S


@pytest.mark.slow
def test_a_broadcaster_that_cannot_be_reached_is_named_and_survived_for_a_while(role, broadcast):
    """As behind a firewall, or under a wrong `weights.advertise`."""
    engine = role._engine
    engine.may_swap.set()
    broadcast(role, 1.0)
    learner = role.ctx.view.peer("learner-0")
    right = learner.address["weights"]
    learner.address["weights"] = right | {"address": "127.0.0.1:1"}
    role.start()
    wait_until(lambda: "weights:" in role.doing)
    for _ in range(20):  # the reason stays while it is looked for again
        assert role.condition().doing.startswith("waiting for the first weights; weights: "), role.doing
        assert "127.0.0.1:1" in role.condition().doing
        time.sleep(0.05)
    learner.address["weights"] = right
    wait_until(lambda: told(role) == right["incarnation"] and role.doing == "serving")
    assert role._failing_since is None


def test_a_server_that_never_reaches_the_broadcaster_fails_with_the_reason(tmp_path, broadcast):
    role: Any = make_role(tmp_path, Around(), ["overseer.no_progress_s=2", "weights.advertise=127.0.0.1:1"])
    role._engine = Engine()
    try:
        broadcast(role, 1.0)
        role.start()
        wait_until(lambda: role.condition().state == "failed")
        error = role.condition().error
        assert error.startswith("no weights could be fetched for 1 s: ") and "127.0.0.1:1" in error
    finally:
        role.stop(LIMIT_S)


def test_weights_that_came_during_a_lease_are_taken_after_it(role, broadcast):
    engine = role._engine
    engine.may_swap.set()
    first = broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role) == first)
    fetched, may_go_on = threading.Event(), threading.Event()
    fetch = role._client.fetch

    def slow_fetch(version):
        arrays = fetch(version)
        fetched.set()
        assert may_go_on.wait(LIMIT_S)
        return arrays

    role._client.fetch = slow_fetch
    second = broadcast(role, 2.0)
    assert fetched.wait(LIMIT_S)
    assert role.hold(LIMIT_S, 0) == VERSION
    may_go_on.set()
    wait_until(lambda: role.doing == "held at its version")
    assert (told(role), engine.served) == (first, [1.0])
    role.release()
    wait_until(lambda: told(role) == second)
    assert engine.served == [1.0, 2.0]


def test_each_version_is_logged_when_the_engine_samples_with_it(role, broadcast):
    role._engine.may_swap.set()
    began = time.time()
    first = broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role) == first)
    second = broadcast(role, 2.0)
    wait_until(lambda: told(role) == second)
    served = [e for kind, e in zip(role.ctx.kinds, role.ctx.events, strict=True) if kind == "weights_served"]
    assert [event["version"] for event in served] == [[VERSION.lineage, VERSION.step]] * 2  # of two broadcasters
    assert {(event["component"], event["incarnation"]) for event in served} == {("inference-0", 0)}
    assert began <= served[0]["time"] <= served[1]["time"] <= time.time()


def test_the_lease_of_an_evaluator_ends_with_its_life(role, broadcast):
    engine, ctx = role._engine, role.ctx
    engine.may_swap.set()
    first = broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role) == first)
    assert role.hold(LIMIT_S, 3) == VERSION
    ctx.others = (Peer(Identity("evaluator", 0, 3), {}),)
    broadcast(role, 2.0)
    wait_until(lambda: role.doing == "held at its version")
    assert engine.served == [1.0]
    ctx.others = (Peer(Identity("evaluator", 0, 4), {}),)
    third = broadcast(role, 3.0)
    wait_until(lambda: told(role) == third)
    assert engine.served[-1] == 3.0


def test_a_draining_server_answers_what_it_was_asked_and_is_drained_after_that(role, broadcast, api):
    engine = role._engine
    engine.may_swap.set()
    role._server.stop()
    role._server, engine.running = api, lambda: api.open
    broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role))
    pool = make_pool(role.settings)

    def look() -> None:
        pool.set_servers(servers_of(Membership(9, 0, (Peer(role.ctx.identity, role.condition().address),))))

    try:
        look()
        with ThreadPoolExecutor(1) as threads:
            context = RemoteContext(pool, role.settings.tokenizer())
            prompt = np.array([5, 6], np.int32)
            asking = threads.submit(context.generate, [prompt], 1, Decoding(max_output_tokens=3), [7])
            wait_until(lambda: api.open)
            role.drain()
            ends = time.monotonic() + 3 * role.config.overseer.heartbeat_s
            while time.monotonic() < ends:
                assert role.condition().state == "running"
                look()
                time.sleep(0.02)
            assert not (asking.done() or pool.servers[0].accepting)
            api.may_answer.set()
            assert len(asking.result(LIMIT_S)[0][0].response_tokens) > 0
        assert pool.metrics()["inference_client/retries_total"] == 0 and len(api.bodies) == 1
        wait_until(lambda: role.condition().state == "drained")
    finally:
        pool.close()


def test_a_draining_server_keeps_the_evaluation_that_it_was_leased_for(role, broadcast):
    role._engine.may_swap.set()
    broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role))
    assert role.hold(LIMIT_S, 3) == VERSION
    role.drain()
    ends = time.monotonic() + 3 * role.config.overseer.heartbeat_s
    while time.monotonic() < ends:
        assert role.condition().state == "running"
        time.sleep(0.02)
    role.release()
    wait_until(lambda: role.condition().state == "drained")


def test_the_ticket_issuer_and_the_clients_are_told_of_a_lease_and_of_its_end(role, broadcast):
    engine, ctx = role._engine, role.ctx
    engine.may_swap.set()
    ctx.others = (Peer(Identity("evaluator", 0, 3), {}), Peer(Identity("replay", 0, 0), {}))
    broadcast(role, 1.0)
    role.start()
    holds = ("server_holds", "inference-0", 0, 0, 0)
    wait_until(lambda: ctx.told == [(*holds, False)])
    role.hold(LIMIT_S, 3)
    wait_until(lambda: ctx.told[1:] == [(*holds, True)])
    assert role.condition().address["held_back"]
    role.release()
    wait_until(lambda: ctx.told[2:] == [(*holds, False)])
    assert not role.condition().address["held_back"]


def test_the_digests_of_every_version_are_told_in_order_until_they_are_verified(role, broadcast):
    engine, ctx = role._engine, role.ctx
    engine.may_swap.set()
    first = broadcast(role, 1.0)
    role.start()
    wait_until(lambda: told(role) == first)
    assert ctx.digests == []  # nobody to tell
    again = broadcast(role, 2.0, step=1)
    wait_until(lambda: told(role) == again)
    heard = threading.Event()
    ctx.verdict = heard.is_set
    ctx.others = (Peer(Identity("replay", 0, 0), {}),)
    ctx.view = Membership(9, 0, (*ctx.view.peers, *ctx.others))
    wait_until(lambda: len(ctx.digests) >= 4)
    zero, one = ("inference-0#0", 0, 0, {"final_norm": "1"}), ("inference-0#0", 0, 1, {"final_norm": "2"})
    assert ctx.digests[:4] == [zero, one, zero, one]
    heard.set()
    wait_until(lambda: role._verified_by == ctx.others[0].identity)
    count = len(ctx.digests)
    last = broadcast(role, 3.0, step=2)
    wait_until(lambda: len(ctx.digests) > count and role._verified_by is not None and told(role) == last)
    assert ctx.digests[count:] == [one, ("inference-0#0", 0, 2, {"final_norm": "3"})]
    assert role.condition().address["digests"]


def test_a_server_whose_arrays_are_others_fails_before_it_counts_as_serving_them(role, broadcast):
    engine, ctx = role._engine, role.ctx
    engine.may_swap.set()

    def refuse() -> bool:
        raise MismatchError("inference-0#0 serves version 0 with other weights than the learner made")

    ctx.verdict, ctx.others = refuse, (Peer(Identity("replay", 0, 0), {}),)
    broadcast(role, 1.0)
    role.start()
    wait_until(lambda: role.condition().state == "failed")
    assert role.condition().error == "inference-0#0 serves version 0 with other weights than the learner made"
    assert ctx.told == [] and role.condition().address == {}
    assert ctx.kinds[-1] == "weights_differ" and ctx.events[-1] == {"reason": role.condition().error}


def test_a_canary_is_no_evidence_before_the_weights_behind_it_are_verified(role, broadcast):
    engine, ctx = role._engine, role.ctx
    engine.may_swap.set()
    heard = threading.Event()
    ctx.verdict, ctx.others = heard.is_set, (Peer(Identity("replay", 0, 0), {}),)
    broadcast(role, 1.0)
    role.start()
    wait_until(lambda: ctx.digests)
    assert role.canary((0, 0), [], 8, 0.1) == []
    heard.set()
    assert role.canary((0, 0), [], 8, LIMIT_S) == ["an answer of version 0"]
    heard.clear()
    broadcast(role, 2.0, step=1)
    wait_until(lambda: len(engine.served) == 2)
    assert role.canary((0, 1), [], 8, 0.1) == []


def test_the_engine_has_the_limit_of_a_start_for_each_program_and_each_is_told(tmp_path):
    limits = ["overseer.no_progress_s=700", "overseer.start_timeout_s=30"]
    role: Any = make_role(tmp_path, Around(), limits)
    role._engine, given = Engine(), []

    def compiling(timeout_s: float) -> list[CompiledProgram]:
        given.append(timeout_s)
        return [CompiledProgram("decode, window 32", 1, 1, 0.5)]

    role._engine.compiling = compiling
    role.start()
    wait_until(lambda: role.condition().state == "running")
    role.stop(LIMIT_S)
    assert given == [700.0]
    (told,) = role.ctx.events
    assert told == {"component": "inference-0", "program": "decode, window 32", "number": 1, "of": 1, "seconds": 0.5}


@pytest.mark.slow
def test_a_runs_server_and_its_clients_speak_tls(tmp_path, broadcast):
    certificate, key = write_certificate(tmp_path)
    files = {"tls_cert": certificate, "tls_key": key, "tls_ca": certificate}
    ctx = Around()
    role = make_role(tmp_path, ctx, [f"inference.{name}={path}" for name, path in files.items()])
    pool = make_pool(role.settings)
    try:
        broadcast(role, 1.0)
        role.start()
        wait_until(lambda: told(role) or role.condition().state == "failed")
        condition = role.condition()
        assert condition.address["url"].startswith("https://127.0.0.1:"), condition
        pool.set_servers(servers_of(Membership(9, 0, (Peer(ctx.identity, condition.address),))))
        prompt = np.array([5, 6], np.int32)
        answers = RemoteContext(pool, role.settings.tokenizer()).generate(
            [prompt], 1, Decoding(max_output_tokens=3), [7]
        )
        assert len(answers[0][0].response_tokens) > 0
    finally:
        pool.close()
        role.stop(LIMIT_S)
