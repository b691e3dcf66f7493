import threading

import pytest

from penstock.rundir import replaced_atomically, write_atomically


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
