"""Updates that are made again come out bit for bit; changed ones show what would have been; nothing is written."""

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from penstock import cli
from penstock.overseer.rerun.replay import ReplayedUpdate, replay_updates
from penstock.overseer.rerun.stored_run import StoredRun
from penstock.rundir import RunDirectory, read_events, read_metrics, read_replays
from penstock.rundir.logs import read_json_lines
from penstock.types import CheckpointError, ConfigError

pytestmark = pytest.mark.slow


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def advantages(run_dir: Path, update: int) -> dict[str, float]:
    tables = [pq.read_table(path) for path in (run_dir / "batches").iterdir()]
    table = next(table for table in tables if table["step"][0].as_py() == update - 1)
    return dict(zip(table["rollout_id"].to_pylist(), table["rollout_advantage"].to_pylist(), strict=True))


def groups_of(run_dir: Path, update: int) -> set[str]:
    return {name.rpartition("/")[0] for name in advantages(run_dir, update)}


def signalled(run_dir: Path) -> int:
    """The first update, but the first of all, whose advantages are not all zero."""
    return next(step for step in range(2, 7) if any(advantages(run_dir, step).values()))


@pytest.mark.parametrize("name", ["sync", "async", "several", "values", "kl", "overlong", "control"])
def test_five_updates_are_equal_bit_for_bit_with_the_weights_of_their_checkpoints(runs: Path, name: str):
    before = contents(runs / name)
    report = replay_updates(runs / name, 2, 6)
    assert contents(runs / name) == before
    assert report.checkpoint == "step-0" and [update.step for update in report.on_the_way] == [1]
    assert [update.step for update in report.updates] == [2, 3, 4, 5, 6] and report.exit_code == 0
    assert all(update.different == [] for update in report.updates)
    compared = [len(update.recomputed) for update in report.updates]
    assert min(compared) >= 14 and max(compared) >= 17  # the fewest where no sequence had an advantage
    recorded = {row["step"]: row for row in read_metrics(runs / name / "metrics.jsonl") if "train/loss" in row}
    for update in report.updates:
        assert update.recomputed["train/grad_norm"] == recorded[update.step]["train/grad_norm"]
    assert report.updates[-1].weights_equal and report.updates[2].weights_equal
    assert report.updates[1].weights_equal is None


def test_a_run_that_went_back_and_was_resumed_otherwise_is_followed_on_the_path_that_survived(runs: Path):
    run_dir = runs / "resumed"
    steps = sorted(pq.read_table(path)["step"][0].as_py() for path in (run_dir / "batches").iterdir())
    assert steps == [0, 1, 2, 2, 3, 3, 4, 4, 5]  # updates 3 to 5 were made twice
    changes = next(event for event in read_events(run_dir / "events.jsonl") if event["event"] == "resume")["changes"]
    assert changes["learner.epochs"] == [1, 2]
    report = replay_updates(run_dir, 1, 6)
    assert report.exit_code == 0 and [update.weights_equal for update in report.updates][1::2] == [True] * 3
    taken = [update.recomputed["train/optimizer_steps"] for update in report.updates]
    assert taken == [1, 1, 2, 2, 2, 2]


