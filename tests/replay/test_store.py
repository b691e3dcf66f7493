"""The store on disk: what it writes, what others read while it writes, and what it refuses."""

import dataclasses
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.replay.stored import HandClock, example, group_records, parts_in

from penstock.replay import ReplayBufferConfig, RolloutStore
from penstock.replay.config import StoreConfig
from penstock.replay.history import ExperienceFormat
from penstock.rundir import RunDirectory, read_json_lines, table_from_examples, table_from_records
from penstock.rundir.parquet import versioned
from penstock.types import PackedRollout, RolloutRecord, RunDirectoryError, SchemaVersionError, WeightVersion


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", {})


@pytest.fixture
def run(sim, directory):
    """Three updates of a simulated run, on disk."""
    store = RolloutStore(directory)
    config = ReplayBufferConfig(groups_per_batch=2, staleness_budget=1)
    simulation = sim.Simulation(config, sim.World(failing=0.1), store, store.open_ledger())
    simulation.run(3)
    yield simulation
    store.close()


def records(sim, ticket, size=2):
    return [RolloutRecord(sim.make_rollout(f"{ticket}/{i}"), ticket, "words:1") for i in range(size)]


def test_files_have_the_names_of_the_documentation(run, directory):
    parts = [path.name for path in directory.rollouts.iterdir()]
    batches = [path.name for path in directory.batches.iterdir()]
    assert parts and all(name.startswith("part-") and name.endswith(".parquet") for name in parts)
    assert len(batches) == 3 and {path.rsplit("_", 1)[0].count("_") for path in batches} == {1}
    assert {update.batch.batch_id + ".parquet" for update in run.trained} == set(batches)


def test_whoever_counts_the_time_is_told_of_each_write(sim, directory):
    writes = []

    def files():
        return len(list(directory.rollouts.iterdir())), len(list(directory.batches.iterdir()))

    @contextmanager
    def counted():
        writes.append(files())
        yield
        writes.append(files())

    store = RolloutStore(directory, writing=counted)
    store.seal(records(sim, "easy-0-0"))
    store.write_batch("batch_1", [example("easy-0-0/0")], 0, 0)
    assert writes == [(0, 0), (1, 0), (1, 0), (1, 1)]


def test_groups_come_back_whole_and_by_name(run, directory):
    store = RolloutStore(directory)
    wanted = run.trained[0].batch.group_ids
    found = store.read_records(wanted)
    assert {record.group_id for record in found} == set(wanted)
    expected = [i for example in run.trained[0].batch.examples for i in example.rollout_ids]
    assert sorted(record.rollout.rollout_id for record in found) == sorted(expected)
    assert all(record.group_key for record in found)
    assert len(store.read_records()) > len(found)


def test_a_batch_comes_back_as_it_was_trained(run, directory):
    update = run.trained[1]
    back = RolloutStore(directory).read_batch(update.batch.batch_id)
    for stored, trained in zip(back, update.batch.examples, strict=True):
        assert stored.rollout_ids == trained.rollout_ids
        assert stored.tokens.tolist() == trained.tokens.tolist()
        assert stored.advantage.tolist() == trained.advantage.tolist()
        assert stored.weight_steps.tolist() == trained.weight_steps.tolist()


def test_the_history_is_that_of_the_run(run, directory):
    history = RolloutStore(directory).history()
    counts = run.ledger.snapshot()
    assert sum(history.started.values()) == counts["started"]
    assert sum(logged.fate == "trained" for logged in history.fates.values()) == counts["trained"]
    assert sorted(batch.version.step for batch in history.batches) == [0, 1, 2]
    uses = history.uses(lambda version: True, 3)
    assert set(uses.values()) == {1} and len(uses) == counts["trained"]
    assert history.uses(lambda version: True, 1).total() == len(run.trained[0].batch.examples)


def test_fates_name_rollout_fate_step_and_reason(run, directory):
    rows = list(read_json_lines(directory.fates_path))
    trained = next(row for row in rows if row["fate"] == "trained")
    assert trained["reason"] == f"trained by update {trained['step']}" and trained["lineage"] == 0
    assert {"rollout_id", "fate", "step", "reason", "lineage", "time"} == set(trained)


