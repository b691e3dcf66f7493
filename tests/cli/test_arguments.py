"""What several commands share: what they show on a terminal, and how names are printed."""

import os
import pty
import subprocess
import sys
from contextlib import suppress

from rich.table import Table

from penstock.cli.arguments import text_console

WORKS = """
import sys, time
from penstock.cli.arguments import busy
with busy("making [updates] again"):
    time.sleep(0.5)
    print("of the command", flush=True)
    print("a note", file=sys.stderr, flush=True)
"""


def test_what_is_done_meanwhile_stands_on_a_terminal_and_not_in_the_output():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as command:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # so a terminal ends
            while found := os.read(ours, 4096):
                shown += found
        assert command.stdout is not None and command.stdout.read() == b"of the command\n"
    os.close(ours)
    assert b"making [updates] again" in shown and b"0:00:00" in shown and b"a note" in shown


def test_without_a_terminal_nothing_is_added():
    done = subprocess.run([sys.executable, "-c", WORKS], capture_output=True, timeout=280, check=True)
    assert (done.stdout, done.stderr) == (b"of the command\n", b"a note\n")


def test_names_and_paths_are_printed_as_they_are(capsys):
    """Rich would take the brackets for a style, and the word between colons for a picture."""
    table = Table("task")
    table.add_row("a[lr=1]")
    console = text_console()
    console.print("run directory  runs/x[seed=1]:car:", soft_wrap=True)
    console.print(table)
    out = capsys.readouterr().out
    assert "runs/x[seed=1]:car:\n" in out and "a[lr=1]" in out
