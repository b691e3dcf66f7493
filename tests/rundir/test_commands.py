"""Hints name the executable that was used."""

from pathlib import Path

import pytest

from penstock.rundir.commands import command_line, executable


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable `penstock` in a virtual environment of the working directory, which is not on the PATH."""
    path = tmp_path / ".venv" / "bin" / "penstock"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return path


def test_what_is_on_the_path_is_called_by_its_name(program, monkeypatch):
    monkeypatch.setenv("PATH", str(program.parent))
    assert executable([str(program), "train"]) == ["penstock"]


def test_what_is_not_is_called_by_its_path_from_here(program, tmp_path, monkeypatch):
    assert executable([str(program)]) == executable([".venv/bin/penstock"]) == [".venv/bin/penstock"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert executable([str(program)]) == [str(program)]


def test_another_one_on_the_path_is_not_taken_for_it(program, tmp_path, monkeypatch):
    other = tmp_path / "other" / "penstock"
    other.parent.mkdir()
    other.touch(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert executable([str(program)]) == [".venv/bin/penstock"]


def test_a_module_is_called_as_one(program, monkeypatch):
    python = program.with_name("python")
    python.touch(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert executable(["/lib/penstock/__main__.py", "train"]) == [".venv/bin/python", "-m", "penstock"]
    monkeypatch.setenv("PATH", str(python.parent))
    assert executable(["/lib/penstock/__main__.py", "train"]) == ["python", "-m", "penstock"]


def test_a_program_of_the_users_own_is_told_the_plain_command():
    assert executable(["train_it.py"]) == executable([""]) == executable([]) == ["penstock"]


def test_words_are_quoted_where_a_shell_needs_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["mine.py"])
    assert command_line("eval", Path("my runs/step-2")) == "penstock eval 'my runs/step-2'"
