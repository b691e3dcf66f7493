import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import cli

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process and an empty directory: its start would take most of the time."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in {"COLUMNS": "160", **variables}.items():
                patch.setenv(name, value)
            capsys.readouterr()
            code = cli.main(words)
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, shown.out, shown.err)

    return run


@pytest.fixture
def penstock_process(tmp_path: Path) -> Run:
    """Runs the command that is installed, in an empty directory."""

    def run(*words: str, timeout_s: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(Path(sys.executable).with_name("penstock")), *words],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "160", **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run
