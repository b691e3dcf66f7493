"""Deltas are lossless, damage to them is noticed, and the last few of them are kept."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import WeightsError, WeightVersion
from penstock.weights import delta as deltas
from penstock.weights.delta import (
    Delta,
    DeltaHistory,
    bits,
    blocks_of,
    decode_block,
    decode_delta,
    encode_block,
    encode_delta,
)
from penstock.weights.manifest import BufferPool, Manifest, describe

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
    monkeypatch.setattr(deltas, "BLOCK_ELEMENTS", 4)
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


LARGE = 1 << 40
Arrays = dict[str, np.ndarray]


def base_arrays() -> Arrays:
    random = np.random.default_rng(0)
    return {
        "embedding": random.standard_normal((50, 40)).astype(np.float32),
        "query": random.standard_normal((30, 7)).astype(ml_dtypes.bfloat16),
        "norm": np.ones(40, np.float32),
        "empty": np.zeros((3, 0), np.float32),
        "scale": np.array(0.0, np.float64),
    }


def changed_arrays() -> Arrays:
    arrays = {name: array.copy() for name, array in base_arrays().items()}
    arrays["embedding"][3, :5] += 1e-3
    arrays["embedding"][49, 39] = np.nan
    arrays["query"][0, 0] = -arrays["query"][0, 0]
    arrays["scale"] = np.array(-0.0)
    return arrays


def manifest_of(step: int, arrays: Arrays) -> Manifest:
    return describe("job", "a" * 32, WeightVersion(0, step), arrays)


def encoded() -> Delta:
    base, new = base_arrays(), changed_arrays()
    return encode_delta(manifest_of(0, base), base, manifest_of(1, new), new)


def test_the_delta_leads_from_one_publication_to_the_other_bit_for_bit():
    base, new, delta = base_arrays(), changed_arrays(), encoded()
    manifest, decoded = decode_delta(delta.to_bytes(), manifest_of(0, base), base, LARGE)
    assert manifest == manifest_of(1, new)
    assert {name: array.tobytes() for name, array in decoded.items()} == {k: v.tobytes() for k, v in new.items()}
    assert {name: (array.shape, array.dtype) for name, array in decoded.items()} == {
        name: (array.shape, array.dtype) for name, array in new.items()
    }


def test_it_counts_what_changed_and_is_smaller():
    delta = encoded()
    assert (delta.changed_elements, delta.elements) == (8, 2251)
    assert delta.nbytes == len(delta.to_bytes()) < 1200 < delta.manifest.nbytes


def test_unchanged_arrays_are_those_of_the_base_and_the_others_are_read_only():
    base = base_arrays()
    _, decoded = decode_delta(encoded().to_bytes(), manifest_of(0, base), base, LARGE)
    assert [name for name in base if decoded[name] is base[name]] == ["norm", "empty"]
    assert not decoded["embedding"].flags.writeable
    assert base["embedding"].tobytes() == base_arrays()["embedding"].tobytes()


def test_memory_is_used_again():
    base, memory = {"x": np.zeros(300_000, np.float32)}, BufferPool()
    new = {"x": base["x"].copy()}
    new["x"][7] = 1.0
    delta = encode_delta(manifest_of(0, base), base, manifest_of(1, new), new).to_bytes()
    places = set[int]()
    for _ in range(3):
        _, decoded = decode_delta(delta, manifest_of(0, base), base, LARGE, memory)
        places.add(decoded["x"].ctypes.data)
        del decoded
    assert len(places) == 1
    assert memory.free_bytes == 1_200_000


def test_arrays_of_several_blocks_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deltas, "BLOCK_ELEMENTS", 7)
    base, new = base_arrays(), changed_arrays()
    _, decoded = decode_delta(encoded().to_bytes(), manifest_of(0, base), base, LARGE)
    assert {name: array.tobytes() for name, array in decoded.items()} == {k: v.tobytes() for k, v in new.items()}


def test_another_base_is_refused():
    other = changed_arrays()
    with pytest.raises(WeightsError, match="applies to"):
        decode_delta(encoded().to_bytes(), manifest_of(0, other), other, LARGE)


def test_the_same_content_under_another_version_is_another_base():
    base = base_arrays()
    with pytest.raises(WeightsError, match="applies to"):
        decode_delta(encoded().to_bytes(), manifest_of(5, base), base, LARGE)


def test_a_base_that_is_not_what_its_manifest_says_is_noticed():
    lies = base_arrays()
    lies["embedding"][0, 0] += 1
    with pytest.raises(WeightsError, match=r"damaged after a delta.*embedding"):
        decode_delta(encoded().to_bytes(), manifest_of(0, base_arrays()), lies, LARGE)


def test_a_change_that_the_delta_does_not_have_is_noticed():
    base, new = base_arrays(), changed_arrays()
    incomplete = encode_delta(manifest_of(0, base), base, manifest_of(1, new), base)
    with pytest.raises(WeightsError, match="embedding changed, but the delta has no change of it"):
        decode_delta(incomplete.to_bytes(), manifest_of(0, base), base, LARGE)


def test_layouts_that_differ_are_refused_by_name():
    base, new = base_arrays(), changed_arrays()
    del new["norm"]
    with pytest.raises(WeightsError, match=r"missing \['norm'\]"):
        encode_delta(manifest_of(0, base), base, manifest_of(1, new), new)


def test_a_result_larger_than_allowed_is_refused():
    with pytest.raises(WeightsError, match="max_bytes"):
        decode_delta(encoded().to_bytes(), manifest_of(0, base_arrays()), base_arrays(), 100)


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1])
def test_a_message_cut_short_is_refused(length: int):
    with pytest.raises(WeightsError):
        decode_delta(encoded().to_bytes()[:length], manifest_of(0, base_arrays()), base_arrays(), LARGE)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_gives_other_arrays(data: st.DataObject):
    message, base = bytearray(encoded().to_bytes()), base_arrays()
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, decoded = decode_delta(bytes(message), manifest_of(0, base), base, LARGE)
    except WeightsError:
        return
    assert {name: array.tobytes() for name, array in decoded.items()} == {
        name: array.tobytes() for name, array in changed_arrays().items()
    }


def publication(step: int) -> tuple[Manifest, dict[str, np.ndarray]]:
    array = np.zeros(100_000, np.float32)
    array[:step] = 1.0
    arrays = {"x": array}
    return describe("job", "a" * 32, WeightVersion(0, step), arrays), arrays


def history_up_to(step: int, most: int = 4) -> DeltaHistory:
    history = DeltaHistory(most)
    for each in range(step + 1):
        history.add(*publication(each))
    return history


def test_the_first_publication_has_a_way_to_itself_only():
    history = DeltaHistory()
    assert history.chains() == {}
    assert history.add(*publication(0)) is None
    assert history.chains() == {publication(0)[0].content: ()}


def test_a_client_that_is_two_behind_gets_two_deltas_in_order():
    chain = history_up_to(3).chains()[publication(1)[0].content]
    manifest, arrays = publication(1)
    for delta in chain:
        manifest, arrays = decode_delta(delta.to_bytes(), manifest, arrays, LARGE)
    assert [delta.manifest.version.step for delta in chain] == [2, 3]
    np.testing.assert_array_equal(arrays["x"], publication(3)[1]["x"])


def test_who_is_too_far_behind_gets_none():
    history = history_up_to(5, most=2)
    assert sorted(version.step for version, _ in history.chains()) == [3, 4, 5]


def test_a_delta_that_is_not_smaller_ends_every_chain():
    history = history_up_to(3)
    random = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    manifest = describe("job", "a" * 32, WeightVersion(0, 4), {"x": random})
    assert history.add(manifest, {"x": random}) is None
    assert history.chains() == {manifest.content: ()}


def test_deltas_that_are_larger_together_are_left_out():
    history = DeltaHistory()
    random = np.random.default_rng(0)
    for step in range(3):
        noise = random.integers(0, 2**20, 100_000, np.uint32)  # a delta of such takes 2.6 of 4 bytes
        arrays = {"x": noise.view(np.float32)}
        history.add(describe("job", "a" * 32, WeightVersion(0, step), arrays), arrays)
    assert sorted(version.step for version, _ in history.chains()) == [1, 2]
