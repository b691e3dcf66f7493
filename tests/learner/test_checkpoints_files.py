"""Checkpoints as files: small ones made by hand, without a learner."""

import json
import zlib
from pathlib import Path

import pytest

from penstock.learner import checkpoints, newest_good_checkpoint, read_states
from penstock.types import CheckpointError


def make(root: Path, step: int, format_version: int = 1, leave_out: str = "") -> Path:
    path = root / f"step-{step}"
    (path / "model").mkdir(parents=True)
    files = {
        "state.json": json.dumps({"format_version": format_version, "step": step, "states": {"replay": {"a": step}}}),
        "learner.safetensors": "arrays",
        "model/config.json": "{}",
    }
    for name, text in files.items():
        (path / name).write_text(text)
    manifest = {n: {"bytes": len(t), "crc32": zlib.crc32(t.encode())} for n, t in files.items() if n != leave_out}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.attack
def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_put_aside(tmp_path: Path):
    for step in (2, 10, 20):
        make(tmp_path, step)
    (tmp_path / "step-20" / "learner.safetensors").write_text("arrayz")
    (tmp_path / "step-10" / "state.json").unlink()
    told: list[tuple[str, str]] = []
    assert newest_good_checkpoint(tmp_path, lambda place, reason: told.append((place, reason))) == tmp_path / "step-2"
    assert [Path(place).name.rsplit("-", 1)[0] for place, _ in told] == ["damaged-step-20", "damaged-step-10"]
    assert "learner.safetensors" in told[0][1] and "state.json" in told[1][1]
    assert all(Path(place).is_dir() for place, _ in told)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2"]


@pytest.mark.attack
def test_where_none_is_whole_there_is_none(tmp_path: Path):
    make(tmp_path, 1, leave_out="learner.safetensors")
    told: list[str] = []
    assert newest_good_checkpoint(tmp_path, lambda place, reason: told.append(reason)) is None
    assert "does not name learner.safetensors" in told[0]
    assert newest_good_checkpoint(tmp_path / "missing", lambda place, reason: None) is None


def test_one_that_may_not_be_read_is_not_damaged_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, 1)
    newest = make(tmp_path, 2)

    def refused(path: Path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoints, "_fingerprint", refused)
    with pytest.raises(CheckpointError, match="step-2 cannot be read: PermissionError"):
        newest_good_checkpoint(tmp_path, lambda place, reason: pytest.fail(reason))
    assert newest.is_dir()


def test_one_on_a_bad_sector_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, 1)
    fingerprint = checkpoints._fingerprint

    def bad_sector(path: Path):
        if "step-2" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return fingerprint(path)

    make(tmp_path, 2)
    monkeypatch.setattr(checkpoints, "_fingerprint", bad_sector)
    told: list[str] = []
    assert newest_good_checkpoint(tmp_path, lambda place, reason: told.append(reason)) == tmp_path / "step-1"
    assert "Input/output error" in told[0]


def test_one_of_a_newer_penstock_is_not_damaged_but_refused(tmp_path: Path):
    make(tmp_path, 1)
    newer = make(tmp_path, 2, format_version=99)
    with pytest.raises(CheckpointError, match="format 99"):
        newest_good_checkpoint(tmp_path, lambda place, reason: pytest.fail(reason))
    assert newer.is_dir()


def test_states_are_read_by_component(tmp_path: Path):
    assert read_states(make(tmp_path, 3)) == {"replay": {"a": 3}}