def test_what_a_resume_added_was_not_there_before(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "resumed", tmp_path / "run")
    run = StoredRun(tmp_path / "run")
    first = run.updates(0, 1, 1)[0]
    event = {"time": first.time_s + 0.001, "event": "resume", "step": 1}
    added = {"learner.parity.every": [None, 9], "learner.optimizer.max_grad_norm": [None, 0.5]}
    log = tmp_path / "run" / "events.jsonl"
    log.write_text(log.read_text() + json.dumps({**event, "changes": added}) + "\n")
    config = StoredRun(tmp_path / "run").config_at(first)
    assert config.learner.optimizer.max_grad_norm is None and config.learner.optimizer.learning_rate == 1e-3
    assert config.learner.parity.every == 1  # which was no key yet


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp"])
def test_another_loss_has_its_own_advantages_on_the_same_rollouts(runs: Path, preset: str):
    run_dir = runs / "sync"
    step = signalled(run_dir)
    words = [f"learner.loss.preset={preset}", "learner.proximal=recompute"]
    report = replay_updates(run_dir, step, changes=words)
    update = report.updates[0]
    assert report.is_experiment and report.exit_code == 0 and update.weights_equal is None
    assert update.stored["train/advantage_max"] != update.recomputed["train/advantage_max"]
    config = StoredRun(run_dir).config_at(StoredRun(run_dir).updates(step - 1, step, step)[0], words)
    assert config.learner.loss.advantage == {"dr_grpo": "dr_grpo", "reinforce_pp": "reinforce_pp"}.get(preset, "grpo")
    rewards = {
        key: rec.rollout.episode_reward for key, rec in StoredRun(run_dir).records(advantages(run_dir, step)).items()
    }
    group = [key for key, value in advantages(run_dir, step).items() if value][0].rpartition("/")[0]
    own = np.array([rewards[key] for key in rewards if key.startswith(f"{group}/")])
    if preset == "grpo":
        expected = np.abs(own - own.mean()).max() / (own.std(ddof=1) + 1e-6)
        assert update.recomputed["train/advantage_max"] == pytest.approx(expected, rel=1e-5)


def test_another_estimator_is_of_the_rewards_less_the_kl(runs: Path):
    """Without it every group of equal rewards would have no advantage, and be skipped."""
    for changes in (["learner.loss.preset=dr_grpo"], ["learner.kl.coefficient=0.2"]):
        update = replay_updates(runs / "kl", 4, changes=changes).updates[0]
        assert update.stored["train/advantage_max"] != update.recomputed["train/advantage_max"] > 0
        assert update.stored["train/skipped_sequences"] == update.recomputed["train/skipped_sequences"] == 0


def test_what_a_change_leaves_without_effect_is_said_once(runs: Path, caplog: pytest.LogCaptureFixture):
    replay_updates(runs / "kl", 3, 5, changes=["learner.kl.coefficient=0"])
    assert [message.partition(" (")[0] for message in caplog.messages if "is left out" in message] == [
        "learner.kl.place", "learner.kl.estimator", "learner.kl.reference"
    ]  # fmt: skip


def test_another_reference_scores_the_batch_anew(runs: Path):
    """And what was scored under the run's own is not taken for it."""
    other = runs / "kl" / "checkpoints" / "step-4" / "model"
    words = ["learner.kl.place=loss", "learner.kl.estimator=k3", f"learner.kl.reference={other}"]
    update = replay_updates(runs / "kl", 5, changes=words).updates[0]
    assert update.stored["train/kl_reference"] > 1e-9 > update.recomputed["train/kl_reference"]  # the policy itself
    with pytest.raises(ConfigError, match=r"--set learner\.kl\.ema_decay: .* set learner\.kl\.place=loss"):
        replay_updates(runs / "kl", 5, changes=["learner.kl.ema_decay=0.5"])


def test_another_estimator_leaves_masked_rollouts_out_of_its_baseline(runs: Path):
    """Optimiser muon, rates by pattern, and answers that were cut and masked."""
    run_dir = runs / "overlong"
    fates = read_json_lines(run_dir / "fates.jsonl")
    masked = {row["rollout_id"] for row in fates if row["fate"] == "filtered"}
    assert masked and all("filter_overlong: mask" in row["reason"] for row in fates if row["fate"] == "filtered")
    step = next(step for step in range(1, 7) if {n.rpartition("/")[0] for n in masked} & groups_of(run_dir, step))
    assert not masked & advantages(run_dir, step).keys()
    run = StoredRun(run_dir)
    [update] = run.updates(step - 1, step, step)
    config = run.config_at(update, ["learner.loss.preset=dr_grpo"])
    assert config.replay.batch_maker.filter_overlong is None  # it was the preset's; what it masked stays masked
    found = {example.rollout_ids[0]: example for example in run.batch(update, config).examples}
    rewards = {key: record.rollout.episode_reward for key, record in run.records(found).items()}
    for name in groups_of(run_dir, step):
        ids = [key for key in found if key.rpartition("/")[0] == name]
        mean = np.mean([rewards[key] for key in ids])
        for key in ids:
            expected = pytest.approx(rewards[key] - mean, abs=1e-6)
            assert found[key].advantage[found[key].loss_mask][0] == expected


