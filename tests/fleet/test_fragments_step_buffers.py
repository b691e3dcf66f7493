"""Arrays that fragments take over: none is written to while somebody holds it, and those given back are used again."""

import numpy as np

from penstock.fleet.fragments import BlockBuffer, SlotBuffer, step_buffer
from penstock.types import LeafSpace

FRAME = LeafSpace("image", "box", (32, 32), "uint8")
SLOTS = np.array([0, 1])


def fill(buffer, first):
    """Steps `first` … of a buffer of length 2, whose step 0 is there from the second fragment on."""
    for at in range(first, 3):
        values = np.full((2, 32, 32), 10 * at, np.uint8) + SLOTS[:, None, None].astype(np.uint8)
        buffer.write(SLOTS, np.full(2, at), values)


def test_the_kind_goes_by_size():
    assert isinstance(step_buffer(FRAME, 2, 2), SlotBuffer)
    assert isinstance(step_buffer(LeafSpace("", "box", (4,), "float32"), 2, 2), BlockBuffer)


def test_what_is_held_is_never_written_to():
    buffer = SlotBuffer(FRAME, 2, 2)
    fill(buffer, 0)
    held = [buffer.take(SLOTS)[1]]
    for _ in range(30):
        fill(buffer, 1)
        held.append(buffer.take(SLOTS)[1])
    assert all(taken[1:, 0, 0].tolist() == [11, 21] for taken in held)
    assert len({taken.ctypes.data for taken in held}) == 31


def test_what_is_given_back_is_used_again_even_if_a_part_was_held_longer():
    buffer = SlotBuffer(FRAME, 1, 2)
    fill_one = lambda: [buffer.write(SLOTS[:1], np.full(1, at), np.full((1, 32, 32), 5, np.uint8)) for at in (1, 2)]  # noqa: E731
    fill_one()
    part, address = buffer.take(SLOTS[:1])[0][1, :4], None
    address = part.ctypes.data - 32 * 32
    for _ in range(5):
        fill_one()
        assert buffer.take(SLOTS[:1])[0].ctypes.data != address
    assert part.min() == part.max() == 5
    del part
    addresses = set()
    for _ in range(5):
        fill_one()
        addresses.add(buffer.take(SLOTS[:1])[0].ctypes.data)
    assert address in addresses
