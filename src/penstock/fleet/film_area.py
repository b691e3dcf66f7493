"""The part of a simulator's shared block through which pictures of a filmed episode travel.

Only where films are wanted. The rollout worker asks for a row; the simulator process answers with one picture per
step, from the row's next episode on until that ends, and then takes the request back. As for the rest of the block,
one side owns it at a time, so a picture is whole. The room is fixed; pages that no picture touched take no memory.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

MOST_PICTURE_BYTES = 1 << 22
"""Room for a picture: 1280 × 1024 in colour. Of a larger one every second row and column is taken, or every third, …"""

_HEADER_BYTES = 4096  # a page, so that pictures begin at one
_ASKED, _MARK, _HEIGHT, _WIDTH = range(4)

FILM_AREA_BYTES = _HEADER_BYTES + MOST_PICTURE_BYTES


class Mark(IntEnum):
    """What a picture shows."""

    NOTHING = 0
    FIRST = 1
    """An episode's first observation."""
    NEXT = 2
    LAST = 3
    """What an episode ended with; no next picture."""
    FAILED = 4
    """No picture, but the words why there is none; the episode is not filmed further."""


@dataclass(frozen=True, slots=True, eq=False)
class Shot:
    """What was taken.

    Attributes:
        mark: What it shows.
        picture: uint8 [height, width, 3]; None where there is none.
        trouble: Why it failed; empty otherwise.
    """

    mark: Mark = Mark.NOTHING
    picture: np.ndarray | None = None
    trouble: str = ""


class FilmArea:
    """One row's pictures, one at a time.

    Args:
        memory: At least `FILM_AREA_BYTES`, writable, the same on both sides.
    """

    def __init__(self, memory: memoryview) -> None:
        self._header = np.frombuffer(memory, np.int64, 4)
        self._pixels = np.frombuffer(memory, np.uint8, MOST_PICTURE_BYTES, _HEADER_BYTES)

    @property
    def asked(self) -> int | None:
        """The row whose next episode is wanted, or is being filmed."""
        row = int(self._header[_ASKED]) - 1
        return row if row >= 0 else None

    def ask(self, row: int | None) -> None:
        """Wants a row's next episode; None: no more pictures."""
        self._header[_ASKED] = 0 if row is None else row + 1

    def put(self, mark: Mark, picture: Any) -> None:
        """Leaves a picture.

        Args:
            mark: What it shows.
            picture: uint8 [height, width], or with 1, 3 or 4 channels; None: the episode ended with no known one.
        """
        height = width = 0
        if picture is not None:
            pixels = _coloured(picture)
            height, width = pixels.shape[:2]
            self._pixels[: height * width * 3].reshape(pixels.shape)[...] = pixels
        self._header[_MARK:] = mark, height, width

    def fail(self, trouble: str) -> None:
        """Leaves the words why there is no picture, and takes the request back."""
        words = np.frombuffer(trouble.encode()[:2000], np.uint8)
        self._pixels[: len(words)] = words
        self._header[:] = 0, Mark.FAILED, len(words), 0

    def take(self) -> Shot:
        """What was left since the last call; the picture is a copy."""
        mark, height, width = Mark(int(self._header[_MARK])), int(self._header[_HEIGHT]), int(self._header[_WIDTH])
        self._header[_MARK] = Mark.NOTHING
        if mark is Mark.FAILED:
            return Shot(mark, trouble=self._pixels[:height].tobytes().decode(errors="replace"))
        if mark is Mark.NOTHING or not height:
            return Shot(mark)
        return Shot(mark, self._pixels[: height * width * 3].reshape(height, width, 3).copy())


def _coloured(picture: Any) -> np.ndarray:
    """In three channels, and small enough."""
    pixels = np.asarray(picture, np.uint8)
    if pixels.ndim not in (2, 3) or not pixels.size:
        raise ValueError(f"a picture has shape {pixels.shape}: it must be [height, width] or [height, width, channels]")
    if pixels.ndim == 2 or pixels.shape[2] < 3:
        pixels = np.broadcast_to(np.atleast_3d(pixels)[..., :1], (*pixels.shape[:2], 3))
    stride = 1
    while -(-pixels.shape[0] // stride) * -(-pixels.shape[1] // stride) * 3 > MOST_PICTURE_BYTES:
        stride += 1
    return pixels[::stride, ::stride, :3]
