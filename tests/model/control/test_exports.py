import subprocess
import sys

import pytest

from penstock.model import control


@pytest.mark.parametrize("name", control.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(control, name) is not None
    assert name in dir(control)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Actor'"):
        _ = control.Actor


def test_the_config_loads_no_jax():
    code = "import sys; from penstock.model.control import ControlModelConfig; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)
