"""One epoll with handlers."""

import os
import socket

from penstock.fleet.pool import DescriptorWatch


def test_handlers_are_called_while_there_is_something_to_read():
    watch, (mine, other) = DescriptorWatch(), socket.socketpair()
    with mine, other:
        watch.add(mine.fileno(), lambda: mine.recv(1) if mine.recv(1, socket.MSG_PEEK) == b"x" else None)
        found = []
        assert not watch.wait(0.0, found)
        other.send(b"x")
        assert not watch.wait(1.0, found) and found == [b"x"]
        other.send(b"y")
        assert watch.wait(1.0, found) and found == [b"x"]
        watch.drop(mine.fileno())
        watch.drop(mine.fileno())
        assert not watch.wait(0.0, found)
        watch.close()


def test_a_retired_descriptor_is_closed_after_the_round_only():
    watch = DescriptorWatch()
    read, write = os.pipe()
    watch.add(read, lambda: watch.retire([read]))
    os.write(write, b"x")
    assert watch.wait(1.0, [])
    assert os.fstat(read)
    watch.close_retired()
    fresh = os.dup(write)
    assert fresh == read  # the number is free
    for fd in (fresh, write):
        os.close(fd)
    watch.close()
