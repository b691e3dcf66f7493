"""The source keeps the shape that it has reached: fewest concepts, no circles, no file that only another one needs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_number_is_beyond_its_ceiling():
    checked = subprocess.run(
        [sys.executable, "scripts/shape.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert checked.returncode == 0, checked.stderr


def test_a_number_beyond_its_ceiling_is_named(tmp_path):
    twins = "".join(f"class Twin{number}:\n    pass\n\n\n" for number in range(12))
    for package in ("", "one", "other"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "module.py").write_text(f"{twins if package else ''}def run():\n    return 1\n")
    checked = subprocess.run(
        [sys.executable, "scripts/shape.py", "--check", "--src", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (checked.returncode, checked.stderr) == (1, "beyond the limit: twin names\n")
