import subprocess
import sys

import pytest
from pydantic import ValidationError

from penstock.weights.config import WeightsConfig


def test_a_certificate_needs_its_key():
    with pytest.raises(ValidationError, match="belong together"):
        WeightsConfig(tls_cert="server.pem")
    assert WeightsConfig(tls_cert="server.pem", tls_key="server.key").tls_ca is None


@pytest.mark.parametrize("field", ["streams", "fanout", "keep", "max_bytes", "fetch_timeout_s"])
def test_numbers_are_positive(field: str):
    with pytest.raises(ValidationError, match=field):
        WeightsConfig.model_validate({field: 0})


def test_it_loads_neither_jax_nor_arrow():
    code = "import sys, penstock.weights.config; print([m for m in ('jax', 'pyarrow', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280).stdout == "[]\n"
