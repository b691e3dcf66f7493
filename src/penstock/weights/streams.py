"""How a payload is cut into the messages of several parallel streams; both ends compute the same plan.

A payload is a row of buffers (the arrays, or one encoded difference). Every stream gets an equal, contiguous share of
its bytes, cut at the buffers' ends and at the largest message: so each message lies in one buffer, and is sent from
there and received into there without any other copy of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """One message: `size` bytes of buffer `index`, from `offset`."""

    index: int
    offset: int
    size: int


def cut(sizes: Sequence[int], streams: int, chunk_bytes: int) -> list[list[Piece]]:
    """The messages of each stream, in order.

    Args:
        sizes: Bytes of every buffer.
        streams: How many streams; those for which there is nothing left get an empty list.
        chunk_bytes: Most bytes of a message.

    Returns:
        One list per stream; together they cover every byte once.
    """
    share = -(-sum(sizes) // streams)
    plan: list[list[Piece]] = [[] for _ in range(streams)]
    stream, room = 0, share
    for index, size in enumerate(sizes):
        offset = 0
        while offset < size:
            if room == 0:
                stream, room = stream + 1, share
            taken = min(size - offset, room, chunk_bytes)
            plan[stream].append(Piece(index, offset, taken))
            offset, room = offset + taken, room - taken
    return plan
