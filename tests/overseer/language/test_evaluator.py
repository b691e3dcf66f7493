"""The evaluator holds its server for as long as answers come, says what cut it short, and drains after its work."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.overseer import load_config
from penstock.overseer.component import Settings
from penstock.overseer.language.evaluator import EvaluatorRole
from penstock.overseer.language.rollout import InterruptedEvaluation
from penstock.overseer.supervisor.messages import Identity, Membership, Peer
from penstock.rundir import RunDirectory
from penstock.types import NoProgressError, UnreachableError, WeightVersion
from tests.waiting import wait_until

LIMIT_S = 280.0
LEASE_S = 1.0
VERSION = WeightVersion(0, 4)
LEARNER = Peer(Identity("learner", 0, 0), {"training": True})


def server(index: int, **address: Any) -> Peer:
    return Peer(Identity("inference", index, 0), {"url": "http://127.0.0.1:1", "lineage": 0, "step": 4, **address})


class Around:
    """A host whose only server keeps its version while it is leased."""

    identity = Identity("evaluator", 0, 3)

    def __init__(self) -> None:
        self.view = Membership(1, 0, (LEARNER, server(0)))
        self.holds: list[tuple[float, int]] = []
        self.leased_until = 0.0
        self.version = VERSION
        self.events: list[tuple[str, dict[str, Any]]] = []

    def caller(self, name: str) -> "Around":
        return self

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "hold":
            self.holds.append(args)
            self.leased_until = time.monotonic() + args[0]
            return self.version
        if method == "release":
            self.leased_until = 0.0
            return None
        raise UnreachableError(f"{method}: nobody is there")

    def event(self, kind: str, step: int = 0, **fields: Any) -> None:
        self.events.append((kind, {"step": step, **fields}))

    def metrics(self, step: int, values: Any) -> None: ...

    @property
    def leased(self) -> bool:
        return time.monotonic() < self.leased_until


class Pool:
    """Stands for the servers' answers."""

    answers = 0

    def set_servers(self, servers: Any) -> None: ...

    def close(self) -> None: ...


class Work:
    """Stands for the evaluations; each does what the test says."""

    def __init__(self) -> None:
        self.begun = self.over = 0
        self.work: Callable[[], None] = lambda: None

    def due(self, step: int) -> str:
        return "eval"

    def __call__(self, version: WeightVersion) -> None:
        self.evaluate(version.step)

    def evaluate(self, step: int, when: str | None = None) -> dict[str, Any]:
        self.begun += 1
        self.work()
        self.over += 1
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None: ...


@pytest.fixture
def role(tmp_path):
    limits = [f"overseer.no_progress_s={LEASE_S}", f"overseer.start_timeout_s={LEASE_S}", "overseer.heartbeat_s=0.1"]
    config = load_config("cats", ["runtime=ray", *limits])
    role: Any = EvaluatorRole(Around(), Settings(config, RunDirectory(tmp_path), "0" * 64), None)
    role._pool.close()
    role._pool, role._evaluator = Pool(), Work()
    yield role
    role.stop(LIMIT_S)


@pytest.mark.slow
def test_a_lease_is_renewed_while_answers_come(role):
    ctx = role.ctx

    def long_work() -> None:
        began = time.monotonic()
        while time.monotonic() < began + 2 * LEASE_S:
            assert ctx.leased
            role._pool.answers += 1
            time.sleep(LEASE_S / 10)

    role._evaluator.work = long_work
    role.evaluate(4)
    assert set(ctx.holds) == {(LEASE_S, 3)} and len(ctx.holds) >= 4
    assert not ctx.leased and ctx.events == []


def test_a_lease_without_answers_runs_out(role):
    ctx = role.ctx
    role._evaluator.work = lambda: wait_until(lambda: not ctx.leased, "end of the lease", LIMIT_S)
    role.evaluate(4)
    assert len(ctx.holds) == 1


def test_a_periodic_evaluation_that_is_cut_short_is_told_and_made_again(role):
    def work() -> None:
        if role._evaluator.begun == 1:
            raise InterruptedEvaluation("steps [5] answered where 4 was evaluated")

    role._evaluator.work = work
    role.start()
    wait_until(lambda: role._evaluator.over == 1, "evaluation", LIMIT_S)
    told = {"step": 4, "server": "inference-0", "reason": "steps [5] answered where 4 was evaluated"}
    assert role.ctx.events == [("evaluation_interrupted", told)]


def test_an_evaluation_that_was_asked_for_is_made_again_while_answers_came(role):
    """Each attempt answers something, so that the limit counts from the last one."""

    def work() -> None:
        role._pool.answers += 1
        if role._evaluator.begun < 4:
            raise InterruptedEvaluation("the server died")

    role._evaluator.work = work
    assert role.evaluate(4) == {}
    assert len(role.ctx.events) == 3


def test_a_version_that_nobody_serves_is_given_up_after_the_limit_of_a_start(role):
    with pytest.raises(NoProgressError, match=r"no server answered for 1 s: no server holds"):
        role.evaluate(5)
    assert role.ctx.events == []


def test_a_server_that_drains_is_not_chosen(role):
    role.ctx.view = Membership(2, 0, (LEARNER, server(0, draining=True), server(1)))
    role._evaluator.work = lambda: None
    named = []
    role._contexts.only = lambda name, incarnation: named.append(name)
    role.evaluate(4)
    assert named == ["inference-1"]


def test_a_draining_evaluator_finishes_its_evaluation_and_begins_none(role):
    may_end = threading.Event()
    role._evaluator.work = lambda: may_end.wait(LIMIT_S)
    role.start()
    wait_until(lambda: role._evaluator.begun == 1, "evaluation", LIMIT_S)
    role.drain()
    for _ in range(10):
        assert role.condition().state == "running"
        time.sleep(0.03)  # three heartbeats
    may_end.set()
    wait_until(lambda: role.condition().state == "drained", "end of the drain", LIMIT_S)
    assert (role._evaluator.begun, role._evaluator.over) == (1, 1)


def test_the_outcome_of_a_task_is_told_before_it_is_drained(role):
    may_end = threading.Event()
    role._evaluator.work = lambda: may_end.wait(LIMIT_S)
    role.state = "running"
    role.begin("evaluate-1", "evaluate", 4)
    wait_until(lambda: role._evaluator.begun == 1, "evaluation", LIMIT_S)
    role.drain()
    may_end.set()
    told = []
    wait_until(lambda: told.append(role.condition()) or told[-1].state == "drained", "end of the drain", LIMIT_S)
    assert "done" in [each.facts["tasks"]["evaluate-1"]["state"] for each in told if each.state == "running"]