def test_the_preset_that_it_was_changes_nothing(runs: Path):
    report = replay_updates(runs / "sync", 3, changes=["learner.loss.preset=rloo"])
    assert report.updates[0].different == []


def test_what_is_dropped_leaves_the_gradient_and_stays_in_the_denominators(runs: Path):
    run_dir = runs / "sync"
    step = signalled(run_dir)
    given = advantages(run_dir, step)
    most = max(given, key=lambda name: abs(given[name]))
    without = replay_updates(run_dir, step, drop=[most]).updates[0]
    assert without.recomputed["train/grad_norm"] != without.stored["train/grad_norm"]
    assert without.recomputed["train/sequences"] == without.stored["train/sequences"]
    idle = [name for name, value in given.items() if value == 0]
    if idle:
        same = replay_updates(run_dir, step, drop=idle).updates[0]
        assert same.recomputed["train/grad_norm"] == pytest.approx(same.stored["train/grad_norm"], rel=1e-6)
        assert same.recomputed["train/loss"] == pytest.approx(same.stored["train/loss"], abs=1e-8)


def test_a_fragment_is_dropped_with_its_place_kept(runs: Path):
    run = StoredRun(runs / "control")
    name = run.updates(2, 3, 3)[0].stored.rollout_ids[0]
    update = replay_updates(runs / "control", 3, drop=[name]).updates[0]
    assert update.recomputed["train/fragments"] == update.stored["train/fragments"] == 4
    assert update.recomputed["train/trained_steps"] == update.stored["train/trained_steps"] - 8


