"""What the tests of weights over sockets share."""

import pytest
from tests.certificates import write_certificate

from penstock.weights import WeightsConfig


@pytest.fixture
def tls_config(tmp_path):
    """A configuration with a certificate for loopback."""
    certificate, key = write_certificate(tmp_path)
    return WeightsConfig(tls_cert=str(certificate), tls_key=str(key), tls_ca=str(certificate))
