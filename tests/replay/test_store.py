"""The store on disk: what it writes, what others read while it writes, and what it refuses."""

import json
import threading

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest

from penstock.replay import ReplayBufferConfig, RolloutStore
from penstock.rundir import RunDirectory, read_json_lines, table_from_records
from penstock.types import RolloutRecord, RunDirectoryError, SchemaVersionError


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
    return [RolloutRecord(sim.make_rollout(f"{ticket}/{i}"), ticket, {}, "words:1") for i in range(size)]


def test_files_have_the_names_of_the_documentation(run, directory):
    parts = [path.name for path in directory.rollouts.iterdir()]
    batches = [path.name for path in directory.batches.iterdir()]
    assert parts and all(name.startswith("part-") and name.endswith(".parquet") for name in parts)
    assert len(batches) == 3 and {path.rsplit("_", 1)[0].count("_") for path in batches} == {1}
    assert {update.batch.batch_id + ".parquet" for update in run.trained} == set(batches)


def test_groups_come_back_whole_and_by_name(run, directory):
    store = RolloutStore(directory)
    wanted = run.trained[0].batch.group_ids
    found = store.read_records(wanted)
    assert {record.group_id for record in found} == set(wanted)
    expected = [i for example in run.trained[0].batch.examples for i in example.rollout_ids]
    assert sorted(record.rollout.rollout_id for record in found) == sorted(expected)
    assert all(record.timings["generate_s"] >= 0 and record.group_key for record in found)
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
