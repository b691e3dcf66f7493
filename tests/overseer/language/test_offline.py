"""Runs on stored rollouts: what they need, leave and reproduce, from Python and from the command line."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from pydantic import ValidationError
from rich.console import Console

from penstock.overseer import train
from penstock.overseer.language.offline import OfflineKind
from penstock.overseer.plan import describe_plan
from penstock.overseer.rerun.replay import replay_updates
from penstock.overseer.rerun.why import explain_update
from penstock.rundir import RunDirectory, read_events, read_metrics, read_status
from penstock.rundir.live_files import RunFiles
from penstock.types import ConfigError
from tests.overseer.conftest import tiny


def on(source: Path, steps: int, **learner):
    changes = {"steps": steps, "replay": {"from_rollouts": str(source)}, "overseer": {"checkpoint_every": 2}}
    return tiny(changes | {"learner": learner})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": "ray"}, "runtime is ray, but replay.from_rollouts has the rollouts"),
        ({"learner": {"warm_start": {"steps": 1}}}, "learner.warm_start is set, but replay.from_rollouts"),
        ({"replay": {"batch_maker": {"name": "recency"}}}, 'replay.batch_maker.name is "recency", which has no effect'),
        ({"replay": {"max_samples": 3}}, "replay.max_samples is 3, which has no effect"),
        ({"async": True, "replay": {"staleness_budget": 3}}, "replay.staleness_budget is 3, .* is of no age"),
        ({"replay": {"straggler_timeout_s": 3}}, "replay.straggler_timeout_s is 3.0, .* nothing is waited for"),
        ({"overseer": {"keep_best": "eval/cats/reward_mean"}}, "overseer.keep_best is .* evaluates nothing"),
    ],
)
def test_what_stored_rollouts_leave_without_effect_is_refused(changes, message):
    replay = {"from_rollouts": "runs/other"} | changes.pop("replay", {})
    with pytest.raises((ConfigError, ValidationError), match=message):
        tiny({"replay": replay, **changes})


def test_a_batch_of_stored_rollouts_may_be_larger_than_what_may_wait(tmp_path: Path):
    """They do not wait in the buffer, whose capacity is too small for such a batch of a run that generates."""
    batch = {"groups_per_batch": 6, "capacity": 9}
    with pytest.raises(ConfigError, match="replay.capacity is 9"):
        tiny({"replay": batch})
    assert tiny({"replay": {"from_rollouts": str(tmp_path), **batch}}).replay.groups_per_batch == 6


def test_the_plan_has_no_engine(tmp_path: Path):
    plan = describe_plan(on(tmp_path, 3))
    assert f"stored rollouts   {tmp_path}, 3 groups per update" in plan
    assert "inference engine" not in plan and "KV cache" not in plan


def test_objects_in_place_of_rewards_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="reward is given, but replay.from_rollouts has rewarded rollouts"):
        train(on(tmp_path, 3), tmp_path / "run", reward=lambda **_: 0.0, quiet=True)


def weights(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run_dir / "checkpoints" / f"step-{step}" / "model" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "learner",
    [{}, {"kl": {"coefficient": 0.1, "place": "reward", "reference": "initial"}}, {"minibatches": 3}],
    ids=["plain", "a KL in the reward", "several steps"],
)
def test_a_run_on_a_run_s_rollouts_is_made_again_resumed_and_accounted_for(tmp_path: Path, learner):
    source = tmp_path / "source"
    train(tiny({"steps": 3, "curriculum": {"eval_frequency": 0, "micro_eval_frequency": 0}}), source, quiet=True)
    summary = train(on(source, 7, **learner), tmp_path / "straight", quiet=True)
    assert summary.complete and summary.step == 7 and summary.after == {}
    train(on(source, 3, **learner), tmp_path / "resumed", quiet=True)
    assert train(on(source, 7, **learner), tmp_path / "resumed", resume=True, quiet=True).complete
    for name, array in weights(tmp_path / "straight", 7).items():
        np.testing.assert_array_equal(array, weights(tmp_path / "resumed", 7)[name], err_msg=name)
    for name in ("straight", "resumed"):
        status = read_status(tmp_path / name / "status.json")
        ledger = status["ledger"]
        assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started") > 0
        assert ledger["waiting"] == 0 and status["from_rollouts"] == str(source)
    events = {each["event"] for each in read_events(tmp_path / "resumed" / "events.jsonl")}
    assert "resume" in events and "files_missing" not in events, "rollouts are the other run's"
    rows = [row for row in read_metrics(tmp_path / "straight" / "metrics.jsonl") if "train/loss" in row]
    assert len(rows) == 7
    assert all("train/staleness_kl" in row for row in rows if row["train/advantage_zero_fraction"] < 1)
    ahead = [row["throughput/packed_ahead"] for row in rows]  # 0 after an update in which nothing was computed
    assert max(ahead) == float("kl" not in learner) and ahead[0] == 0
    assert replay_updates(tmp_path / "resumed", 7, trust=True).exit_code == 0
    report = explain_update(tmp_path / "straight", 7)
    assert report.sums["staleness"] == report.sums["version"] == () and report.sums["lesson"]
    assert {(rollout.version, rollout.staleness) for rollout in report.rollouts} == {(None, None)}
    report.print(Console(file=(text := io.StringIO()), width=200))
    assert "  no version  " in text.getvalue() and "old)" not in text.getvalue()
    stored = RunFiles.list_now(RunDirectory(source)).records()
    rewards = {record.rollout.rollout_id: record.rollout.episode_reward for record in stored}
    assert all(rollout.reward == rewards[rollout.influence.rollout_id] for rollout in report.rollouts)
    other = ["learner.loss.preset=grpo"]
    assert replay_updates(tmp_path / "straight", 7, changes=other).updates[0].different  # by those rewards, too
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"--set changes the advantage.*is not in .*source any more"):
        replay_updates(tmp_path / "straight", 7, changes=other)
    assert {rollout.reward for rollout in explain_update(tmp_path / "straight", 7).rollouts} == {None}
    (told,) = [
        each for each in read_events(tmp_path / "straight" / "events.jsonl") if each["event"] == "stored_rollouts"
    ]
    assert told["rollouts"] == status["ledger"]["started"] - sum(told["left_out"].values())


@pytest.mark.slow
def test_others_tokenizers_and_changed_sources_are_refused(tmp_path: Path):
    source = tmp_path / "source"
    train(tiny({"steps": 2}), source, quiet=True)
    config = on(source, 2)
    train(config, tmp_path / "run", quiet=True)
    part = next((source / "rollouts").glob("*.parquet"))
    part.rename(tmp_path / part.name)
    try:
        with pytest.raises(ConfigError, match=r"does not hold the rollouts|holds no rollouts|groups to train"):
            train(on(source, 4), tmp_path / "run", resume=True, quiet=True)
        assert RunDirectory(tmp_path / "run").read_config()["steps"] == 2, "what was refused is put back"
    finally:
        (tmp_path / part.name).rename(part)
    for folder in source.glob("checkpoints/step-*/model/tokenizer.json"):
        folder.write_text(json.dumps(json.loads(folder.read_text()) | {"version": "another"}))
    with pytest.raises(ConfigError, match="its tokenizer .* is another than that of"):
        OfflineKind(config).begin(config)
