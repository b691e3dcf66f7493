"""While the disk is full, logs keep their lines in order, and a checkpoint is tried until there is room."""

import errno

import pytest

from penstock.overseer import full_disk
from penstock.overseer.full_disk import RetriedWrites, when_there_is_room
from penstock.replay.ledger import DiskSpace
from penstock.types import RunFailed


class Disk:
    def __init__(self) -> None:
        self.lines: list[int] = []
        self.full = False
        self.error = errno.ENOSPC

    def write(self, line: int) -> int:
        if self.full:
            raise OSError(self.error, "no room", "events.jsonl")
        self.lines.append(line)
        return line


@pytest.fixture
def seconds(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(full_disk, "DiskSpace", lambda limit_s: DiskSpace(limit_s, lambda: now[0]))
    return now


def test_lines_that_found_no_room_come_first_when_there_is_some(seconds):
    disk, writes = Disk(), RetriedWrites(60)
    writes.do(lambda: disk.write(1))
    disk.full = True
    for line in (2, 3):
        writes.do(lambda line=line: disk.write(line))
    assert disk.lines == [1] and writes.finish() == 2
    disk.full = False
    writes.do(lambda: disk.write(4))
    assert disk.lines == [1], "a full disk is left alone for a moment"
    seconds[0] = 10.0
    writes.do(lambda: disk.write(5))
    assert disk.lines == [1, 2, 3, 4, 5] and writes.finish() == 0


def test_a_disk_that_stays_full_is_told_once(seconds):
    disk, writes = Disk(), RetriedWrites(60)
    disk.full = True
    writes.do(lambda: disk.write(1))
    seconds[0] = 61.0
    with pytest.raises(RunFailed, match=r"events.jsonl.*full_disk_s = 60"):
        writes.do(lambda: disk.write(2))
    seconds[0] = 99.0
    writes.do(lambda: disk.write(3))
    disk.full, seconds[0] = False, 199.0
    writes.do(lambda: disk.write(4))
    assert disk.lines == [1, 2, 3, 4]


def test_another_failure_is_raised_at_once(seconds):
    disk, writes = Disk(), RetriedWrites(60)
    disk.full, disk.error = True, errno.EIO
    with pytest.raises(OSError, match="no room"):
        writes.do(lambda: disk.write(1))
    disk.full = False
    writes.do(lambda: disk.write(2))
    assert disk.lines == [2]


def test_what_must_be_on_the_disk_is_tried_until_it_is(seconds):
    disk, waits = Disk(), []
    disk.full = True

    def wait(pause_s: float, why: str) -> None:
        waits.append(round(pause_s, 3))
        assert "no room on the disk" in why and "events.jsonl" in why
        seconds[0] += pause_s
        disk.full = len(waits) < 3

    assert when_there_is_room(lambda: disk.write(7), 60, wait) == 7
    assert waits == [0.1, 0.2, 0.4] and disk.lines == [7]


def test_waiting_for_room_ends_at_the_limit(seconds):
    disk = Disk()
    disk.full = True

    def wait(pause_s: float, why: str) -> None:
        seconds[0] += 40

    with pytest.raises(RunFailed, match="make room and resume"):
        when_there_is_room(lambda: disk.write(7), 60, wait)
