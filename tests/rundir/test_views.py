"""Queries over a run: what the views hold, and what a query may not do."""

import json
import shutil
from pathlib import Path

import duckdb
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.dashboard.sample_run import example, group, write_run

from penstock.rundir import (
    EventLog,
    JsonLinesLog,
    MetricsLog,
    RunDirectory,
    read_parquet,
    write_evaluation,
    write_examples,
)
from penstock.rundir.live_files import RunFiles
from penstock.rundir.parquet import REPLACES_KEY, VERSION_KEY, parquet_writer
from penstock.rundir.views import VIEWS, RunViews
from penstock.types import ConfigError, RolloutBatch, RolloutGroup, RunDirectoryError, SchemaVersionError


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    with RunViews(write_run(tmp_path_factory.mktemp("runs") / "mine").path) as opened:
        yield opened


def rows(views: RunViews, sql: str, parameters=None) -> list[tuple]:
    return list(views.select(sql, parameters).rows())


def test_rollouts_carry_their_last_fate(views):
    assert rows(views, "SELECT state, count(*) FROM rollouts GROUP BY 1 ORDER BY 1") == [
        ("stale_step", 2), ("trained", 8), ("training", 2), ("waiting", 2),
    ]  # fmt: skip
    columns = "fate, fate_step, fate_reason, uses, trained_step, advantage, state"
    assert rows(views, f"SELECT {columns} FROM rollouts WHERE rollout_id = ?", ["cats-0-0/0"]) == [
        ("trained", 0, "trained by update 0", 1, 0, pytest.approx(-0.8), "trained")
    ]
    assert rows(views, f"SELECT {columns} FROM rollouts WHERE rollout_id = ?", ["cats-0-2/0"]) == [
        (None, None, None, 0, None, None, "waiting")  # a resume took its fate back
    ]


def test_turns_are_one_row_each(views):
    found = rows(
        views, "SELECT index, role, content, stop - start FROM turns WHERE rollout_id = 'tools-0-0/0' ORDER BY 1"
    )
    assert [row[:3] for row in found] == [
        (0, "system", "Use <calc>."), (1, "user", "2*3="), (2, "assistant", "<calc>2*3</calc>"),
        (3, "tool", "<result>6</result>"), (4, "assistant", "6"),
    ]  # fmt: skip
    assert [row[3] for row in found] == [6, 4, 6, 3, 2]


def test_uses_name_every_rollout_of_a_batch_row(views):
    assert rows(views, "SELECT rollout_id, advantage FROM uses WHERE step = 1 ORDER BY 1") == [
        ("cats-0-1/0", -1.0), ("cats-0-1/1", 1.0), ("tools-0-0/0", None), ("tools-0-0/1", None),
    ]  # fmt: skip
    assert rows(views, "SELECT count(*) FROM batches WHERE step = 1") == [(3,)]


def test_every_view_of_an_empty_run_is_there_with_its_columns(tmp_path, views):
    with RunViews(RunDirectory.create(tmp_path / "new", {}).path) as empty:
        for name in VIEWS:
            assert rows(empty, f"SELECT count(*) FROM {name}") == [(0,)]
            mine, full = (view.select(f"SELECT * FROM {name} LIMIT 0").columns for view in (empty, views))
            assert mine == full
        assert rows(empty, "SELECT state FROM rollouts") == []


def test_a_directory_that_a_store_made_alone_has_views_too(tmp_path):
    (tmp_path / "rollouts").mkdir()
    with RunViews(tmp_path) as opened:
        assert rows(opened, "SELECT count(*) FROM rollouts") == [(0,)]
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts"]  # nothing is made by looking


def test_metrics_and_events_are_queried_by_name(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {})
    metrics = MetricsLog(directory.metrics_path, lambda: 5.0)
    metrics.append(1, {"train/loss": 0.5, "train/kl": float("nan")})
    metrics.append(2, {"train/loss": 0.25, "replay/size": 3})
    metrics.close()
    events = EventLog(directory.events_path, lambda: 6.0)
    events.append("death", role="worker", detail={"code": 9})
    events.close()
    with directory.metrics_path.open("a") as file:
        file.write('{"step": 3, "tra')  # being written
    with RunViews(directory.path) as views:
        found = rows(views, 'SELECT step, "train/loss", "train/kl", "replay/size" FROM metrics')
        assert found == [(1, 0.5, None, None), (2, 0.25, None, 3.0)]
        assert rows(views, "SELECT event, details->>'role', details->'$.detail.code' FROM events") == [
            ("death", "worker", "9")
        ]


