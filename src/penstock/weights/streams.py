"""How a payload is cut into the messages of several parallel streams; both ends compute the same plan.

A payload is a row of buffers (the arrays, or one encoded difference). Every stream gets an equal, contiguous share of
its bytes, cut at the buffers' ends and at the largest message: so each message lies in one buffer, and is sent from
there and received into there without any other copy of ours.
"""

from collections.abc import Iterator, Sequence
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
    return [list(pieces_of(sizes, streams, chunk_bytes, stream)) for stream in range(streams)]


def pieces_of(sizes: Sequence[int], streams: int, chunk_bytes: int, stream: int) -> Iterator[Piece]:
    """The messages of one stream, one after the other: a server keeps no plan, however small a client wants them.

    Args:
        sizes: As for `cut`, with the next two.
        streams: How many there are.
        chunk_bytes: Most bytes of a message.
        stream: Which; one that is not among them has nothing.
    """
    share = -(-sum(sizes) // streams)
    first, end = stream * share, (stream + 1) * share if stream < streams else 0
    start = 0
    for index, size in enumerate(sizes):
        low, high = max(first - start, 0), min(end - start, size)
        for offset in range(low, high, chunk_bytes):
            yield Piece(index, offset, min(chunk_bytes, high - offset))
        start += size
