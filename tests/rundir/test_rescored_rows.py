"""What `penstock why` computes of tokens, in the user's cache and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.rundir import RescoredRollout, RunDirectory, read_rescored, write_rescored
from penstock.rundir.parquet import read_parquet, write_parquet
from penstock.rundir.rescored_rows import rescored_path
from penstock.types import RunDirectoryError


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return RunDirectory.create(tmp_path / "run", {})


def rescored(name, *numbers, newest=20):
    return RescoredRollout(name, newest, *(np.array(each, np.float32) for each in numbers))


def test_numbers_come_back_as_they_were_and_the_run_has_no_byte_of_them(directory):
    before = sorted(directory.path.rglob("*"))
    nan = np.nan
    written = [
        replace(
            rescored("cats-0-1/0", [nan, -1.5, -0.25], [nan, 2.0, 1.0], [nan, -1.0, -0.5]),
            numbers=(("moved", 0.25), ("drift", -0.5)),
        ),
        rescored("cats-0-1/1", [nan], [nan], [nan]),
    ]
    path = write_rescored(directory, "batch_1_1", written)
    read = read_rescored(directory, "batch_1_1")
    assert list(read) == ["cats-0-1/0", "cats-0-1/1"] and read["cats-0-1/0"].newest_step == 20
    assert [one.numbers for one in read.values()] == [(("moved", 0.25), ("drift", -0.5)), ()]
    for one in written:
        for name in ("logprobs", "entropies", "newest_logprobs"):
            np.testing.assert_array_equal(getattr(read[one.rollout_id], name), getattr(one, name))
    assert sorted(directory.path.rglob("*")) == before and path.stat().st_mode & 0o700 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0


def test_what_was_computed_anew_takes_the_place_of_the_old(directory):
    for newest in (20, 30):
        write_rescored(directory, "batch_1_1", [rescored("a-0-0/0", [0.0], [0.0], [0.0], newest=newest)])
    assert read_rescored(directory, "batch_1_1")["a-0-0/0"].newest_step == 30
    assert len(list(rescored_path(directory, "").parent.iterdir())) == 1


def test_another_batch_and_another_run_have_none(directory, tmp_path):
    write_rescored(directory, "batch_1_1", [rescored("a-0-0/0", [0.0], [0.0], [0.0])])
    assert read_rescored(directory, "batch_2_1") == {}
    assert read_rescored(RunDirectory.create(tmp_path / "other", {}), "batch_1_1") == {}


def test_a_file_of_before_it_said_what_rollouts_did_says_the_rest(directory):
    path = write_rescored(directory, "batch_1_1", [rescored("a-0-0/0", [0.5], [0.0], [0.0])])
    write_parquet(path, read_parquet(path).drop_columns(["numbers"]))
    one = read_rescored(directory, "batch_1_1")["a-0-0/0"]
    assert one.logprobs.tolist() == [0.5] and one.numbers == ()


def test_a_batch_leads_nowhere_else_by_its_name(directory):
    assert rescored_path(directory, "../../etc/x").parent == rescored_path(directory, "batch_1_1").parent


def test_a_damaged_file_is_named(directory):
    path = write_rescored(directory, "batch_1_1", [rescored("a-0-0/0", [0.0], [0.0], [0.0])])
    path.write_bytes(b"half")
    with pytest.raises(RunDirectoryError, match=path.name):
        read_rescored(directory, "batch_1_1")