def test_a_broken_line_is_an_error_that_names_the_file(tmp_path):
    directory = write_run(tmp_path / "run")
    directory.fates_path.write_text("no json\n" + directory.fates_path.read_text())
    with pytest.raises(RunDirectoryError, match=r"fates\.jsonl, line 1 is not JSON"):
        RunViews(directory.path)
    directory.fates_path.write_text('{"rollout_id": "x", "step": "soon"}\n')
    with pytest.raises(RunDirectoryError, match=r"fates\.jsonl has a line that is not a JSON object of this log"):
        RunViews(directory.path)


def test_half_a_surrogate_pair_in_a_log_is_shown_by_its_escape(tmp_path):
    directory = write_run(tmp_path / "run")
    fates, metrics, events = (
        JsonLinesLog(path) for path in (directory.fates_path, directory.metrics_path, directory.events_path)
    )
    fate = {"fate": "aborted", "step": 1, "lineage": 0, "time": 1}
    fates.append({"rollout_id": "cats-0-2/0", **fate, "reason": "é \udcff", "unknown": [1]})
    fates.append({"rollout_id": "cats-0-2/1", **fate})
    metrics.append({"step": 1, "time": 1.0, "a\udcff": 1}, {"step": 2, "time": 2, "a\udcff": 0.5, "b": None})
    events.append({"time": 1.0, "event": "x\udcff", "why": {"y\udcff": ["z\udcff"]}})
    for log in (fates, metrics, events):
        log.close()
    with RunViews(directory.path) as views:
        assert rows(views, "SELECT state, fate_reason FROM rollouts WHERE group_id = 'cats-0-2' ORDER BY 2") == [
            ("aborted", "é \\udcff"), ("aborted", None),
        ]  # fmt: skip
        assert rows(views, "SELECT count(*), count(DISTINCT line) FROM fates") == [(17, 17)]
        assert rows(views, 'SELECT step, "a\\udcff", b FROM metrics') == [(1, 1.0, None), (2, 0.5, None)]
        assert rows(views, "SELECT event, details->>'$.why.*[0]' FROM events") == [("x\\udcff", ["z\\udcff"])]


def test_a_merged_part_stands_for_those_it_replaces(tmp_path):
    directory = write_run(tmp_path / "run")
    parts = [directory.rollouts / name for name in ("part-a.parquet", "part-b.parquet")]
    table = pa.concat_tables([read_parquet(path) for path in parts])
    names = json.dumps([path.name for path in parts]).encode()
    table = table.replace_schema_metadata({**table.schema.metadata, REPLACES_KEY: names})
    pq.write_table(table, directory.rollouts / "part-m.parquet")
    count = "SELECT count(*), count(DISTINCT rollout_id) FROM rollouts"
    with RunViews(directory.path) as views:
        assert rows(views, count) == [(14, 14)]
        for path in parts:
            path.unlink()  # what compaction does next, while the views are open
        assert rows(views, count) == [(14, 14)]


def test_files_that_were_merged_meanwhile_are_looked_up_anew(tmp_path):
    directory = write_run(tmp_path / "run")
    with RunViews(directory.path) as views:
        part = directory.rollouts / "part-a.parquet"
        part.rename(directory.rollouts / "part-z.parquet")
        assert views.files.vanished
        assert rows(views, "SELECT count(*) FROM rollouts") == [(14,)]
        assert not views.files.vanished


def test_rows_of_version_0_stand_beside_those_of_version_1(tmp_path):
    directory = write_run(tmp_path / "run")
    old = pa.table(
        {
            "env_name": ["cats"], "env_example_id": ["3"], "prompt_tokens": [[1, 2]], "response_tokens": [[5]],
            "response_logprobs": [[-0.5]], "token_rewards": [[0.25]], "episode_reward": [0.25],
        }
    )  # fmt: skip
    stamp = {b"penstock.batch_metadata": b'{"worker_id": "old", "timestamp": 9.0, "weight_step": 4}'}
    pq.write_table(old.replace_schema_metadata(stamp), directory.rollouts / "part-old.parquet")
    with RunViews(directory.path) as views:
        found = rows(
            views, "SELECT rollout_id, weight_step, response_mask, state FROM rollouts WHERE worker_id = 'old'"
        )
        assert found == [("part-old-3/0", 4, [True], "waiting")]
        assert rows(views, "SELECT count(*) FROM rollouts") == [(15,)]
        record = views.files.read_rollouts(["part-old-3/0"])["part-old-3/0"]
        assert record.rollout.episode_reward == 0.25


