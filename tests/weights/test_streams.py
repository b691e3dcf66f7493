"""Both ends of a transfer cut it alike, and nothing is left out."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.weights.streams import Piece, cut, pieces_of


def test_shares_are_equal_and_messages_end_with_their_buffers():
    assert cut([10, 0, 3, 7], streams=2, chunk_bytes=4) == [
        [Piece(0, 0, 4), Piece(0, 4, 4), Piece(0, 8, 2)],
        [Piece(2, 0, 3), Piece(3, 0, 4), Piece(3, 4, 3)],
    ]


def test_streams_without_a_share_are_empty():
    assert cut([2], streams=3, chunk_bytes=8) == [[Piece(0, 0, 1)], [Piece(0, 1, 1)], []]
    assert cut([], streams=2, chunk_bytes=8) == [[], []]
    assert cut([0, 0], streams=2, chunk_bytes=8) == [[], []]


@given(
    st.lists(st.integers(0, 500), max_size=8),
    st.integers(1, 9),
    st.integers(1, 64),
)
def test_every_byte_is_in_one_message_of_one_stream(sizes, streams, chunk_bytes):
    plan = cut(sizes, streams, chunk_bytes)
    assert len(plan) == streams
    covered = [set() for _ in sizes]
    for piece in (piece for pieces in plan for piece in pieces):
        part = set(range(piece.offset, piece.offset + piece.size))
        assert 0 < piece.size <= chunk_bytes and not covered[piece.index] & part
        covered[piece.index] |= part
    assert covered == [set(range(size)) for size in sizes]
    shares = [sum(piece.size for piece in pieces) for pieces in plan]
    assert max(shares) == -(-sum(sizes) // streams)


def test_a_plan_of_tiny_messages_takes_no_memory_before_it_is_used():
    """A client says how small; a plan of all of them at once would have sixteen million entries here."""
    pieces = pieces_of([1 << 36], 1, 4096, 0)
    assert next(pieces) == Piece(0, 0, 4096) and next(pieces) == Piece(0, 4096, 4096)


def test_a_stream_that_is_not_there_has_nothing():
    assert list(pieces_of([10, 20], 2, 8, 2)) == [] == list(pieces_of([], 2, 8, 0))
