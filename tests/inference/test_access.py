"""What connections and requests must pass: known hosts, tokens, sizes, times, and how many at once."""

import json
import re
import socket
import ssl
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from tests.certificates import write_certificate
from tests.waiting import wait_until

from penstock.inference import AccessRules, HttpServer, create_app
from penstock.inference import access as module
from penstock.inference.codec import largest_body_bytes

TOKEN = "a test's token"
WAIT_S = 280.0
ASKED = {"model": "tiny", "prompt": "a", "max_tokens": 1}


@contextmanager
def running(app, **options):
    server = HttpServer(app, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def app(served_engine, codec):
    return create_app(served_engine, codec, "tiny")


@pytest.fixture
def guarded(served_engine, codec):
    return create_app(served_engine, codec, "tiny", AccessRules(TOKEN))


@pytest.fixture
def connect():
    """Opens connections, which are closed at the end."""
    with ExitStack() as open_ones:

        def connect(server):
            address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
            return open_ones.enter_context(socket.create_connection(address, timeout=WAIT_S))

        yield connect


def received(connection):
    """Everything until the other side closes."""
    answer = bytearray()
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            answer += piece
    return bytes(answer)


def status_under(url, host, **headers):
    return httpx.get(f"{url}/v1/models", headers={"host": host} | headers).status_code


@pytest.mark.attack
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:65535", 200),
        ("penstock.test:80", 200),  # as it was told to listen on
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example@localhost", 421),
        ("localhost:80:80", 421),
        ("localhost:99999", 421),
        ("localhost:x", 421),
        ("::1", 421),
        ("", 421),
        ("localhost, evil.example", 421),
    ],
)
def test_without_a_token_only_names_of_this_machine_are_answered(served_engine, codec, host, status):
    """A page whose name was made to point here (DNS rebinding) says that name."""
    with running(create_app(served_engine, codec, "tiny", AccessRules(host="Penstock.test"))) as server:
        assert status_under(server.url, host, origin="http://evil.example") == status
        refused = httpx.post(f"{server.url}/v1/completions", json=ASKED, headers={"host": "evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (421, "unknown_host")
        assert "evil.example" in refused.json()["error"]["message"]


@pytest.mark.attack
def test_a_request_without_a_host_is_refused_where_there_is_no_token(app, connect):
    with running(app) as server, connect(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 421 ")


@pytest.mark.attack
def test_with_a_token_any_host_is_answered_and_without_it_none(guarded):
    with running(guarded) as server:
        assert status_under(server.url, "evil.example", authorization=f"Bearer {TOKEN}") == 200
        assert status_under(server.url, "localhost") == 401


@pytest.mark.attack
def test_no_route_changes_anything_so_that_none_needs_more_than_the_token(app, guarded):
    """Whoever adds a route that changes weights or state: not to an application without a token."""
    generating = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
    for each in (app, guarded):
        posts = {route.path for route in each.routes if route.methods - {"GET", "HEAD"}}
        assert posts == generating


def test_the_bodys_limit_is_256_kib_or_what_a_runs_own_clients_send(app, guarded, served_engine, codec):
    """Of a longer sequence the limit is larger; a given one goes before both."""
    spaces = b" " * 262_144
    known = largest_body_bytes(served_engine.config.max_seq_len, codec.vocab_size)
    given = create_app(served_engine, codec, "tiny", AccessRules(max_body_bytes=300_000))
    for app_, most, headers in (
        (app, 262_144, {}), (guarded, known, {"authorization": f"Bearer {TOKEN}"}), (given, 300_000, {}),
    ):  # fmt: skip
        with running(app_) as server:
            for size, status in ((most, 200), (most + 1, 413)):
                content = json.dumps(ASKED).encode().ljust(size)
                typed = headers | {"content-type": "application/json"}
                answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=typed)
                assert answer.status_code == status, (most, answer.text)
    assert len(spaces) < known < largest_body_bytes(32_768, codec.vocab_size)


@pytest.mark.attack
def test_a_larger_body_may_not_be_intricate(served_engine, codec):
    """Whatever limit was given: parsing holds the interpreter."""
    with running(create_app(served_engine, codec, "tiny", AccessRules(max_body_bytes=8 << 20))) as server:
        for content in ("[" + "{}," * 1_390_000 + "1]", "[" + "1," * 2_000_000 + "1]", '{"a":' * 100_000):
            headers = {"content-type": "application/json"}
            answer = httpx.post(f"{server.url}/tokenize", content=content.encode(), headers=headers)
            assert answer.status_code == 413 and "send several requests" in answer.json()["error"]["message"]
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "a" * 4_000_000})
        assert answer.status_code == 400 and "more than 64 tokens can hold" in answer.json()["error"]["message"]