def test_pandas_and_duckdb_read_the_files_while_they_are_written(sim, directory):
    store = RolloutStore(directory)
    done = threading.Event()

    def write():
        for number in range(40):
            store.seal(records(sim, f"easy-0-{number}"))
        done.set()

    store.seal(records(sim, "easy-0-999"))
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    looks = 0
    while not done.is_set() or looks == 0:
        frame = pd.read_parquet(directory.rollouts)
        [(groups, rows)] = duckdb.sql(
            f"select count(distinct group_id), count(*) from '{directory.rollouts}/*.parquet'"
        ).fetchall()
        assert rows == 2 * groups and len(frame) == 2 * frame["group_id"].nunique()  # groups are never split
        looks += 1
    writer.join(30)
    assert pd.read_parquet(directory.rollouts)["group_id"].nunique() == 41


def test_fates_join_rows_by_sql(run, directory):
    rows = duckdb.sql(
        f"""
        with last as (select rollout_id, last(fate order by time) as fate
                      from read_json_auto('{directory.fates_path}', format='newline_delimited') group by 1)
        select fate, count(*) from '{directory.rollouts}/*.parquet' left join last using (rollout_id) group by 1
        """
    ).fetchall()
    assert dict(rows)["trained"] == run.ledger.snapshot()["trained"]


def test_a_newer_file_is_refused_by_every_reader(sim, directory):
    table = table_from_records(records(sim, "easy-0-1"))
    newer = table.replace_schema_metadata({b"penstock.schema_version": b"2"})
    pq.write_table(newer, directory.rollouts / "part-x.parquet")
    store = RolloutStore(directory)
    with pytest.raises(SchemaVersionError, match="part-x.parquet has schema version 2"):
        store.read_records()
    with pytest.raises(SchemaVersionError, match="part-x.parquet has schema version 2"):
        store.history()


def test_a_newer_batch_is_refused_too(directory):
    table = table_from_examples([example("easy-0-1/0")], "batch_x_1", 0, 0)
    newer = table.replace_schema_metadata({b"penstock.schema_version": b"2"})
    pq.write_table(newer, directory.batches / "batch_x_1.parquet")
    store = RolloutStore(directory)
    for refuse in (store.history, lambda: store.read_batch("batch_x_1")):
        with pytest.raises(SchemaVersionError, match="batch_x_1.parquet has schema version 2.*Penstock that wrote it"):
            refuse()


def test_rows_of_the_original_form_are_read_and_make_no_history(directory):
    table = pa.table(
        {
            "env_name": ["cats"],
            "env_example_id": ["1"],
            "prompt_tokens": pa.array([[1, 2]], pa.list_(pa.int64())),
            "response_tokens": pa.array([[4, 5]], pa.list_(pa.int64())),
            "response_logprobs": pa.array([[-1.0, -2.0]], pa.list_(pa.float64())),
            "token_rewards": pa.array([[0.0, 1.0]], pa.list_(pa.float32())),
            "episode_reward": [1.0],
        }
    )
    pq.write_table(table, directory.rollouts / "part-old.parquet")
    store = RolloutStore(directory, StoreConfig(max_bytes=1))
    assert [record.rollout.rollout_id for record in store.read_records()] == ["part-old-1/0"]
    assert store.history().sealed == {}
    assert store.expendable(["part-old-1"]) == ("rollouts/part-old.parquet",)  # its rows belong to no ticket


def test_a_plain_path_will_do(tmp_path):
    store = RolloutStore(str(tmp_path / "new" / "place"))
    assert (tmp_path / "new" / "place" / "rollouts").is_dir() and (tmp_path / "new" / "place" / "batches").is_dir()
    store.seal(group_records("easy-0-1"))
    store.write_batch("batch_x_1", [example("easy-0-1/0")], 0, 0)
    assert len(RolloutStore(tmp_path / "new" / "place").history().sealed) == 2


def test_a_path_where_no_folder_can_be_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="no rollouts can be stored in .*file: .*Not a directory"):
        RolloutStore(tmp_path / "file")


def test_opening_a_store_to_read_touches_nothing_of_its_writer(directory):
    unfinished = directory.rollouts / ".part-1.parquet.0a.tmp"
    unfinished.write_text("half")
    store = RolloutStore(directory.path)
    assert store.read_records() == [] and unfinished.exists()
    store.open_ledger()
    assert not unfinished.exists()
    store.close()


