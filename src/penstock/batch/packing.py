"""Packing: several sequences, each a sample of a rollout, share one row of fixed length, kept apart by segment ids.

Invariants, each a property test: nothing is lost or duplicated, the tokens of a sequence keep their order and
stay together, segments are disjoint and numbered 1, 2, … along the row, no row is longer than asked, and the
same input always gives the same rows. A sequence longer than a row is an error, never cut.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import combinations
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped

from penstock.batch.examples import samples_of
from penstock.types import ConfigError, RLExample

_PADDING = {"temperature": 1, "weight_steps": -1}
"""What padding holds where it is not zero: a temperature that divides, and no version."""

_ALIGNED = tuple(field.name for field in fields(RLExample) if field.name != "rollout_ids")


class Placement(NamedTuple):
    """Where one sequence lies: ``row[start:stop]``, as that row's segment number `segment`."""

    row: int
    start: int
    stop: int
    segment: int


class PackedBatch(NamedTuple):
    """Rows stacked to one shape; a NamedTuple, so that compiled functions take it as it is.

    Attributes are those of `RLExample`, each [rows, row_length], without the rollout ids.
    """

    tokens: Int32[np.ndarray, "rows pos"]
    loss_mask: Bool[np.ndarray, "rows pos"]
    segment_ids: Int32[np.ndarray, "rows pos"]
    position_ids: Int32[np.ndarray, "rows pos"]
    advantage: Float32[np.ndarray, "rows pos"]
    generator_log_probs: Float32[np.ndarray, "rows pos"]
    reference_log_probs: Float32[np.ndarray, "rows pos"] | None
    temperature: Float32[np.ndarray, "rows pos"]
    weight_steps: Int32[np.ndarray, "rows pos"]


