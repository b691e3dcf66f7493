import threading
from pathlib import Path

import pytest
from tests.small_disk import fill, small_disk

from penstock.rundir import replaced_atomically, write_atomically
from penstock.rundir.storage import check_place, keep_room, write_into_kept_room
from penstock.types import ConfigError


def test_a_file_appears_whole_and_leaves_nothing_beside_it(tmp_path):
    write_atomically(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").read_text() == "{}"
    write_atomically(tmp_path / "a.json", b"\x00\x01", durable=False)
    assert (tmp_path / "a.json").read_bytes() == b"\x00\x01"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_error_while_writing_keeps_the_old_file(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(ValueError, match="in the middle"), replaced_atomically(target) as temporary:
        temporary.write_text("half")
        assert target.read_text() == "old"
        raise ValueError("in the middle")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_unfinished_files_match_no_readers_pattern(tmp_path):
    with replaced_atomically(tmp_path / "part-1.parquet") as temporary:
        temporary.write_text("half")
        assert not list(tmp_path.glob("*.parquet"))
        assert temporary.name.startswith(".")  # which pandas and Arrow skip in a directory


def test_many_writers_of_one_file_never_tear_it(tmp_path):
    target = tmp_path / "status.json"
    contents = {letter * 20_000 for letter in "abcd"}

    def write(content):
        for _ in range(20):
            write_atomically(target, content, durable=False)

    write("a" * 20_000)
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert target.read_text() in contents
    for thread in threads:
        thread.join(10)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.attack
def test_on_a_full_disk_a_file_is_replaced_in_the_room_that_was_kept(tmp_path):
    with small_disk(tmp_path / "disk", "256k") as disk:
        path = disk / "status.json"
        write_atomically(path, "old", durable=False)
        keep_room(path, 8192)
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "x" * 8000, durable=False)
        for number in range(5):  # longer than one block, in turn in two files
            content = f"{number}".encode() * 8000
            with path.open("rb") as reader:  # who has the old one open reads it to its end
                before = path.read_bytes()
                write_into_kept_room(path, content)
                assert reader.read() == before
            assert path.read_bytes() == content.ljust(8192)
        with pytest.raises(OSError, match="8192 bytes were kept"):
            write_into_kept_room(path, bytes(8193))
        assert path.read_bytes().startswith(b"4444")
        assert not list(disk.glob("*.tmp"))


def test_kept_room_grows_and_never_shrinks(tmp_path):
    path = tmp_path / "status.json"
    with pytest.raises(OSError, match="0 bytes were kept"):
        write_into_kept_room(path, b"x")
    keep_room(path, 100)
    keep_room(path, 50)
    write_into_kept_room(path, b"x" * 100)
    keep_room(path, 200)
    write_into_kept_room(path, b"y" * 200)
    assert path.read_bytes() == b"y" * 200


@pytest.mark.attack
@pytest.mark.parametrize("name", ["line\nbreak", "bell\a", "bytes\udcff", "right-to-left\u202e"])
def test_a_path_that_cannot_be_printed_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be printed") as refusal:
        check_place(tmp_path / name, "--rollouts")
    assert str(refusal.value).isprintable() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a b", "☃", "quo'te\"", "$(x)", "ä/ö"])
def test_other_paths_are_fine(tmp_path, name):
    check_place(tmp_path / name, "--rollouts")
    assert not list(tmp_path.iterdir())


@pytest.mark.attack
def test_a_place_where_no_file_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", Path("/proc/none/below"), tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="--rollouts .* cannot be written"):
            check_place(place, "--rollouts")
    (tmp_path / "dangling").symlink_to("nowhere")
    for place in (tmp_path, tmp_path / "file", tmp_path / "dangling"):
        with pytest.raises(ConfigError, match="--rollouts .* exists already and is not overwritten"):
            check_place(place, "--rollouts")
