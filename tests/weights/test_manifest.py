"""Manifests of other processes, digests, work in several threads, and memory that is used again."""

import gc
import json
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import WeightsError, WeightVersion
from penstock.weights import manifest as manifests
from penstock.weights.manifest import (
    DTYPES,
    BufferPool,
    Manifest,
    check_layout,
    check_sendable,
    compact_json,
    damaged_arrays,
    describe,
    in_parallel,
    plain_memory,
    raw_bytes,
    read_json,
)


@pytest.mark.parametrize("nbytes", [0, 1 << 30])
def test_results_keep_the_order_of_the_items(nbytes: int):
    assert in_parallel(lambda item: item * item, range(50), nbytes) == [item * item for item in range(50)]


def test_small_work_stays_in_its_thread_and_large_work_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifests, "THREADS", 2)
    here = threading.get_ident()
    assert set(in_parallel(lambda _: threading.get_ident(), range(4), 1000)) == {here}
    assert here not in in_parallel(lambda _: threading.get_ident(), range(4), 1 << 30)


def test_an_error_comes_through():
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda item: 1 // item, [1, 0], 1 << 30)


SIZE = 1 << 20


def address(array):
    return array.ctypes.data


def test_memory_is_used_again_after_the_last_view_is_gone():
    memory = BufferPool()
    first = memory.take(SIZE)
    place, view = address(first), first.view(np.float32).reshape(512, 512)[3:]
    view.flags.writeable = False
    del first
    gc.collect()
    second = memory.take(SIZE)  # the view is still there
    assert address(second) != place and memory.free_bytes == 0
    del view
    gc.collect()
    assert memory.free_bytes == SIZE
    assert address(memory.take(SIZE)) == place


def test_other_sizes_get_memory_of_their_own():
    memory = BufferPool()
    memory.take(SIZE)
    gc.collect()
    assert len(memory.take(SIZE + 8)) == SIZE + 8
    assert memory.free_bytes == SIZE + SIZE + 8


def test_arrays_outlive_the_memory_that_gave_them():
    memory = BufferPool()
    array = memory.take(SIZE)
    array[:] = 7
    del memory
    gc.collect()
    assert int(array.sum()) == 7 * SIZE


def test_all_arrays_are_aligned_and_small_ones_are_not_kept():
    memory = BufferPool()
    assert memory.take(0).shape == (0,)
    for size in (1, 63, 4097, SIZE, SIZE + 1):
        array = memory.take(size)
        assert array.shape == (size,) and array.dtype == np.uint8 and address(array) % 64 == 0
        del array
    assert address(plain_memory(100)) % 64 == 0
    gc.collect()
    assert memory.free_bytes == 2 * SIZE + 1


LARGE = 1 << 40


def arrays() -> dict[str, np.ndarray]:
    return {
        "embedding": np.arange(6, dtype=np.float32).reshape(2, 3),
        "norm": np.ones(3, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.int32),
        "scale": np.array(2.0, np.float64),
    }


def described() -> Manifest:
    return describe("job", "a" * 32, WeightVersion(1, 7), arrays())


def test_a_manifest_says_what_the_arrays_are():
    manifest = described()
    assert [spec.nbytes for spec in manifest.arrays] == [24, 6, 0, 8]
    assert manifest.nbytes == 38
    assert manifest.layout["norm"] == ((3,), "bfloat16")
    assert manifest.arrays[2].digest == "00000000"  # CRC-32 of nothing


def test_digests_are_crc_32():
    manifest = describe("job", "a" * 32, WeightVersion(0, 0), {"check": np.frombuffer(b"123456789", np.uint8)})
    assert manifest.arrays[0].digest == "cbf43926"  # the check value of its definition


def test_a_manifest_survives_its_text():
    assert Manifest.from_values(read_json(compact_json(described().to_values())), LARGE) == described()


def test_equal_content_has_one_digest_whoever_published_it():
    other = describe("other", "b" * 32, WeightVersion(2, 9), arrays())
    assert other.digest == described().digest


@pytest.mark.parametrize("name", ["embedding", "norm", "scale"])
@pytest.mark.attack
def test_one_flipped_bit_is_found(name: str):
    damaged = {key: array.copy() for key, array in arrays().items()}
    raw_bytes(damaged[name])[-1] ^= 1
    assert damaged_arrays(described().arrays, damaged) == [name]
    assert describe("job", "a" * 32, WeightVersion(1, 7), damaged).digest != described().digest


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_keeps_its_bytes(dtype: str):
    array = (
        np.frombuffer(bytes(range(48)), np.uint8).view(DTYPES[dtype]) if dtype != "bool" else np.array([True, False])
    )
    spec = describe("job", "a" * 32, WeightVersion(0, 0), {"x": array}).arrays[0]
    back = manifests.from_raw_bytes(spec, raw_bytes(array).copy())
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_a_dtype_that_does_not_travel_is_refused_by_name():
    with pytest.raises(WeightsError, match="spin is complex64"):
        check_sendable({"spin": np.zeros(1, np.complex64)})
    with pytest.raises(WeightsError, match="swapped is >f4"):
        check_sendable({"swapped": np.zeros(1, ">f4")})


def change(path: list[Any], value: Any) -> bytes:
    values = described().to_values()
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (change(["arrays", 0, 2], [1 << 30, 1 << 30]), "max_bytes"),
        (change(["arrays", 0, 2], [-1, 3]), "not a number"),
        (change(["arrays", 0, 2], [2.0, 3]), "not a number"),
        (change(["arrays", 0, 2], [3, 2]), "damaged"),
        (change(["arrays", 0, 1], "object"), "does not travel"),
        (change(["arrays", 0, 0], "norm"), "two arrays"),
        (change(["arrays", 0, 0], ""), "not a text"),
        (change(["arrays", 0, 3], "0"), "8 digits"),
        (change(["arrays", 0], [1]), "TypeError"),
        (change(["version"], [1]), "lineage, step"),
        (change(["version"], [True, 2]), "not a number"),
        (change(["digest"], "0" * 32), "damaged"),
        (b"{}", "KeyError"),
        (b"[]", "TypeError"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_manifest_is_refused(text: bytes, message: str):
    with pytest.raises(WeightsError, match=message):
        Manifest.from_values(read_json(text), LARGE)


@pytest.mark.attack
def test_a_manifest_of_too_many_bytes_is_not_parsed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(WeightsError, match="at most 10 are read"):
        Manifest.from_values(read_json(compact_json(described().to_values())), LARGE)


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.attack
def test_any_damage_to_the_text_is_noticed_or_harmless(data: st.DataObject):
    text = bytearray(compact_json(described().to_values()))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = Manifest.from_values(read_json(bytes(text)), LARGE)
    except WeightsError:
        return
    assert read.arrays == described().arrays


def test_another_layout_is_refused_by_name():
    expected = {"a": ((1,), "float32"), "b": ((2,), "float32")}
    with pytest.raises(WeightsError, match=r"missing \['b'\], extra \['c'\], changed \[.a .*float32.* became .*int8"):
        check_layout(expected, {"a": ((1,), "int8"), "c": ((2,), "float32")}, "arrays")