class RowShape(NamedTuple):
    """Rows of one micro-batch.

    Attributes:
        length: Tokens of each.
        rows: How many there are.
        tight: Whether arrays have room for hardly more sequences than the rows hold, which makes a program of every
            power of two; else for one to every two tokens.
    """

    length: int
    rows: int
    tight: bool = False

    def room(self, sequences: int) -> int:
        """For how many sequences a row's arrays have room, where it holds so many at most."""
        most = max(1, self.length // 2)
        return min(most, max(8, 1 << (sequences - 1).bit_length())) if self.tight else most


def shapes_for(lengths: Sequence[int], shapes: Sequence[RowShape]) -> list[int]:
    """In rows of which shape each sequence lies: the shortest that it fits, among those that are used.

    Used are those that need the fewest micro-batches, which all cost the like where they have as many tokens; of
    equals, those with the least attention (rows · length²).

    Args:
        lengths: Tokens of each sequence.
        shapes: Ascending by length; a sequence longer than the last is left to `place` to refuse.

    Returns:
        An index into `shapes` for each sequence.
    """

    def assigned(used: Sequence[int]) -> list[int]:
        return [next((i for i in used if shapes[i].length >= length), used[-1]) for length in lengths]

    def cost(found: Sequence[int]) -> tuple[int, int]:
        batches = attention = 0
        for index in set(found):
            length, rows, _ = shapes[index]
            count = -(-_row_count(place(_chosen(lengths, found, index), length)) // rows)
            batches, attention = batches + count, attention + count * rows * length**2
        return batches, attention

    longest = max(lengths, default=0)
    if len(shapes) == 1 or longest > shapes[-1].length:
        return assigned([len(shapes) - 1])
    last = next(i for i, shape in enumerate(shapes) if shape.length >= longest)
    subsets = (s for n in range(1, len(shapes) + 1) for s in combinations(range(len(shapes)), n) if s[-1] >= last)
    return min((assigned(used) for used in subsets), key=cost)


def _chosen(lengths: Iterable[int], found: Iterable[int], index: int) -> list[int]:
    return [length for length, own in zip(lengths, found, strict=True) if own == index]


def place(lengths: Sequence[int], row_length: int) -> list[Placement]:
    """Best-fit decreasing: each sequence, longest first, goes into the fullest row with room for it.

    Of rows equally full into the first. O(n log n) comparisons for n sequences.

    Args:
        lengths: Tokens of each sequence.
        row_length: Tokens of a row.

    Returns:
        One placement per sequence, in the order given. Equal lengths keep their order.

    Raises:
        ConfigError: a sequence is longer than a row.
    """
    room: list[tuple[int, int]] = []  # of each row, ascending, with its number
    segments: list[int] = []
    placements: dict[int, Placement] = {}
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > row_length:
            raise ConfigError(
                f"learner.row_length is {row_length} but a sequence has {length} tokens: "
                "raise learner.row_length or lower max_output_tokens"
            )
        at = bisect_left(room, (length, 0))
        left, row = room.pop(at) if at < len(room) else (row_length, len(segments))
        if row == len(segments):
            segments.append(0)
        segments[row] += 1
        start = row_length - left
        placements[index] = Placement(row, start, start + length, segments[row])
        insort(room, (left - length, row))
    return [placements[index] for index in range(len(lengths))]


def pack(examples: Sequence[RLExample], row_length: int) -> list[RLExample]:
    """Packs unpacked examples into rows of exactly `row_length` positions, padded at the end.

    Args:
        examples: Of a rollout each, whose samples are placed one by one; either all or none with reference
            log-probabilities.
        row_length: Positions of a row.

    Raises:
        ConfigError: a sample is longer than a row.
        ValueError: reference log-probabilities on some examples only, or an example that is a packed row.
    """
    _check_packable(examples)
    examples = [sample for example in examples for sample in samples_of(example)]
    placements = place([len(example.tokens) for example in examples], row_length)
    rows: list[list[tuple[Placement, RLExample]]] = [[] for _ in range(_row_count(placements))]
    for placement, example in zip(placements, examples, strict=True):
        rows[placement.row].append((placement, example))
    return [_fill(sorted(members, key=lambda m: m[0].start), row_length) for members in rows]


def stack(rows: Sequence[RLExample], count: int) -> PackedBatch:
    """Stacks packed rows to [count, row_length]; rows that are missing are all padding.

    Raises:
        ValueError: no row at all, more rows than `count`, or rows of different lengths.
    """
    if len(rows) > count or len({len(row.tokens) for row in rows}) != 1:
        raise ValueError(f"{len(rows)} rows of {[len(row.tokens) for row in rows]} positions for {count}")
    length = len(rows[0].tokens)
    arrays: dict[str, np.ndarray | None] = {}
    for name in PackedBatch._fields:
        given = [getattr(row, name) for row in rows]
        arrays[name] = None
        if given[0] is not None:
            padding = np.full((count - len(rows), length), _PADDING.get(name, 0), given[0].dtype)
            arrays[name] = np.concatenate([np.stack(given), padding])
    return PackedBatch(**arrays)  # pyright: ignore[reportArgumentType]


def unpack(
    values: Sequence[Shaped[np.ndarray, " _"]], placements: Sequence[Placement]
) -> list[Shaped[np.ndarray, " n"]]:
    """Takes per-position values of packed rows back to their sequences, in the placements' order.

    Args:
        values: Row by row; rows may have different lengths.
        placements: Of the sequences, from `place`.
    """
    return [values[p.row][p.start : p.stop] for p in placements]


def _row_count(placements: Sequence[Placement]) -> int:
    return max((placement.row for placement in placements), default=-1) + 1


def _check_packable(examples: Sequence[RLExample]) -> None:
    if len({example.reference_log_probs is None for example in examples}) > 1:
        raise ValueError("reference_log_probs must be given for all examples of a batch or for none")
    for example in examples:
        if len(example.rollout_ids) != 1 or not (example.segment_ids >= 1).all():
            raise ValueError(f"example of rollouts {example.rollout_ids} is packed already")
        if example.loss_mask[example.position_ids == 0].any():
            raise ValueError(f"example of {example.rollout_ids} has a loss on its first token, which nothing predicts")


def _fill(members: Sequence[tuple[Placement, RLExample]], row_length: int) -> RLExample:
    """One row from its sequences in order."""
    row: dict[str, np.ndarray | None] = {}
    for name in _ALIGNED:
        first = cast(np.ndarray | None, getattr(members[0][1], name))
        row[name] = None if first is None else np.full(row_length, _PADDING.get(name, 0), first.dtype)
    for placement, example in members:
        for name, array in row.items():
            if array is not None:
                array[placement.start : placement.stop] = getattr(example, name)
        cast(np.ndarray, row["segment_ids"])[placement.start : placement.stop] = placement.segment
    ids = tuple(example.rollout_ids[0] for _, example in members)
    return RLExample(rollout_ids=ids, **row)  # pyright: ignore[reportArgumentType]
