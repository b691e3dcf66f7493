import threading

import duckdb
import pyarrow as pa
import pytest

from penstock.dashboard import index as module
from penstock.dashboard.index import AGE, STAGES, RunIndex, _turns
from penstock.rundir import JsonLinesLog, RunDirectory, write_examples, write_records
from penstock.rundir.parquet import PAIRS, read_parquet, replacing, write_parquet
from penstock.rundir.rollout_rows import table_from_records
from tests.dashboard.sample_run import SPENT, example, group, write_run

STATES = """
SELECT coalesce(state, 'waiting') AS state, count(*) AS n, count(part) AS stored FROM rollouts GROUP BY 1 ORDER BY 1
"""


def read(index):
    return list(index.read_on())


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return write_run(tmp_path / "run")


@pytest.fixture
def index(directory, tmp_path):
    made = RunIndex(directory, tmp_path / "cache")
    read(made)
    yield made
    made.close()


def test_every_rollout_has_one_row_the_aborted_without_a_place_too(index):
    assert index.rows(STATES) == [
        {"state": "aborted", "n": 2, "stored": 0},
        {"state": "stale_step", "n": 2, "stored": 2},
        {"state": "trained", "n": 8, "stored": 8},
        {"state": "waiting", "n": 4, "stored": 4},
    ]


def test_steps_are_those_of_the_metrics_and_ages_those_of_the_update(index):
    rows = index.rows(
        f"""SELECT g.group_id, min(r.step) AS step, max({AGE}) AS age, max(r.advantage) AS most,
               any_value(r.reason) AS why
        FROM rollouts r JOIN groups g USING (g) GROUP BY 1 ORDER BY 1"""
    )
    found = {row["group_id"]: row for row in rows}
    assert found["cats-0-0"]["step"] == 1 and found["cats-0-0"]["age"] == 0  # update 0 made version 1 of version 0
    assert found["cats-0-0"]["most"] == pytest.approx(0.5)
    assert found["tools-0-0"]["step"] == 2 and found["tools-0-0"]["most"] is None  # a row that several share says none
    assert found["cats-0-10"]["step"] == 3  # in the batch of the update that is being computed
    assert found["cats-0-3"]["step"] == 2 and found["cats-0-3"]["age"] == 2
    assert found["cats-0-3"]["why"] == "weight step 0 is too old"
    assert found["cats-0-5"]["why"] == "the update waited too long"
    assert found["cats-0-2"]["step"] is None and found["cats-0-2"]["most"] is None


def test_seconds_by_stage_are_there_where_a_run_has_them(index):
    keys = [key for key in SPENT if key in STAGES]
    rows = index.rows(
        f"""SELECT {", ".join(STAGES[key] for key in keys)}, turns FROM rollouts r JOIN groups g USING (g)
        WHERE group_id = 'tools-0-0' ORDER BY position"""
    )
    of_turns = [0, 20, 30, 60, 30] + [10, 0, 20, 40, 0]  # rest before it, waiting, prefill, decode, tools behind it
    assert list(rows[0].values()) == [*(1000 * SPENT[key] for key in keys), of_turns]
    assert list(rows[1].values()) == [None] * 6


def test_the_seconds_of_turns_are_those_of_their_own_rollouts():
    answered, tool = {"decode_s": 0.25}, {"tool_s": 0.5}
    told = [[{}, tool, answered, {}, tool], None, [{}, {}], [tool], [answered, answered, tool, tool]]
    kind = pa.list_(pa.struct([("timings", PAIRS)]))
    rows = [None if one is None else [{"timings": list(turn.items())} for turn in one] for one in told]
    found = _turns(6, iter([pa.array(rows[:2], kind), pa.array(rows[2:] + [[{"timings": None}]], kind)]))
    first, last = [0, 0, 0, 250, 500], [0, 0, 0, 250, 0] + [0, 0, 0, 250, 500]
    assert found.to_pylist() == [first, None, None, None, last, None]
    assert _turns(2, iter(())).to_pylist() == [None, None]


def test_a_part_of_before_there_were_seconds_of_turns_is_read_beside_newer_ones(directory, tmp_path):
    def rows_of(index):
        return index.rows("SELECT group_id, position, r.* EXCLUDE (g, part) FROM rollouts r JOIN groups g USING (g) "
                          "ORDER BY ALL")  # fmt: skip

    new = RunIndex(directory, None)
    read(new)
    path = directory.rollouts / "part-b.parquet"
    table = read_parquet(path)
    older = table.schema.field("turns").type.value_type
    kind = pa.list_(pa.struct([field for field in older if field.name != "timings"]))
    at = table.schema.get_field_index("turns")
    plain = [[{k: v for k, v in turn.items() if k != "timings"} for turn in turns] for turns in
             table.column("turns").to_pylist()]  # fmt: skip
    path.unlink()
    write_parquet(path, table.set_column(at, "turns", pa.array(plain, kind)))
    old = RunIndex(directory, None)
    read(old)
    before, after = rows_of(new), rows_of(old)
    assert sum(row["turns"] is not None for row in before) == 1
    assert [row | {"turns": None} for row in before] == after and not old.damaged
    new.close()
    old.close()


