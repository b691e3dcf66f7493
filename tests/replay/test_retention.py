"""The disk budget: what goes, what never goes, and what is seen when nothing may go."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.replay.stored import HandClock, example, group_records, parts_in

from penstock.replay import RolloutStore
from penstock.replay.config import StoreConfig
from penstock.replay.parts import Entry, choose_expendable


def make_store(path, clock, **config):
    return RolloutStore(path, StoreConfig(**{"compact_after_s": 0, **config}), clock, grace_s=5.0)


def fill(store, clock, count=4):
    """Groups 0 to count - 1, one part and one batch each, ten seconds apart."""
    for number in range(count):
        clock.now += 9
        store.seal(group_records(f"words-0-{number}"))
        clock.now += 1
        batch = f"batch_{number:032x}_{int(clock.now * 1000)}"
        store.write_batch(batch, [example(f"words-0-{number}/0"), example(f"words-0-{number}/1")], number, 0)


def sizes(path):
    return {f"{p.parent.name}/{p.name}": p.stat().st_size for p in path.glob("*/*.parquet")}


def groups(store):
    return list(dict.fromkeys(record.group_id for record in store.read_records()))


@pytest.fixture
def clock():
    return HandClock()


def test_nothing_goes_without_a_cap_or_below_it(tmp_path, clock):
    store = make_store(tmp_path, clock)
    fill(store, clock)
    assert store.expendable([]) == () and not store.over_cap
    assert store.bytes == sum(sizes(tmp_path).values())
    store = make_store(tmp_path, clock, max_bytes=store.bytes)
    assert store.expendable([]) == () and not store.over_cap


def test_the_oldest_parts_and_batches_go_until_the_rest_fits(tmp_path, clock):
    fill(make_store(tmp_path, clock), clock)
    before = sizes(tmp_path)
    oldest = sorted(before, key=lambda name: (tmp_path / name).stat().st_mtime_ns)
    store = make_store(tmp_path, clock, max_bytes=sum(before[name] for name in oldest[3:]))
    assert store.over_cap
    names = store.expendable([])
    assert list(names) == oldest[:3]
    assert sizes(tmp_path) == before  # the checkpoint is not there yet
    store.expire(names)
    assert set(sizes(tmp_path)) == set(oldest[3:])
    assert store.bytes == sum(sizes(tmp_path).values()) and not store.over_cap
    assert groups(store) == ["words-0-2", "words-0-3"]


def test_files_with_a_live_group_stay_and_so_do_its_batches(tmp_path, clock):
    store = make_store(tmp_path, clock, max_bytes=1)
    fill(store, clock)
    store.expire(store.expendable(["words-0-0", "words-0-2"]))
    assert groups(store) == ["words-0-0", "words-0-2"]
    kept = [batch.rollout_ids[0] for batch in store.history().batches]
    assert sorted(kept) == ["words-0-0/0", "words-0-2/0"]
    assert store.over_cap  # and that can be seen
    assert store.expendable(["words-0-0", "words-0-2"]) == ()
    store.expire(store.expendable([]))
    assert sizes(tmp_path) == {} and store.bytes == 0 and not store.over_cap


def test_one_live_group_keeps_its_whole_file(tmp_path, clock):
    store = make_store(tmp_path, clock, max_bytes=1)
    store.seal(group_records("words-0-0") + group_records("words-0-1"))
    assert store.expendable(["words-0-1"]) == ()
    assert len(store.expendable(["words-0-2"])) == 1


def test_no_file_goes_before_its_time(tmp_path, clock):
    store = make_store(tmp_path, clock, max_bytes=1, retention_s=25.0)
    fill(store, clock)  # 31 and 30, 21 and 20, 11 and 10, 1 and 0 seconds ago
    store.expire(store.expendable([]))
    assert groups(store) == ["words-0-1", "words-0-2", "words-0-3"] and store.over_cap
    clock.now += 10
    store.expire(store.expendable([]))
    assert groups(store) == ["words-0-2", "words-0-3"]


def test_ages_survive_a_restart_and_a_merge(tmp_path, clock):
    store = make_store(tmp_path, clock, compact_parts=2)
    fill(store, clock, 2)
    clock.now += 1000
    store.maintain()
    store.close()
    assert len(parts_in(tmp_path)) == 1
    store = make_store(tmp_path, clock, max_bytes=1, retention_s=999.0)
    assert len(store.expendable([])) == 3  # made when its newest rollouts were, not when it was merged


def test_what_was_merged_between_the_two_calls_is_not_touched(tmp_path, clock):
    store = make_store(tmp_path, clock, max_bytes=1, compact_parts=2)
    fill(store, clock, 3)
    store.maintain()  # parts are replaced, and wait for their time
    names = store.expendable(["words-0-2"])
    assert all(name.startswith("batches/") for name in names) and len(names) == 2
    clock.now += 100
    store.maintain()
    [merged] = parts_in(tmp_path)
    stale = [f"rollouts/part-{number}.parquet" for number in range(3)]
    store.expire([*names, *stale, f"rollouts/{merged}"])
    assert parts_in(tmp_path) == [merged] and groups(store) == [f"words-0-{number}" for number in range(3)]
    assert store.expendable(["words-0-2"]) == ()
    assert f"rollouts/{merged}" in store.expendable([])


def test_what_was_offered_is_not_merged_until_it_is_offered_anew(tmp_path, clock):
    store = make_store(tmp_path, clock, max_bytes=1, compact_parts=2)
    fill(store, clock, 3)
    names = store.expendable(["words-0-2"])
    before = parts_in(tmp_path)
    store.maintain()
    assert parts_in(tmp_path) == before  # one part alone is not merged
    assert store.expendable([f"words-0-{number}" for number in range(3)]) == ()  # that checkpoint failed
    store.expire(names)
    assert parts_in(tmp_path) == before
    store.maintain()
    assert len(parts_in(tmp_path)) == 4


def test_a_file_that_somebody_deleted_is_no_error(tmp_path, clock):
    store = make_store(tmp_path, clock, max_bytes=1)
    fill(store, clock, 2)
    (tmp_path / "rollouts" / parts_in(tmp_path)[0]).unlink()
    store.expire(store.expendable([]))
    assert sizes(tmp_path) == {} and store.bytes == 0


def test_a_file_that_cannot_be_read_stays(tmp_path, clock):
    fill(make_store(tmp_path, clock), clock, 2)
    store = make_store(tmp_path, clock, max_bytes=1, compact_parts=0, compact_after_s=600)
    store.open_ledger()
    broken = tmp_path / "rollouts" / parts_in(tmp_path)[0]
    broken.write_bytes(b"PAR1" + bytes(100))
    broken.with_name("part-zz.parquet").write_bytes(b"")
    for _ in range(2):
        store.expire(store.expendable([]))
        assert set(parts_in(tmp_path)) == {broken.name, "part-zz.parquet"} and store.over_cap
    store.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.sets(st.integers(0, 9), max_size=3)), max_size=12),
    st.sets(st.integers(0, 9)),
    st.integers(-10, 300),
    st.integers(0, 12),
)
def test_the_choice_frees_enough_or_all_that_may_go_and_nothing_live(files, live, excess, young):
    entries = [Entry(f"rollouts/{i}.parquet", size, float(i)) for i, (size, _) in enumerate(files)]
    content = {entry.name: frozenset(map(str, groups)) for entry, (_, groups) in zip(entries, files, strict=True)}
    live = {str(group) for group in live}
    chosen = choose_expendable(entries, excess, live, float(len(files) - young), lambda entry: content[entry.name])
    assert not set(chain.from_iterable(content[entry.name] for entry in chosen)) & live
    may_go = [e for e in entries if not content[e.name] & live and e.made_at_s <= len(files) - young]
    assert chosen == may_go[: len(chosen)]  # the oldest
    freed = sum(entry.size_bytes for entry in chosen)
    assert freed >= excess or chosen == may_go
    assert not chosen or freed - chosen[-1].size_bytes < excess  # and no more than that
