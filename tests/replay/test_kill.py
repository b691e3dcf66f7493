"""SIGKILL at random points: afterwards the ledger closes, and no sealed rollout is lost or trained too often.

20 kills in `make test`, 200 in `make test-slow`, over several kinds of run; see `killed_run.VARIANTS`.
"""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.chaos.invariants import violations

from penstock.replay import (
    FATES,
    FRAGMENTS,
    LANGUAGE,
    ExperienceFormat,
    Ledger,
    OpenAdmission,
    ReplayBufferConfig,
    RolloutStore,
    TicketIssuer,
    TicketRules,
)
from penstock.replay.draws import parse_ticket_id
from penstock.replay.history import History
from penstock.replay.recovery import CheckpointView, RecoveryPlan, plan_recovery
from penstock.rundir import RunDirectory, read_parquet

SCRIPT = Path(__file__).with_name("killed_run.py")
CAPS = {"plain": 1, "reuse": 2, "spool": 1, "expiring": 1, "open": 3, "fragments": 2}
LIMIT_S = 280.0
"""Longest wait for a line; a life prints many per second."""


class Lives:
    """The process that forks lives, and what they print."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        environment = os.environ | {
            "OPENBLAS_NUM_THREADS": "1",  # a process that forks should have one thread
            "PYTHONPATH": str(SCRIPT.parents[2]),
        }
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment,
            )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("the forking process has ended")

    def line(self, timeout_s: float = LIMIT_S) -> str:
        line = self._lines.get(timeout=timeout_s)
        assert not line.startswith(("exit 1", "the forking process")), f"{line}: {self.errors()}"
        return line

    def begin(self, path: Path, steps: int, variant: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(path), steps, variant]) + "\n")
        self._process.stdin.flush()
        word, pid = self.line().split()
        assert word == "life"
        return int(pid)

    def rest(self) -> list[str]:
        """The lines until the life is over, with its exit code as the last."""
        lines: list[str] = []
        while not lines or not lines[-1].startswith("exit"):
            lines.append(self.line())
        assert self.errors() == ""
        return lines

    def errors(self) -> str:
        return self._errors.read_text()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        self._process.stdout.close()


@pytest.fixture
def lives(tmp_path):
    lives = Lives(tmp_path / "errors")
    yield lives
    lives.close()


def kill(lives: Lives, pid: int, news: int, delay_s: float) -> list[str]:
    """Kills a life `delay_s` after it printed so many lines, the first of which says `ready`; returns all it said."""
    said = [lives.line() for _ in range(news)]
    deadline = time.monotonic() + delay_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            said.append(lives.line(left))
        except queue.Empty:
            break
    assert not any(line.startswith("exit") for line in said), lives.errors()
    os.kill(pid, signal.SIGKILL)
    return said + lives.rest()


@dataclass(frozen=True)
class Audit:
    """What a resume would find in a run's files."""

    step: int
    lineage: int
    history: History
    plan: RecoveryPlan
    uses: Counter[str]
    fates: dict[str, str]


def experience_of(variant: str) -> ExperienceFormat:
    return FRAGMENTS if variant == "fragments" else LANGUAGE


def parts_of(path: Path, variant: str) -> list[Path]:
    return list((path / experience_of(variant).folder).glob("*.parquet"))


def audit(path: Path, variant: str) -> Audit:
    """Every file is whole, every rollout that was started is accounted for, and none was used too often."""
    directory = RunDirectory(path)
    for file in [*parts_of(path, variant), *directory.batches.glob("*.parquet")]:
        read_parquet(file)
    store = RolloutStore(directory, experience=experience_of(variant))
    history = store.history()
    states = json.loads(max(directory.checkpoints.glob("*.json"), key=lambda file: int(file.stem)).read_text())
    view = checkpoint_view(states, history, store)
    plan = plan_recovery(history, view)
    fates = {i: logged.fate for i, logged in history.fates.items()} | {i: fate for i, fate, _ in plan.decisions}
    waiting = {i for ids in plan.waiting.values() for i in ids}
    ended = {i for i, fate in fates.items() if fate != "waiting"}
    everyone = {i for ids in history.tickets().values() for i in ids}
    assert everyone == waiting | ended and waiting.isdisjoint(ended)
    assert plan.started == len(everyone) and plan.fates == Counter(fates[i] for i in ended)
    assert everyone >= history.sealed.keys() >= waiting
    uses = history.uses(view.survives, view.step)
    assert max(uses.values(), default=0) <= CAPS[variant]
    if variant != "expiring":
        assert uses.keys() <= history.sealed.keys(), "a rollout was trained that no file holds"
    if variant != "open":  # whose groups have no tickets of their own
        assert violations(directory, step=view.step) == []
    return Audit(view.step, store.lineages.newest, history, plan, uses, fates)


