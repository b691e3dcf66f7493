"""A command that computes begins anew with memory in huge pages, where Linux gives them to those who ask."""

import os
import subprocess
import sys

import pytest

from penstock import __main__ as process

BEGUN_ANEW = """
import os, sys
from penstock import __main__ as process
process._given_on_request = lambda: True
sys.argv = ["penstock", "eval", "--help"]
print(os.environ.get("GLIBC_TUNABLES"), flush=True)
code = process.run()
print(os.environ.get("GLIBC_TUNABLES"), code)
"""


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """On a machine with huge pages on request: what was begun in this process's place."""
    found = []
    monkeypatch.setattr(os, "execve", lambda *given: found.append(given))
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.35"))
    monkeypatch.setattr(process, "_HUGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(sys, "argv", ["/bin/penstock", "train", "cats"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "/bin/penstock", "train", "cats"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    return found


def test_a_command_that_computes_begins_anew_with_its_own_words(begun):
    process.begin_with_huge_pages()
    [(program, words, environment)] = begun
    assert program == sys.executable
    assert words == [sys.executable, "-X", "dev", "/bin/penstock", "train", "cats"]
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("words", [[], ["--help"], ["status", "runs/x"], ["dashboard", "train"]])
def test_other_commands_go_on(begun, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["/bin/penstock", *words])
    process.begin_with_huge_pages()
    assert begun == []


@pytest.mark.parametrize("library", [("glibc", "2.34"), ("glibc", "2.9"), ("", "")])
def test_another_library_goes_on(begun, monkeypatch, library):
    monkeypatch.setattr("platform.libc_ver", lambda: library)
    process.begin_with_huge_pages()
    assert begun == []


@pytest.mark.parametrize("given", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_where_they_are_given_to_all_or_none_it_goes_on(begun, tmp_path, given):
    (tmp_path / "enabled").unlink()
    if given is not None:
        (tmp_path / "enabled").write_text(given)
    process.begin_with_huge_pages()
    assert begun == []


def test_what_the_user_says_of_them_holds(begun, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    process.begin_with_huge_pages()
    assert begun == []


@pytest.mark.parametrize("before", ["", "glibc.malloc.check=3"])
def test_processes_begun_by_it_have_the_tunables_of_before(begun, monkeypatch, before):
    if before:
        monkeypatch.setenv("GLIBC_TUNABLES", before)
    process.begin_with_huge_pages()
    environment = begun.pop()[2]
    assert environment["GLIBC_TUNABLES"] == f"{before}:glibc.malloc.hugetlb=1".lstrip(":")
    monkeypatch.setattr(os, "environ", environment)
    process.begin_with_huge_pages()
    assert begun == []
    assert os.environ.get("GLIBC_TUNABLES", "") == before
    assert "_PENSTOCK_GLIBC_TUNABLES" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="glibc reads its tunables on Linux")
def test_the_process_that_was_begun_anew_is_the_command():
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", BEGUN_ANEW], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    first, second, *told, last = done.stdout.splitlines()
    assert (first, second, last) == ("None", "glibc.malloc.hugetlb=1", "None 0")
    assert any("Evaluate a checkpoint" in line for line in told)