@pytest.mark.parametrize("folder", ["rollouts", "batches"])
def test_files_of_a_newer_version_are_refused(tmp_path, folder):
    directory = write_run(tmp_path / "run")
    newer = pa.table({"rollout_id": ["x"]}).replace_schema_metadata({VERSION_KEY: b"2"})
    pq.write_table(newer, directory.path / folder / "new.parquet")
    with pytest.raises(SchemaVersionError, match=r"new\.parquet has schema version 2, this Penstock reads up to 1"):
        RunViews(directory.path)


def test_unfinished_files_are_no_files(tmp_path):
    directory = write_run(tmp_path / "run")
    (directory.rollouts / ".part-x.parquet.0123.tmp").write_bytes(b"half")
    (directory.rollouts / ".part-y.parquet").write_bytes(b"half")
    with RunViews(directory.path) as views:
        assert rows(views, "SELECT count(*) FROM rollouts") == [(14,)]


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    directory = write_run(tmp_path / "run")
    (directory.rollouts / "part-x.parquet").write_bytes(b"nonsense")
    with pytest.raises(RunDirectoryError, match=r"part-x\.parquet cannot be read as Parquet"):
        RunViews(directory.path)


def change_a_byte(part: Path) -> None:
    """In the log-probabilities of a part that is written anew, uncompressed."""
    table = read_parquet(part)
    with parquet_writer(part, table.schema, "none") as writer:
        writer.write_table(table)
    with pq.ParquetFile(part) as file:
        columns = [file.metadata.row_group(0).column(i) for i in range(file.metadata.num_columns)]
    changed = next(column for column in columns if column.path_in_schema.startswith("response_logprobs"))
    content = bytearray(part.read_bytes())
    content[changed.data_page_offset + changed.total_compressed_size - 2] ^= 0x10
    part.write_bytes(bytes(content))


def test_changed_bytes_are_noticed_where_nothing_is_compressed_and_their_file_is_named(tmp_path):
    directory = write_run(tmp_path / "run")
    part = next(directory.rollouts.glob("*.parquet"))
    change_a_byte(part)
    damaged = rf"{part.name} cannot be read as Parquet: .*CRC.*restore it from a"
    with pytest.raises(RunDirectoryError, match=damaged):
        list(RunFiles.list_now(directory).records())
    with RunViews(directory.path) as views:
        with pytest.raises(RunDirectoryError, match=damaged):
            rows(views, "SELECT response_logprobs FROM rollouts")
        with pytest.raises(ConfigError, match="cannot be answered: .*nothing_like_it"):
            rows(views, "SELECT nothing_like_it FROM rollouts")


def test_changed_bytes_of_an_evaluation_are_noticed_by_a_query_and_their_file_is_named(tmp_path):
    directory = write_run(tmp_path / "run")
    answers = tuple(record.rollout for record in group("eval-cats-0-1", [("a cat", 1.0), ("a dog", 0.0)]))
    batch = RolloutBatch((RolloutGroup("cats:7", answers, group_id="eval-cats-0-1"),))
    part = write_evaluation(directory, [batch], "eval", 0, 1)
    assert part is not None
    change_a_byte(part)
    with RunViews(directory.path) as views, pytest.raises(RunDirectoryError, match=rf"{part.name} .*metrics\.jsonl"):
        rows(views, "SELECT response_logprobs FROM evaluations")