def test_packed_rollouts_are_stored_as_they_were(directory):
    plain = group_records("easy-0-1")
    packed = [dataclasses.replace(record, rollout=PackedRollout(record.rollout)) for record in plain]
    assert table_from_records(packed).equals(table_from_records(plain))
    store = RolloutStore(directory)
    store.seal(packed)
    assert table_from_records(store.read_records()).equals(table_from_records(plain))


def test_parts_come_back_in_the_order_of_sealing(directory):
    store = RolloutStore(directory, clock=lambda: 5.0)  # a clock that stands still
    for number in range(20):
        store.seal(group_records(f"easy-0-{number}", 1))
    assert [record.group_id for record in store.read_records()] == [f"easy-0-{number}" for number in range(20)]


FRAGMENTS = versioned(
    [pa.field(name, pa.string()) for name in ("rollout_id", "group_id")]
    + [pa.field(name, pa.int32()) for name in ("lineage", "newest_weight_step", "observation")]
)
STEPS = versioned(
    [pa.field("lineage", pa.int32()), pa.field("step", pa.int32()), pa.field("rollout_ids", pa.list_(pa.string()))]
)


def test_experience_of_another_kind_goes_through_the_same_store(tmp_path):
    fragments = ExperienceFormat(
        folder="fragments",
        to_table=lambda rows: pa.Table.from_pylist(list(rows), FRAGMENTS),
        from_table=lambda table, name: [SimpleNamespace(**row) for row in table.to_pylist()],
        batch_folder="batches",
        batch_to_table=lambda rows, batch_id, step, lineage: pa.Table.from_pylist(
            [{"lineage": lineage, "step": step, "rollout_ids": list(rows)}], STEPS
        ),
        batch_from_table=lambda table, name: table.column("rollout_ids").to_pylist(),
    )
    store = RolloutStore(tmp_path, StoreConfig(compact_parts=2, compact_after_s=0, max_bytes=1), experience=fragments)
    for number in range(3):
        row = {
            "rollout_id": f"pong-0-{number}/0",
            "group_id": f"pong-0-{number}",
            "lineage": 0,
            "newest_weight_step": 4,
        }
        store.seal([{**row, "observation": number}])
    store.write_batch("batch_x_1", ["pong-0-1/0"], 4, 0)
    store.maintain()
    assert [row.observation for row in store.read_records()] == [0, 1, 2]
    assert [row.observation for row in store.read_records(["pong-0-1"])] == [1]
    history = store.history()
    assert history.sealed["pong-0-2/0"].newest_version == WeightVersion(0, 4)
    assert history.batches[0].rollout_ids == ("pong-0-1/0",) and store.read_batch("batch_x_1") == [["pong-0-1/0"]]
    store.close()
    assert len(list((tmp_path / "fragments").iterdir())) == 1
    assert store.expendable(["pong-0-0"]) == ("batches/batch_x_1.parquet",)


def test_an_empty_batch_file_is_named(directory):
    store = RolloutStore(directory)
    store.write_batch("batch_x_1", [], 0, 0)
    with pytest.raises(RunDirectoryError, match="batch_x_1.parquet holds no examples"):
        store.history()


def test_states_are_json(run):
    states = {"issuer": run.issuer.state(), "replay": run.buffer.state()}
    assert json.loads(json.dumps(states)) == states


def test_a_closed_store_writes_no_more_fates(directory):
    store = RolloutStore(directory)
    ledger = store.open_ledger()
    store.close()
    with pytest.raises(RunDirectoryError, match="fates.jsonl is closed"):
        ledger.log_fates([("a/0", "invalid", "")], 0)


def _rows(store):
    return [record.rollout.rollout_id for record in store.read_records()]


def _fail(_):
    raise OSError(5, "Input/output error")


def test_a_part_that_appeared_although_its_write_failed_is_written_over(directory, monkeypatch):
    store = RolloutStore(directory)
    store.seal(group_records("easy-0-0"))
    with monkeypatch.context() as patch:
        patch.setattr("penstock.rundir.storage.sync_directory", _fail)
        with pytest.raises(OSError, match="Input/output"):
            store.seal(group_records("easy-0-1"))  # after the rename
        with pytest.raises(OSError, match="Input/output"):
            store.seal(group_records("easy-0-1") + group_records("easy-0-2"))  # with what came meanwhile
    assert len(parts_in(directory.path)) == 2
    store.seal(group_records("easy-0-1") + group_records("easy-0-2") + group_records("easy-0-3"))
    store.seal(group_records("easy-0-4"))
    assert len(parts_in(directory.path)) == 3
    frame = pd.read_parquet(directory.rollouts)
    assert list(frame["rollout_id"]) == [f"easy-0-{number}/{index}" for number in range(5) for index in range(2)]
    assert store.bytes == sum(path.stat().st_size for path in directory.rollouts.iterdir())


