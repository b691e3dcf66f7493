"""What a run that is to be made again must have shown before it counts, and what is planted in an update."""

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.marks import Marks
from tests.overseer.conftest import tiny

from benchmarks import rerun, why
from penstock.overseer import train
from penstock.overseer.rerun.stored_run import StoredRun
from penstock.overseer.rerun.why import explain_update


def run_directory(folder: Path, state: str, updates: int, starts: tuple[str, ...] = ()) -> Path:
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"state": state}))
    rows = [{"step": step, "time": 1.0, "train/optimizer_steps": 1.0, "train/loss": 0.5} for step in range(updates)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"time": 1.0, "event": "component_start", "component": name} for name in starts]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_only_a_run_that_is_over_and_long_enough_is_not_made_again(tmp_path):
    assert not rerun.is_complete(tmp_path, 3)
    assert rerun.is_complete(run_directory(tmp_path / "whole", "finished", 3), 3)
    assert not rerun.is_complete(tmp_path / "whole", 4)
    assert not rerun.is_complete(run_directory(tmp_path / "broken", "running", 3), 3)


def test_restarts_are_starts_beyond_the_first(tmp_path):
    folder = run_directory(tmp_path / "run", "finished", 1, ("rollout-0", "rollout-1", "rollout-1", "learner-0"))
    assert rerun.restarts(folder) == 1


@pytest.mark.parametrize("different", [[], ["train/loss"]])
def test_marks_are_on_every_update_and_checkpoint(tmp_path, monkeypatch, capsys, different):
    update = {"different": [], "weights_equal": None, "recomputed": {"train/loss": 0.5}}
    made = [update] * 19 + [update | {"weights_equal": True, "different": different}]
    monkeypatch.setattr(rerun, "replayed", lambda *_: (int(bool(different)), {"updates": made}, ""))
    marks = Marks()
    rerun.check_equal("tools", run_directory(tmp_path / "run", "finished", 20), 20, marks)
    said = capsys.readouterr().out
    assert f"{19 + (not different)} of 20 updates equal, 20 numbers and the weights of 1 checkpoints" in said
    assert marks.missed == 1 + bool(different), "one checkpoint of two, and the updates"


def test_a_refusal_without_the_remedy_is_no_refusal(tmp_path, monkeypatch):
    folder = run_directory(tmp_path / "run", "finished", 20)
    (folder / "checkpoints" / "step-0").mkdir(parents=True)
    remedy = "penstock: no checkpoint …: the nearest is step-10, …; overseer.keep_every=N keeps every Nth"
    for code, complaint, missed in ((2, remedy, 0), (1, remedy, 1), (2, "penstock: no checkpoint", 1)):
        monkeypatch.setattr(rerun, "replayed", lambda *_, told=(code, {}, complaint): told)
        marks = Marks()
        rerun.check_gone(folder, marks)
        assert marks.missed == missed and not (tmp_path / "run-without-beginning").exists()
    assert (folder / "checkpoints" / "step-0").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planted_rollouts_are_what_they_are_said_to_be(tmp_path):
    settings = {
        "steps": 12, "async": True, "overseer": {"checkpoint_every": 1, "keep_every": 1},
        "replay": {"groups_per_batch": 8}, "curriculum": {"eval_frequency": 0, "lessons": {"cats": {
            "environment": {"env_args": {"variant": "named"}}, "sampling_params": {"n_generations_per_prompt": 8}
        }}},
    }  # fmt: skip
    train(tiny(settings), tmp_path / "run", quiet=True)
    run = StoredRun(tmp_path / "run")
    update = run.updates(11, 12, 12)[0]
    planted = why.Planter(run, update).planted(0.5)
    why.write_planted(tmp_path / "run", tmp_path / "planted", [planted])
    rollouts = {rollout.influence.rollout_id: rollout for rollout in explain_update(tmp_path / "planted", 12).rollouts}
    before = {rollout.influence.rollout_id: rollout for rollout in explain_update(tmp_path / "run", 12).rollouts}
    off_task, stale, shifted = (rollouts[planted.names[kind]] for kind in why.KINDS)
    assert off_task.reward == 1 and off_task.advantage > 0 and off_task.drift == pytest.approx(0, abs=1e-4)
    assert stale.staleness == why.OLD
    name = planted.names["shifted"]
    assert shifted.drift == pytest.approx(before[name].drift - 0.5, abs=1e-4)
    assert shifted.response == before[name].response and shifted.advantage == before[name].advantage
    assert len(set(planted.names.values())) == 3 and rollouts.keys() == before.keys()
    touched = {name.rpartition("/")[0] for name in planted.names.values()}
    others = [name for name in before if name.rpartition("/")[0] not in touched]
    assert others and all(rollouts[name].response == before[name].response for name in others)
    assert why.cosine_of_drop(tmp_path / "planted", 12, name) > 0.999 or not np.any(shifted.influence.moved)
