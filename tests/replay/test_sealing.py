"""Groups on their way to a file: which of them somebody has to write now."""

import errno
import threading
from typing import Any

from tests.replay.stored import HandClock

from penstock.replay import Ledger, StoreConfig
from penstock.replay.condition import NotifyingCondition
from penstock.replay.ledger import DiskSpace
from penstock.replay.store import Sealer

LIMIT_S = 20.0


class Store:
    """Writes when it may."""

    def __init__(self) -> None:
        self.writing, self.may_write = threading.Event(), threading.Event()
        self.full = False

    def seal(self, records: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writing.set()
        assert self.may_write.wait(LIMIT_S)


def sealer(store: Any, clock: HandClock) -> Sealer:
    config = StoreConfig(buffer_size=4, seal_s=30.0)
    made = Sealer(store, Ledger(), NotifyingCondition(), config, clock, lambda group_ids: None)
    made.space = DiskSpace(60.0, clock)
    return made


def test_groups_are_overdue_once_their_file_is_due_and_while_it_is_written():
    store, clock = Store(), HandClock()
    queue: Any = sealer(store, clock)
    queue.add("a", ["a/0", "a/1"])
    assert (queue.overdue, len(queue)) == (0, 1)  # it may wait
    clock.now += 31.0
    assert queue.overdue == 1
    writer = threading.Thread(target=queue.seal)
    writer.start()
    assert store.writing.wait(LIMIT_S)
    queue.add("b", ["b/0"])
    assert (queue.overdue, len(queue)) == (1, 2)
    store.may_write.set()
    writer.join(LIMIT_S)
    assert (queue.overdue, len(queue)) == (0, 1)
    queue.add("c", ["c/0", "c/1", "c/2"])
    assert queue.overdue == 2


def test_nothing_is_overdue_while_a_full_disk_is_waited_for():
    store, clock = Store(), HandClock()
    queue: Any = sealer(store, clock)
    queue.add("a", ["a/0"] * 4)
    store.full = True
    queue.seal()
    assert (queue.overdue, len(queue)) == (0, 1)
    clock.now += 1.0
    assert queue.overdue == 1
