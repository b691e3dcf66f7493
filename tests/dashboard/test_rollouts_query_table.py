import json

import pytest

from penstock.dashboard.rollouts import print_query, print_query_json
from penstock.types import ConfigError


def shown(views, printed, sql: str, limit=None, **named) -> list[str]:
    return printed(lambda console: print_query(views, sql, limit, console), **named).splitlines()


def test_a_table(views, printed):
    sql = "SELECT state, count(*) AS n, avg(episode_reward) AS r FROM rollouts GROUP BY 1 ORDER BY 1"
    lines = shown(views, printed, sql)
    assert [line.split() for line in lines] == [
        ["state", "n", "r"], ["stale_step", "2", "0.5"], ["trained", "8", "0.5"], ["training", "2", "0.5"],
        ["waiting", "2", "0.5"],
    ]  # fmt: skip


def test_a_limit_says_that_there_is_more(views, printed):
    lines = shown(views, printed, "SELECT rollout_id FROM rollouts ORDER BY 1", 2)
    assert lines[1:] == ["cats-0-0/0", "cats-0-0/1", "2 rows; there are more: --limit N, or --json for all"]
    assert len(shown(views, printed, "SELECT rollout_id FROM rollouts", 14)) == 15


def test_an_answer_without_rows_says_so(views, printed):
    assert shown(views, printed, "SELECT * FROM rollouts WHERE false", width=80) == ["0 rows"]
    assert shown(views, printed, "SELECT rollout_id FROM rollouts WHERE false", width=80) == ["0 rows"]


def test_rows_with_many_columns_are_printed_down_the_page(views, printed):
    lines = shown(views, printed, "SELECT * FROM rollouts ORDER BY rollout_id", 1, width=80)
    assert lines[0].strip() == "row 1" and lines[2].split() == ["rollout_id", "cats-0-0/0"]
    assert max(map(len, lines)) <= 80
    wide = shown(views, printed, "SELECT * FROM rollouts ORDER BY rollout_id", 1, width=800)
    assert wide[0].split()[:2] == ["schema_version", "rollout_id"]


def test_what_a_model_wrote_is_escaped(views, printed):
    out = "\n".join(shown(views, printed, "SELECT content FROM turns WHERE rollout_id = 'cats-0-2/0'", width=500))
    assert "\\x1b[2J" in out and "[bold]not bold[/bold]" in out
    assert not set(out) & set("\x1b\r\x9b\u202e\u200b")
    assert "[red]x" in "\n".join(shown(views, printed, 'SELECT 1 AS "[red]x"'))


def test_numbers_are_short_and_times_are_whole(views, printed):
    sql = "SELECT timestamp + 1.7e9 AS t, 0.1::FLOAT AS f, [0.1::FLOAT] AS l, NULL AS n, timings FROM rollouts LIMIT 1"
    (_, line) = shown(views, printed, sql)
    assert line.split(maxsplit=4) == ["1700001000.0", "0.1", "[0.1]", "–", '{"generate_s": 0.25}']


def test_json_lines_hold_every_row(views, capsys):
    print_query_json(views, "SELECT rollout_id, timings, turns[1].content AS said FROM rollouts ORDER BY 1", None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 14
    assert rows[0] == {"rollout_id": "cats-0-0/0", "timings": {"generate_s": 0.25}, "said": "Say cat."}


def test_json_of_every_kind_of_value(views, capsys):
    sql = (
        "SELECT sum(1) AS big, 1.5::DECIMAL(4, 2) AS d, 'nan'::FLOAT AS x, DATE '2026-01-02' AS day, true AS yes, "
        "to_timestamp(0) AT TIME ZONE 'UTC' AS t, 1 AS a, 2 AS a, [1.5, NULL] AS l, 'é' AS s, '\\x01'::BLOB AS b"
    )
    print_query_json(views, sql, None)
    line = capsys.readouterr().out
    assert line.isascii()
    assert json.loads(line) == {
        "big": 1, "d": 1.5, "x": None, "day": "2026-01-02", "yes": True, "t": "1970-01-01T00:00:00", "a": 1, "a_2": 2,
        "l": [1.5, None], "s": "é", "b": "b'\\x01'",
    }  # fmt: skip


def test_a_limit_holds_for_json_too(views, capsys):
    print_query_json(views, "FROM rollouts", 3)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_wrong_query_is_bad_input(views, printed):
    with pytest.raises(ConfigError, match="cannot be answered"):
        shown(views, printed, "SELECT")