def decide(directory, rollout_id, fate, step, reason="why", lineage=0):
    log = JsonLinesLog(directory.fates_path)
    log.append(
        {"rollout_id": rollout_id, "fate": fate, "reason": reason, "step": step, "lineage": lineage, "time": 9.0}
    )
    log.close()


def test_a_second_look_reads_nothing_and_a_new_line_only_itself(index, directory):
    version = index.version
    assert read(index) == []
    decide(directory, "cats-0-2/0", "filtered", 2)
    assert len(read(index)) == 1 and index.version > version
    assert index.rows("SELECT count(*) AS n FROM rollouts WHERE state = 'filtered'") == [{"n": 1}]


def test_a_look_at_files_that_have_not_changed_asks_the_index_nothing(index, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RunIndex, "rows", lambda *_: pytest.fail("it asked"))
        patched.setattr(RunIndex, "_writing", lambda *_: pytest.fail("it wrote"))
        assert read(index) == []


def test_it_goes_on_where_the_last_one_ended_and_is_made_again_when_deleted(directory, tmp_path):
    cache = tmp_path / "cache"
    first = RunIndex(directory, cache)
    read(first)
    before = first.rows(STATES)
    first.close()
    again = RunIndex(directory, cache)
    assert read(again) == [] and again.rows(STATES) == before
    again.close()
    for path in cache.iterdir():
        path.write_bytes(b"no DuckDB")
    anew = RunIndex(directory, cache)
    assert read(anew) and anew.rows(STATES) == before
    anew.close()


def test_another_version_of_the_tables_is_made_again(directory, tmp_path, monkeypatch):
    first = RunIndex(directory, tmp_path)
    read(first)
    before = first.rows(STATES)
    first.close()
    monkeypatch.setattr(module, "VERSION", 99)
    again = RunIndex(directory, tmp_path)
    assert read(again) and again.rows(STATES) == before
    again.close()


def test_a_merged_part_takes_the_places_over_while_the_old_ones_are_there_and_after(index, directory):
    old = sorted(directory.rollouts.iterdir())
    records = group("cats-0-0", [("dog", 0.0), ("cat cat", 0.5), ("cat", 1.0), ("cat", 1.0)])
    records += group("cats-0-3", [("dog", 0.0), ("cat", 1.0)])
    table = table_from_records(records)
    names = [old[0].name]
    write_parquet(directory.rollouts / "part-z.parquet", table.cast(replacing(table.schema, names)))
    before = index.rows(STATES)
    read(index)
    assert index.rows(STATES) == before
    assert {row["name"] for row in index.part_of("cats-0-0")} == {"rollouts/part-z.parquet"}
    old[0].unlink()
    read(index)
    assert index.rows(STATES) == before


def test_large_parts_are_entered_one_by_one_and_small_ones_together(directory, monkeypatch):
    def portions():
        index = RunIndex(directory, None)
        pieces = [piece for piece in read(index) if "rollouts" in piece]
        index.close()
        return pieces

    assert portions() == ["3 files of rollouts"]
    monkeypatch.setattr(module, "PORTION_BYTES", 1)
    assert portions() == ["1 files of rollouts"] * 3


@pytest.mark.parametrize("rows_at_once", [1, 4, module.ROWS])
def test_of_a_rollout_in_two_new_parts_the_later_counts(directory, index, monkeypatch, rows_at_once):
    """Parts of up to `ROWS` are worked out together, larger ones on their own: what is kept is the same."""
    whole = "SELECT group_id, r.* EXCLUDE (part, g), p.name FROM rollouts r JOIN groups USING (g) JOIN parts p USING "
    whole += "(part) WHERE evaluation IS NULL ORDER BY group_id, position"
    before = index.rows(whole)
    table = table_from_records(group("cats-0-0", [("dog", 0.0), ("cat cat", 0.25), ("cat", 1.0), ("cat", 1.0)]))
    write_parquet(directory.rollouts / "part-z.parquet", table)  # sorted behind the part that has them with 0.5
    monkeypatch.setattr(module, "ROWS", rows_at_once)
    anew = RunIndex(directory, None)
    read(anew)
    found = anew.rows(whole)
    anew.close()
    own = [row for row in found if row["group_id"] == "cats-0-0"]
    assert [row["reward"] for row in own] == [0.0, 0.25, 1.0, 1.0]
    assert {row["name"] for row in own} == {"rollouts/part-z.parquet"}
    assert [row for row in found if row["group_id"] != "cats-0-0"] == [r for r in before if r["group_id"] != "cats-0-0"]


