import subprocess
import sys

import penstock.batch


def test_every_exported_name_resolves():
    for name in penstock.batch.__all__:
        assert getattr(penstock.batch, name) is not None
    assert sorted(dir(penstock.batch)) == sorted(penstock.batch.__all__)


def test_importing_the_package_and_its_makers_loads_no_jax():
    code = "import sys, penstock.batch as b; b.DeadlineBatchMaker, b.pack; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
