"""Where code lies that would be imported, found without importing it; test_loading.py imports."""

import sys

import pytest

from penstock.types.importing import load_attribute, locate

LOUD = "import pathlib; (pathlib.Path(__file__).parent / 'imported').touch()\ndef make(): ...\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """``loud.inner`` in the current directory, which leaves a file behind when it, or its package, is imported."""
    (tmp_path / "loud").mkdir()
    for name in ("__init__.py", "inner.py"):
        (tmp_path / "loud" / name).write_text(LOUD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("loud", "loud.inner"):
        sys.modules.pop(name, None)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("loud.inner.make", "loud/inner.py"), ("loud.inner:make", "loud/inner.py"), ("loud.make", "loud/__init__.py"),
        ("loud/inner.py:make", "loud/inner.py"), ("loud:Name-v0", "loud/__init__.py"),
    ],
)  # fmt: skip
def test_a_file_is_found_and_not_imported(package, path, file):
    assert locate(path) == str(package / file)
    assert not (package / "loud" / "imported").exists() and "loud" not in sys.modules
    if "-" not in path:
        assert callable(load_attribute(path, "reward")) and (package / "loud" / "imported").exists()


def test_what_is_installed_or_compiled_is_named(package):
    assert str(locate("json.decoder:JSONDecoder")).endswith("json/decoder.py")
    assert locate("sys.exit") == "built-in"


@pytest.mark.parametrize(
    "path",
    ["no_such.module.name", "loud.absent.name", "loud.inner.deeper:name", "absent.py:name", "x", "a..b:c", "", ":",
     "a\0:b", "a\0.py:b", "~nobody-of-that-name/x.py:y", "/dev/null.py:x"],
)  # fmt: skip
def test_what_is_not_there_is_none(package, path):
    assert locate(path) is None
