import subprocess
import sys

import penstock.learner


def test_every_exported_name_resolves():
    for name in penstock.learner.__all__:
        assert getattr(penstock.learner, name) is not None
    assert sorted(dir(penstock.learner)) == sorted(penstock.learner.__all__)


def test_importing_the_config_loads_neither_jax_nor_optax():
    code = (
        "import sys, penstock.learner.config as c; c.LearnerConfig();"
        "print(sorted({'jax', 'optax', 'equinox', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