def test_what_has_expired_keeps_its_row_without_a_place(index, directory):
    (directory.rollouts / "part-a.parquet").unlink()
    read(index)
    assert [row["name"] for row in index.part_of("cats-0-0")] == [None] * 4
    assert [row["reward"] for row in index.part_of("cats-0-0")] == [0.0, 0.5, 1.0, 1.0]


def test_a_part_that_cannot_be_read_is_named_and_the_others_are_there(directory, tmp_path):
    (directory.rollouts / "part-b.parquet").write_bytes(b"PAR1 half")
    index = RunIndex(directory, None)
    read(index)
    assert list(index.damaged) == ["rollouts/part-b.parquet"] and "part-b" in index.damaged["rollouts/part-b.parquet"]
    assert len(index.part_of("cats-0-0")) == 4
    whole = tmp_path / "whole.parquet"
    write_records(whole, group("cats-0-88", [("a cat", 1.0)], (2,), timestamp=2e9))
    (directory.rollouts / "part-b.parquet").write_bytes(whole.read_bytes())
    read(index)
    assert not index.damaged and len(index.part_of("cats-0-88")) == 1
    index.close()


def test_a_resume_takes_back_the_advantages_of_updates_that_do_not_count(index, directory):
    (directory.path / "lineages.jsonl").write_text('{"lineage": 1, "parent": 0, "step": 1, "time": 9.0}\n')
    for position in range(2):
        decide(directory, f"cats-0-1/{position}", "rolled_back", 1, lineage=1)
    read(index)
    rows = index.rows(
        """SELECT group_id, max(advantage) AS most, max(step) AS step, any_value(state) AS state
        FROM rollouts JOIN groups USING (g) GROUP BY 1"""
    )
    found = {row["group_id"]: row for row in rows}
    assert found["cats-0-1"] == {"group_id": "cats-0-1", "most": None, "step": 1, "state": "rolled_back"}
    assert found["cats-0-0"]["most"] == pytest.approx(0.5)
    assert found["cats-0-10"] == {"group_id": "cats-0-10", "most": None, "step": None, "state": None}  # it waits again


@pytest.mark.attack
def test_nothing_is_written_into_the_run(directory, tmp_path):
    def seen():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in directory.path.rglob("*")}

    before = seen()
    index = RunIndex(directory, tmp_path / "cache")
    read(index)
    index.close()
    assert seen() == before


def test_where_another_has_the_file_open_it_is_made_in_memory(directory, tmp_path, monkeypatch):
    def locked(path):
        if path is not None:
            raise duckdb.IOException('Could not set lock on file "x": Conflicting lock is held')
        return original(path)

    original = module._connected
    monkeypatch.setattr(module, "_connected", locked)
    index = RunIndex(directory, tmp_path)
    assert index.where.startswith("in memory (") and "lock" in index.where
    assert index.rows("SELECT current_setting('memory_limit') AS most") == [{"most": "3.7 GiB"}]  # it has nothing else
    assert read(index)
    index.close()


def test_it_can_be_asked_while_it_is_read(directory):
    index = RunIndex(directory, None)
    counts: list[int] = []
    done = threading.Event()

    def ask():
        while not done.is_set():
            counts.append(index.rows("SELECT count(*) AS n FROM rollouts")[0]["n"])

    asking = threading.Thread(target=ask)
    asking.start()
    for number in range(20):
        write_records(directory.rollouts / f"part-m{number}.parquet", group(f"cats-1-{number}", [("cat", 1.0)]))
        read(index)
    done.set()
    asking.join(10)
    assert counts == sorted(counts) and index.rows("SELECT count(*) AS n FROM rollouts") == [{"n": 36}]
    index.close()


def test_a_rollout_trained_twice_has_its_last_advantage(index, directory):
    records = group("cats-0-0", [("dog", 0.0)])
    write_examples(directory.batches / "batch_5_9.parquet", [example(records, [9.0])], "batch_5_9", 5, 0)
    read(index)
    assert index.part_of("cats-0-0")[0]["advantage"] == pytest.approx(9.0)
