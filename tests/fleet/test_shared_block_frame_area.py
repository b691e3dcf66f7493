"""Pictures through shared memory: whole, in three channels, within the room, and only where films are wanted."""

import os

import numpy as np
import pytest

from penstock.fleet.shared_block import MOST_PICTURE_BYTES, FrameLabel, SharedBlock, block_bytes, create_memory
from penstock.types import LeafSpace, Spaces

_SPACES = Spaces((LeafSpace("", "box", (3,), "uint8"),), (LeafSpace("", "discrete", (), "int64", n=(2,)),))


@pytest.fixture
def sides():
    fd = create_memory(block_bytes(_SPACES, 2, True))
    blocks = SharedBlock(fd, _SPACES, 2, True), SharedBlock(fd, _SPACES, 2, True)
    yield blocks[0].film, blocks[1].film, fd
    os.close(fd)


def test_a_picture_arrives_once_and_is_a_copy(sides):
    mine, other, _ = sides
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    mine.put(FrameLabel.NEXT, picture)
    frame = other.take()
    mine.put(FrameLabel.LAST, None)
    assert frame.label is FrameLabel.NEXT and (frame.picture == picture).all()
    assert (other.take().label, other.take().label) == (FrameLabel.LAST, FrameLabel.NOTHING)


def test_a_row_is_asked_for_and_failure_takes_the_request_back(sides):
    mine, other, _ = sides
    assert mine.asked is None
    other.ask(1)
    assert mine.asked == 1
    mine.fail("the brush is löst")
    frame = other.take()
    assert (frame.label, frame.picture, frame.trouble, other.asked) == (
        FrameLabel.FAILED,
        None,
        "the brush is löst",
        None,
    )


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 4)])
def test_pictures_of_other_channels_become_three(sides, shape):
    mine, other, _ = sides
    mine.put(FrameLabel.FIRST, np.full(shape, 9, np.uint8))
    picture = other.take().picture
    assert picture.shape == (3, 5, 3) and (picture == 9).all()


def test_pictures_of_other_numbers_are_none_but_those_that_are_bytes(sides):
    mine, other, _ = sides
    mine.put(FrameLabel.FIRST, np.full((3, 5, 3), 200, np.int64))
    picture = other.take().picture
    assert picture.dtype == np.uint8 and (picture == 200).all()
    for wrong in (np.full((3, 5, 3), 0.5), np.full((3, 5, 3), 256), np.full((3, 5), -1)):
        with pytest.raises(ValueError, match=f"a picture is {wrong.dtype}: it must be uint8, of 0 to 255"):
            mine.put(FrameLabel.FIRST, wrong)


def test_a_picture_that_is_too_large_is_thinned_out(sides):
    mine, other, _ = sides
    large = np.zeros((2160, 3840, 3), np.uint8)
    large[::3, ::3] = 200
    mine.put(FrameLabel.FIRST, large)
    picture = other.take().picture
    assert picture.shape == (720, 1280, 3) and picture.nbytes <= MOST_PICTURE_BYTES and (picture == 200).all()


def test_room_for_pictures_takes_memory_only_when_used_and_there_is_none_without_films(sides):
    mine, _, fd = sides
    assert os.fstat(fd).st_blocks * 512 < 3 * 4096 < MOST_PICTURE_BYTES
    assert block_bytes(_SPACES, 2) < 4096
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        mine.put(FrameLabel.FIRST, np.zeros(3, np.uint8))
