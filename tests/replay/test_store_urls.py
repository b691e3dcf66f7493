"""The store at every kind of place: the same files, the same promises."""

from pathlib import Path

import fsspec
import pytest
from tests.object_stores import s3_server, s3_url, store_url  # noqa: F401  (fixtures)
from tests.replay.stored import HandClock, example, group_records

from penstock.replay import RolloutStore
from penstock.replay.config import StoreConfig
from penstock.rundir import RunDirectory
from penstock.types import ConfigError, RunDirectoryError


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", {})


def make_store(directory, url, clock=None, **config):
    return RolloutStore(directory, StoreConfig(url=url, compact_after_s=0, **config), clock or HandClock(), grace_s=5.0)


def test_a_run_is_written_merged_cut_and_read_back(directory, store_url):  # noqa: F811
    clock = HandClock()
    store = make_store(directory, store_url, clock, compact_parts=3, max_bytes=1)
    store.open_ledger()
    for number in range(4):
        clock.now += 1
        store.seal(group_records(f"words-0-{number}"))
        store.write_batch(f"batch_{number}_{int(clock.now * 1000)}", [example(f"words-0-{number}/0")], number, 0)
    before = [record.rollout.rollout_id for record in store.read_records()]
    assert before == [f"words-0-{number}/{index}" for number in range(4) for index in range(2)]
    store.maintain()
    assert [record.rollout.rollout_id for record in store.read_records()] == before
    clock.now += 6
    store.maintain()
    assert len(store._storage.files("rollouts")) == 1
    history = make_store(directory, store_url).history()
    assert list(history.sealed) == before and [batch.version.step for batch in history.batches] == [0, 1, 2, 3]
    assert store.read_batch(history.batches[2].batch_id)[0].rollout_ids == ("words-0-2/0",)
    names = store.expendable(["words-0-3"])
    store.expire(names)
    assert len(names) == 3 and len(store._storage.files("batches")) == 1
    assert store.bytes == sum(f.size_bytes for folder in ("rollouts", "batches") for f in store._storage.files(folder))
    assert not list(directory.rollouts.iterdir()) and directory.tickets_path.exists()
    store.close()


def test_a_merge_that_was_not_finished_is_finished(directory, store_url):  # noqa: F811
    store = make_store(directory, store_url, compact_parts=2)
    store.open_ledger().log_fates([("words-0-0/0", "trained", "")], 0)
    directory.tickets_path.write_text('{"ticket_id": "words-0-0", "rollouts": 2}\n')
    for number in range(2):
        store.seal(group_records(f"words-0-{number}"))
    store.maintain()
    assert len(store._storage.files("rollouts")) == 3
    successor = make_store(directory, store_url)
    assert len(successor.read_records()) == 4
    successor.open_ledger()
    assert len(successor._storage.files("rollouts")) == 1 and len(successor.read_records()) == 4
    successor.close()


@pytest.mark.attack
def test_two_runs_do_not_share_a_place(directory, store_url, tmp_path):  # noqa: F811
    store = make_store(directory, store_url)
    store.open_ledger()
    store.seal(group_records("words-0-0"))
    store.close()
    other = make_store(RunDirectory.create(tmp_path / "other", {}), store_url)
    with pytest.raises(RunDirectoryError, match=r"replay.store.url is .* another run has 1 files in rollouts/"):
        other.open_ledger()


def test_a_batch_that_is_not_there_is_named(directory, store_url):  # noqa: F811
    with pytest.raises(RunDirectoryError, match="batch_x_1.parquet is missing"):
        make_store(directory, store_url).read_batch("batch_x_1")


def test_a_bucket_that_is_not_there_ends_the_run_before_it_starts(directory, s3_url):  # noqa: F811
    with pytest.raises(ConfigError, match="replay.store.url is 's3://no-such-bucket/run', which cannot be written"):
        make_store(directory, "s3://no-such-bucket/run").open_ledger()


def test_a_refused_second_run_leaves_the_first_ones_write_alone(directory, tmp_path):
    url = str(tmp_path / "shared")
    store = make_store(directory, url)
    store.open_ledger()
    store.seal(group_records("words-0-0"))
    other = make_store(RunDirectory.create(tmp_path / "other", {}), url)
    with store._storage.writing("rollouts/part-x.parquet") as path:
        path.write_bytes(b"half")
        with pytest.raises(RunDirectoryError, match="another run has 1 files"):
            other.open_ledger()
    store.close()


def test_an_upload_whose_answer_is_lost_is_made_again_under_its_key(directory, monkeypatch):
    store = make_store(directory, "memory://lost-answer")
    upload = store._storage._upload
    monkeypatch.setattr(store._storage, "_upload", lambda *file: (upload(*file), _lose()))
    with pytest.raises(OSError, match="the answer was lost"):
        store.seal(group_records("words-0-0"))
    monkeypatch.undo()
    store.seal(group_records("words-0-0") + group_records("words-0-1"))
    assert len(fsspec.filesystem("memory").ls("/lost-answer/rollouts")) == 1
    assert len(store.read_records()) == 4


def _lose():
    raise OSError("connection reset: the answer was lost")


def test_a_relative_place_is_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert StoreConfig(url="runs/x").url == str(tmp_path / "runs" / "x")
    assert StoreConfig(url="/data/x").url == "/data/x" and StoreConfig(url="~/x").url == str(Path.home() / "x")
    assert StoreConfig(url="s3://bucket/x").url == "s3://bucket/x" and StoreConfig().url is None
