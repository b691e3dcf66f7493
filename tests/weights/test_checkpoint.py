"""Checkpoint files: what is written and read of them, kept, damaged, and left by the dead."""

import io
import uuid
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.weights.publications import JOB, arrays_of, manifest_of

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster, open_client
from penstock.weights.checkpoint import CheckpointFiles, read_tensors, write_tensors
from penstock.weights.manifest import DTYPES, Manifest, describe


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


CONFIG = WeightsConfig(transport="checkpoint", keep=2)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def test_as_many_versions_are_kept_as_asked_and_each_can_be_fetched(tmp_path: Path):
    broadcaster = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    client = open_client(broadcaster.endpoint(), CONFIG, "t", "c")
    for step in range(5):
        broadcaster.publish(WeightVersion(0, step), arrays_of(step))
    assert files(tmp_path) == ["marker.json", "weights-0.safetensors", "weights-1.safetensors"]
    assert client.fetch(WeightVersion(0, 3))["step"][0] == 3
    assert client.fetch(WeightVersion(0, 4))["step"][0] == 4
    with pytest.raises(SupersededVersionError):
        client.fetch(WeightVersion(0, 2))


def test_the_files_are_safetensors(tmp_path: Path):
    broadcaster = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    broadcaster.publish(WeightVersion(0, 4), arrays_of(4))
    (path,) = tmp_path.rglob("*.safetensors")
    np.testing.assert_array_equal(load_file(path)["kernel"], arrays_of(4)["kernel"])


def test_a_file_that_is_damaged_gives_no_arrays(tmp_path: Path):
    broadcaster = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    broadcaster.publish(WeightVersion(0, 4), arrays_of(4))
    (path,) = tmp_path.rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"3 attempts.*\['kernel'\]"):
        open_client(broadcaster.endpoint(), CONFIG, "t", "c").fetch(WeightVersion(0, 4))
    path.write_bytes(content[:100])
    with pytest.raises(WeightsError, match="damaged"):
        open_client(broadcaster.endpoint(), CONFIG, "t", "c").fetch(WeightVersion(0, 4))


def test_a_file_that_is_missing_is_named(tmp_path: Path):
    broadcaster = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    broadcaster.publish(WeightVersion(0, 4), arrays_of(4))
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(WeightsError, match=r"weights-0.safetensors is gone"):
        open_client(broadcaster.endpoint(), CONFIG, "t", "c").fetch(WeightVersion(0, 4))


def test_what_a_killed_broadcaster_left_behind_goes(tmp_path: Path):
    first = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    first.publish(WeightVersion(0, 0), arrays_of(0))
    folder = next(tmp_path.rglob("marker.json")).parent
    (folder / ".weights-1.safetensors.123.tmp").write_bytes(b"half")
    (folder / "weights-1.safetensors").write_bytes(b"whole, but the pointer does not name it yet")
    second = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    second.publish(WeightVersion(0, 1), arrays_of(1))
    assert files(tmp_path) == ["marker.json", "weights-0.safetensors", "weights-1.safetensors"]
    client = open_client(second.endpoint(), CONFIG, "t", "c")
    assert [client.fetch(WeightVersion(0, step))["step"][0] for step in (0, 1)] == [0, 1]


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}"])
def test_a_pointer_that_is_not_ours_is_written_over(tmp_path: Path, content: bytes):
    first = open_broadcaster(CONFIG, JOB, "another token", str(tmp_path))
    first.publish(WeightVersion(0, 7), arrays_of(7))
    if content:
        next(tmp_path.rglob("marker.json")).write_bytes(content)
    second = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    second.publish(WeightVersion(0, 3), arrays_of(3))
    client = open_client(second.endpoint(), CONFIG, "t", "c")
    assert client.latest() == WeightVersion(0, 3)


def test_a_restart_at_an_older_version_of_the_same_life_is_refused(tmp_path: Path):
    open_broadcaster(CONFIG, JOB, "t", str(tmp_path)).publish(WeightVersion(0, 7), arrays_of(7))
    again = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    with pytest.raises(WeightsError, match="older than"):
        again.publish(WeightVersion(0, 6), arrays_of(6))
    again.publish(WeightVersion(1, 6), arrays_of(6))


def test_the_configured_url_goes_before_the_default(tmp_path: Path):
    config = CONFIG.model_copy(update={"url": str(tmp_path / "mine")})
    open_broadcaster(config, JOB, "t", str(tmp_path / "default")).publish(WeightVersion(0, 0), arrays_of(0))
    assert not (tmp_path / "default").exists() and files(tmp_path / "mine")


def test_a_place_that_cannot_be_written_is_a_configuration_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        open_broadcaster(CONFIG, JOB, "t", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="weights.url is 'nothing://x'"):
        CheckpointFiles("nothing://x", JOB)


def test_a_full_disk_is_told_and_the_version_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broadcaster = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    broadcaster.publish(WeightVersion(0, 0), arrays_of(0))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.weights.checkpoint.write_tensors", full)
    with pytest.raises(WeightsError, match=r"weights-1.safetensors cannot be written: OSError.*No space left"):
        broadcaster.publish(WeightVersion(0, 1), arrays_of(1))
    monkeypatch.undo()
    client = open_client(broadcaster.endpoint(), CONFIG, "t", "c")
    assert client.latest() == WeightVersion(0, 0)
    broadcaster.publish(WeightVersion(0, 1), arrays_of(1))
    assert client.fetch(WeightVersion(0, 1))["step"][0] == 1


def test_a_place_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch):
    url = f"memory://{uuid.uuid4().hex}"
    folder = CheckpointFiles(url, JOB)
    folder.prepare()
    assert folder.read_pointer() is None

    def broken(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "open", broken)
    with pytest.raises(UnreachableError, match="cannot be read: ConnectionError: no route"):
        folder.read_pointer()


def test_two_jobs_have_two_folders_whatever_their_names(tmp_path: Path):
    for job in ("../a", "a/b", "a_b", "é" * 100):
        folder = CheckpointFiles(str(tmp_path), job)
        folder.prepare()
        name = folder.begin_arrays(arrays_of(0), set())
        folder.write_arrays(name, manifest_of(0), arrays_of(0))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 4
