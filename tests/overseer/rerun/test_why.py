"""What moved an update: what each rollout did to it is what a replay without that rollout lacks."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from penstock import cli
from penstock.cli.arguments import print_report
from penstock.learner.influence import RolloutInfluence
from penstock.overseer.config import RunConfig
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.rerun.replay import UpdateWalk
from penstock.overseer.rerun.stored_run import StoredRun
from penstock.overseer.rerun.why import ExplainedRollout, WhyReport, explain_update, sums_of, unusual_of
from penstock.rundir import read_rescored
from penstock.types import ConfigError
from tests.overseer.rerun.test_replay import contents, signalled

needs_runs = pytest.mark.slow


def rollout(name: str, moved: float = 0.1, staleness: int = 0, advantage: float = 1.0, drift=0.0, surprise=2.0):
    """One of an update, as ordinary as the others but for what is said."""
    influence = RolloutInfluence(name, 1.0, 1.0, moved, moved, advantage)
    return ExplainedRollout(
        influence, "cats", 9 - staleness, staleness, advantage, 4, drift, surprise, 1.0, "who?", "cat"
    )


def ordinary(count: int) -> list[ExplainedRollout]:
    """Spread evenly: drift within ±0.1, surprise from 1 to 3, every second one with a negative advantage."""
    spread = np.linspace(-1, 1, count)
    return [
        rollout(f"o-{i}", staleness=i % 2, advantage=1 - 2 * (i % 2), drift=0.1 * x, surprise=2 + x)
        for i, x in enumerate(spread)
    ]


def test_what_is_unlike_the_others_is_found_whatever_it_moved():
    planted = [rollout("old", 0.001, staleness=8), rollout("off", drift=-0.5), rollout("odd", surprise=9.0)]
    found = unusual_of([*ordinary(61), *planted])
    assert [(one.rollout_id, one.trait) for one in found[:3]] == [
        ("old", "staleness"), ("off", "drift"), ("odd", "surprise")
    ]  # fmt: skip
    assert found[0].usual == 0 and found[0].value == 8 and found[0].deviations == pytest.approx(4)
    assert found[1].deviations == pytest.approx(0.5 / 0.1)


def test_a_gradient_that_is_not_finite_is_told_and_is_null_in_json(capsys):
    bad = rollout("bad", 0.0)
    bad = replace(bad, influence=replace(bad.influence, gradient_norm=float("nan")))
    report = WhyReport(Path("run"), 3, "step-2", (bad, rollout("good", 0.0)), {})
    print_report(report)
    assert "1 with a gradient that is not finite, first here: a step with one is skipped" in capsys.readouterr().out
    print_report(report, as_json=True)
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rollouts"]
    assert [one["gradient_norm"] for one in told] == [None, 1.0]


def test_sums_by_reward_function_are_over_what_each_gave_something():
    """A rollout that two rewarded is in both rows, one that none rewarded in a row of its own."""
    found = [
        replace(rollout("both", 0.5), rewarded_by=("right", "short")),
        replace(rollout("short", 0.25), rewarded_by=("short",)),
        replace(rollout("neither", 0.125), rewarded_by=()),
        rollout("expired", 0.0625),
    ]
    sums = sums_of(found)
    rows = {row.value: (row.rollouts, row.along) for row in sums["reward_function"]}
    assert rows == {"right": (1, 0.5), "short": (2, 0.75), "none": (1, 0.125)}
    assert [(row.value, row.rollouts) for row in sums["lesson"]] == [("cats", 4)]
    assert sums_of([rollout("untold")])["reward_function"] == ()


def test_what_moved_nothing_or_was_not_rewarded_or_is_usual_is_not_told():
    planted = [rollout("idle", 0.0, staleness=8, drift=2.0), rollout("wrong", advantage=-1.0, surprise=9.0)]
    found = {one.rollout_id for one in unusual_of([*ordinary(61), *planted])}
    assert not found & {"idle", "wrong"}
    assert unusual_of([rollout(f"o-{i}", drift=0.04 * (i % 2)) for i in range(9)]) == ()
    assert unusual_of([]) == ()


def test_half_a_deviation_is_told_where_the_others_differ_much():
    """Median 5, from which the median distance is 2: 0.67 and 1.35 deviations."""
    found = unusual_of([rollout(f"o-{value}", surprise=value) for value in (1, 3, 5, 7, 9)])
    assert [one.rollout_id for one in found] == ["o-9", "o-7"]
    assert found[1].deviations == pytest.approx(2 / (1.4826 * 2))


def test_traits_take_turns_and_ten_are_told():
    many = [rollout(f"drifted-{i}", drift=3.0 + i) for i in range(20)]
    odd = [rollout(f"odd-{i}", surprise=20.0 + i) for i in range(4)]
    found = [one.rollout_id for one in unusual_of([*ordinary(81), *many, *odd, rollout("old", staleness=5)])]
    assert found == ["old", "drifted-19", "odd-3", "drifted-18", "odd-2", "drifted-17", "odd-1", "drifted-16",
                     "odd-0", "drifted-15"]  # fmt: skip


def parameters(run_dir: Path, step: int, drop: tuple[str, ...] = ()) -> np.ndarray:
    """After update `step`, end to end."""
    run = StoredRun(run_dir)
    walk = UpdateWalk(run, run.checkpoint_before(step), (step, step), drop=drop)
    for update in walk.updates:
        walk.make(update)
    return np.concatenate([np.ravel(array) for array in walk.learner.named_arrays().values()])


@pytest.fixture(scope="module")
def report(runs: Path) -> WhyReport:
    return explain_update(runs / "sync", signalled(runs / "sync"))


@needs_runs
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


@needs_runs
def test_the_sums_are_of_all_and_have_their_signs(runs: Path, report: WhyReport):
    stored = StoredRun(runs / "sync").updates(report.step - 1, report.step, report.step)[0]
    assert len(report.rollouts) == len(stored.stored.rollout_ids) == 9
    moved = [rollout.influence.moved for rollout in report.rollouts]
    assert moved == sorted(moved, reverse=True) and moved[0] > 0
    assert report.sums["reward_function"] == ()  # the environment tells none apart
    for rows in (rows for name, rows in report.sums.items() if name != "reward_function"):
        assert sum(row.rollouts for row in rows) == 9
        assert sum(row.inner_product for row in rows) == pytest.approx(
            sum(rollout.influence.inner_product for rollout in report.rollouts)
        )
    signs = {row.value: row for row in report.sums["advantage"]}
    assert signs["positive"].rollouts and signs["negative"].rollouts
    assert [row.value for row in report.sums["lesson"]] == ["cats"]
    idle = [rollout.influence for rollout in report.rollouts if rollout.sign == "zero"]
    assert all(one.gradient_norm == one.moved == one.inner_product == 0 for one in idle)


@needs_runs
def test_with_a_value_head_an_advantage_is_over_its_values(runs: Path):
    """Batch files have the reward still to come there, which is 0 of most rollouts; not so the advantage."""
    run_dir = runs / "values"
    report = explain_update(run_dir, signalled(run_dir))
    stored = StoredRun(run_dir).updates(report.step - 1, report.step, report.step)[0]
    advantages = [rollout.advantage for rollout in report.rollouts]
    assert max(map(abs, advantages)) <= stored.metrics["train/advantage_max"] * (1 + 1e-6)
    assert np.mean(advantages) == pytest.approx(stored.metrics["train/advantage_mean"], abs=1e-5)
    assert "zero" not in {row.value for row in report.sums["advantage"]}


@needs_runs
@pytest.mark.parametrize("name", ["sync", "kl"])
def test_the_means_of_ratios_and_entropies_are_those_that_the_update_recorded(runs: Path, name: str):
    run_dir = runs / name
    report = explain_update(run_dir, signalled(run_dir))
    run = StoredRun(run_dir)
    assert isinstance(run.config, RunConfig)
    update = run.updates(report.step - 1, report.step, report.step)[0]
    computed = [one for one in run.batch(update, run.config).examples if name == "kl" or one.advantage.any()]
    tokens = {one.rollout_id: one for one in report.tokens}
    ratios, entropies = [], []
    for example in computed:
        own, mask = tokens[example.rollout_ids[0]], example.loss_mask
        assert own.newest_step == 6 and np.isnan(own.logprobs[~mask]).all()
        ratios.append(np.exp(own.logprobs[mask] - example.generator_log_probs[mask]))
        entropies.append(own.entropies[mask])
    # of two programs, each with roundings of its own: up to 1.03e-5 apart was seen
    assert float(np.concatenate(ratios).mean()) == pytest.approx(update.metrics["train/ratio_mean"], rel=3e-5)
    assert float(np.concatenate(entropies).mean()) == pytest.approx(update.metrics["train/entropy"], rel=1e-5)
    learner = LanguageKind().make_learner(run.config, run.start(run.checkpoints[6]))
    for example, scores in zip(computed, learner.score(computed), strict=True):
        own = tokens[example.rollout_ids[0]].newest_logprobs
        np.testing.assert_array_equal(own[example.loss_mask], scores[example.loss_mask])


@needs_runs
def test_the_command_shows_the_text_and_writes_nothing_into_the_run(runs: Path, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run_dir = runs / "several"
    step, before = signalled(run_dir), contents(run_dir)
    assert cli.main(["why", str(run_dir), "--step", str(step), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert contents(run_dir) == before and len(found["rollouts"]) == 18
    batch_id = StoredRun(run_dir).updates(step - 1, step, step)[0].stored.batch_id
    kept = read_rescored(StoredRun(run_dir).directory, batch_id)
    assert kept.keys() == {one["rollout_id"] for one in found["rollouts"]}
    for one in found["rollouts"]:
        numbers = dict(kept[one["rollout_id"]].numbers)
        assert len(numbers) == 7 and numbers == {name: one[name] for name in numbers}
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.main(["why", str(run_dir), "--step", str(step), "--json"]) == 0
    assert "will not colour its tokens by ratio" in capsys.readouterr().err
    assert found["rollouts"][0]["prompt"] and found["rollouts"][0]["reward"] is not None
    report = explain_update(run_dir, step)
    out = io.StringIO()
    report.print(Console(file=out, width=120))
    shown = out.getvalue()
    assert f"what moved update {step} (18 rollouts)" in shown
    for place, rollout in enumerate(report.rollouts[:10], 1):
        assert f"{place:2}. {rollout.influence.rollout_id}  moved {rollout.influence.moved:.1%}" in shown
    most, _, unlike = shown.partition("unlike the others")
    assert report.rollouts[10].influence.rollout_id not in most
    assert [one["rollout_id"] for one in found["unusual"]] == [one.rollout_id for one in report.unusual]
    assert all(one.rollout_id in unlike for one in report.unusual)


@needs_runs
def test_a_control_run_is_refused(runs: Path):
    with pytest.raises(
        ConfigError, match=r"trains a control policy: rollouts of language policies .* replay .* --step \d+ computes"
    ):
        explain_update(runs / "control", 3)
