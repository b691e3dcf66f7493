"""Whole runs and the rollout storage between worker and buffer: either kind, leftovers, a reader that is not there."""

from pathlib import Path

import numpy as np
import pytest

from penstock.overseer import train
from penstock.replay import FileRolloutStorage
from penstock.rundir import read_events, read_metrics, read_status
from penstock.types import (
    ConfigError,
    NoProgressError,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
)
from tests.overseer.conftest import tiny
from tests.overseer.test_training import reproducible, weights

FILES = {"storage": {"kind": "file"}}


def make_batch(group_id: str) -> RolloutBatch:
    rollout = Rollout(
        env_name="cats",
        env_example_id="1",
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.array([3], np.int32),
        response_logprobs=np.array([-0.5], np.float32),
        token_rewards=np.array([1.0], np.float32),
        episode_reward=1.0,
        metadata=RolloutMetadata("ghost", 1.0, 0),
        rollout_id=f"{group_id}/0",
        lesson_id="cats",
    )
    return RolloutBatch.of((RolloutGroup("cats:1", (rollout,), group_id),))


def waiting_files(folder: Path) -> list[Path]:
    return list(folder.glob("w-*/*.arrow"))


@pytest.mark.slow
def test_at_staleness_zero_both_kinds_train_the_same(tmp_path: Path):
    train(tiny({"async": False}), tmp_path / "memory", quiet=True)
    train(tiny({"async": False, "rollout": FILES}), tmp_path / "file", quiet=True)
    rows = reproducible(tmp_path / "file")
    assert rows == reproducible(tmp_path / "memory")
    assert [row["rollout_storage/received"] for row in rows if "train/loss" in row] == [3.0, 6.0, 9.0]
    np.testing.assert_equal(weights(tmp_path / "file", 3), weights(tmp_path / "memory", 3))
    assert waiting_files(tmp_path / "file" / "rollout_storage") == []
    assert not (tmp_path / "memory" / "rollout_storage").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_share_of_one_group_slows_the_worker_but_loses_nothing(run_dir: Path, kind: str):
    storage = {"kind": kind, "capacity_groups": 1, **({"poll_s": 0.01} if kind == "file" else {})}
    summary = train(tiny({"rollout": {"storage": storage}}), run_dir, quiet=True)
    assert summary.complete
    status = read_status(run_dir / "status.json")
    assert status["ledger"]["trained"] == 27
    assert status["rollout_storage"]["receiver"].startswith("stopped")
    assert status["rollout_storage"]["rollout_storage/groups_received"] >= 9
    updates = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    names = {"depth", "received", "quarantined", "blocked_writers", "blocked_s"}
    assert all({f"rollout_storage/{name}" for name in names} <= row.keys() for row in updates)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_receiver_that_is_gone_ends_the_run_by_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    import penstock.overseer.language.local as local

    monkeypatch.setattr(local.RolloutReceiver, "run", lambda self: None)
    storage = {"kind": kind, "capacity_groups": 1, "write_timeout_s": 0.5}
    with pytest.raises(NoProgressError, match=r"rollout-worker-0 waited 0.5 s .*no reader has asked yet"):
        train(tiny({"rollout": {"storage": storage}}), run_dir, quiet=True)
    assert read_status(run_dir / "status.json")["state"] == "failed"


@pytest.mark.slow
def test_an_error_in_the_receiver_ends_the_run_with_that_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    import penstock.overseer.language.local as local

    def broken(self, batches) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(local.PacedReplayBuffer, "add_batches", broken)
    with pytest.raises(OSError, match="no space left"):
        train(tiny({"rollout": FILES}), run_dir, quiet=True)
    assert waiting_files(run_dir / "rollout_storage")  # never acknowledged, so never deleted


@pytest.mark.slow
def test_what_an_earlier_life_left_in_the_folder_does_no_harm(run_dir: Path):
    """A group of a dead lineage is refused by its ticket, a torn file is put aside; the run goes on."""
    train(tiny({"steps": 2, "rollout": FILES}), run_dir, quiet=True)
    folder = run_dir / "rollout_storage"
    ghost = FileRolloutStorage(folder).writer("ghost")
    ghost.add_batches([make_batch("cats-0-0"), make_batch("cats-0-1")])
    torn = sorted((folder / "w-ghost").glob("*.arrow"))[1]
    torn.write_bytes(torn.read_bytes()[:64])
    assert train(tiny({"steps": 4, "rollout": FILES}), run_dir, resume=True, quiet=True).complete
    status = read_status(run_dir / "status.json")
    ledger = status["ledger"]
    assert ledger["trained"] == 4 * 9
    assert ledger["started"] == sum(count for state, count in ledger.items() if state != "started")
    assert [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row][-1][
        "replay/late_deliveries"
    ] >= 1
    [event] = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "rollouts_quarantined"]
    assert torn.name in event["source"] and "cut short" in event["reason"]
    assert not torn.exists() and (folder / "quarantine" / "w-ghost" / torn.name).exists()


def test_a_new_run_refuses_a_folder_with_rollouts_of_another(tmp_path: Path):
    FileRolloutStorage(tmp_path / "shared").writer("w").add_batches([make_batch("cats-0-0")])
    storage = {"kind": "file", "path": str(tmp_path / "shared")}
    with pytest.raises(ConfigError, match=r"rollout.storage.path .*shared holds 1 files of another run"):
        train(tiny({"rollout": {"storage": storage}}), tmp_path / "run", quiet=True)
    assert len(waiting_files(tmp_path / "shared")) == 1