@pytest.mark.attack
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/nowhere"])
def test_every_post_counts(served_engine, codec, path, connect):
    """`/tokenize` too; and one whose body is still on its way keeps nobody out."""
    entered, leave = threading.Semaphore(0), threading.Event()

    async def hanging(scope, receive, send):
        entered.release()
        while not leave.is_set():
            await module.asyncio.sleep(0.01)

    with running(module.BoundedPosts(hanging, most_bytes=100, most_unanswered=1)) as server:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n".encode()
        )
        with connect(server) as unfinished, connect(server) as first:
            unfinished.sendall(head + b"{")
            first.sendall(head + b"{}")
            assert entered.acquire(timeout=WAIT_S)
            refused = httpx.post(server.url + path, json={})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert not entered.acquire(timeout=0.1)
            leave.set()


@pytest.mark.attack
@pytest.mark.parametrize(
    ("limit", "sent", "answered"),
    [
        ("HEADER_S", b"", b"HTTP/1.1 408 "),
        ("HEADER_S", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"HTTP/1.1 408 "),
        ("HEADER_S", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n", b"HTTP/1.1 200 "),
        (
            "BODY_S",
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
            b"HTTP/1.1 408 ",
        ),
        (
            "BODY_S",
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\n{",
            b"HTTP/1.1 415 ",
        ),
        ("KEEP_ALIVE_S", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200 "),
    ],
)
def test_each_phase_of_a_connection_has_its_time(guarded, app, monkeypatch, limit, sent, answered, connect):
    monkeypatch.setattr(module, limit, 0.3)
    with running(app) as server, connect(server) as connection:
        connection.sendall(sent.replace(b"Host: x", b"Host: localhost"))
        began = time.monotonic()
        answer = received(connection)
        assert answer.startswith(answered)
        assert 0.2 < time.monotonic() - began < WAIT_S / 2


@pytest.mark.attack
def test_a_drip_of_bytes_does_not_prolong_the_time(app, monkeypatch, connect):
    monkeypatch.setattr(module, "HEADER_S", 0.5)
    with running(app) as server, connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                connection.sendall(b"a")
                time.sleep(0.02)


@pytest.mark.attack
def test_a_client_that_takes_nothing_of_its_answer_is_given_up(monkeypatch, connect):
    monkeypatch.setattr(module, "WRITE_S", 0.5)

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a" * (64 << 20)})

    with running(large) as server, connect(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connections = server._server.server_state.connections
        wait_until(lambda: connections, "the connection is there", WAIT_S)
        wait_until(lambda: not connections, "it is given up", WAIT_S)


@pytest.mark.attack
def test_a_handshake_has_its_time_too(app, tmp_path, monkeypatch, connect):
    monkeypatch.setattr("penstock.inference.http_server.HEADER_S", 0.3)
    certificate, key = write_certificate(tmp_path)
    with running(app, tls_cert=certificate, tls_key=key) as server:
        with connect(server) as connection:
            assert received(connection) == b""  # within WAIT_S, where it would be a minute
        trust = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{server.url}/health", verify=trust).status_code == 200


@pytest.mark.attack
def test_a_peer_without_the_token_has_few_connections_and_one_with_it_as_many_as_it_likes(
    guarded, monkeypatch, connect
):
    monkeypatch.setattr(module, "MOST_CONNECTIONS_OF_ONE_PEER", 3)
    known = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()

    def is_answered(friend):
        friend.sendall(known)
        answer = b""
        while b"owned_by" not in answer and (piece := friend.recv(1 << 16)):
            answer += piece
        return answer.startswith(b"HTTP/1.1 200 OK")

    with running(guarded) as server:
        friends = []
        for _ in range(8):  # one by one: before its token is here, it is a stranger
            friends.append(connect(server))
            assert is_answered(friends[-1])
        strangers = [connect(server) for _ in range(5)]
        assert [received(each).startswith(b"HTTP/1.1 503 ") for each in strangers[:2]] == [True, True], "the oldest go"
        strangers[4].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert received(strangers[4]).startswith(b"HTTP/1.1 200 ")
        assert all(is_answered(friend) for friend in friends)


@pytest.mark.attack
def test_the_whole_server_has_fewer_connections_than_descriptors(app, monkeypatch, connect):
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (0, 0))
    with running(app) as server:
        held = [connect(server) for _ in range(module.FEWEST_CONNECTIONS + 10)]
        assert [received(each).startswith(b"HTTP/1.1 503 ") for each in held[:10]] == [True] * 10
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.attack
def test_where_all_connections_are_busy_a_new_one_is_refused(monkeypatch, connect):
    monkeypatch.setattr(module, "MOST_CONNECTIONS_OF_ONE_PEER", 2)
    entered, leave = threading.Semaphore(0), threading.Event()

    async def hanging(scope, receive, send):
        entered.release()
        while not leave.is_set():
            await module.asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with running(hanging) as server:
        busy = [connect(server) for _ in range(2)]
        for each in busy:
            each.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert all(entered.acquire(timeout=WAIT_S) for _ in busy)
        with connect(server) as late:
            answer = received(late)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"too many connections are open" in answer
        assert re.search(rb"content-type: application/json", answer)
        leave.set()
        assert all(received(each).startswith(b"HTTP/1.1 204 ") for each in busy)