def test_batches_of_a_dead_lineage_do_not_count(tmp_path):
    directory = write_run(tmp_path / "run")
    lineages = JsonLinesLog(directory.lineages_path)
    lineages.append({"lineage": 1, "parent": 0, "step": 1})  # resumed from version 1: update 1 was undone
    lineages.close()
    again = group("cats-0-1", [("a dog\nor two", 0.0)], (0, 1))
    write_examples(directory.batches / "batch_1_2.parquet", [example(again, (-0.5,))], "batch_1_2", 1, 1)
    with RunViews(directory.path) as views:
        assert rows(views, "SELECT DISTINCT batch_id, survives FROM batches ORDER BY 1") == [
            ("batch_0_1", True), ("batch_1_1", False), ("batch_1_2", True), ("batch_2_1", False),
        ]  # fmt: skip
        assert rows(views, "SELECT uses, advantage FROM rollouts WHERE rollout_id = 'cats-0-1/0'") == [(1, -0.5)]
        assert rows(views, "SELECT uses FROM rollouts WHERE rollout_id = 'cats-0-1/1'") == [(0,)]


@pytest.mark.parametrize("with_status", [True, False])
def test_what_the_update_that_is_next_holds_is_training(tmp_path, with_status):
    directory = write_run(tmp_path / "run")
    directory.fates_path.write_text("")
    if not with_status:
        directory.status_path.unlink()
    with RunViews(directory.path) as views:  # without any fate, only the newest batch is being trained
        found = rows(views, "SELECT group_id FROM rollouts WHERE state = 'training' GROUP BY 1")
    assert found == [("cats-0-10",)]


def test_rollouts_in_another_place_are_found_by_its_url(tmp_path):
    directory = write_run(tmp_path / "run")
    store = fsspec.filesystem("memory")
    store.put(str(directory.rollouts), "/penstock-test/rollouts", recursive=True)
    store.put(str(directory.batches), "/penstock-test/batches", recursive=True)
    try:
        shutil.rmtree(directory.rollouts)
        shutil.rmtree(directory.batches)
        directory.write_config({"replay": {"store": {"url": "memory://penstock-test"}}})
        with RunViews(directory.path) as views:
            assert rows(views, "SELECT state, count(*) FROM rollouts GROUP BY 1 ORDER BY 1")[1] == ("trained", 8)
            assert list(views.files.read_rollouts(["cats-0-0/2"])) == ["cats-0-0/2"]
    finally:
        store.rm("/penstock-test", recursive=True)


def test_a_url_that_cannot_be_opened_is_bad_input(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {"replay": {"store": {"url": "gopher://x/y"}}})
    with pytest.raises(ConfigError, match="replay.store.url is 'gopher://x/y'"):
        RunViews(directory.path)


@pytest.mark.parametrize("url", ["elsewhere", "file://{}/elsewhere"])
def test_a_local_url_is_a_folder(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    directory = write_run(tmp_path / "run")
    directory.rollouts.rename(tmp_path / "elsewhere_rollouts")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere_rollouts").rename(tmp_path / "elsewhere" / "rollouts")
    directory.write_config({"replay": {"store": {"url": url.format(tmp_path)}}})
    with RunViews(directory.path) as views:
        assert rows(views, "SELECT count(*) FROM rollouts") == [(14,)]


def test_what_reads_is_answered(views):
    for sql in ("FROM rollouts LIMIT 1", "DESCRIBE rollouts", "SUMMARIZE fates", "SHOW TABLES", "VALUES (1)",
                "WITH a AS (SELECT 1) FROM a", "SELECT 1;"):  # fmt: skip
        assert rows(views, sql)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DELETE FROM fates", "the query is DELETE: it must be one statement that reads"),
        ("SELECT 1; SELECT 2", "the query is SELECT, SELECT"),
        ("", "the query is nothing"),
        ("COPY (SELECT 1) TO '{}'", "the query is COPY"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO '{}'", "the query is EXPLAIN"),
        ("ATTACH '{}'", "the query is ATTACH"),
        ("SET enable_external_access = true", "the query is SET"),
        ("SELECT nonsense FROM rollouts", 'cannot be answered: Binder Error: Referenced column "nonsense" not found'),
        ("SELECT '\udcff'", r"the query is .*udcff.*, which is not Unicode text"),
        ("SELECT FROM WHERE", "cannot be answered: Parser Error: .* at or near"),
        ("SELECT content::DATE FROM turns", "cannot be answered: Conversion Error"),
        ("SELECT * FROM read_text('/etc/hostname')", "Permission Error"),
        ("SELECT * FROM glob('/etc/*')", "Permission Error"),
        ("SELECT * FROM read_csv('/etc/passwd')", "Permission Error"),
        ("SELECT * FROM '/etc/passwd.csv'", "Permission Error"),
        ("SELECT * FROM read_parquet('https://127.0.0.1:1/x')", "Permission Error|cannot be answered"),
        ("SELECT * FROM which_secret('s3://a', 's3')", "cannot be answered"),
        ("SELECT getenv('HOME')", "cannot be answered: Catalog Error"),
        ("INSTALL httpfs", "the query is"),
        ("LOAD httpfs", "the query is LOAD"),
        ("CREATE SECRET s (TYPE s3)", "the query is"),
        ("PRAGMA database_list", "the query is PRAGMA|cannot"),
        ("CALL pragma_version()", "the query is CALL|cannot"),
        ("WITH a AS (COPY (SELECT 1) TO '{}') FROM a", "Permission Error|is COPY|Parser Error"),
        ("SELECT * FROM victim", "victim does not exist"),
    ],
)
def test_what_does_more_than_read_or_is_wrong_is_refused_in_one_line(views, tmp_path, sql, message):
    victim = pa.table({"a": [1]})  # a Python variable is no table either
    with pytest.raises(ConfigError, match=message) as refused:
        views.select(sql.format(tmp_path / "out"))
    assert "\n" not in str(refused.value) and victim.num_rows == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.attack
