"""A reward function that is right whenever it answers, and that misbehaves now and then in every way there is.

It is copied beside a run, and knows nothing of Penstock. What it did stands in a file beside it, a line each.
"""

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

SHARE = 0.25
"""Of the calls."""
LONG_LINE_BYTES = 1 << 29
SLEEP_S = 86_399.25
"""Of what is left behind: known by this number in the list of processes."""
LATE_S = 0.5
DESCRIPTORS = range(3, 64)
LOG = Path(__file__).with_suffix(".log")


def checksum(completions: list[str], **_: object) -> list[float]:
    """A number in [0, 1) that follows from the text alone."""
    if random.random() < SHARE:
        done = LOG.read_text().count("\n") if LOG.exists() else 0
        kind = list(KINDS)[done % len(KINDS)]
        with LOG.open("a") as log:
            log.write(kind + "\n")
        KINDS[kind](completions)
    return [of(text) for text in completions]


def of(text: str) -> float:
    """Of one text."""
    return zlib.crc32(text.encode()) / 2**32


def _fork_and_answer_twice(_: list[str]) -> None:
    os.fork()


def _fork_and_raise(_: list[str]) -> None:
    if os.fork() == 0:
        raise RuntimeError("the child")


def _write_everywhere(content: bytes) -> None:
    for descriptor in DESCRIPTORS:
        try:
            os.write(descriptor, content)
        except OSError:
            continue  # there is none, or it is for reading


def _write_junk(_: list[str]) -> None:
    _write_everywhere(b"oops\n")


def _write_half_a_line(_: list[str]) -> None:
    _write_everywhere(b'{"rewards": [')


def _forge(completions: list[str]) -> None:
    _write_everywhere(b'{"rewards": [%s]}\n' % b", ".join([b"99.0"] * len(completions)))


def _write_later(completions: list[str]) -> None:
    if os.fork() == 0:
        time.sleep(LATE_S)  # the answer to this call is given by then, and the next one is under way
        _forge(completions)
        os._exit(0)


def _close_everything(_: list[str]) -> None:
    os.closerange(DESCRIPTORS.start, DESCRIPTORS.stop)


def _leave_a_grandchild_and_crash(_: list[str]) -> None:
    subprocess.Popen(["sleep", str(SLEEP_S)], start_new_session=True)
    os._exit(1)


def _write_a_long_line(_: list[str]) -> None:
    block = b"x" * (1 << 20)
    for _number in range(LONG_LINE_BYTES // len(block)):
        os.write(1, block)


def _exit(_: list[str]) -> None:
    os._exit(3)


def _leave(_: list[str]) -> None:
    sys.exit(3)


def _hang(_: list[str]) -> None:
    time.sleep(SLEEP_S)


def _stop(_: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


KINDS = {
    "fork and answer twice": _fork_and_answer_twice,
    "fork and raise": _fork_and_raise,
    "write junk": _write_junk,
    "write half a line": _write_half_a_line,
    "forge a reply": _forge,
    "forge one later": _write_later,
    "close every descriptor": _close_everything,
    "leave a grandchild and crash": _leave_a_grandchild_and_crash,
    "write a long line": _write_a_long_line,
    "os._exit": _exit,
    "SystemExit": _leave,
    "hang": _hang,
    "SIGSTOP": _stop,
}
"""Everything it does, in turn."""
