"""The pool against servers that answer, refuse, hang, hang up, lie and die, over real HTTP."""

import gc
import json
import threading
import time
import warnings

import pytest
from tests.certificates import write_certificate
from tests.inference.fake_servers import HANG_UP, FakeServer, answer, refusal, serving
from tests.inference.pools import WAIT_S, in_threads, metric, pools, request
from tests.waiting import wait_until

from penstock.inference import HttpServer, ServerPool
from penstock.inference import server_pool as module
from penstock.inference.routing import PinnedServer, Server
from penstock.types import (
    ConfigError,
    NoProgressError,
    Stopped,
    UnreachableError,
)

start, make_pool, in_threads = (pytest.fixture(each) for each in (serving, pools, in_threads))


def test_requests_are_answered_in_order_over_connections_that_stay(start, make_pool):
    server = start()
    pool = make_pool(server.known_as("inference-0"), token="a secret")
    assert pool.ask([request(seed) for seed in range(8)]) == [[seed] for seed in range(8)]
    assert pool.ask([]) == []
    for seed in range(8):
        pool.ask([request(seed)])
    assert len(server.connections) <= 8
    assert {h["authorization"] for h in server.headers} == {"Bearer a secret"}
    assert pool.metrics() == {
        "inference_client/requests_total": 16.0, "inference_client/answers_total": 16.0,
        "inference_client/retries_total": 0.0, "inference_client/refusals_total": 0.0,
        "inference_client/wait_s_total": pytest.approx(0, abs=1.0),
        "inference_client/waiting": 0.0, "inference_client/servers": 1.0,
        "inference_client/outstanding_tokens/inference-0": 0.0,
    }  # fmt: skip