def test_the_connection_itself_cannot_write(views, tmp_path):
    with pytest.raises(duckdb.PermissionException):
        views._connection.execute(f"COPY (SELECT 1) TO '{tmp_path / 'out'}'")
    with pytest.raises(duckdb.InvalidInputException):
        views._connection.execute("SET enable_external_access = true")


@pytest.mark.attack
def test_what_does_not_fit_into_memory_fails_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    connect = duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda: connect(config={"memory_limit": "40MB", "threads": 1}))
    with RunViews(write_run(tmp_path / "run").path) as views:
        assert rows(views, "SELECT current_setting('temp_directory')") == [("",)]
        with pytest.raises(ConfigError, match="the query needs more memory than there is"):
            views.select("SELECT i, repeat('x', 100) || i AS s FROM range(600_000) t(i) ORDER BY hash(i)")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_limit_says_whether_there_is_more(views):
    part = views.select("SELECT rollout_id FROM rollouts ORDER BY 1", limit=13)
    assert (part.table.num_rows, part.more) == (13, True)
    whole = views.select("SELECT rollout_id FROM rollouts", limit=14)
    assert (whole.table.num_rows, whole.more) == (14, False)


def test_values_are_plain_python(views):
    sql = "SELECT timings, to_timestamp(0) AS t, decoding.temperature FROM rollouts LIMIT 1"
    ((timings, moment, temperature),) = rows(views, sql)
    assert timings == {"generate_s": 0.25} and moment.year == 1970 and temperature == 1.0


@pytest.mark.parametrize(
    "value", ["'infinity'::TIMESTAMP", "DATE '10000-01-01'", "[DATE '-infinity']", "{'a': '294000-01-01'::TIMESTAMP}"]
)
def test_a_date_that_python_does_not_have_is_bad_input(views, value):
    result = views.select(f"SELECT {value} AS x")
    with pytest.raises(ConfigError, match=r"column 'x' holds a .* take it as text, by CAST\(… AS VARCHAR\)"):
        list(result.rows())


@pytest.mark.parametrize("name", ["missing", "file", "other"])
def test_what_is_no_run_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunDirectoryError, match="no such directory|is not a run directory"):
        RunViews(tmp_path / name)


def test_a_live_run_is_read_while_it_grows(tmp_path):
    directory = write_run(tmp_path / "run")
    with RunViews(directory.path) as views:
        more = group("cats-0-20", [("cat", 1.0)], (2,))
        from penstock.rundir import write_records

        write_records(directory.rollouts / "part-new.parquet", more)
        assert rows(views, "SELECT count(*) FROM rollouts") == [(14,)]  # the moment it was opened
        views.reopen()
        assert rows(views, "SELECT count(*) FROM rollouts") == [(15,)]


def test_a_read_of_batches_names_those_of_a_rollout(views):
    table = views.files.read_uses(["cats-0-0/2"])
    ids = [set(row) for row in table.column("rollout_ids").to_pylist()]
    assert {"cats-0-0/2"} in ids and {"tools-0-0/0", "tools-0-0/1"} in ids and {"cats-0-0/1"} not in ids
    assert np.isclose(table.column("advantage").to_pylist()[0][-1], 0.5)
