import errno
import json
import os
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import SafetensorError

from penstock.learner import (
    BestCheckpoint,
    Learner,
    OptimizerConfig,
    checkpoints,
    latest_checkpoint,
    load_checkpoint,
    restore_learner,
    save_checkpoint,
)
from penstock.types import CheckpointError


class FakeTokenizer:
    """What a model directory needs of a tokenizer."""

    vocab_size = 41
    eos_token_id = 1
    pad_token_id = 0
    stop_token_ids = (1,)

    def save(self, directory: str | Path) -> None:
        Path(directory, "tokenizer.json").write_text("{}")


@pytest.fixture
def config(config):
    """A schedule, warm-up and decay, so that a wrong step or moment shows."""
    optimizer = OptimizerConfig(
        learning_rate=1e-2, warmup_steps=3, schedule="cosine", weight_decay=0.1, max_grad_norm=0.5
    )
    return config.model_copy(update={"optimizer": optimizer})


@pytest.fixture
def learner(decoder, config, examples, make_batch) -> Learner:
    """After one update."""
    learner = Learner(decoder, config, 10)
    learner.update(make_batch(examples), 0)
    return learner


STATES = {"curriculum": {"success": 0.1 + 0.2, "lessons": ["a"]}, "replay": {"waiting": []}}


def _save(root: Path, learner: Learner, step: int = 1, **options: int) -> Path:
    return save_checkpoint(root, step, learner, FakeTokenizer(), STATES, **options)


def test_resuming_equals_going_straight_on_bit_for_bit(tmp_path, learner, config, draw_examples, make_batch):
    path = _save(tmp_path, learner)
    second = make_batch(draw_examples([(2, 9), (4, 13), (1, 5)], seed=9), 1)
    straight_metrics = learner.update(second, 1)
    resumed = restore_learner(load_checkpoint(path), config, 10)
    assert resumed.step == 1
    resumed_metrics = resumed.update(second, 1)
    for a, b in zip(jax.tree.leaves(learner.decoder), jax.tree.leaves(resumed.decoder), strict=True):
        np.testing.assert_array_equal(a, b)
    straight_state, resumed_state = learner.state_arrays(), resumed.state_arrays()
    assert straight_state.keys() == resumed_state.keys()
    for name, value in straight_state.items():
        np.testing.assert_array_equal(value, resumed_state[name], err_msg=name)
    train = {name for name in straight_metrics if name.startswith("train/")}
    assert {n: straight_metrics[n] for n in train} == {n: resumed_metrics[n] for n in train}


def test_a_checkpoint_holds_the_states_exactly_and_a_model_directory(tmp_path, learner):
    checkpoint = load_checkpoint(_save(tmp_path / "made" / "checkpoints", learner))
    assert checkpoint.states == STATES
    assert checkpoint.step == 1
    assert checkpoint.path.name == "step-1"
    names = {path.name for path in checkpoint.path.iterdir()}
    assert names == {"model", "learner.safetensors", "state.json", "manifest.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (checkpoint.path / "model").iterdir()
    }


