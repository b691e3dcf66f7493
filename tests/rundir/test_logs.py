import json
import os
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


@pytest.mark.attack
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


@pytest.mark.parametrize(
    ("line", "message"),
    [("{nope}", "line 2 is not JSON"), ("[1]", "not a JSON object"), ("[" * 9999, "line 2 is not JSON")],
)
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


def test_an_event_with_a_number_that_is_not_finite_is_written_with_null(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0)
    log.append("evaluation", reward={"pole": float("nan"), "cart": 2.0})
    assert read_events(tmp_path / "events.jsonl") == [
        {"time": 1.0, "event": "evaluation", "reward": {"pole": None, "cart": 2.0}}
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
    with pytest.raises(TypeError):
        log.append({"a": 1}, {"a": object()})
    log.close()
    assert json.loads("[]") == list(read_json_lines(log.path))


class FullDisk:
    """Writes nine bytes and then none, as a disk that fills up."""

    def __init__(self, monkeypatch):
        self._write = os.write
        self._calls = 0
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor, content):
        self._calls += 1
        if self._calls == 1:
            return self._write(descriptor, bytes(content)[:9])
        raise OSError(28, "No space left on device")


def test_an_append_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    log = JsonLinesLog(tmp_path / "log.jsonl")
    log.append({"a": 1})
    with monkeypatch.context() as patch:
        FullDisk(patch)
        with pytest.raises(OSError, match="No space left"):
            log.append({"a": 2, "padding": "p" * 50})
    assert log.path.read_text() == '{"a": 1}\n'
    log.append({"a": 3})
    log.close()
    assert [row["a"] for row in read_json_lines(log.path)] == [1, 3]


@pytest.mark.parametrize("then", ["append", "close"])
def test_what_could_not_be_cut_off_at_once_is_before_the_next_line(tmp_path, monkeypatch, then):
    log = JsonLinesLog(tmp_path / "log.jsonl")
    log.append({"a": 1})
    with monkeypatch.context() as patch:
        FullDisk(patch)
        patch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="No space left"):
            log.append({"a": 2}, {"a": 3})
    assert log.path.read_text() == '{"a": 1}\n{"a": 2}\n'  # whole, but nobody was told that it is there
    if then == "append":
        log.append({"a": 4})
    log.close()
    assert [row["a"] for row in read_json_lines(log.path)] == ([1, 4] if then == "append" else [1])


def test_halves_of_surrogate_pairs_are_written_as_text_wherever_they_are(tmp_path):
    log = JsonLinesLog(tmp_path / "log.jsonl")
    log.append({"why": "boom \udcff", "deep": [{"k\ud800": ("x\udcff", 1, None)}], "whole": "😀 \\ud"})
    log.close()
    [row] = read_json_lines(log.path)
    assert row == {"why": "boom \\udcff", "deep": [{"k\\ud800": ["x\\udcff", 1, None]}], "whole": "😀 \\ud"}


def test_a_new_log_has_its_name_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("penstock.rundir.logs.sync_directory", synced.append)
    log = JsonLinesLog(tmp_path / "log.jsonl")
    assert synced == [tmp_path]
    log.append({"a": 1})
    log.close()
    JsonLinesLog(log.path).close()
    assert synced == [tmp_path]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_status_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    assert read_status(tmp_path / "status.json") is None
    assert read_status(tmp_path) is None
