"""What the tests of weights over sockets share."""

import pytest
from tests.weights.certificates import write_certificate

from penstock.weights import WeightsConfig


@pytest.fixture
def tls_config(tmp_path):
    """A configuration with a certificate for loopback."""
    certificate, key = write_certificate(tmp_path)
    return WeightsConfig(tls_cert=certificate, tls_key=key, tls_ca=certificate)
