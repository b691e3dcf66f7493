"""What `penstock replay` found, in the user's cache and nowhere else."""

from dataclasses import replace

import pytest

from penstock.rundir import KeptReplay, RunDirectory, read_replays, write_replay
from penstock.rundir.replayed_updates import MOST_KEPT, replays_path
from penstock.types import RunDirectoryError

AS_IT_WAS = KeptReplay(
    5.0, "step-4", {"train/loss": 0.1, "train/entropy": None}, {"train/loss": 0.1, "train/entropy": 2.5},
    ("train/entropy",), True, notes=("processors was 9 and is 2",),
)  # fmt: skip
CHANGED = replace(AS_IT_WAS, weights_equal=None, changes=("learner.loss.preset=grpo",), dropped=("cats-0-1/0",))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return RunDirectory.create(tmp_path / "run", {})


def test_replays_come_back_as_they_were_the_newest_first_and_the_run_has_no_byte_of_them(directory):
    before = sorted(directory.path.rglob("*"))
    assert read_replays(directory, "batch_1_1") == []
    path = write_replay(directory, "batch_1_1", AS_IT_WAS)
    assert write_replay(directory, "batch_1_1", CHANGED) == path
    assert read_replays(directory, "batch_1_1") == [CHANGED, AS_IT_WAS]
    assert read_replays(directory, "batch_2_2") == []
    assert sorted(directory.path.rglob("*")) == before and path.stat().st_mode & 0o700 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_same_changes_take_the_place_of_the_older_and_few_are_kept(directory):
    for time in (1.0, 2.0):
        write_replay(directory, "batch_1_1", replace(CHANGED, time=time))
    assert [one.time for one in read_replays(directory, "batch_1_1")] == [2.0]
    for number in range(MOST_KEPT):
        write_replay(directory, "batch_1_1", replace(CHANGED, dropped=(f"cats-0-1/{number + 1}",)))
    kept = [one.dropped[0] for one in read_replays(directory, "batch_1_1")]
    assert kept == [f"cats-0-1/{number}" for number in range(MOST_KEPT, 0, -1)]


@pytest.mark.parametrize("content", ["[{", "[3]", "{}x", '[{"time": 1}]', '[{"when": 1, "different": []}]'])
def test_a_damaged_file_is_named_and_replaced(directory, content):
    path = replays_path(directory, "batch_1_1")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(RunDirectoryError, match="cannot be read .*: delete it, penstock replay makes it again"):
        read_replays(directory, "batch_1_1")
    write_replay(directory, "batch_1_1", AS_IT_WAS)
    assert read_replays(directory, "batch_1_1") == [AS_IT_WAS]
