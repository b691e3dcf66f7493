"""What moved an update: what each rollout did to it is what a replay without that rollout lacks."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from penstock import cli
from penstock.overseer.rerun.replay import UpdateWalk
from penstock.overseer.rerun.stored_run import StoredRun
from penstock.overseer.rerun.why import WhyReport, explain_update
from penstock.types import ConfigError
from tests.overseer.rerun.test_replay import contents, signalled

pytestmark = pytest.mark.slow


def parameters(run_dir: Path, step: int, drop: tuple[str, ...] = ()) -> np.ndarray:
    """After update `step`, end to end."""
    run = StoredRun(run_dir)
    walk = UpdateWalk(run, run.checkpoint_before(step), (step, step), drop=drop)
    for update in walk.updates:
        walk.make(update)
    return np.concatenate([np.ravel(array) for array in walk.kind.arrays(walk.learner).values()])


@pytest.fixture(scope="module")
def report(runs: Path) -> WhyReport:
    return explain_update(runs / "sync", signalled(runs / "sync"))


@pytest.mark.parametrize("name", ["sync", "overlong"])
def test_what_each_rollout_did_is_what_a_replay_without_it_lacks(runs: Path, name: str):
    run_dir = runs / name
    report = explain_update(run_dir, signalled(run_dir))
    step = report.step
    whole = parameters(run_dir, step)
    before = parameters(run_dir, step - 1)
    for rollout in report.rollouts[:3]:
        without = parameters(run_dir, step, (rollout.influence.rollout_id,))
        difference = np.linalg.norm((whole - without).astype(float))
        assert difference / np.linalg.norm((whole - before).astype(float)) == pytest.approx(
            rollout.influence.moved, rel=1e-2
        )


def test_the_sums_are_of_all_and_have_their_signs(runs: Path, report: WhyReport):
    stored = StoredRun(runs / "sync").updates(report.step - 1, report.step, report.step)[0]
    assert len(report.rollouts) == len(stored.stored.rollout_ids) == 9
    moved = [rollout.influence.moved for rollout in report.rollouts]
    assert moved == sorted(moved, reverse=True) and moved[0] > 0
    for rows in report.sums.values():
        assert sum(row.rollouts for row in rows) == 9
        assert sum(row.inner_product for row in rows) == pytest.approx(
            sum(rollout.influence.inner_product for rollout in report.rollouts)
        )
    signs = {row.value: row for row in report.sums["advantage"]}
    assert signs["positive"].rollouts and signs["negative"].rollouts
    assert [row.value for row in report.sums["lesson"]] == ["cats"]
    idle = [rollout.influence for rollout in report.rollouts if rollout.sign == "zero"]
    assert all(one.gradient_norm == one.moved == one.inner_product == 0 for one in idle)


def test_the_command_shows_the_text_and_writes_nothing(runs: Path, capsys):
    run_dir = runs / "several"
    step, before = signalled(run_dir), contents(run_dir)
    assert cli.main(["why", str(run_dir), "--step", str(step), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert contents(run_dir) == before and len(found["rollouts"]) == 18
    assert found["rollouts"][0]["prompt"] and found["rollouts"][0]["reward"] is not None
    report = explain_update(run_dir, step)
    out = io.StringIO()
    report.print(Console(file=out, width=120))
    shown = out.getvalue()
    assert f"what moved update {step} (18 rollouts)" in shown
    for place, rollout in enumerate(report.rollouts[:10], 1):
        assert f"{place:2}. {rollout.influence.rollout_id}  moved {rollout.influence.moved:.1%}" in shown
    assert report.rollouts[10].influence.rollout_id not in shown


def test_a_control_run_is_refused(runs: Path):
    with pytest.raises(ConfigError, match="trains a control policy: rollouts of language policies alone are explained"):
        explain_update(runs / "control", 3)
