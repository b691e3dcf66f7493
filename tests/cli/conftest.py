import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def penstock(tmp_path: Path) -> Run:
    """Runs the real command line in an empty directory."""

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
