"""Output whose reader is gone ends no command."""

import errno
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.text.lasting_output import LastingOutput, lasting_output

PRINTS = """
import sys
from penstock import cli
sys.exit(cli.main(["recipes"]))
"""
OTHER_COMMANDS = ('["train", "cats", "--dry-run"]', '["config"]', '["config", "learner"]', '["train", "--help"]')
TRAINS = """
import sys
from penstock import cli
from penstock.overseer import training
class Conductor:
    step, complete, training_s, lessons, failures, results = 3, True, 1.0, {}, (0, ""), {}
    newest_metrics = {}
    class log:
        class progress:
            stretches = ()
            goal = ""
class Directory:
    path = __import__("pathlib").Path("mine")
def run(request, feed):
    for line in range(2000):
        print("step", line, flush=True)
    return Directory, Conductor
training.open_run = run
sys.exit(cli.main(["train", "cats"]))
"""


class Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.attack
@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(),
        OSError(errno.EIO, "the terminal is dead"),
        OSError(errno.ENOSPC, "full"),
        ValueError("closed"),
    ],
)
def test_what_cannot_be_written_is_dropped(error: Exception):
    stream = LastingOutput(Broken(error))
    assert stream.write("hello") == 5
    stream.flush()
    assert not stream.isatty()


def test_what_the_encoding_lacks_is_escaped():
    raw = io.BytesIO()
    stream = LastingOutput(io.TextIOWrapper(raw, "ascii"))
    stream.write("☃ ok\n")
    stream.flush()
    assert raw.getvalue() == b"\\u2603 ok\n"


def test_the_streams_are_given_back(capsys):
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("heard")
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr().out == "heard\n"


@pytest.mark.attack
@pytest.mark.parametrize(
    "program",
    [
        PRINTS,
        *(pytest.param(PRINTS.replace('["recipes"]', words), marks=pytest.mark.slow) for words in OTHER_COMMANDS),
        pytest.param(TRAINS, marks=pytest.mark.slow),
    ],
    ids=["recipes", *OTHER_COMMANDS, "train"],
)
def test_a_pipe_that_is_closed_fails_no_command(program: str, tmp_path: Path):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run([sys.executable, "-c", program], stdout=pipe, stderr=pipe, cwd=tmp_path, timeout=120)
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.attack
def test_descriptors_that_are_closed_from_the_start_fail_no_command(tmp_path: Path):
    words = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, TRAINS]
    assert subprocess.run(words, cwd=tmp_path, timeout=120).returncode == 0


@pytest.mark.slow
@pytest.mark.attack
def test_a_dead_terminal_fails_no_command(tmp_path: Path):
    controller, terminal = pty.openpty()
    words = [sys.executable, "-c", "import sys; sys.stdin.readline()\n" + TRAINS]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal, cwd=tmp_path, start_new_session=True
    ) as process:
        os.close(terminal)
        os.close(controller)  # from now on writing is an input/output error
        process.communicate(b"\n", timeout=120)
    assert process.returncode == 0


@pytest.mark.attack
def test_a_full_standard_output_fails_no_run(tmp_path: Path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", TRAINS], stdout=full, stderr=full, cwd=tmp_path, timeout=120)
    assert done.returncode == 0


@pytest.mark.attack
def test_what_was_asked_for_and_cannot_be_written_is_an_error(tmp_path: Path):
    script = "import sys; from penstock.cli import main; sys.exit(main(['recipes']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=120
        )
    assert (done.returncode, done.stderr) == (1, "penstock: the output could not be written: No space left on device\n")


def test_help_is_still_printed(capsys):
    assert main(["--help"]) == 0
    assert "penstock train cats" in capsys.readouterr().out
