import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import WeightsError, WeightVersion
from penstock.weights import delta_blocks
from penstock.weights.delta import Delta, decode_delta, encode_delta
from penstock.weights.manifest import Manifest, describe
from penstock.weights.warm_memory import WarmMemory

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
    base, memory = {"x": np.zeros(300_000, np.float32)}, WarmMemory()
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
    monkeypatch.setattr(delta_blocks, "BLOCK_ELEMENTS", 7)
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