def test_proxies_of_the_environment_are_not_used(start, make_pool, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    pool = make_pool(start().known_as("inference-0"), request_timeout_s=5.0)
    assert pool.ask([request(1)]) == [[1]]


def test_load_goes_where_less_is_outstanding(start, make_pool, in_threads):
    slow = start()
    slow.behave = slow.hang
    quick = start()
    pool = make_pool(slow.known_as("slow"), quick.known_as("quick"))
    stuck = in_threads(pool.ask, [request(0, tokens=50)], target=PinnedServer("slow"))
    slow.wait_for_requests(1)
    assert metric(pool, "outstanding_tokens/slow") == 50
    for seed in range(5):
        assert pool.ask([request(seed)]) == [[seed]]
    assert (len(slow.bodies), len(quick.bodies)) == (1, 5)
    slow.over.set()  # it hangs up; asked again, it answers
    slow.behave = answer
    assert stuck.result(WAIT_S) == [[0]]


def test_a_session_stays_with_its_server(start, make_pool):
    servers = [start() for _ in range(3)]
    pool = make_pool(*(s.known_as(f"inference-{i}") for i, s in enumerate(servers)))
    for turn in range(6):
        pool.ask([request(turn)], "talk")
    assert sorted(len(s.bodies) for s in servers) == [0, 0, 6]


@pytest.mark.parametrize("reply", [HANG_UP, refusal(503, "the engine was stopped", "engine_unavailable")])
def test_a_server_that_cannot_answer_is_left_for_another(start, make_pool, reply):
    bad, good = start(lambda body: reply), start()
    pool = make_pool(bad.known_as("bad"), good.known_as("good"))
    assert [pool.ask([request(seed)]) for seed in range(4)] == [[[seed]] for seed in range(4)]
    assert metric(pool, "retries_total") == len(bad.bodies) <= 2
    assert metric(pool, "outstanding_tokens/bad") == metric(pool, "outstanding_tokens/good") == 0


@pytest.mark.parametrize("reply", [HANG_UP, *(refusal(status) for status in (429, 502, 503, 504))])
def test_a_server_may_be_unable_to_answer_as_often_as_time_allows(start, make_pool, monkeypatch, reply):
    monkeypatch.setattr(module, "MOST_SERVER_FAULTS", 1)
    replies = iter([reply] * 3)
    server = start()
    server.behave = lambda body: next(replies, None) or answer(body)
    assert make_pool(server.known_as("inference-0")).ask([request(5)]) == [[5]]
    assert len(server.bodies) == 4


def test_nobody_listening_is_left_for_another(start, make_pool):
    gone = start()
    address = gone.known_as("gone")
    gone.close()
    pool = make_pool(address, start().known_as("there"))
    assert [pool.ask([request(seed)]) for seed in range(3)] == [[[seed]] for seed in range(3)]


@pytest.mark.parametrize("url", ["http://[", "ftp://127.0.0.1:9", "nonsense"])
def test_an_address_that_is_none_is_left_for_another(start, make_pool, url):
    pool = make_pool(Server("bad", 0, url), start().known_as("good"))
    assert [pool.ask([request(seed)]) for seed in range(3)] == [[[seed]] for seed in range(3)]


def test_a_death_in_the_middle_is_survived_by_all_and_a_session_moves_on(start, make_pool, in_threads):
    victim, heir = start(), start()
    victim.behave = victim.hang
    pool = make_pool(victim.known_as("victim"))
    asked = [in_threads(pool.ask, [request(seed)], "talk") for seed in range(5)]
    victim.wait_for_requests(5)
    pool.set_servers([victim.known_as("victim"), heir.known_as("heir")])
    victim.over.set()
    assert [one.result(WAIT_S) for one in asked] == [[[seed]] for seed in range(5)]
    assert sorted(body["seeds"] for body in heir.bodies) == [[0], [1], [2], [3], [4]]
    pool.ask([request(9)], "talk")
    assert len(heir.bodies) == 6 and len(victim.bodies) == 5


def test_a_server_reported_dead_is_not_waited_for_although_it_says_nothing(start, make_pool, in_threads):
    frozen, heir = start(), start()
    frozen.behave = frozen.hang
    pool = make_pool(frozen.known_as("inference-0"))
    stuck = in_threads(pool.ask, [request(3)])
    frozen.wait_for_requests(1)
    pool.set_servers([heir.known_as("inference-0", incarnation=1)])
    assert stuck.result(WAIT_S) == [[3]]
    assert not frozen.over.is_set()


def test_a_frozen_server_is_found_out_by_its_health(start, make_pool, in_threads):
    frozen, heir = start(), start()
    frozen.behave = frozen.hang
    frozen.healthy.clear()
    pool = make_pool(frozen.known_as("frozen"), quiet_s=0.1, health_s=0.1)
    stuck = in_threads(pool.ask, [request(3)])
    frozen.wait_for_requests(1)
    pool.set_servers([frozen.known_as("frozen"), heir.known_as("heir")])
    assert stuck.result(WAIT_S) == [[3]]


def test_a_slow_server_in_good_health_is_waited_for(start, make_pool, in_threads):
    slow, other = start(), start()
    asked = threading.Event()
    slow.behave = lambda body: (asked.wait(WAIT_S), answer(body))[1]
    pool = make_pool(slow.known_as("slow"), quiet_s=0.02, health_s=5.0)
    waiting = in_threads(pool.ask, [request(3)])
    slow.wait_for_requests(1)
    pool.set_servers([slow.known_as("slow"), other.known_as("other")])
    with pytest.raises(TimeoutError):
        waiting.result(0.4)  # many examinations later
    asked.set()
    assert waiting.result(WAIT_S) == [[3]] and len(slow.bodies) == 1 and not other.bodies


def test_a_server_that_is_full_is_asked_again_after_a_pause(start, make_pool):
    replies = iter([refusal(429, "busy"), refusal(429, "busy")])
    server = start()
    server.behave = lambda body: next(replies, None) or answer(body)
    pool = make_pool(server.known_as("inference-0"))
    began = time.monotonic()
    assert pool.ask([request(4)]) == [[4]]
    assert time.monotonic() - began >= 0.05 + 0.1
    assert metric(pool, "refusals_total") == metric(pool, "retries_total") == 2
    assert metric(pool, "wait_s_total") >= 0.15


def test_a_server_that_is_full_is_left_for_another(start, make_pool):
    full, free = start(lambda body: refusal(429)), start()
    pool = make_pool(full.known_as("full"), free.known_as("free"))
    for seed in range(4):
        assert pool.ask([request(seed)]) == [[seed]]
    assert len(free.bodies) == 4


def test_a_conversation_waits_for_its_server_when_that_is_full(start, make_pool):
    home, other = start(), start()
    pool = make_pool(home.known_as("home"))
    pool.ask([request(0)], "talk")
    pool.set_servers([home.known_as("home"), other.known_as("other")])
    replies = iter([refusal(429)] * 2)
    home.behave = lambda body: next(replies, None) or answer(body)
    assert pool.ask([request(1)], "talk") == [[1]]
    assert len(home.bodies) == 4 and not other.bodies


def test_no_more_than_the_limit_is_outstanding(start, make_pool, in_threads):
    server = start()
    server.behave = server.hang
    pool = make_pool(server.known_as("inference-0"), most_outstanding_tokens=100)
    asked = [in_threads(pool.ask, [request(seed, tokens=50)]) for seed in range(4)]
    server.wait_for_requests(2)
    wait_until(lambda: metric(pool, "waiting") == 2)
    assert metric(pool, "outstanding_tokens/inference-0") == 100 and len(server.bodies) == 2
    assert pool.waiting_for() == "room at the inference servers"
    server.behave = answer
    server.over.set()
    assert sorted(one.result(WAIT_S)[0] for one in asked) == [[0], [1], [2], [3]]
    assert metric(pool, "wait_s_total") > 0 and pool.waiting_for() is None


def test_requests_wait_for_the_first_server(start, make_pool, in_threads):
    pool = make_pool()
    waiting = in_threads(pool.ask, [request(2)])
    wait_until(lambda: pool.waiting_for() == "an inference server")
    pool.set_servers([start().known_as("inference-0")])
    assert waiting.result(WAIT_S) == [[2]]


def test_a_draining_server_finishes_what_it_has_and_gets_nothing_new(start, make_pool, in_threads):
    draining, other = start(), start()
    release = threading.Event()
    draining.behave = lambda body: (release.wait(WAIT_S), answer(body))[1]
    pool = make_pool(draining.known_as("draining"))
    running = in_threads(pool.ask, [request(1)], "talk")
    draining.wait_for_requests(1)
    pool.set_servers([draining.known_as("draining", accepting=False), other.known_as("other")])
    assert pool.ask([request(2)], "talk") == [[2]] and len(other.bodies) == 1
    release.set()
    assert running.result(WAIT_S) == [[1]] and len(draining.bodies) == 1


def test_no_answer_in_time_names_the_servers_and_what_they_did(start, make_pool):
    hanging, refusing = start(), start(lambda body: HANG_UP)
    hanging.behave = hanging.hang
    pool = make_pool(refusing.known_as("refusing"), request_timeout_s=0.5)
    with pytest.raises(NoProgressError, match="inference.request_timeout_s = 0.5: asked refusing#0 .*RemoteProtocolEr"):
        pool.ask([request(0)])
    pool.set_servers([hanging.known_as("hanging")])
    with pytest.raises(NoProgressError, match=r"asked hanging#0 \(times: 1, at last: no answer yet\)"):
        pool.ask([request(0)])
    pool.set_servers([])
    with pytest.raises(NoProgressError, match="none that may be asked was there and had room"):
        pool.ask([request(0)])
    assert metric(pool, "waiting") == 0


def test_a_target_waits_for_its_name_and_fails_with_its_incarnation(start, make_pool, in_threads):
    other, reborn = start(), start()
    pool = make_pool(other.known_as("other"))
    waiting = in_threads(pool.ask, [request(1)], target=PinnedServer("inference-0"))
    with pytest.raises(UnreachableError, match="inference-0#0 does not live"):
        pool.ask([request(2)], target=PinnedServer("inference-0", 0))
    wait_until(lambda: metric(pool, "waiting") == 1)
    pool.set_servers([other.known_as("other"), reborn.known_as("inference-0", 1)])
    assert waiting.result(WAIT_S) == [[1]] and not other.bodies
    with pytest.raises(UnreachableError):
        pool.ask([request(2)], target=PinnedServer("inference-0", 0))


def test_one_failed_request_ends_its_siblings(start, make_pool):
    def behave(body):
        return refusal(400, "bad") if body["seeds"] == [1] else server.hang(body)

    server: FakeServer = start()
    server.behave = behave
    pool = make_pool(server.known_as("inference-0"), request_timeout_s=10 * WAIT_S)
    with pytest.raises(ConfigError):
        pool.ask([request(0), request(1)])
    wait_until(lambda: metric(pool, "outstanding_tokens/inference-0") == 0)


def test_closing_stops_those_who_wait(start, make_pool, in_threads):
    server = start()
    server.behave = server.hang
    pool = make_pool(server.known_as("inference-0"))
    waiting = in_threads(pool.ask, [request(0), request(1)])
    server.wait_for_requests(2)
    pool.close()
    with pytest.raises(Stopped, match="the pool of inference servers was closed"):
        waiting.result(WAIT_S)
    with pytest.raises(Stopped):
        pool.ask([request(0)])
    pool.set_servers([])
    pool.close()


def test_servers_come_and_go_under_load_and_nothing_is_lost(start, make_pool, in_threads):
    servers = [start() for _ in range(3)]
    names = [s.known_as(f"inference-{i}") for i, s in enumerate(servers)]
    pool = make_pool(*names)
    answers = [in_threads(pool.ask, [request(16 * i + j) for j in range(16)]) for i in range(12)]
    for turn in range(30):
        pool.set_servers([Server(n.name, turn, n.url) for i, n in enumerate(names) if i != turn % 3])
    assert [one.result(WAIT_S) for one in answers] == [[[16 * i + j] for j in range(16)] for i in range(12)]
    assert all(value == 0 for name, value in pool.metrics().items() if "outstanding" in name)


def test_a_certificate_is_checked(tmp_path, make_pool):
    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer({"seeds": [8], "n": 1})[1]).encode()})

    server = HttpServer(app, **dict(zip(("tls_cert", "tls_key"), write_certificate(tmp_path), strict=True)))
    server.start()
    assert server.url.startswith("https://127.0.0.1:")
    known = Server("inference-0", 0, server.url)
    trusting = make_pool(known, certificate_authority=str(tmp_path / "cert.pem"), request_timeout_s=WAIT_S)
    doubting = make_pool(known, request_timeout_s=0.5)
    try:
        assert trusting.ask([request(8)]) == [[8]]
        with pytest.raises(NoProgressError, match="CERTIFICATE_VERIFY_FAILED"):
            doubting.ask([request(8)])
    finally:
        trusting.close()  # a server that stops first does not wait for the end of its TLS connections
        server.stop()


def test_a_certificate_authority_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "broken.pem").write_text("nonsense")
    for name in ("absent.pem", "broken.pem"):
        with pytest.raises(ConfigError, match=f"inference.tls_ca is .*{name}: its certificates cannot be read"):
            ServerPool(certificate_authority=str(tmp_path / name))


def test_closing_just_after_servers_went_leaves_no_socket_open(start, in_threads):
    pool = ServerPool(request_timeout_s=WAIT_S)
    pool.set_servers([start().known_as(f"inference-{i}") for i in range(4)])
    for answered in [in_threads(pool.ask, [request(seed)]) for seed in range(16)]:
        answered.result(WAIT_S)
    pool.set_servers([])
    pool.close()
    del pool, answered
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