def test_a_write_of_other_groups_does_not_take_its_name(directory, monkeypatch):
    store = RolloutStore(directory)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.rundir.storage.sync_directory", _fail)
        with pytest.raises(OSError):
            store.seal(group_records("easy-0-1"))
    store.seal(group_records("easy-0-2"))
    store.seal(group_records("easy-0-1"))
    assert _rows(store) == ["easy-0-1/0", "easy-0-1/1", "easy-0-2/0", "easy-0-2/1"]


def test_a_part_that_will_be_written_over_is_neither_merged_nor_offered(directory, monkeypatch):
    RolloutStore(directory).seal(group_records("easy-0-0"))
    store = RolloutStore(directory, StoreConfig(compact_parts=2, compact_after_s=0, max_bytes=1))
    with monkeypatch.context() as patch:
        patch.setattr("penstock.rundir.storage.sync_directory", _fail)
        with pytest.raises(OSError):
            store.write_batch("batch_x_1", [example("easy-0-0/0")], 0, 0)
        with pytest.raises(OSError):
            store.seal(group_records("easy-0-1"))
    names = parts_in(directory.path)
    store.maintain()
    assert parts_in(directory.path) == names
    assert store.expendable([]) == (f"rollouts/{names[0]}",)
    store.seal(group_records("easy-0-1") + group_records("easy-0-2"))
    assert store.expendable([]) == tuple(f"rollouts/{name}" for name in names)


def test_a_listing_that_fails_after_the_write_is_no_second_part(directory, monkeypatch):
    store = RolloutStore(directory)
    store.seal(group_records("easy-0-0"))
    with monkeypatch.context() as patch:
        patch.setattr(store._inventory, "add", lambda *_: _fail(_))
        with pytest.raises(OSError):
            store.seal(group_records("easy-0-1"))
    store.seal(group_records("easy-0-1"))
    assert len(parts_in(directory.path)) == 2 and len(_rows(store)) == 4


def test_a_rollout_that_is_in_two_parts_is_read_once(directory):
    for _ in range(2):
        RolloutStore(directory).seal(group_records("easy-0-1"))
    store = RolloutStore(directory)
    assert _rows(store) == ["easy-0-1/0", "easy-0-1/1"] and len(store.read_records(["easy-0-1"])) == 2


@pytest.mark.attack
def test_the_order_of_sealing_survives_a_clock_that_steps_back(directory):
    clock = HandClock()
    RolloutStore(directory, clock=clock).seal(group_records("easy-0-0", 1))
    clock.now -= 60
    store = RolloutStore(directory, clock=clock)
    store.seal(group_records("easy-0-1", 1))
    assert _rows(store) == ["easy-0-0/0", "easy-0-1/0"]


@pytest.mark.parametrize("folder", ["rollouts", "batches"])
def test_a_part_that_cannot_be_read_is_named_with_the_remedy(directory, folder):
    broken = directory.path / folder / "part-x.parquet"
    broken.write_bytes(b"")
    with pytest.raises(RunDirectoryError, match=rf"part-x.parquet cannot be read .* move it out of {folder}/:"):
        RolloutStore(directory).history()
    broken.unlink()
    assert RolloutStore(directory).history().sealed == {}


@pytest.mark.parametrize("metadata", [b"[]", b"{", b'{"weight_step": "soon"}', b'{"timestamp": null}'])
def test_metadata_of_the_original_form_that_is_none_is_named(directory, metadata):
    table = pa.table(
        {
            "env_name": ["cats"], "env_example_id": ["1"], "prompt_tokens": [[1]], "response_tokens": [[4]],
            "response_logprobs": [[-1.0]], "token_rewards": [[1.0]], "episode_reward": [1.0],
        }
    ).replace_schema_metadata({b"penstock.batch_metadata": metadata})  # fmt: skip
    pq.write_table(table, directory.rollouts / "part-old.parquet")
    with pytest.raises(RunDirectoryError, match="part-old: penstock.batch_metadata is .* which is not a JSON object"):
        RolloutStore(directory).read_records()