def test_without_a_checkpoint_before_it_the_nearest_and_the_remedy_are_named(
    runs: Path, tmp_path: Path, capsys, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "sync", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-0")
    assert cli.main(["replay", str(run_dir), "--step", "3"]) == 2
    assert capsys.readouterr().err == (
        f"penstock: no checkpoint before update 3 is left in {run_dir}/checkpoints: the nearest is step-4, from which "
        "updates from 5 on can be made again; overseer.keep_every=N keeps every Nth, and that of the beginning, for "
        "good\n"
    )
    assert cli.main(["replay", str(run_dir), "--step", "5"]) == 0
    assert "the dashboard will not show this replay" in capsys.readouterr().err  # its cache is a file
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no checkpoint, so that update 3 cannot"):
        replay_updates(run_dir, 3)


def test_a_batch_that_is_not_what_was_trained_is_found_out(runs: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "sync", run_dir)
    log = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in rows:
        if row["step"] == 5 and "train/entropy" in row:
            row["train/entropy"] += 1e-7
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["replay", str(run_dir), "--step", "5", "--until", "6", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["equal"] and [update["different"] for update in report["updates"]] == [["train/entropy"], []]
    kept = [read_replays(RunDirectory(run_dir), each["batch_id"]) for each in report["updates"]]
    assert [len(each) for each in kept] == [1, 1] and kept[0][0].different == ("train/entropy",)
    assert kept[1][0].weights_equal and kept[1][0].stored == kept[1][0].recomputed == report["updates"][1]["recomputed"]
    assert kept[0][0].recomputed == report["updates"][0]["recomputed"] != kept[0][0].stored
    assert cli.main(["replay", str(run_dir), "--step", "6"]) == 1  # update 5 is made on the way
    assert "on the way: updates 5–5, 5 not equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "7"], "--step is 7, and {run} has no such update: it made updates 1 to 6"),
        (["--step", "0"], "--step is 0: updates count from 1; "),
        (["--step", "3", "--until", "9"], "--until is 9, and {run} has no such update: it made updates 1 to 6"),
        (["--step", "3", "--until", "2"], "--until is 2, before --step 3: give a later update, or leave it out"),
        (["--step", "3", "--set", "steps=4"], "--set steps=4: only keys under learner. act on an update that is made"),
        (["--step", "3", "--set", "learner.parity.every=2"], "--set learner.parity.every=2: learner.parity.every acts"),
        (["--step", "3", "--set", "learner.warm_start=null"], "--set learner.warm_start=null: learner.warm_start acts"),
        (["--step", "3", "--set", "learner.loss.preset=x"], "learner.loss.preset is 'x': it must be one of"),
        (["--step", "3", "--drop", "cats-0-99/0"], "--drop cats-0-99/0: update 3 trained on no such rollout: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs: Path, capsys, arguments: list[str], message: str):
    run_dir = runs / "sync"
    assert cli.main(["replay", str(run_dir), *arguments]) == 2
    assert capsys.readouterr().err.startswith("penstock: " + message.format(run=run_dir))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("some.key=1", "--set some.key=1: only keys under learner. act on .* for example --set learner.clip=0.1"),
        ("learner.cliip=0.1", "unknown key learner.cliip: did you mean learner.clip?"),
        ("learner.loss.preset=grpo", "unknown key learner.loss: remove it; the keys known here are burn_in, clip, "),
        ("learner.clip=2", "learner.clip is 2: it must be less than 1"),
    ],
)
def test_a_key_of_set_is_at_fault_itself_not_the_config_of_the_run(runs: Path, capsys, change: str, message: str):
    assert cli.main(["replay", str(runs / "control"), "--step", "3", "--set", change]) == 2
    assert re.match("penstock: " + message.replace("?", "[?]"), capsys.readouterr().err)


def test_a_change_without_its_option_is_told_the_option(capsys):
    assert cli.main(["replay", "run", "learner.clip=0.1", "--step", "3"]) == 2
    line = capsys.readouterr().err
    assert "learner.clip=0.1" in line and "Changes are given by --set KEY=VALUE (see penstock replay --help)" in line


def test_dropping_everything_leaves_no_update(runs: Path):
    with pytest.raises(ConfigError, match="--drop names every rollout of update 3: leave one in it at least"):
        replay_updates(runs / "sync", 3, drop=list(advantages(runs / "sync", 3)))


def test_the_learner_records_how_it_computes_and_differences_are_explained_by_it(runs: Path, tmp_path: Path):
    events = [event for event in read_events(runs / "sync" / "events.jsonl") if event["event"] == "arithmetic"]
    assert len(events) == 1 and events[0]["platform"] == "cpu" and events[0]["processors"] >= 1
    run_dir = tmp_path / "run"
    shutil.copytree(runs / "sync", run_dir)
    log = run_dir / "events.jsonl"
    log.write_text(log.read_text().replace('"processors": ', '"processors": 9'))
    run = StoredRun(run_dir)
    found = run.notes(run.updates(4, 5, 5)[0])
    assert (
        len(found) == 1
        and found[0].startswith("processors was 9")
        and StoredRun(runs / "sync").notes(run.updates(4, 5, 5)[0]) == []
    )


def test_a_report_says_what_is_not_recorded():
    update = ReplayedUpdate(3, {"train/loss": None}, {"train/loss": 0.5}, None)
    assert not update.is_recorded and not update.equal
    assert ReplayedUpdate(3, {"train/loss": None}, {"train/loss": 0.5}, True).equal
    assert not ReplayedUpdate(3, {"train/loss": 0.5}, {"train/loss": 0.5}, False).equal


def test_the_table_has_stored_and_recomputed_side_by_side(runs: Path):
    step = signalled(runs / "sync")
    out = io.StringIO()
    report = replay_updates(runs / "sync", step, changes=["learner.loss.preset=grpo"])
    report.print(Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    row = next(line for line in lines if "train/advantage_max" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert float(cells[1]) == pytest.approx(report.updates[0].stored["train/advantage_max"])
    assert float(cells[2]) == pytest.approx(report.updates[0].recomputed["train/advantage_max"])
