from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import RowShape, example_from_pair, pack, place, shapes_for, stack, unpack
from penstock.types import ConfigError, RLExample

ROW = 16
lengths_of = st.lists(st.integers(2, ROW), min_size=1, max_size=24)


def _examples(lengths: list[int]) -> list[RLExample]:
    """Sequences whose tokens are all different, each with its own id, log-probabilities and temperature."""
    examples, first = [], 1
    for index, length in enumerate(lengths):
        tokens = np.arange(first, first + length, dtype=np.int32)
        example = example_from_pair(tokens[:1], tokens[1:])
        examples.append(
            replace(
                example,
                rollout_ids=(f"r{index}",),
                generator_log_probs=np.where(example.loss_mask, -tokens / np.float32(7), 0).astype(np.float32),
                temperature=np.full(length, index + 0.5, np.float32),
                weight_steps=np.where(example.loss_mask, index, -1).astype(np.int32),
            )
        )
        first += length
    return examples


@given(lengths_of)
def test_nothing_is_lost_or_duplicated_and_order_is_kept(lengths):
    rows = pack(_examples(lengths), ROW)
    found = {}
    for row in rows:
        assert len(row.tokens) == ROW
        for number, rollout_id in enumerate(row.rollout_ids, start=1):
            where = np.flatnonzero(row.segment_ids == number)
            assert (np.diff(where) == 1).all(), "a segment is one run of positions"
            found[rollout_id] = row.tokens[where].tolist()
            assert row.position_ids[where].tolist() == list(range(len(where)))
        assert row.segment_ids.max() == len(row.rollout_ids)
    assert found == {e.rollout_ids[0]: e.tokens.tolist() for e in _examples(lengths)}
    assert sum((row.segment_ids > 0).sum() for row in rows) == sum(lengths)


@given(lengths_of)
def test_every_array_travels_with_its_tokens_and_padding_is_neutral(lengths):
    examples = _examples(lengths)
    batch = stack(pack(examples, ROW), count=len(examples))
    placements = place(lengths, ROW)
    for name in ("tokens", "loss_mask", "generator_log_probs", "temperature", "weight_steps", "advantage"):
        for example, values in zip(examples, unpack(list(getattr(batch, name)), placements), strict=True):
            np.testing.assert_array_equal(values, getattr(example, name))
    padding = batch.segment_ids == 0
    assert padding.sum() == padding.size - sum(lengths) and batch.loss_mask.dtype == np.bool_
    assert not batch.loss_mask[padding].any()
    assert (batch.temperature[padding] == 1).all()
    assert (batch.weight_steps[padding] == -1).all()
    assert (batch.advantage[padding] == 0).all() and (batch.generator_log_probs[padding] == 0).all()


