"""Without the extra, whoever asks for Ray is told how to get it."""

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["ray"] = None
from penstock.types import ConfigError
try:
    import penstock.overseer.ray
except ConfigError as error:
    print(error)
"""


def test_the_remedy_is_named():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout == 'runtime: ray needs Ray, which is not installed: pip install "penstock[ray]"\n'
