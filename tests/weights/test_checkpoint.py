import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.weights.publications import JOB, arrays_of, manifest_of

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, open_broadcaster, open_client
from penstock.weights.checkpoint import CheckpointFolder

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
    (folder / "weights-1.safetensors").write_bytes(b"whole, but not in the marker yet")
    second = open_broadcaster(CONFIG, JOB, "t", str(tmp_path))
    second.publish(WeightVersion(0, 1), arrays_of(1))
    assert files(tmp_path) == ["marker.json", "weights-0.safetensors", "weights-1.safetensors"]
    client = open_client(second.endpoint(), CONFIG, "t", "c")
    assert [client.fetch(WeightVersion(0, step))["step"][0] for step in (0, 1)] == [0, 1]


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}"])
def test_a_marker_that_is_not_ours_is_written_over(tmp_path: Path, content: bytes):
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
        CheckpointFolder("nothing://x", JOB)


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
    folder = CheckpointFolder(url, JOB)
    assert folder.prepare("t", JOB, 1 << 40) is None

    def broken(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "open", broken)
    with pytest.raises(UnreachableError, match="cannot be read: ConnectionError: no route"):
        folder.marker()


def test_two_jobs_have_two_folders_whatever_their_names(tmp_path: Path):
    for job in ("../a", "a/b", "a_b", "é" * 100):
        folder = CheckpointFolder(str(tmp_path), job)
        folder.prepare("t", job, 1 << 40)
        name = folder.begin_arrays(arrays_of(0), set())
        folder.write_arrays(name, manifest_of(0), arrays_of(0))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 4
