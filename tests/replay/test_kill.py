"""SIGKILL at random points: afterwards the ledger closes, and no sealed rollout is lost or trained too often."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.replay import RolloutStore
from penstock.replay.draws import parse_ticket_id
from penstock.replay.history import History
from penstock.replay.recovery import CheckpointView, plan_recovery
from penstock.rundir import RunDirectory, read_parquet

SCRIPT = Path(__file__).with_name("killed_run.py")


def start(directory: Path, steps: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), str(steps)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill_after(life: subprocess.Popen, lines: int, delay_s: float) -> None:
    """Kills it `delay_s` after it printed so many lines; the first says that it is ready to generate."""
    assert life.stdout is not None
    for _ in range(lines):
        if not life.stdout.readline():
            raise AssertionError(life.communicate(timeout=30)[1])
    try:
        life.wait(delay_s)
    except subprocess.TimeoutExpired:
        life.kill()
    life.communicate(timeout=30)


def audit(path: Path) -> tuple[History, dict]:
    """What a resume would find: every file is whole, and every rollout that was started is accounted for."""
    directory = RunDirectory(path)
    for file in [*directory.rollouts.glob("*.parquet"), *directory.batches.glob("*.parquet")]:
        read_parquet(file)
    store = RolloutStore(directory)
    history = store.history()
    checkpoints = sorted(directory.checkpoints.glob("*.json"), key=lambda file: int(file.stem))
    states = json.loads(checkpoints[-1].read_text())["issuer"]
    view = CheckpointView(
        states["update"],
        {(row[1], row[2]): row[0] for row in states["outstanding"]},
        (),
        lambda lesson, index: index < states["next_index"].get(lesson, 0),
        lambda version: store.lineages.survives(version, states["lineage"]),
    )
    plan = plan_recovery(history, view)
    waiting = {rollout_id for ids in plan.waiting.values() for rollout_id in ids}
    everyone = {i for ids in history.tickets().values() for i in ids}
    assert plan.started == len(everyone) == plan.fates.total() + len(waiting)
    assert everyone >= history.sealed.keys() and everyone >= history.fates.keys()
    assert not plan.uses or max(plan.uses.values()) == 1
    groups = {i.rpartition("/")[0] for i in plan.uses}
    keys = Counter(parse_ticket_id(group)[::2] for group in groups)
    assert max(keys.values(), default=1) == 1, "a ticket was trained under two ids"
    return history, states


def survive(path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    sealed: set[str] = set()
    for number in range(kills):
        if number % 3 == 2:  # while it starts: imports, recovery, the first tickets
            kill_after(start(path, 10_000), lines=0, delay_s=0.3 + 1.2 * rng.random())
        else:
            kill_after(start(path, 10_000), rng.randint(1, 12), rng.random() * 0.05)
        history, states = audit(path)
        assert history.sealed.keys() >= sealed, "a sealed rollout is gone"
        sealed = set(history.sealed)
    steps = states["update"] + 4
    out, err = start(path, steps).communicate(timeout=120)
    assert err == "" and out.split()[-1] == str(steps)
    history, states = audit(path)
    assert states["update"] == steps
    store = RolloutStore(RunDirectory(path))
    uses = history.uses(lambda version: store.lineages.survives(version, states["lineage"]), steps)
    survivors = [b for b in history.batches if store.lineages.survives(b.outcome, states["lineage"])]
    assert sorted(b.version.step for b in survivors) == list(range(steps)), "one batch per update, none missing"
    assert set(uses) == {i for i, fate in history.fates.items() if fate == "trained"}
    assert not list(RunDirectory(path).rollouts.glob(".*")), "unfinished files are cleared away"


def test_a_killed_run_loses_no_sealed_rollout_and_trains_none_twice(tmp_path):
    survive(tmp_path / "run", kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_many_kills(tmp_path, seed):
    survive(tmp_path / "run", kills=20, seed=100 + seed)
