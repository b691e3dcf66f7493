"""A component's logs: JSON lines over all incarnations, and whatever was printed."""

import logging
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.overseer.launch.host import ComponentLog, logged
from penstock.rundir import read_events

TALKER = """
import logging, os, sys, warnings
from pathlib import Path
from penstock.overseer.launch.host import open_component_logs
from penstock.overseer.supervisor.messages import Identity

open_component_logs(Path(sys.argv[1]), Identity("rollout", 3, int(sys.argv[2])))
logging.getLogger("penstock.rollout").info("begun")
logging.getLogger("elsewhere").info("chatter")
logging.getLogger("elsewhere").warning("half %s", "\\ud800")
warnings.warn("old way")
print("printed")
print("complained", file=sys.stderr)
os.write(1, b"from below\\n")
try:
    {}["missing"]
except KeyError:
    logging.getLogger("penstock").exception("failed")
"""


def talk(directory: Path, incarnation: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TALKER, str(directory), str(incarnation)],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip


def test_what_a_process_logs_and_prints_goes_into_its_files_alone(tmp_path):
    logs = tmp_path / "run" / "logs"
    (logs / "rollout-3.jsonl").parent.mkdir(parents=True)
    (logs / "rollout-3.jsonl").write_bytes(b'{"torn by a kil')
    for incarnation in (0, 1):
        done = talk(logs, incarnation)
        assert (done.stdout, done.stderr) == ("", "")
    lines = read_events(logs / "rollout-3.jsonl")
    assert [line["incarnation"] for line in lines] == [0] * 4 + [1] * 4
    begun, half, warned, failed = lines[:4]
    assert (begun["level"], begun["logger"], begun["message"]) == ("INFO", "penstock.rollout", "begun")
    assert begun["time"] > 1e9 and begun["thread"] == "MainThread"
    assert half["message"] == "half \\ud800"
    assert "old way" in warned["message"] and warned["logger"] == "py.warnings"
    assert failed["message"] == "failed" and "KeyError: 'missing'" in failed["traceback"]
    printed = (logs / "rollout-3.out").read_text().splitlines()
    assert sorted(printed) == sorted(["printed", "complained", "from below"] * 2)


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "logs").write_text("a file where the directory should be")
    done = talk(tmp_path / "logs", 0)
    assert "printed" in done.stdout


def test_a_record_that_cannot_be_written_is_told_on_the_standard_stream(tmp_path, capsys):
    handler = ComponentLog(tmp_path / "x.jsonl", 0)
    handler.close()
    handler.handle(logging.LogRecord("name", logging.INFO, "path", 1, "words", None, None))
    assert "is closed" in capsys.readouterr().err


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_records_hold_their_level(tmp_path, level):
    handler = ComponentLog(tmp_path / "x.jsonl", 4)
    handler.handle(logging.LogRecord("name", level, "path", 1, "words %d", (3,), None))
    handler.close()
    (line,) = read_events(tmp_path / "x.jsonl")
    assert (line["level"], line["message"], line["incarnation"]) == (logging.getLevelName(level), "words 3", 4)
    assert "traceback" not in line


def test_what_penstock_logs_in_a_run_of_one_process_is_kept_and_its_warnings_are_printed_still(tmp_path, capsys):
    path, logger = tmp_path / "logs" / "run.jsonl", logging.getLogger("penstock")
    handlers, level = list(logger.handlers), logger.level
    with without_other_handlers(), logged(path, 2):
        assert not path.parent.exists()  # a run that logs nothing has no folder for it
        logging.getLogger("penstock.environments.x").info("printed by a reward")
        logging.getLogger("elsewhere").info("not Penstock's")
        logging.getLogger("penstock.environments.x").warning("few problems")
    lines = list(read_events(path))
    assert [(line["level"], line["message"], line["incarnation"]) for line in lines] == [
        ("INFO", "printed by a reward", 2), ("WARNING", "few problems", 2),
    ]  # fmt: skip
    assert capsys.readouterr().err == "few problems\n"
    assert (logger.handlers, logger.level) == (handlers, level)


@contextmanager
def without_other_handlers():
    """As in a program that sets up no logging: pytest's own handlers would count as some."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers
