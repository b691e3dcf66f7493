"""Merging of small files: what is merged and what is not, what readers see meanwhile, and what a kill leaves."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import duckdb
import pyarrow.parquet as pq
import pytest
from tests.replay.stored import HandClock, group_records, parts_in

from penstock.replay import RolloutStore
from penstock.replay.config import StoreConfig
from penstock.replay.store import Compactor
from penstock.rundir import table_from_records
from penstock.rundir.parquet import replaced_names
from penstock.types import RunDirectoryError

GRACE_S = 10.0


def make_store(path, clock=None, **config):
    config = StoreConfig(**{"compact_parts": 4, "compact_rollouts": 8, "compact_after_s": 0, **config})
    return RolloutStore(path, config, clock or HandClock(), grace_s=GRACE_S)


def seal_groups(store, *numbers, size=2):
    for number in numbers:
        store.seal(group_records(f"words-0-{number}", size))


def stored_ids(store):
    return [record.rollout.rollout_id for record in store.read_records()]


def ids(*numbers, size=2):
    return [f"words-0-{number}/{index}" for number in numbers for index in range(size)]


def test_enough_small_files_become_one_with_the_rows_in_order(tmp_path):
    clock = HandClock()
    store = make_store(tmp_path, clock)
    seal_groups(store, 0, 1, 2)
    store.maintain()
    assert len(parts_in(tmp_path)) == 3  # too few
    seal_groups(store, 3)
    before = parts_in(tmp_path)
    store.maintain()
    [merged] = set(parts_in(tmp_path)) - set(before)
    schema = pq.read_schema(tmp_path / "rollouts" / merged)
    assert list(replaced_names(schema)) == before
    clock.now += GRACE_S + 1
    store.maintain()
    assert parts_in(tmp_path) == [merged]
    assert stored_ids(store) == ids(0, 1, 2, 3)
    assert pq.ParquetFile(tmp_path / "rollouts" / merged).num_row_groups == 1


def test_records_come_back_from_a_merged_file_as_they_were(tmp_path):
    clock = HandClock()
    store = make_store(tmp_path, clock)
    seal_groups(store, 0, 1, 2, 3)
    before = table_from_records(store.read_records())
    store.maintain()
    store.close()
    assert len(parts_in(tmp_path)) == 1
    assert table_from_records(store.read_records()).equals(before)


def test_the_oldest_go_first_and_a_merged_file_stops_being_small(tmp_path):
    clock = HandClock()
    store = make_store(tmp_path, clock, compact_rollouts=6)
    seal_groups(store, *range(5))
    store.maintain()
    clock.now += GRACE_S + 1
    store.maintain()
    sizes = [pq.read_metadata(tmp_path / "rollouts" / name).num_rows for name in parts_in(tmp_path)]
    assert sizes == [6, 2, 2]  # in the order of their names, which is that of their rows
    assert stored_ids(store) == ids(*range(5))
    seal_groups(store, 5, 6)
    store.maintain()
    clock.now += GRACE_S + 1
    store.maintain()
    sizes = [pq.read_metadata(tmp_path / "rollouts" / name).num_rows for name in parts_in(tmp_path)]
    assert sizes == [6, 6, 2] and stored_ids(store) == ids(*range(7))


def test_our_readers_see_nothing_twice_while_both_are_there(tmp_path):
    clock = HandClock()
    store = make_store(tmp_path, clock)
    seal_groups(store, 0, 1, 2, 3)
    store.maintain()
    assert len(parts_in(tmp_path)) == 5
    for reader in (store, make_store(tmp_path)):
        assert stored_ids(reader) == ids(0, 1, 2, 3)
        assert sorted(reader.history().sealed) == ids(0, 1, 2, 3)
        assert len(reader.read_records(["words-0-2"])) == 2
    [(rows, different)] = duckdb.sql(
        f"select count(*), count(distinct rollout_id) from '{tmp_path}/rollouts/*.parquet'"
    ).fetchall()
    assert (rows, different) == (16, 8)  # the documented moment of other readers, and their remedy:
    [(rows,)] = duckdb.sql(
        f"select count(*) from (select distinct on (rollout_id) * from '{tmp_path}/rollouts/*.parquet')"
    ).fetchall()
    assert rows == 8


def test_replaced_files_stay_for_the_grace_and_no_longer_than_the_store(tmp_path):
    clock = HandClock()
    store = make_store(tmp_path, clock)
    seal_groups(store, 0, 1, 2, 3)
    store.maintain()
    clock.now += GRACE_S - 1
    store.maintain()
    assert len(parts_in(tmp_path)) == 5
    store.close()
    assert len(parts_in(tmp_path)) == 1 and stored_ids(store) == ids(0, 1, 2, 3)


def test_a_merge_that_was_not_finished_is_finished_by_the_next_writer(tmp_path):
    store = make_store(tmp_path)
    seal_groups(store, 0, 1, 2, 3)
    store.maintain()
    successor = make_store(tmp_path)  # the first one was killed
    successor.open_ledger()
    assert len(parts_in(tmp_path)) == 1 and stored_ids(successor) == ids(0, 1, 2, 3)
    assert successor.bytes == sum(path.stat().st_size for path in (tmp_path / "rollouts").iterdir())
    successor.close()


def test_a_writer_without_a_ledger_does_not_merge_what_is_merged_already(tmp_path):
    store = make_store(tmp_path)
    seal_groups(store, 0, 1, 2, 3)
    store.maintain()
    successor = make_store(tmp_path, HandClock(1_700_000_001.0), compact_rollouts=100)
    seal_groups(successor, 4, 5, 6)
    successor.maintain()
    successor.close()
    assert stored_ids(successor) == ids(*range(7))
    assert len(parts_in(tmp_path)) == 1


def test_files_that_are_not_small_or_of_another_form_are_left_alone(tmp_path):
    store = make_store(tmp_path)
    seal_groups(store, 0, size=9)
    old = table_from_records(group_records("words-0-1")).drop_columns(["turns"]).replace_schema_metadata({})
    pq.write_table(old, tmp_path / "rollouts" / "part-old.parquet")
    store = make_store(tmp_path)  # lists them anew
    seal_groups(store, 2, 3, 4)
    store.maintain()
    assert len(parts_in(tmp_path)) == 5
    seal_groups(store, 5)
    store.maintain()
    store.close()
    sizes = sorted(pq.read_metadata(tmp_path / "rollouts" / name).num_rows for name in parts_in(tmp_path))
    assert sizes == [2, 8, 9] and "part-old.parquet" in parts_in(tmp_path)


def test_young_files_are_left_alone(tmp_path):
    clock = HandClock()
    store = make_store(tmp_path, clock, compact_after_s=600)
    seal_groups(store, 0, 1, 2, 3)
    clock.now += 599
    seal_groups(store, 4, 5, 6, 7)
    store.maintain()
    assert len(parts_in(tmp_path)) == 8
    clock.now += 2
    store.maintain()
    clock.now += GRACE_S + 1
    store.maintain()
    assert len(parts_in(tmp_path)) == 5 and stored_ids(store) == ids(*range(8))


def test_zero_parts_means_never(tmp_path):
    config = StoreConfig(compact_rollouts=8, compact_after_s=0).model_copy(update={"compact_parts": 0})
    store = RolloutStore(tmp_path, config, HandClock(), grace_s=GRACE_S)
    seal_groups(store, *range(6))
    store.maintain()
    assert len(parts_in(tmp_path)) == 6


def test_memory_is_bounded_by_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.replay.parts._ROW_GROUP_ROWS", 4)
    store = make_store(tmp_path, compact_rollouts=100)
    seal_groups(store, 0, 1, 2, 3, 4)
    store.maintain()
    store.close()
    [name] = parts_in(tmp_path)
    metadata = pq.read_metadata(tmp_path / "rollouts" / name)
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [4, 4, 2]
    assert stored_ids(store) == ids(*range(5))


def test_a_broken_part_is_named_and_nothing_is_lost(tmp_path):
    store = make_store(tmp_path)
    seal_groups(store, 0, 1, 2, 3)
    victim = tmp_path / "rollouts" / parts_in(tmp_path)[2]
    content = victim.read_bytes()
    victim.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(RunDirectoryError, match=victim.name):
        store.maintain()
    assert len(parts_in(tmp_path)) == 4 and not list((tmp_path / "rollouts").glob(".*"))
    victim.write_bytes(content)
    store.maintain()
    assert stored_ids(store) == ids(0, 1, 2, 3)


def test_a_part_that_nobody_can_read_does_not_keep_the_others_from_being_merged(tmp_path):
    seal_groups(make_store(tmp_path), 0, 1, 2, 3)
    store = make_store(tmp_path)  # that has to look into them
    store.open_ledger()
    (tmp_path / "rollouts" / "part-zz.parquet").write_bytes(b"")
    for _ in range(2):
        store.maintain()
    store.close()
    [merged, broken] = parts_in(tmp_path)
    assert broken == "part-zz.parquet" and pq.read_metadata(tmp_path / "rollouts" / merged).num_rows == 8


def test_what_may_have_appeared_in_spite_of_an_error_is_not_merged_again(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    seal_groups(store, 0, 1, 2, 3)
    monkeypatch.setattr("penstock.rundir.storage.sync_directory", _fail)
    with pytest.raises(OSError, match="the disk is gone"):
        store.maintain()  # after the rename
    monkeypatch.undo()
    assert len(parts_in(tmp_path)) == 5
    store.maintain()
    assert len(parts_in(tmp_path)) == 5 and stored_ids(store) == ids(0, 1, 2, 3)


def _fail(_):
    raise OSError("the disk is gone")


def test_a_store_that_closes_abandons_the_round(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    seal_groups(store, 0, 1, 2, 3)
    pieces = Compactor._pieces
    reached, go_on = threading.Event(), threading.Event()

    def slow_pieces(self, names):
        for piece in pieces(self, names):
            reached.set()
            assert go_on.wait(10)
            yield piece

    monkeypatch.setattr(Compactor, "_pieces", slow_pieces)
    round_ = threading.Thread(target=store.maintain, daemon=True)
    round_.start()
    assert reached.wait(10)
    store.maintain()  # a second thread has nothing to do meanwhile
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    while not store._compactor._closed:
        assert closing.is_alive()
    go_on.set()
    closing.join(10)
    round_.join(10)
    assert not closing.is_alive() and not round_.is_alive()
    assert len(parts_in(tmp_path)) == 4 and not list((tmp_path / "rollouts").glob(".*"))


_SEALER = """
import sys
from penstock.replay import RolloutStore
from penstock.replay.config import StoreConfig
from tests.replay.stored import group_records

