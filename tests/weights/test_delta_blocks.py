import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import WeightsError
from penstock.weights import delta_blocks
from penstock.weights.delta_blocks import bits, blocks_of, decode_block, encode_block

WIDTHS = [np.uint8, np.uint16, np.uint32, np.uint64]


def frames(old: np.ndarray, new: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    block = encode_block(old, new)
    return block.changed, np.frombuffer(block.mask, np.uint8), np.frombuffer(block.changes, np.uint8)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(1, 70), st.integers(0, 70), st.integers(0, 2**32))
def test_what_is_encoded_comes_back_bit_for_bit(dtype: type, size: int, changes: int, seed: int):
    random = np.random.default_rng(seed)
    old = random.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    new = old.copy()
    places = random.choice(size, min(changes, size), replace=False)
    new[places] = random.integers(0, np.iinfo(dtype).max, places.size, dtype, endpoint=True)
    decoded = np.zeros(size, dtype)
    decode_block(old, decoded, *frames(old, new))
    np.testing.assert_array_equal(decoded, new)


def test_nothing_changed_needs_no_bytes():
    same = np.arange(100, dtype=np.uint16)
    assert encode_block(same, same.copy()) == (0, b"", b"")


def test_all_changed_needs_no_mask():
    old = np.arange(100, dtype=np.uint32)
    block = encode_block(old, old + np.uint32(1))
    assert (block.changed, block.mask) == (100, b"")


def test_one_step_of_the_last_place_costs_less_than_its_position():
    random = np.random.default_rng(0)
    old = bits(random.standard_normal(1 << 20).astype(ml_dtypes.bfloat16))
    new, moved = old.copy(), random.choice(1 << 20, 10_486, replace=False)
    new[moved] += random.choice(np.array([1, 0xFFFF], np.uint16), moved.size)  # one unit up or down
    block = encode_block(old, new)
    assert block.changed == 10_486
    assert len(block.changes) < 10_486 // 4
    assert len(block.mask) + len(block.changes) < (1 << 21) // 100


@pytest.mark.parametrize(("old", "new", "changed"), [(0.0, -0.0, 1), (np.nan, np.nan, 0), (np.nan, 1.0, 1)])
def test_elements_are_compared_by_their_bits(old: float, new: float, changed: int):
    assert encode_block(bits(np.array([old], np.float32)), bits(np.array([new], np.float32))).changed == changed


def test_blocks_cover_an_array(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta_blocks, "BLOCK_ELEMENTS", 4)
    assert list(blocks_of(9)) == [slice(0, 4), slice(4, 8), slice(8, 9)]
    assert list(blocks_of(0)) == []


def test_a_frame_that_would_expand_to_more_is_refused():
    old = np.zeros(1 << 16, np.uint8)
    bomb = np.frombuffer(encode_block(old, old + np.uint8(1)).changes, np.uint8)
    small = np.zeros(8, np.uint8)
    with pytest.raises(WeightsError, match="damaged"):
        decode_block(small, small.copy(), 8, np.zeros(0, np.uint8), bomb)


def test_a_frame_that_expands_to_less_is_refused():
    small = np.zeros(8, np.uint8)
    changes = np.frombuffer(encode_block(small, small + np.uint8(1)).changes, np.uint8)
    old = np.zeros(1 << 16, np.uint8)
    with pytest.raises(WeightsError, match="damaged"):
        decode_block(old, old.copy(), old.size, np.zeros(0, np.uint8), changes)


def test_a_mask_with_another_count_is_refused():
    old = np.zeros(64, np.uint16)
    three, four = old.copy(), old.copy()
    three[:3], four[:4] = 1, 1
    mask, changes = frames(old, three)[1], frames(old, four)[2]
    with pytest.raises(WeightsError, match="mask"):
        decode_block(old, old.copy(), 4, mask, changes)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 64))
def test_no_bytes_crash_the_decoder(mask: bytes, changes: bytes, changed: int):
    old = np.zeros(64, np.uint16)
    try:
        decode_block(old, old.copy(), changed, np.frombuffer(mask, np.uint8), np.frombuffer(changes, np.uint8))
    except WeightsError:
        return
