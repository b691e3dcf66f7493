"""The wheel holds all that runs need, and runs without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "penstock"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` builds, of a copy of the sources: setuptools writes beside them."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=240)
    if done.returncode != 0 and "Could not find a version that satisfies the requirement setuptools" in done.stderr:
        pytest.skip("no package index here to build with")
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("penstock-*-py3-none-any.whl")
    return built


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("penstock/")}
    on_disk = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == on_disk
    assert {"penstock/recipes/cats.yaml", "penstock/recipes/tokenizer/tokenizer.json", "penstock/py.typed"} <= inside


@pytest.mark.slow
def test_it_runs_where_the_repository_is_not(wheel, tmp_path):
    """With the packages of this environment, but Penstock from the wheel alone."""
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    (tmp_path / "here").mkdir()

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *words], cwd=tmp_path / "here", capture_output=True, text=True,
            timeout=280, env={**os.environ, "PYTHONPATH": str(installed)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "cats" in run("recipes") and "Peak" in run("config", "learner.optimizer.learning_rate")
    shown = run("train", "cats", "steps=2", "curriculum.eval_n_examples=4", "--run-dir", "first")
    assert "finished at step 2/2" in shown
    assert f"{sys.executable} -m penstock eval first/checkpoints/step-2" in shown or "python -m penstock eval" in shown
    written = (tmp_path / "here" / "first" / "config.yaml").read_text()
    assert "steps: 2" in written and str(ROOT) not in written