@given(lengths_of)
def test_placements_are_disjoint_inside_their_rows_and_deterministic(lengths):
    placements = place(lengths, ROW)
    assert placements == place(lengths, ROW)
    used = np.zeros((max(p.row for p in placements) + 1, ROW), int)
    for length, p in zip(lengths, placements, strict=True):
        assert p.stop - p.start == length
        used[p.row, p.start : p.stop] += 1
    assert used.max() == 1
    # At most one row can be half empty or less, for two such would have shared one.
    assert (used.sum(axis=1) <= ROW // 2).sum() <= 1


def test_the_longest_go_first_and_gaps_are_filled():
    placements = place([3, 10, 6, 5], 16)
    assert [(p.row, p.start, p.stop, p.segment) for p in placements] == [
        (1, 5, 8, 2), (0, 0, 10, 1), (0, 10, 16, 2), (1, 0, 5, 1),
    ]  # fmt: skip


def test_the_fullest_row_with_room_is_taken():
    """9 + 4 leaves 3 of 16, 8 + 6 leaves 2: the 2 goes where it fits exactly."""
    placements = place([9, 8, 6, 4, 2], 16)
    assert [(p.row, p.start) for p in placements] == [(0, 0), (1, 0), (0, 9), (1, 8), (1, 12)]
    assert [(p.row, p.start) for p in place([9, 8, 7, 5, 3], 16)][3:] == [(1, 8), (1, 13)]


@pytest.mark.parametrize(("mean", "longest", "row"), [(63, 256, 272), (200, 1000, 1024), (800, 4000, 4096)])
def test_ragged_rollouts_fill_their_rows(mean, longest, row):
    rng, fills = np.random.default_rng(0), []
    for _ in range(20):
        lengths = np.minimum(rng.geometric(1 / mean, 128), longest) + 16
        rows = 1 + max(p.row for p in place(lengths.tolist(), row))
        fills.append(lengths.sum() / (rows * row))
    assert np.mean(fills) > 0.96 and min(fills) > 0.94


def test_a_sequence_longer_than_the_row_is_an_error_not_a_cut():
    with pytest.raises(ConfigError, match="row_length is 16 but a sequence has 17 tokens"):
        pack(_examples([4, 17]), 16)


def test_no_examples_make_no_rows():
    assert pack([], ROW) == []
    assert place([], ROW) == []


def test_reference_logprobs_are_packed_for_all_or_none():
    first, second = _examples([4, 5])
    with_reference = replace(first, reference_log_probs=np.arange(4, dtype=np.float32))
    (row,) = pack([with_reference], 8)
    assert row.reference_log_probs.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert stack([row], 2).reference_log_probs.shape == (2, 8)
    with pytest.raises(ValueError, match="for all examples of a batch or for none"):
        pack([with_reference, second], 16)


def test_packed_rows_are_not_packed_again():
    for lengths in ([4, 5], [ROW - 4, 4], [4]):
        (row,) = pack(_examples(lengths), ROW)
        with pytest.raises(ValueError, match="packed already"):
            pack([row], 2 * ROW)


def test_a_loss_on_a_first_token_is_refused():
    """Nothing predicts it; in a packed row the sequence before would seem to."""
    example = _examples([4])[0]
    with pytest.raises(ValueError, match="first token"):
        pack([replace(example, loss_mask=np.ones(4, np.bool_))], ROW)


@pytest.mark.parametrize("count", [0, 1])
def test_stacking_more_rows_than_asked_is_an_error(count):
    with pytest.raises(ValueError, match="2 rows"):
        stack(pack(_examples([16, 16]), ROW), count)


SHAPES = (RowShape(4, 8), RowShape(8, 4), RowShape(16, 2))


def _micro_batches(lengths, shapes, found):
    counts = [place([n for n, own in zip(lengths, found, strict=True) if own == i], shapes[i].length) for i in range(3)]
    return sum(-(-len({p.row for p in each}) // shape.rows) for each, shape in zip(counts, shapes, strict=True))


@given(lengths_of)
def test_of_several_row_lengths_each_sequence_fits_and_no_single_length_needs_fewer_micro_batches(lengths):
    found = shapes_for(lengths, SHAPES)
    assert all(length <= SHAPES[own].length for length, own in zip(lengths, found, strict=True))
    assert _micro_batches(lengths, SHAPES, found) <= _micro_batches(lengths, SHAPES, [2] * len(lengths))
    assert shapes_for(lengths, SHAPES) == found


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([4] * 8, [0] * 8),  # one micro-batch of any shape: that with the least attention
        ([4] * 8 + [16] * 2, [0] * 8 + [2] * 2),
        ([3] * 4 + [16], [2] * 5),  # beside the long one is room: a second micro-batch would cost as much again
        ([3] * 10, [2] * 10),  # 3 of 4 leave 25% empty: two micro-batches of short rows, one of long ones
        ([5, 5, 5, 5], [1] * 4),
        ([], []),
    ],
)
def test_sequences_go_where_they_need_the_fewest_micro_batches(lengths, found):
    assert shapes_for(lengths, SHAPES) == found


def test_a_sequence_longer_than_all_rows_is_left_to_packing_to_refuse():
    assert shapes_for([17, 3], SHAPES) == [2, 2]


def test_rows_of_ragged_rollouts_are_full():
    """Lengths as rollouts have them: most are short, some fill a row."""
    rng = np.random.default_rng(7)
    for count, row_length in ((128, 1024), (256, 1024), (512, 2048)):
        lengths = np.clip(rng.lognormal(5.0, 0.8, count).astype(int), 8, row_length)
        rows = 1 + max(each.row for each in place(lengths.tolist(), row_length))
        assert lengths.sum() / (rows * row_length) >= 0.95
