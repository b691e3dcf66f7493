"""Whole distributed runs in threads whose components leave, are told to end, are slow, or die once too often."""

import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.environments.cats import CatsEnvironment
from penstock.overseer.language import rollout
from penstock.overseer.language.evaluator import Evaluator
from penstock.overseer.language.rollout import servers_of
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.supervisor import supervisor
from penstock.overseer.supervisor.scaling import ask_to_scale
from penstock.overseer.supervisor.stragglers import Stragglers
from penstock.overseer.training import oversee
from penstock.rollout import RolloutManager
from penstock.rundir import read_events, read_status
from penstock.types import RunFailed, WeightVersion
from tests.overseer.test_run import LIMIT_S, Run, components, running

HEALTHY_S, SLOW_S = 0.1, 2.0
"""What the reward of one answer takes, and what it takes at a straggler."""

HELD_BACK: dict[str, Any] = {"steps": 8, "replay": {"max_rollout_step_delay": 8}}  # what is held back is not too old


def is_by(worker: str, args: tuple[Any, ...]) -> bool:
    """Whether a worker of that name samples, wherever it runs."""
    return any(isinstance(each, str) and each.startswith(f"{worker}@") for each in args)


class Gate:
    """Holds the training groups of one rollout worker back while it is closed, when they have been generated.

    Attributes:
        begun: Tickets of all training groups, as often as one was begun by any worker.
        held: Those that were held back.
    """

    def __init__(self, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.held: list[str] = []
        self._open = threading.Event()
        self._open.set()
        sample_batch = RolloutManager.sample_batch

        def held(manager: RolloutManager, *args: Any, group_ids: Any = None, **more: Any) -> Any:
            if isinstance(group_ids, list):  # an evaluation gives a prefix
                self.begun.extend(group_ids)
            outcome = sample_batch(manager, *args, group_ids=group_ids, **more)
            if isinstance(group_ids, list) and is_by(worker, args) and not self._open.is_set():
                self.held.extend(group_ids)
                self._open.wait(LIMIT_S)
            return outcome

        monkeypatch.setattr(RolloutManager, "sample_batch", held)

    def close(self, run: Run) -> None:
        """Returns when a group is held back."""
        self._open.clear()
        run.until(lambda: self.held, "group that is held back")

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate("rollout-1", monkeypatch)


def story(run: Run, name: str) -> list[str]:
    """What befell a component, in order."""
    return [event["event"] for event in read_events(run.directory.events_path) if event.get("component") == name]


def tickets(rollout_ids: Iterable[str]) -> set[str]:
    return {rollout_id.split("/")[0] for rollout_id in rollout_ids}


def check_all_is_trained_once(run: Run, steps: int) -> None:
    """The run ended well, and trained the tickets of its lesson without gaps, each once; the ledger closes."""
    assert run.conductor.complete and run.conductor.lineage == 0 and not run.events("rewind")
    trained = run.trained()
    assert len(trained) == len(set(trained)) == steps * 9
    assert len(tickets(trained)) == steps * 3
    fates = run.fates()
    assert all(fates[rollout_id] == "trained" for rollout_id in trained)
    ledger = run.conductor.status()["ledger"]
    assert ledger["trained"] == steps * 9
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")


@pytest.mark.slow
def test_a_worker_that_is_scaled_away_finishes_what_it_began(run_dir: Path, gate: Gate):
    with running(run_dir, HELD_BACK) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        gate.close(run)
        assert "has begun" in ask_to_scale(run_dir, "rollout", 1, LIMIT_S)
        run.until(lambda: components(run)["rollout-1"].get("leaving"), "worker that leaves")
        assert components(run)["rollout-1"]["phase"] == "living" and not run.events("component_drained")
        gate.open()
        run.until(lambda: run.events("component_removed"), "removal")
        run.until(lambda: "rollout-1" not in components(run), "status without it")
        run.end()
    check_all_is_trained_once(run, 8)
    (scale,) = run.events("scale")
    assert (scale["role"], scale["before"], scale["after"]) == ("rollout", 2, 1)
    left = ["component_start", "component_up", "draining", "component_drained", "component_removed"]
    assert story(run, "rollout-1") == left
    assert run.launcher.incarnations("rollout-1") == [0] and not run.launcher.newest("rollout-1").alive
    assert set(gate.held) <= tickets(run.trained())
    assert all(gate.begun.count(ticket) == 1 for ticket in gate.held)  # nobody had to do them again


@pytest.mark.slow
def test_a_worker_that_dies_while_it_leaves_is_not_replaced_and_its_groups_go_to_others(run_dir: Path, gate: Gate):
    with running(run_dir, HELD_BACK) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        gate.close(run)
        ask_to_scale(run_dir, "rollout", 1, LIMIT_S)
        run.until(lambda: components(run)["rollout-1"].get("leaving"), "worker that leaves")
        run.launcher.die("rollout-1")
        run.end()
        gate.open()
    check_all_is_trained_once(run, 8)
    assert story(run, "rollout-1")[-3:] == ["draining", "component_death", "component_removed"]
    assert run.launcher.incarnations("rollout-1") == [0]
    assert set(gate.held) <= tickets(run.trained())
    assert all(gate.begun.count(ticket) == 2 for ticket in gate.held)


@pytest.mark.slow
def test_a_worker_whose_machine_goes_finishes_what_it_began_and_is_replaced(run_dir: Path, gate: Gate):
    with running(run_dir, HELD_BACK) as run:
        run.until(lambda: run.conductor.step >= 2, "second update")
        gate.close(run)
        host = run.launcher.newest("rollout-1").host
        assert host is not None
        host.drain("SIGTERM")
        run.until(lambda: run.events("drain_notice"), "notice")
        assert run.launcher.incarnations("rollout-1") == [0] and not run.events("component_drained")
        gate.open()
        run.until(lambda: run.launcher.incarnations("rollout-1") == [0, 1], "replacement")
        run.end()
    check_all_is_trained_once(run, 8)
    (notice,), (drained,) = run.events("drain_notice"), run.events("component_drained")
    assert not run.events("component_death")
    assert (notice["component"], notice["reason"]) == ("rollout-1#0", "SIGTERM")
    assert (drained["component"], drained["incarnation"]) == ("rollout-1", 0)
    assert drained["reason"] == "it was told to end, and drained"
    assert set(gate.held) <= tickets(run.trained())
    assert all(gate.begun.count(ticket) == 1 for ticket in gate.held)


@pytest.mark.slow
def test_nothing_is_generated_with_weights_that_an_evaluation_holds_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """Though no worker knows which server that is: it says so itself."""
    monkeypatch.setattr(rollout, "servers_of", lambda view: [replace(s, accepting=True) for s in servers_of(view)])
    evaluate = Evaluator.__call__

    def evaluate_for_three_updates(self: Evaluator, version: WeightVersion) -> None:
        run.until(lambda: run.conductor.step >= min(version.step + 3, 23), "updates during an evaluation")
        evaluate(self, version)

    monkeypatch.setattr(Evaluator, "__call__", evaluate_for_three_updates)
    with running(run_dir, {"steps": 24}) as run:
        run.end()
    check_all_is_trained_once(run, 24)
    ledger, numbers = run.conductor.status()["ledger"], run.conductor.status()["numbers"]
    assert ledger["stale_step"] == 0 and numbers["inference_client/retries_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [True, False])
def test_a_worker_that_is_slow_at_its_own_work_is_told_and_replaced_where_asked_for(
    run_dir: Path, replaced: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "STRAGGLERS_S", 0.2)
    monkeypatch.setattr(supervisor, "Stragglers", partial(Stragglers, window_s=10.0, least_work_s=0.6))
    healed, score = threading.Event(), CatsEnvironment.score

    def slow_at_one(self: CatsEnvironment, *args: Any) -> float:
        if threading.current_thread().name.startswith("rollout-"):
            healed.wait(SLOW_S if threading.current_thread().name.startswith("rollout-2") else HEALTHY_S)
        return score(self, *args)

    monkeypatch.setattr(CatsEnvironment, "score", slow_at_one)
    changes = {
        "steps": 16,
        "replay": {"staleness_budget": 24, "max_rollout_step_delay": 24},  # the others need not wait for its groups
        "rollout": {"workers": 3, "max_concurrent_groups": 4},
        "inference": {"servers": 1},
        "curriculum": {"eval_frequency": 100, "micro_eval_frequency": 100},
        "overseer": {"replace_stragglers": replaced, "checkpoint_every": 100},
    }
    with running(run_dir, changes) as run:
        run.until(lambda: run.events("straggler"), "straggler")
        monkeypatch.setattr(supervisor, "STRAGGLERS_S", LIMIT_S)  # judged by so little work, the next might be any
        healed.set()
        run.end()
    check_all_is_trained_once(run, 16)
    (told,) = run.events("straggler")
    assert (told["component"], told["incarnation"], told["replaced"]) == ("rollout-2", 0, replaced)
    assert told["rate"] * 3.0 < told["median"]
    assert run.launcher.incarnations("rollout-2") == ([0, 1] if replaced else [0])
    deaths = [(death["component"], death["reason"]) for death in run.events("component_death")]
    assert deaths == ([("rollout-2", "slower than its peers")] if replaced else [])


@pytest.mark.slow
def test_a_run_that_gave_up_tells_its_story(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(run_dir, {"steps": 1000, "overseer": {"max_restarts": 1, "checkpoint_every": 500}})
    sample_batch = RolloutManager.sample_batch

    def broken(manager: RolloutManager, *args: Any, **more: Any) -> Any:
        if is_by("rollout-1", args) and run.conductor.step >= 2:
            raise RuntimeError("the verifier's disk is gone")
        return sample_batch(manager, *args, **more)

    monkeypatch.setattr(RolloutManager, "sample_batch", broken)
    with pytest.raises(RunFailed, match="rollout-1 died 2 times"):
        oversee(run.conductor, ThreadGroup(), quiet=True)
    life = ["component_start", "component_up", "component_death"]
    assert story(run, "rollout-1") == [*life, *life, "restart_budget_exhausted"]
    deaths = run.events("component_death")
    assert [(death["component"], death["incarnation"]) for death in deaths] == [("rollout-1", 0), ("rollout-1", 1)]
    assert all("RuntimeError: the verifier's disk is gone" in death["reason"] for death in deaths)
    (given_up,) = run.events("restart_budget_exhausted")
    assert (given_up["deaths"], given_up["reason"]) == (2, deaths[1]["reason"])
    kinds = [event["event"] for event in read_events(run.directory.events_path)]
    assert kinds[kinds.index("restart_budget_exhausted") :].count("checkpoint") == 1 and kinds[-1] == "failure"
    (failure,), saved = run.events("failure"), run.events("checkpoint")[-1]
    assert failure["error"] == "RunFailed"
    for words in ("rollout-1 died 2 times", "overseer.max_restarts", "the verifier's disk is gone"):
        assert words in failure["message"]
    assert saved["step"] >= 2 and Path(saved["path"]).is_dir()
    status = read_status(run.directory.status_path)
    assert status is not None and status["state"] == "failed"