store = RolloutStore(sys.argv[1], StoreConfig(compact_parts=3, compact_rollouts=10, compact_after_s=0), grace_s=0.0)
store.open_ledger()
for number in range(int(sys.argv[2]), 1_000_000):
    store.seal(group_records(f"words-0-{number}"))
    print(number, flush=True)
    store.maintain()
"""


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.attack
def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_double(tmp_path, kills):
    rng = random.Random(kills)
    sealed, merges = -1, set()
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", _SEALER, str(tmp_path), str(sealed + 2)],  # sealed + 1 may be there, unsaid
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()  # it is running
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        said = [first, *process.stdout.readlines()]
        process.wait(10)
        process.stdout.close()
        promised = [int(line) for line in said if line.endswith("\n") and line.strip()]
        sealed = max([sealed, *promised])
        store = RolloutStore(tmp_path)
        found = stored_ids(store)
        merges |= {name for name in parts_in(tmp_path) if replaced_names(pq.read_schema(tmp_path / "rollouts" / name))}
        assert len(found) == len(set(found)), "double"
        assert set(ids(*promised)) <= set(found), "lost"
        assert sorted(store.history().sealed) == sorted(found)
    assert merges or kills < 10
    store.open_ledger()
    after = stored_ids(store)
    assert sorted(after) == sorted(found) and not list((tmp_path / "rollouts").glob(".*"))
    store.close()
