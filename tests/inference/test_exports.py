import subprocess
import sys

import penstock.inference as package


def test_every_exported_name_exists():
    assert dir(package) == package.__all__ == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_config_loads_neither_jax_nor_the_server():
    code = "import sys, penstock.inference.config; print(sorted({'jax', 'uvicorn', 'transformers'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    assert loaded.stdout.strip() == "[]"
