import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors import safe_open

from penstock.types import WeightsError, WeightVersion
from penstock.weights.manifest import DTYPES, Manifest, describe
from penstock.weights.tensor_file import read_tensors, write_tensors


def arrays() -> dict[str, np.ndarray]:
    return {
        "odd": np.arange(3, dtype=np.int8),
        "kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.ones(5, ml_dtypes.bfloat16),
        "empty": np.zeros((0, 2), np.float64),
        "scalar": np.array(7, np.int64),
    }


def described() -> Manifest:
    return describe("job", "a" * 32, WeightVersion(2, 3), arrays())


def content() -> bytes:
    file = io.BytesIO()
    write_tensors(file, described(), arrays())
    return file.getvalue()


def test_what_is_written_is_read():
    found = read_tensors(io.BytesIO(content()), described())
    assert {name: (array.dtype, array.shape, array.tobytes()) for name, array in found.items()} == {
        name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays().items()
    }
    assert not any(array.flags.writeable for array in found.values())


def test_it_is_a_safetensors_file(tmp_path: Path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content())
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"lineage": "2", "step": "3"}
        assert sorted(file.keys()) == sorted(arrays())
        np.testing.assert_array_equal(file.get_tensor("kernel"), arrays()["kernel"])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_safetensors_knows_every_dtype(dtype: str):
    array = {"x": np.zeros(8, DTYPES[dtype])}
    file = io.BytesIO()
    write_tensors(file, describe("job", "a" * 32, WeightVersion(0, 0), array), array)
    assert [name for name, _ in safetensors.deserialize(file.getvalue())] == ["x"]


@pytest.mark.parametrize("length", [0, 7, 20, -1])
def test_a_file_cut_short_is_refused(length: int):
    with pytest.raises(WeightsError, match="damaged|cut short within scalar"):
        read_tensors(io.BytesIO(content()[:length]), described())


def test_a_header_that_says_it_is_huge_is_not_read():
    with pytest.raises(WeightsError, match="header differs"):
        read_tensors(io.BytesIO((1 << 60).to_bytes(8, "little") + b"{}"), described())


def test_a_file_of_another_version_is_refused():
    other = describe("job", "a" * 32, WeightVersion(2, 4), arrays())
    with pytest.raises(WeightsError, match="not of .*step=4"):
        read_tensors(io.BytesIO(content()), other)
