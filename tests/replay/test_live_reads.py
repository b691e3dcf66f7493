"""Others read a run's files while it writes, merges and deletes them, and never lose sight of a rollout.

The one error that docs/run_directory.md announces is met as it says: a file that was merged between the reader's
listing and its opening is gone, and the reader reads again. Only a look during which files were deleted meets it.
"""

import threading
import time

import duckdb
import pandas as pd
import pytest
from tests.replay.stored import example, group_records, parts_in

from penstock.replay import RolloutStore
from penstock.replay.config import StoreConfig

LOOKS = 12


class Writer:
    """A run that seals, writes batches and merges in two threads, as fast as it can."""

    def __init__(self, store):
        self.store = store
        self.sealed = 0
        self.deleting = []  # from when to when, of the rounds of merging that deleted files
        self.errors = []
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(w,), daemon=True) for w in (self._seal, self._merge)
        ]

    def __enter__(self):
        self._step()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        assert self.errors == []

    def _guard(self, work):
        try:
            while not self._over.is_set():
                work()
        except Exception as error:
            self.errors.append(error)

    def _seal(self):
        self._step()
        time.sleep(0.005)  # leaves the readers some of the machine

    def _step(self):
        number = self.sealed
        self.store.seal(group_records(f"words-0-{number}"))
        batch_id = f"batch_{number:032x}_{int(time.time() * 1000)}"
        self.store.write_batch(batch_id, [example(f"words-0-{number}/0")], number, 0)
        self.sealed += 1

    def _merge(self):
        before, start = set(parts_in(self.store._directory.path)), time.monotonic()
        self.store.maintain()
        end = time.monotonic()
        if not before <= set(parts_in(self.store._directory.path)):  # others were sealed meanwhile
            self.deleting.append((start, end))
        time.sleep(0.01)


def with_pandas(path, folder):
    return set(pd.read_parquet(path / folder)["rollout_id"])


def with_duckdb(path, folder):
    return {row for (row,) in duckdb.sql(f"select rollout_id from '{path}/{folder}/*.parquet'").fetchall()}


def with_duckdb_once_each(path, folder):
    rows = duckdb.sql(f"select distinct on (rollout_id) rollout_id from '{path}/{folder}/*.parquet'").fetchall()
    assert len(rows) == len(set(rows))
    return {row for (row,) in rows}


def with_ours(path, folder):
    store = RolloutStore(path)
    if folder == "batches":
        return {rollout_id for batch in store.history().batches for rollout_id in batch.rollout_ids}
    found = [record.rollout.rollout_id for record in store.read_records()]
    assert len(found) == len(set(found))
    return set(found)


class Again:
    """Reads as docs/run_directory.md advises, and remembers the looks that failed."""

    def __init__(self, read):
        self._read = read
        self.failed = []  # from when to when

    def __call__(self, path, folder):
        for _ in range(20):
            start = time.monotonic()
            try:
                return self._read(path, folder)
            except (FileNotFoundError, duckdb.IOException) as error:
                assert "No such file" in str(error) and folder == "rollouts", error
                self.failed.append((start, time.monotonic()))
        raise AssertionError("twenty times in a row")


WITH_PANDAS = pytest.param(with_pandas, marks=pytest.mark.slow)


@pytest.mark.parametrize("read", [WITH_PANDAS, with_duckdb, with_duckdb_once_each])
def test_other_readers_of_a_live_run_see_ever_more(tmp_path, read):
    again = Again(read)
    deleting = watch(tmp_path, again)
    for start, end in again.failed:
        assert any(first < end and start < last for first, last in deleting), "nothing was deleted meanwhile"


def test_our_readers_meet_no_error_at_all(tmp_path):
    watch(tmp_path, with_ours)


@pytest.mark.parametrize("read", [WITH_PANDAS, with_duckdb])
def test_without_merging_nobody_meets_an_error(tmp_path, read):
    watch(tmp_path, read, compact_parts=0)


def watch(path, read, compact_parts=8):
    """Looks again and again while a run goes on; gives when files were deleted, (from, to) each."""
    merging = {"compact_rollouts": 64, "compact_after_s": 0} if compact_parts else {}
    store = RolloutStore(path, StoreConfig(compact_parts=compact_parts, **merging), grace_s=0.05)
    seen = {"rollouts": set(), "batches": set()}
    with Writer(store) as writer:
        looks, end = 0, time.monotonic() + 30
        while time.monotonic() < end and (
            looks < LOOKS or writer.sealed < 24 or compact_parts and len(writer.deleting) < 2
        ):
            for folder, before in seen.items():
                sealed = writer.sealed
                now = read(path, folder)
                assert before <= now, "a rollout was seen and is not any more"
                assert {f"words-0-{number}/0" for number in range(sealed)} <= now, "a rollout is durable and not seen"
                seen[folder] = now
            looks += 1
    assert looks >= LOOKS and writer.sealed >= 24 and (len(writer.deleting) >= 2) == bool(compact_parts)
    store.close()
    assert read(path, "rollouts") == {f"words-0-{n}/{i}" for n in range(writer.sealed) for i in range(2)}
    return writer.deleting