def test_the_latest_is_the_highest_number_and_the_oldest_are_removed(tmp_path, learner):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (2, 9, 10, 11):
        _save(tmp_path, learner, step, keep_last=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-11", "step-9"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-11"


def test_nothing_is_removed_while_there_are_fewer_than_are_kept(tmp_path, learner):
    for step in (1, 2, 3, 4):
        _save(tmp_path, learner, step, keep_last=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-3", "step-4"]


def test_every_nth_stays_for_good(tmp_path, learner):
    for step in (5, 10, 15, 20, 25, 30, 35):
        _save(tmp_path, learner, step, keep_last=2, keep_every=15)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-15", "step-30", "step-35"]


def test_what_was_just_written_is_never_removed(tmp_path, learner):
    _save(tmp_path, learner, 9)
    assert _save(tmp_path, learner, 5, keep_last=1).is_dir()


def test_leftovers_of_a_dead_writer_are_ignored_and_cleaned(tmp_path, learner):
    leftover = tmp_path / ".tmp-step-7-abc"
    leftover.mkdir()
    (leftover / "state.json").write_text("{")
    assert latest_checkpoint(tmp_path) is None
    path = _save(tmp_path, learner)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_writer_that_dies_leaves_no_checkpoint(tmp_path, learner, monkeypatch):
    monkeypatch.setattr("os.rename", lambda *paths: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        _save(tmp_path, learner)
    assert latest_checkpoint(tmp_path) is None
    monkeypatch.undo()
    assert load_checkpoint(_save(tmp_path, learner)).step == 1


def test_everything_is_flushed_before_the_rename(tmp_path, learner, monkeypatch):
    """Files, then their directories, then the rename, then the directory that holds the name."""
    happened, opened = [], {}
    import os

    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def opens(path, *args, **kwargs):
        descriptor = real_open(path, *args, **kwargs)
        opened[descriptor] = Path(path)
        return descriptor

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "fsync", lambda d: (happened.append(opened[d].name), real_fsync(d)))
    monkeypatch.setattr(os, "rename", lambda a, b: (happened.append("RENAME"), real_rename(a, b)))
    _save(tmp_path, learner)
    before = set(happened[: happened.index("RENAME")])
    assert {"learner.safetensors", "model.safetensors", "state.json", "manifest.json", "model"} <= before
    assert happened[happened.index("RENAME") + 1 :] == [tmp_path.name]


def test_a_step_is_written_once(tmp_path, learner):
    _save(tmp_path, learner)
    with pytest.raises(CheckpointError, match="step-1 exists already"):
        _save(tmp_path, learner)


def test_a_state_that_is_not_json_is_refused(tmp_path, learner):
    with pytest.raises(CheckpointError, match="not JSON"):
        save_checkpoint(tmp_path, 1, learner, FakeTokenizer(), {"curriculum": {"bad": np.float32(1)}})
    assert latest_checkpoint(tmp_path) is None


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.attack
@pytest.mark.parametrize("name", ["learner.safetensors", "model/model.safetensors", "model/config.json", "state.json"])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
def test_damage_is_a_clear_error(tmp_path, learner, name, damage):
    path = _save(tmp_path, learner)
    damage(path / name)
    with pytest.raises(CheckpointError, match=f"step-1 is .*{name}"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_or_missing_manifest_is_a_clear_error(tmp_path, learner, content):
    path = _save(tmp_path, learner)
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match="manifest.json"):
        load_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ([["float32"]], "dtype in state.json is a list, not one of float32, bfloat16"),
        ("float99", "dtype in state.json is 'float99', not one"),
    ],
)
def test_a_dtype_that_is_none_is_a_clear_error(tmp_path, learner, dtype, message):
    path = _save(tmp_path, learner)
    content = json.dumps(json.loads((path / "state.json").read_text()) | {"dtype": dtype}).encode()
    (path / "state.json").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    fingerprint = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (path / "manifest.json").write_text(json.dumps(manifest | {"state.json": fingerprint}))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_a_path_that_is_no_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        load_checkpoint(tmp_path / "step-3")


def test_a_newer_format_is_refused(tmp_path, learner, monkeypatch):
    monkeypatch.setattr("penstock.learner.checkpoints.FORMAT_VERSION", 2)
    path = _save(tmp_path, learner)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2, this Penstock reads 1"):
        load_checkpoint(path)


def test_an_optimiser_state_that_does_not_fit_is_named(learner, decoder, config):
    arrays = learner.state_arrays()
    name = next(name for name in arrays if name.endswith("mu.layers.gate"))
    with pytest.raises(CheckpointError, match=r"mu.layers.gate is float32\[3\]"):
        Learner(decoder, config, 1).restore_arrays(arrays | {name: np.zeros(3, np.float32)})
    del arrays[name]
    with pytest.raises(CheckpointError, match="missing .*mu.layers.gate"):
        Learner(decoder, config, 1).restore_arrays(arrays | {"what": np.zeros(1)})


@pytest.mark.attack
def test_names_and_files_hold_no_pickle(tmp_path, learner):
    """Every file is JSON or safetensors."""
    path = _save(tmp_path, learner)
    for file in path.rglob("*"):
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.is_file():
            assert file.suffix == ".safetensors"


def test_a_full_disk_is_told_as_such_and_the_next_try_is_as_if_there_had_been_none(tmp_path, learner, monkeypatch):
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left") as raised:
        full.setattr(checkpoints.safetensors.numpy, "save_file", raising(SafetensorError(said)))
        _save(tmp_path, learner)
    assert raised.value.errno == errno.ENOSPC
    assert latest_checkpoint(tmp_path) is None
    path = _save(tmp_path, learner)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert load_checkpoint(path).step == 1


def raising(error: Exception):
    def raise_it(*_, **__):
        raise error

    return raise_it


@pytest.mark.attack
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o027, 0o640)])
def test_who_may_read_a_checkpoint_follows_the_umask(tmp_path, learner, umask, mode):
    before = os.umask(umask)
    try:
        path = _save(tmp_path, learner)
    finally:
        os.umask(before)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.name: file.stat().st_mode & 0o777 for file in files} == {file.name: mode for file in files}
    assert {"learner.safetensors", "model.safetensors", "manifest.json"} <= {file.name for file in files}


