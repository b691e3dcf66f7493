"""Malformed logs and state files of a run directory."""

import functools
import json

import pytest
from tests.fuzz.fuzzing import COUNTS, damaged, fuzz, json_bytes

from penstock.rundir import JsonLinesLog, RunDirectory, read_events, read_metrics, read_status
from penstock.rundir.views import (
    FATE_SCHEMA,
    TICKET_SCHEMA,
    read_event_table,
    read_fate_table,
    read_log_table,
    read_metric_table,
)
from penstock.types import RunDirectoryError

METRICS = {"step": 3, "time": 1.5, "train/loss": 0.25, "reward/cats": None}
EVENT = {"time": 1.5, "event": "death", "component": "rollout-1", "details": {"reason": "gone", "codes": [1, 2]}}
FATE = {"rollout_id": "a/0", "fate": "trained", "reason": "used", "step": 3, "lineage": 0, "time": 1.5}
TICKET = {
    "ticket_id": "cats-0-3", "lesson_id": "cats", "index": 3, "rollouts": 4, "admitted_step": 0, "deadline_step": 4,
    "lineage": 0, "time": 1.5,
}  # fmt: skip
READERS = {
    "metrics": (METRICS, read_metrics),
    "metric table": (METRICS, read_metric_table),
    "events": (EVENT, read_events),
    "event table": (EVENT, read_event_table),
    "fate table": (FATE, read_fate_table),
    "fates by schema": (FATE, functools.partial(read_log_table, schema=FATE_SCHEMA)),
    "tickets": (TICKET, functools.partial(read_log_table, schema=TICKET_SCHEMA)),
    "status": (METRICS, read_status),
}


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("reader", READERS)
def test_logs_are_read_or_refused(tmp_path, reader, count):
    row, read = READERS[reader]
    path = tmp_path / "log.jsonl"

    def make(rng):
        lines = [json_bytes(row, rng) if rng.random() < 0.5 else json.dumps(row).encode() for _ in range(3)]
        return b"\n".join(lines) + b"\n" * rng.randint(0, 1)

    def target(content):
        path.write_bytes(content)
        read(path)

    refused = fuzz(target, make, count, RunDirectoryError)
    assert (refused == 0) if reader == "status" else (0.1 * count < refused < count)


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
def test_a_writer_goes_on_after_any_file(tmp_path, count):
    path = tmp_path / "log.jsonl"

    def target(content):
        path.write_bytes(content)
        log = JsonLinesLog(path)
        log.append(METRICS)
        log.close()
        assert path.read_bytes() == content[: content.rfind(b"\n") + 1] + json.dumps(METRICS).encode() + b"\n"

    fuzz(target, lambda rng: damaged(b'{"a": 1}\n' * rng.randint(0, 4), rng), count, ())


@pytest.mark.parametrize("count", COUNTS)
def test_the_resolved_config_is_read_or_refused(tmp_path, count):
    directory = RunDirectory(tmp_path)
    good = b"seed: 0\nsteps: 3\nmodel: {init: {hidden_size: 8}, path: null}\nlist: [1, 2.5, text, 2001-01-01]\n"

    def target(content):
        directory.config_path.write_bytes(content)
        directory.read_config()

    def make(rng):
        return json_bytes({"seed": 0, "model": {"init": None}}, rng) if rng.random() < 0.5 else damaged(good, rng)

    assert 0 < fuzz(target, make, count, RunDirectoryError) < count
