"""The HTTP server around the API: its start and end, TLS, and `serve`."""

import re
import socket
import ssl
import sys
import threading
import time
import types
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tests.certificates import write_certificate

from penstock.inference import EngineConfig, HttpServer, ServeConfig, create_app, http_server, serve
from penstock.inference.serving import model_directory
from penstock.model.language import save_decoder
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError, NoProgressError, RunFailed

WAIT_S = 280.0


@pytest.fixture
def url(served_engine, codec):
    server = HttpServer(create_app(served_engine, codec, "tiny"))
    server.start()
    yield server.url
    server.stop()


async def says_ok(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_body_does_not_wait_until_the_client_has_acknowledged_the_head():
    """Linux acknowledges after 40 ms on a connection that has been used a while: no answer was faster than that."""

    server = HttpServer(says_ok)
    server.start()
    try:
        with httpx.Client() as client:
            seconds = [client.get(server.url).elapsed.total_seconds() for _ in range(40)]
        assert min(seconds[20:]) < 0.03
    finally:
        server.stop()


def test_an_event_loop_that_is_installed_besides_is_left_alone(monkeypatch):
    """Other packages bring uvloop, Trackio and vLLM for two, whose connections no bound could be set on."""

    def taken():
        raise AssertionError("uvloop was taken")

    other = types.ModuleType("uvloop")
    other.new_event_loop = taken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uvloop", other)
    monkeypatch.delitem(sys.modules, "uvicorn.loops.uvloop", raising=False)

    server = HttpServer(says_ok)
    server.start()
    try:
        assert httpx.get(server.url).text == "ok"
    finally:
        server.stop()


def test_a_server_starts_ready_and_ends_clean(served_engine, codec):
    server = HttpServer(create_app(served_engine, codec, "tiny"))
    server.start()
    address = server.url
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"  # loopback, no token
    with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1 port"):
        HttpServer(create_app(served_engine, codec, "tiny"), port=int(address.rpartition(":")[2]))
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    assert not [thread for thread in threading.enumerate() if thread.name == "http-server" and thread.is_alive()][1:]


@pytest.mark.attack
def test_headers_without_an_end_are_cut_off_before_they_take_memory(url):
    """Nobody has shown a token yet; a parser without a bound would keep all of it."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((host, port), timeout=WAIT_S) as connection:
        with suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_it_speaks_tls(served_engine, codec, tmp_path):
    certificate, key = write_certificate(tmp_path)
    server = HttpServer(create_app(served_engine, codec, "tiny"), tls_cert=certificate, tls_key=key)
    server.start()
    try:
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=server.url, verify=trust) as client:
            assert server.url.startswith("https://") and client.get("/health").json() == {"status": "ok"}
    finally:
        server.stop()


def test_a_certificate_that_cannot_be_used_is_told_before_anything_starts(served_engine, codec, tmp_path):
    app = create_app(served_engine, codec, "tiny")
    certificate, key = write_certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, wrong_key = write_certificate(other)
    for cert, private, said in (
        (certificate, wrong_key, "cannot be used"),
        (certificate, tmp_path / "absent", "No such file"),
        (key, certificate, "cannot be used"),
        (certificate, None, "go together"),
    ):
        with pytest.raises(ConfigError, match=said):
            HttpServer(app, tls_cert=cert, tls_key=private)
    _, encrypted = write_certificate(other, password=b"secret")
    with pytest.raises(ConfigError, match="unencrypted key"):  # and does not ask the terminal for the password
        HttpServer(app, tls_cert=other / "cert.pem", tls_key=encrypted)


def test_a_server_that_does_not_stop_says_where_it_stands(monkeypatch):
    monkeypatch.setattr(http_server, "CLOSE_S", 0.2)
    entered, leave = threading.Event(), threading.Event()

    async def stuck(scope, receive, send):
        entered.set()
        leave.wait(WAIT_S)  # holds the whole event loop

    server = HttpServer(stuck, stop_timeout_s=0.1)
    server.start()
    with socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: penstock\r\n\r\n")
        assert entered.wait(WAIT_S)
        with pytest.raises(NoProgressError, match=r"not stop within 0.3 s: its thread is in wait .*threading.py"):
            server.stop()
        monkeypatch.undo()
        leave.set()
        server.stop()


def test_a_server_stops_though_it_sleeps_by_a_clock_that_was_set_back(monkeypatch):
    async def app(scope, receive, send):
        raise AssertionError("nobody asks")

    server, looked = HttpServer(app, stop_timeout_s=1.0), threading.Event()
    server.start()

    def back() -> float:
        looked.set()
        return 0.0

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", back)
        server._server.wake()
        assert looked.wait(WAIT_S)
    server.stop()


def test_a_server_that_cannot_start_says_why(served_engine, codec, monkeypatch):
    server = HttpServer(create_app(served_engine, codec, "tiny"))

    async def fail(sockets=None):
        raise OSError("no sockets")

    monkeypatch.setattr(server._server, "startup", fail)
    with pytest.raises(RunFailed, match="HTTP server failed.*no sockets"):
        server.start()
    server.stop()


@pytest.fixture
def checkpoint(tmp_path, make_decoder):
    tokenizer = Tokenizer.load("penstock")
    decoder = make_decoder(vocab_size=tokenizer.vocab_size, max_position_embeddings=48)
    save_decoder(decoder, tmp_path / "step-4" / "model", tokenizer)
    return tmp_path / "step-4"


@pytest.mark.slow
def test_serve_announces_its_address_and_runs_until_told(checkpoint, config):
    said, stop, announced = [], threading.Event(), threading.Event()
    settings = ServeConfig(port=0, engine=config.model_copy(update={"windows": (48,), "prefill_lengths": (46,)}))

    def announce(line):
        said.append(line)
        if "serving" in line:
            announced.set()

    thread = threading.Thread(target=serve, args=(str(checkpoint), settings, announce, stop))
    thread.start()
    try:
        assert announced.wait(120)
        address = re.search(r"serving 'step-4' at (http://127.0.0.1:\d+/v1)", said[-1])
        assert address is not None
        with openai.OpenAI(base_url=address[1], api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model="step-4", messages=[{"role": "user", "content": "Say hi."}], max_tokens=5
            )
        assert 1 <= answer.usage.completion_tokens <= 5
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert "48 tokens" in said[0]  # clipped to what the model is meant for


def test_serve_names_its_own_keys(checkpoint):
    settings = ServeConfig(port=0, engine=EngineConfig(max_seq_len=48, model_parallel=1000))
    with pytest.raises(ConfigError, match=r"^engine\.model_parallel is 1000, but this process has"):
        serve(str(checkpoint), settings)


def test_a_directory_without_a_model_is_refused(tmp_path, checkpoint):
    assert model_directory(str(checkpoint)) == checkpoint / "model"
    assert model_directory(str(checkpoint / "model")) == checkpoint / "model"
    with pytest.raises(CheckpointError, match="holds no config.json"):
        serve(str(tmp_path / "nothing"), ServeConfig())
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        model_directory("x" * 5000)
