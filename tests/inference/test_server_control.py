"""Drives servers that answer as they are told to; others: `tests/overseer/language/test_external.py`."""

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.certificates import write_certificate

from penstock.inference import HttpServer
from penstock.inference.config import ExternalConfig, InferenceConfig
from penstock.inference.server_control import control_of
from penstock.types import ConfigError

LIMIT_S = 30.0


@pytest.fixture
def serving(tmp_path):
    """Starts a server that is healthy and takes no key, with a certificate if asked; gives its URL."""
    started = []

    def start(**tls):
        async def healthy(_):
            return Response()

        async def locked(_):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)

        server = HttpServer(Starlette(routes=[Route("/health", healthy), Route("/v1/models", locked)]), **tls)
        started.append(server)
        server.start()
        return server.url

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def driving():
    """Makes what drives a server."""
    made = []

    def make(url, key=None, tls_ca=None, **external):
        config = InferenceConfig(engine="vllm", external=ExternalConfig(urls=(url,), **external), tls_ca=tls_ca)
        made.append(control_of(url, key, config, LIMIT_S))
        return made[-1]

    yield make
    for control in made:
        control.close()


def test_a_certificate_is_checked_against_those_that_a_run_trusts(serving, driving, tmp_path):
    certificate, key = write_certificate(tmp_path)
    url = serving(tls_cert=certificate, tls_key=key)
    assert url.startswith("https://")
    assert driving(url, tls_ca=certificate).unhealthy() == ""
    assert "certificate verify failed: self-signed certificate" in driving(url).unhealthy()
    assert "Connection refused" in driving("http://127.0.0.1:9").unhealthy()
    with pytest.raises(ConfigError, match="inference.tls_ca is .*absent.pem: its certificates cannot be read"):
        driving(url, tls_ca=tmp_path / "absent.pem")


def test_a_key_that_is_missing_and_one_that_is_wrong_are_told_apart(serving, driving, tmp_path):
    url, file = serving(), tmp_path / "key.txt"
    with pytest.raises(ConfigError, match="asks for a key: give the file that holds it as inference.external.api_key"):
        driving(url).check()
    with pytest.raises(ConfigError, match="takes another key than that of .*key.txt: give the file"):
        driving(url, "another", api_key_file=file).check()