def checkpoint_view(states: dict, history: History, store: RolloutStore) -> CheckpointView:
    """The checkpoint's, as the classes that wrote it read it."""
    replay = states["replay"]
    lineage = replay["lineage"]
    if "issuer" in states:
        rules = TicketRules(7, None, {"easy": 2, "hard": 3}.__getitem__)
        admission = TicketIssuer(ReplayBufferConfig(), rules, lineage, Ledger(lineage))
        admission.restore(states["issuer"])
        outstanding, key_of, was_drawn = admission.restored_tickets(), admission.key_of, admission.was_drawn
    else:
        admission = OpenAdmission(Ledger(lineage), lineage)
        admission.restore(replay["admission"])
        admission.recover(list(history.tickets()), history.lost())
        outstanding, key_of, was_drawn = {}, lambda group_id: (group_id, 0), admission.was_started
    return CheckpointView(
        admission.update,
        outstanding,
        {group: set(ids) for group, ids in replay["alive"].items()},
        key_of,
        was_drawn,
        lambda version: store.lineages.survives(version, lineage),
    )


def check_no_ticket_was_trained_under_two_ids(found: Audit) -> None:
    groups = {i.rpartition("/")[0] for i in found.uses}
    keys = Counter(parse_ticket_id(group)[::2] for group in groups)
    assert max(keys.values(), default=1) == 1


def check_nothing_sealed_is_gone(variant: str, before: Audit | None, now: Audit) -> None:
    """Where files may expire, only what had met its fate is gone."""
    gone = set() if before is None else before.history.sealed.keys() - now.history.sealed.keys()
    if variant != "expiring":
        assert not gone, "a sealed rollout is gone"
    assert gone <= {i for i, fate in now.fates.items() if fate != "waiting"}


def check_the_resumed_ledger(before: Audit, said: list[str]) -> None:
    """What the next life starts from is what the files said."""
    if not said or not said[0].startswith("ready"):
        return  # it was killed before
    counts = json.loads(said[0].partition(" ")[2])
    assert counts["step"] == before.step and counts["started"] == before.plan.started
    assert counts["started"] == sum(n for name, n in counts.items() if name not in ("started", "step"))
    fates, waiting = before.plan.fates, sum(map(len, before.plan.waiting.values()))
    assert all(counts[fate] >= fates[fate] for fate in fates)  # more where there is no room for all that came back
    assert waiting - counts["waiting"] == sum(counts[fate] - fates[fate] for fate in FATES)


def survive(lives: Lives, path: Path, variant: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    found: Audit | None = None
    lives_begun = 0
    while lives_begun < kills:
        lives_begun += 1
        if found is None or lives_begun % 3:
            news, delay_s = rng.randint(1, 12), rng.random() * 0.05
        else:  # while it recovers, or begins
            news, delay_s = 0, rng.random() * 0.1
        said = kill(lives, lives.begin(path, 10_000, variant), news, delay_s)
        assert said[-1] == "exit -9"
        if found is not None:
            check_the_resumed_ledger(found, said)
        before, found = found, audit(path, variant)
        check_nothing_sealed_is_gone(variant, before, found)
        if variant not in ("open", "fragments"):
            check_no_ticket_was_trained_under_two_ids(found)
    assert found is not None
    finish(lives, path, variant, found)


def finish(lives: Lives, path: Path, variant: str, before: Audit) -> None:
    """A last life comes to its end; then everything that was used is trained."""
    steps = before.step + 4
    lives.begin(path, steps, variant)
    said = lives.rest()
    check_the_resumed_ledger(before, said)
    assert said[-2:] == [str(steps), "exit 0"]
    found = audit(path, variant)
    check_nothing_sealed_is_gone(variant, before, found)
    assert found.step == steps
    store = RolloutStore(RunDirectory(path))
    survivors = [b.version.step for b in found.history.batches if store.lineages.survives(b.outcome, found.lineage)]
    if variant != "expiring":
        assert sorted(survivors) == list(range(steps)), "one batch per update, none missing"
        trained = {i for i, logged in found.history.fates.items() if logged.fate == "trained"}
        waiting = {i for ids in found.plan.waiting.values() for i in ids}
        assert trained <= found.uses.keys() <= trained | waiting
        assert {i for i, uses in found.uses.items() if uses == CAPS[variant]} <= trained
    parts = list((path / experience_of(variant).folder).iterdir())
    assert all(part.suffix == ".parquet" for part in parts), "unfinished files are cleared away"
    rows = [i for part in parts for i in read_parquet(part, ["rollout_id"]).column(0).to_pylist()]
    assert Counter(rows) == Counter(found.history.sealed.keys()), "what was merged is there once"


@pytest.mark.parametrize("variant", ["plain", "open"])  # the others: test_many_kills
@pytest.mark.attack
def test_a_killed_run_loses_no_sealed_rollout_and_trains_none_too_often(lives, tmp_path, variant):
    survive(lives, tmp_path / "run", variant, kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", sorted(CAPS))
@pytest.mark.attack
def test_many_kills(lives, tmp_path, variant, seed):
    survive(lives, tmp_path / "run", variant, kills=20, seed=100 + seed)
