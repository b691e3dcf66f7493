import asyncio
import ssl
import time

import pytest
from tests.inference.fake_servers import HANG_UP, serving

from penstock.inference import server_pool as module
from penstock.inference.server_pool import ConnectionFailed, ServerConnection

LIMIT_S = 280.0

start = pytest.fixture(serving)


def run(scenario, server, **settings):
    """Runs a scenario over a connection, within a limit, and closes it."""

    async def limited():
        tls = ssl.create_default_context()
        connection = ServerConnection(server.known_as("inference-0"), "a token", tls, time.monotonic, **settings)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await scenario(connection)
        finally:
            await connection.close()

    return asyncio.run(limited())


def test_any_status_is_an_answer(start):
    server = start(lambda body: (503, b"{}"))
    answer = run(lambda connection: connection.post("/v1/completions", b"{}"), server)
    assert (answer.status, answer.content) == (503, b"{}")
    (headers,) = server.headers
    assert (headers["authorization"], headers["content-type"]) == ("Bearer a token", "application/json")
    assert headers["accept-encoding"] == "identity", "nothing that unpacks to more than was sent"


def test_no_answer_is_a_failed_connection(start):
    with pytest.raises(ConnectionFailed, match="RemoteProtocolError"):
        run(lambda connection: connection.post("/v1/completions", b"{}"), start(lambda body: HANG_UP))


def test_an_answer_without_end_is_not_collected(start, monkeypatch):
    monkeypatch.setattr(module, "MOST_ANSWER_BYTES", 1000)
    server = start(lambda body: (200, b"x" * 1001))
    with pytest.raises(ConnectionFailed, match="larger than 1000 bytes"):
        run(lambda connection: connection.post("/v1/completions", b"{}"), server)
    server.behave = lambda body: (200, b"x" * 1000)
    assert len(run(lambda connection: connection.post("/v1/completions", b"{}"), server).content) == 1000


def test_an_abort_fails_what_waits_and_nothing_after(start):
    server = start()
    server.behave = server.hang

    async def scenario(connection):
        waiting = asyncio.ensure_future(connection.post("/v1/completions", b"{}"))
        await asyncio.to_thread(server.wait_for_requests, 1)
        connection.abort("it died")
        with pytest.raises(ConnectionFailed, match="it died"):
            await waiting
        server.behave = lambda body: (200, b"later")
        return await connection.post("/v1/completions", b"{}")

    assert run(scenario, server).content == b"later"


def test_many_requests_to_a_frozen_server_fail_together(start):
    server = start()
    server.behave = server.hang
    server.healthy.clear()

    async def scenario(connection):
        posts = [asyncio.ensure_future(connection.post("/v1/completions", b"{}")) for _ in range(5)]
        return await asyncio.gather(*posts, return_exceptions=True)

    failures = run(scenario, server, quiet_s=0.1, health_s=0.1)
    assert all(isinstance(failure, ConnectionFailed) and "silent for" in str(failure) for failure in failures)


def test_new_requests_do_not_hide_that_a_server_is_frozen(start):
    server = start()
    server.behave = server.hang
    server.healthy.clear()

    async def scenario(connection):
        first = asyncio.ensure_future(connection.post("/v1/completions", b"{}"))
        others = []
        while not first.done():
            others.append(asyncio.ensure_future(connection.post("/v1/completions", b"{}")))
            await asyncio.wait({first}, timeout=0.05)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return first

    with pytest.raises(ConnectionFailed, match="silent for"):
        run(scenario, server, quiet_s=0.2, health_s=0.1).result()
