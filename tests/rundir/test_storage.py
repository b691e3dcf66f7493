"""Every kind of place keeps the promises of `penstock.rundir.storage`."""

import os
import sys
import time

import fsspec.registry  # noqa: F401
import pytest
from tests.object_stores import s3_server, s3_url, storage_url  # noqa: F401  (fixtures)

from penstock.rundir.storage import LocalStorage, RemoteStorage, open_storage
from penstock.types import ConfigError


@pytest.fixture
def storage(storage_url, tmp_path):  # noqa: F811
    return open_storage(tmp_path / "run", storage_url)


def write(storage, name, content):
    with storage.writing(name) as path:
        path.write_bytes(content)


def read(storage, name):
    with storage.opened(name) as source:
        return source.read_bytes() if hasattr(source, "read_bytes") else source.read()


def test_a_file_comes_back_and_goes(storage):
    before = time.time()
    storage.prepare(["rollouts", "batches"])
    assert storage.files("rollouts") == []
    write(storage, "rollouts/part-2.parquet", b"two")
    write(storage, "rollouts/part-1.parquet", b"o")
    write(storage, "batches/batch_1.parquet", b"b")
    found = storage.files("rollouts")
    assert [(file.name, file.size_bytes) for file in found] == [
        ("rollouts/part-1.parquet", 1),
        ("rollouts/part-2.parquet", 3),
    ]
    assert all(before - 2 <= file.modified_s <= time.time() + 2 for file in found)
    assert read(storage, "rollouts/part-2.parquet") == b"two"
    storage.delete("rollouts/part-2.parquet")
    storage.delete("rollouts/part-2.parquet")
    assert [file.name for file in storage.files("rollouts")] == ["rollouts/part-1.parquet"]
    with pytest.raises(FileNotFoundError):
        read(storage, "rollouts/part-2.parquet")


def test_nothing_is_listed_in_a_folder_that_is_not_there(storage):
    assert storage.files("rollouts") == []


def test_an_error_while_writing_leaves_no_file(storage):
    storage.prepare(["rollouts"])
    with pytest.raises(ValueError, match="in the middle"), storage.writing("rollouts/part-1.parquet") as path:
        path.write_bytes(b"half")
        raise ValueError("in the middle")
    assert storage.files("rollouts") == []


def test_another_writer_s_file_is_seen_at_once(storage, storage_url, tmp_path):  # noqa: F811
    other = open_storage(tmp_path / "run", storage_url)
    storage.prepare(["rollouts"])
    assert other.files("rollouts") == []  # which a cache would remember
    write(storage, "rollouts/part-1.parquet", b"1")
    assert len(other.files("rollouts")) == 1
    storage.delete("rollouts/part-1.parquet")
    assert other.files("rollouts") == []


def test_a_file_that_was_set_aside_is_where_no_reader_looks(storage):
    storage.prepare(["rollouts"])
    write(storage, "rollouts/part-1.parquet", b"1")
    write(storage, "rollouts/part-2.parquet", b"2")
    place = storage.set_aside("rollouts/part-1.parquet")
    assert place == storage.locate("damaged/rollouts/part-1.parquet")
    assert [file.name for file in storage.files("rollouts")] == ["rollouts/part-2.parquet"]
    assert read(storage, "damaged/rollouts/part-1.parquet") == b"1"


def test_listings_of_an_object_store_are_never_stale(s3_url, tmp_path):  # noqa: F811
    import s3fs

    elsewhere = s3fs.S3FileSystem(skip_instance_cache=True)  # another process, to all intents
    path = f"{s3_url.removeprefix('s3://')}/rollouts/part-1.parquet"
    elsewhere.pipe_file(path, b"1")
    storage = open_storage(tmp_path, s3_url)
    assert len(storage.files("rollouts")) == 1
    elsewhere.rm_file(path)
    assert storage.files("rollouts") == []
    with pytest.raises(FileNotFoundError):
        read(storage, "rollouts/part-1.parquet")


def test_a_file_is_not_listed_before_it_is_whole(tmp_path):
    storage = RemoteStorage(f"plain://{tmp_path}/x")
    storage.prepare(["rollouts"])
    seen = []
    upload = storage.filesystem.put_file

    def slow_upload(source, target):
        with open(target, "wb") as file:
            file.write(b"h")
            seen.append(storage.files("rollouts"))
        upload(source, target)

    storage.filesystem.put_file = slow_upload
    write(storage, "rollouts/part-1.parquet", b"whole")
    assert seen == [[]] and read(storage, "rollouts/part-1.parquet") == b"whole"


@pytest.mark.parametrize("url", [None, "plain"])
def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path, url):
    storage = open_storage(tmp_path, None if url is None else f"plain://{tmp_path}")
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name in ("part-1.parquet", ".part-2.parquet.1f.tmp", "notes.txt"):
        (folder / name).write_text("x")
    storage.prepare(["rollouts"])
    assert len(list(folder.iterdir())) == 3  # somebody may be writing it
    storage.remove_unfinished(["rollouts"])
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "part-1.parquet"]


def test_a_local_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: steps.append("flush"))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (steps.append("rename"), rename(*paths)))
    storage = LocalStorage(tmp_path)
    storage.prepare(["rollouts"])
    write(storage, "rollouts/part-1.parquet", b"x")
    assert steps == ["flush", "rename", "flush"]


def test_files_have_full_names_for_people(storage, storage_url):  # noqa: F811
    assert storage.locate("rollouts/part-1.parquet") == f"{storage_url.removeprefix('file://')}/rollouts/part-1.parquet"


def test_a_missing_package_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match=r"replay.store.url is 's3://b/r'.*s3fs: pip install 'penstock\[s3\]'"):
        open_storage(tmp_path, "s3://b/r")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match="replay.store.url is 'gs://b/r'.*pip install gcsfs"):
        open_storage(tmp_path, "gs://b/r")


def test_an_unknown_protocol_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="replay.store.url is 'tape://b/r', which fsspec cannot open"):
        open_storage(tmp_path, "tape://b/r")


def test_a_place_that_cannot_be_written_is_named_at_once(s3_url, tmp_path):  # noqa: F811
    with pytest.raises(ConfigError, match="replay.store.url is 's3://no-such-bucket/r', which cannot be written"):
        open_storage(tmp_path, "s3://no-such-bucket/r").prepare(["rollouts"])
