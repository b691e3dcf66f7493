import json
import threading

import numpy as np
import pytest

from penstock.rundir import (
    EventLog,
    JsonLinesLog,
    MetricsLog,
    read_events,
    read_json_lines,
    read_metrics,
    read_status,
)
from penstock.types import RunDirectoryError


def test_rows_come_back_in_order_while_the_log_is_open(tmp_path):
    log = JsonLinesLog(tmp_path / "log.jsonl")
    log.append({"a": 1}, {"a": 2})
    log.append({"a": "three\n"})
    assert [row["a"] for row in read_json_lines(log.path)] == [1, 2, "three\n"]
    log.sync()
    log.close()
    log.close()
    with pytest.raises(RunDirectoryError, match="is closed"):
        log.append({})


def test_a_reader_ignores_an_unfinished_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_json_lines(path)) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2}')  # parses, but its end may be missing all the same
    assert list(read_json_lines(path)) == [{"a": 1}]


@pytest.mark.parametrize("tail", ['{"a": 2', "x" * 10_000, ""])
def test_the_next_writer_cuts_an_unfinished_line_off(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + tail)
    log = JsonLinesLog(path)
    log.append({"a": 3})
    log.close()
    assert path.read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_log_that_is_one_unfinished_line_starts_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("x" * 9000)
    JsonLinesLog(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize(("line", "message"), [("{nope}", "line 2 is not JSON"), ("[1]", "not a JSON object")])
def test_a_broken_line_in_the_middle_is_an_error_that_says_where(tmp_path, line, message):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(RunDirectoryError, match=message):
        list(read_json_lines(path))


def test_a_missing_log_reads_as_empty(tmp_path):
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []
    assert read_status(tmp_path / "none.json") is None


def test_metrics_are_numbers_by_step_and_null_where_not_finite(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", clock=lambda: 12.5)
    log.append(3, {"train/loss": np.float32(0.5), "train/kl": float("nan"), "time/x": 2})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 3, "time": 12.5, "train/loss": 0.5, "train/kl": None, "time/x": 2.0}
    ]
    log.close()


def test_events_carry_their_details(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0)
    log.append("checkpoint", step=4, path="checkpoints/step-4")
    assert read_events(tmp_path / "events.jsonl") == [
        {"time": 1.0, "event": "checkpoint", "step": 4, "path": "checkpoints/step-4"}
    ]
    log.close()


def test_threads_do_not_tear_one_anothers_lines(tmp_path):
    log = JsonLinesLog(tmp_path / "log.jsonl")

    def write(writer):
        for number in range(50):
            log.append({"writer": writer, "number": number, "padding": "p" * 500})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rows = list(read_json_lines(log.path))
    log.close()
    for writer in range(4):
        assert [row["number"] for row in rows if row["writer"] == writer] == list(range(50))


def test_a_value_that_json_does_not_know_is_refused_and_leaves_no_line(tmp_path):
    log = JsonLinesLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError):
        log.append({"a": 1}, {"a": float("inf")})
    log.close()
    assert json.loads("[]") == list(read_json_lines(log.path))