def test_a_snapshot_stays_what_it_was_while_the_learner_goes_on(tmp_path, learner, config, draw_examples, make_batch):
    """Written after two further updates, byte for byte as if it had been written at once."""
    at_once = _save(tmp_path / "at once", learner)
    snapshot = learner.snapshot()
    for step in (1, 2):
        learner.update(make_batch(draw_examples([(2, 9), (4, 13)], seed=step), step), step)
    late = save_checkpoint(tmp_path / "late", 1, snapshot, FakeTokenizer(), STATES)
    for name in ("learner.safetensors", "model/model.safetensors", "model/config.json", "state.json", "manifest.json"):
        assert (late / name).read_bytes() == (at_once / name).read_bytes(), name
    assert restore_learner(load_checkpoint(late), config, 10).step == 1


REWARD = "eval/cats/reward_mean"


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*"))


def test_the_best_stays_and_is_called_best(tmp_path, learner):
    best = BestCheckpoint(tmp_path, REWARD)
    assert best.record is None and not (tmp_path / "best").is_symlink()
    _save(tmp_path, learner, 1, keep_last=1, best=best)
    assert best.note(1, 0.5) == (REWARD, 0.5, 1, 1)
    for step, value in ((2, 0.4), (3, float("nan")), (4, None)):
        _save(tmp_path, learner, step, keep_last=1, best=best)
        assert best.note(step, value) is None
    assert _names(tmp_path) == ["step-1", "step-4"] and (tmp_path / "best").resolve() == tmp_path / "step-1"
    assert load_checkpoint(tmp_path / "best").step == 1 and latest_checkpoint(tmp_path) == tmp_path / "step-4"
    assert best.note(4, 0.6) == (REWARD, 0.6, 4, 4)
    _save(tmp_path, learner, 5, keep_last=1, best=best)
    assert _names(tmp_path) == ["step-4", "step-5"]


def test_a_version_without_a_checkpoint_is_kept_by_the_first_after_it(tmp_path, learner):
    best = BestCheckpoint(tmp_path, REWARD)
    _save(tmp_path, learner, 5, best=best)
    assert best.note(7, 0.5) is None and best.record is None
    _save(tmp_path, learner, 10, best=best)
    assert best.record == (REWARD, 0.5, 7, 10)
    assert best.note(3, 0.7) == (REWARD, 0.7, 3, 5)
    best.note(12, 0.8), best.note(11, 0.75)
    _save(tmp_path, learner, 15, best=best)
    assert best.record == (REWARD, 0.8, 12, 15)


def test_an_evaluation_that_takes_long_finds_its_checkpoint(tmp_path, learner):
    best = BestCheckpoint(tmp_path, REWARD)
    for step in (5, 10, 15, 20):
        _save(tmp_path, learner, step, keep_last=1, best=best)
        if step == 10:
            best.expect(8)
    assert _names(tmp_path) == ["step-10", "step-20"]
    assert best.note(8, 0.5) == (REWARD, 0.5, 8, 10)
    best.expect(20)
    assert best.note(20, None) is None
    _save(tmp_path, learner, 25, keep_last=1, best=best)
    assert _names(tmp_path) == ["step-10", "step-25"]


def test_what_is_best_outlives_its_process_unless_it_is_gone_or_judged_otherwise(tmp_path, learner):
    before = BestCheckpoint(tmp_path, REWARD)
    for step in (1, 2):
        _save(tmp_path, learner, step, best=before)
    before.note(1, 0.5)
    (tmp_path / "best").unlink()  # as where a kill came between record and link
    (tmp_path / ".best").symlink_to("step-1")
    again = BestCheckpoint(tmp_path, REWARD)
    assert again.record == (REWARD, 0.5, 1, 1) and (tmp_path / "best").resolve() == tmp_path / "step-1"
    assert again.note(2, 0.4) is None and not list(tmp_path.glob(".best*"))
    assert BestCheckpoint(tmp_path, "eval/cats/success_rate").record is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    (tmp_path / "best.json").write_text(
        '{"metric": "eval/cats/reward_mean", "value": 1, "evaluated_step": 9, "step": 9}'
    )
    assert BestCheckpoint(tmp_path, REWARD).record is None, "its checkpoint is gone"
    (tmp_path / "best.json").write_text("{")
    assert BestCheckpoint(tmp_path, REWARD).record is None


def test_a_link_that_cannot_be_written_is_tried_again_and_costs_no_checkpoint(tmp_path, learner, monkeypatch):
    best = BestCheckpoint(tmp_path, REWARD)
    best.note(1, 0.5)

    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(BestCheckpoint, "_write", full)
        for step in (1, 2, 3):
            _save(tmp_path, learner, step, keep_last=1, best=best)
    assert best.record is None and "No space left" in best.failure and _names(tmp_path) == ["step-1", "step-3"]
    _save(tmp_path, learner, 4, keep_last=1, best=best)
    assert best.record == (REWARD, 0.5, 1, 1) and not best.failure
