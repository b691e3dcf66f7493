"""Who fetches from whom: clients in a tree, the relay of each, and how every failure of a parent leads to the root."""

import threading
import time

import numpy as np
import pyarrow.flight as flight
import pytest
from tests.waiting import wait_until

from penstock.types import SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, flight_client, flight_server, open_broadcaster, open_client
from penstock.weights.flight_client import PeerRelay
from penstock.weights.flight_connection import Channel
from penstock.weights.flight_messages import Access, OfferAnswer, OfferRequest
from penstock.weights.manifest import describe

BASE = (WeightVersion(0, 1), "digest")


@pytest.fixture
def relay():
    made = PeerRelay("job", Access("token"), "127.0.0.1")
    yield made
    made.close()


def keep(relay, step, base=None, messages=()):
    arrays = {"x": np.full(3, step, np.int32)}
    return relay.keep(describe("job", "ab", WeightVersion(0, step), arrays), arrays, base, messages)


def offer(port, step, base=None, job="job", token="token"):
    channel = Channel(f"127.0.0.1:{port}", False, Access(token), 1, 4096)
    try:
        request = OfferRequest(job=job, client="c", version=WeightVersion(0, step), base=base, timeout_s=0.0)
        return channel.ask("offer", request, OfferAnswer, 20.0)
    finally:
        channel.close()


def test_the_version_kept_last_is_offered(relay):
    port = keep(relay, 1)
    assert keep(relay, 2) == port
    assert offer(port, 2) == OfferAnswer()
    with pytest.raises(SupersededVersionError) as refusal:
        offer(port, 1)
    assert refusal.value.newest == (0, 2)


def test_deltas_are_offered_as_they_came(relay):
    port = keep(relay, 2, BASE, [b"123", b"45"])
    assert offer(port, 2, BASE).deltas == [3, 2]
    assert offer(port, 2, (WeightVersion(0, 0), "digest")).deltas is None


def test_others_jobs_and_tokens_get_nothing(relay):
    port = keep(relay, 1)
    with pytest.raises(WeightsError, match="job 'other'"):
        offer(port, 1, job="other")
    with pytest.raises(WeightsError, match="token"):
        offer(port, 1, token="wrong")


def test_what_was_dropped_is_offered_no_more(relay):
    relay.drop()
    port = keep(relay, 1)
    relay.drop()
    with pytest.raises(SupersededVersionError):
        offer(port, 1)


def test_after_its_end_nothing_is_kept(relay):
    port = keep(relay, 1)
    relay.close()
    relay.close()
    assert keep(relay, 2) is None and relay.metrics() == {"weights/bytes_relayed": 0.0}
    with pytest.raises(UnreachableError):
        offer(port, 1)


SIZE = 300_000
LIMIT_S = 20.0


def arrays(step):
    noise = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    noise[:step] += 1.0
    return {"w": noise, "step": np.array([step], np.int32)}


class Job:
    """A broadcaster and clients that all know of each other, as after the first version."""

    def __init__(self, clients, **config):
        self.config = WeightsConfig(**{"fanout": 1, "chunk_bytes": 1 << 18, "fetch_timeout_s": LIMIT_S} | config)
        self.root = open_broadcaster(self.config, "job", "token", "unused")
        self.clients = [
            open_client(self.root.endpoint(), self.config, "token", f"inference-{index}") for index in range(clients)
        ]
        self.publish(0)
        for client in self.clients:
            assert client.wait_for(None, LIMIT_S) == WeightVersion(0, 0)
        for client in self.clients:
            client.fetch(WeightVersion(0, 0))

    def publish(self, step):
        self.root.publish(WeightVersion(0, step), arrays(step))

    def fetch(self, index, step):
        found = self.clients[index].fetch(WeightVersion(0, step))
        for name, expected in arrays(step).items():
            assert found[name].tobytes() == expected.tobytes()
        return found

    def number(self, index, name):
        return self.clients[index].metrics()[f"weights/{name}"]

    def served(self):
        return self.root.metrics()["weights/bytes_served"]

    def close(self):
        for client in self.clients:
            client.close()
        self.root.close()


@pytest.fixture
def job(request):
    made = Job(**getattr(request, "param", {"clients": 3}))
    yield made
    made.close()


def test_one_client_fetches_from_the_root_and_the_others_from_it(job):
    before = job.served()
    job.publish(1)
    for index in range(3):
        job.fetch(index, 1)
    assert job.served() - before == SIZE * 4 + 4
    assert [job.number(index, "from_clients") for index in range(3)] == [0.0, 2.0, 2.0]
    assert sum(job.number(index, "bytes_relayed") for index in range(3)) == 4 * (SIZE * 4 + 4)


@pytest.mark.parametrize("job", [{"clients": 4, "fanout": 2}], indirect=True)
def test_clients_that_fetch_at_once_load_the_root_with_its_number_only(job):
    for step in (1, 2, 3):
        before, failures = job.served(), []

        def follow(index, step=step, failures=failures):
            try:
                job.fetch(index, step)
            except Exception as error:
                failures.append(error)

        job.publish(step)
        threads = [threading.Thread(target=follow, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert failures == [] and not any(thread.is_alive() for thread in threads)
        assert job.served() - before <= 2 * (SIZE * 4 + 4)


@pytest.mark.parametrize("job", [{"clients": 3, "encoding": "delta"}], indirect=True)
def test_deltas_pass_through_the_tree(job):
    for step in (1, 2):
        job.publish(step)
        for index in range(3):
            job.fetch(index, step)
            assert job.number(index, "bytes") < 3000
    assert job.number(2, "from_clients") >= 2


def kill(client):
    """What a dead process looks like from outside: nobody listens at its address."""
    client._reader._relay._service.close()


def test_a_dead_parent_leads_to_the_root(job):
    job.publish(1)
    job.fetch(0, 1)
    job.fetch(1, 1)  # from client 0
    before = job.served()
    kill(job.clients[0])
    kill(job.clients[1])
    job.fetch(2, 1)
    assert job.number(2, "parent_failures") == 1 and job.served() - before == SIZE * 4 + 4


@pytest.mark.parametrize(
    ("parent", "why"), [("127.0.0.1:99999", "is no address"), ("127.0.0.1:1", "is dead"), (None, "none came free")]
)
@pytest.mark.parametrize("job", [{"clients": 1}], indirect=True)
def test_a_root_that_leads_nowhere_ends_the_fetch_at_its_limit(job, monkeypatch, parent, why):
    asked = Channel.ask

    def ask(self, name, request, kind, timeout_s):
        answer = asked(self, name, request, kind, timeout_s)
        return answer.model_copy(update={"parent": parent}) if kind is OfferAnswer else answer

    monkeypatch.setattr(Channel, "ask", ask)
    monkeypatch.setattr(job.clients[0]._reader, "_direct", None)
    monkeypatch.setattr(job.clients[0], "_config", job.config.model_copy(update={"fetch_timeout_s": 0.5}))
    job.publish(1)
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=rf"no place in the fan-out tree .* in 0\.[45]\d* s: .*{why}"):
        job.fetch(0, 1)
    assert time.monotonic() - began < 10.0


def test_a_parent_that_stalls_is_left(job, monkeypatch):
    monkeypatch.setattr(flight_client, "STALL_S", 0.3)
    release = threading.Event()
    job.publish(1)
    job.fetch(0, 1)
    service = job.clients[0]._reader._relay._service
    monkeypatch.setattr(service, "_batches", lambda buffers, pieces, client: iter(lambda: release.wait(LIMIT_S), True))
    before, began = job.served(), time.monotonic()
    job.fetch(1, 1)
    assert time.monotonic() - began < 10.0
    assert job.number(1, "parent_failures") == 1 and job.served() - before == SIZE * 4 + 4
    release.set()


def test_damage_on_the_way_through_a_client_is_noticed_and_mended_by_the_root(job, monkeypatch):
    keep = PeerRelay.keep

    def damaging(self, manifest, arrays, base, messages):
        damaged = {name: array.copy() for name, array in arrays.items()}
        damaged["w"][5] += 1.0
        return keep(self, manifest, damaged, base, messages)

    monkeypatch.setattr(PeerRelay, "keep", damaging)
    job.publish(1)
    job.fetch(0, 1)
    before = job.served()
    job.fetch(1, 1)
    assert job.number(1, "retries") == 1 and job.served() - before == SIZE * 4 + 4


def test_a_parent_that_moved_on_leads_to_the_root(job, monkeypatch):
    job.publish(1)
    job.fetch(0, 1)
    job.clients[0]._reader._relay.drop()
    job.fetch(1, 1)
    assert job.number(1, "parent_failures") == 1


@pytest.mark.parametrize("job", [{"clients": 2, "fanout": 4}], indirect=True)
def test_with_few_clients_nobody_relays(job):
    for step in (1, 2):
        job.publish(step)
        for index in range(2):
            job.fetch(index, step)
    assert [client._reader._relay._service for client in job.clients] == [None, None]
    assert job.served() == 6 * (SIZE * 4 + 4)


@pytest.mark.parametrize("job", [{"clients": 1}], indirect=True)
def test_streams_are_opened_while_the_root_is_asked(job, monkeypatch):
    service, opened, early = job.root._server._service, threading.Event(), []
    batches, (kind, offer) = service._batches, service._actions["offer"]

    def noted(buffers, pieces, client):
        opened.set()
        return batches(buffers, pieces, client)

    def patient(request, host):
        early.append(opened.wait(5.0))
        return offer(request, host)

    monkeypatch.setattr(service, "_batches", noted)
    monkeypatch.setitem(service._actions, "offer", (kind, patient))
    before = job.served()
    job.publish(1)
    job.fetch(0, 1)
    assert early == [True] and job.served() - before == SIZE * 4 + 4


@pytest.mark.parametrize("job", [{"clients": 1}], indirect=True)
@pytest.mark.parametrize("longest", [flight_server.MAX_RIDING_OFFER_BYTES, 10], ids=["rides", "too long"])
def test_the_first_stream_brings_the_answer_where_that_is_short(job, longest, monkeypatch):
    service, asked = job.root._server._service, []
    do_action = type(service).do_action
    monkeypatch.setattr(flight_server, "MAX_RIDING_OFFER_BYTES", longest)
    monkeypatch.setattr(
        type(service), "do_action", lambda self, c, action: asked.append(action.type) or do_action(self, c, action)
    )
    job.publish(1)
    job.fetch(0, 1)
    wait_until(lambda: "finished" in asked, "the fetch is told of")
    assert asked.count("offer") == (1 if longest == 10 else 0)


@pytest.mark.parametrize("job", [{"clients": 1}], indirect=True)
def test_a_first_stream_that_fails_is_opened_anew(job, monkeypatch):
    service, refused = job.root._server._service, []
    do_get = type(service).do_get

    def once(self, context, ticket):
        if not refused and b'"asks":true' in ticket.ticket:
            refused.append(ticket)
            raise flight.FlightUnavailableError("not now")
        return do_get(self, context, ticket)

    monkeypatch.setattr(type(service), "do_get", once)
    job.publish(1)
    job.fetch(0, 1)
    assert len(refused) == 1 and job.number(0, "retries") == 0.0


@pytest.mark.parametrize("job", [{"clients": 1}], indirect=True)
def test_streams_that_were_opened_in_vain_are_given_up(job, monkeypatch):
    job.clients.append(open_client(job.root.endpoint(), job.config, "token", "inference-1"))
    job.clients[1].wait_for(None, LIMIT_S)  # now there are more clients than the root serves
    job.publish(1)
    job.fetch(1, 1)
    release, service = threading.Event(), job.root._server._service
    monkeypatch.setattr(service, "_batches", lambda buffers, pieces, client: iter(lambda: release.wait(LIMIT_S), True))
    began = time.monotonic()
    job.fetch(0, 1)  # from client 1
    assert time.monotonic() - began < 5.0
    assert (job.number(0, "from_clients"), job.number(0, "retries")) == (1.0, 0.0)
    wait_until(lambda: job.clients[0]._reader._root._users == 0, "the streams end", LIMIT_S)
    release.set()


def test_a_broadcaster_that_restarts_is_found_by_the_whole_tree(job):
    job.publish(1)
    for index in range(3):
        job.fetch(index, 1)
    job.root.close()
    job.root = open_broadcaster(job.config, "job", "token", "unused")
    job.root.publish(WeightVersion(0, 1), arrays(1))
    for index, client in enumerate(job.clients):
        client.connect(job.root.endpoint())
        assert client.wait_for(WeightVersion(0, 1), LIMIT_S) == WeightVersion(0, 1)
        job.fetch(index, 1)
        assert client.wait_for(WeightVersion(0, 1), 0.0) is None


@pytest.mark.parametrize("job", [{"clients": 3}, {"clients": 1}], indirect=True)
def test_a_broadcaster_that_restarts_at_its_old_address_needs_no_new_endpoint(job):
    port = int(job.root.endpoint()["address"].rpartition(":")[2])
    job.publish(1)
    job.fetch(0, 1)
    job.root.close()
    job.root = open_broadcaster(job.config.model_copy(update={"port": port}), "job", "token", "unused")
    job.root.publish(WeightVersion(0, 1), arrays(1))
    assert job.clients[0].wait_for(WeightVersion(0, 1), LIMIT_S) == WeightVersion(0, 1)
    job.fetch(0, 1)


def test_the_tree_speaks_tls(tls_config):
    files = tls_config.model_dump(include={"tls_cert", "tls_key", "tls_ca"})
    job = Job(clients=2, **files)
    try:
        assert job.root.endpoint()["tls"] is True
        job.publish(1)
        for index in range(2):
            job.fetch(index, 1)
        assert job.number(1, "from_clients") >= 1 and job.number(1, "parent_failures") == 0
    finally:
        job.close()


def test_a_client_without_a_certificate_fetches_and_serves_nobody(tls_config):
    job = Job(clients=1, **tls_config.model_dump(include={"tls_cert", "tls_key", "tls_ca"}))
    trusting = tls_config.model_copy(update={"tls_cert": None, "tls_key": None, "fanout": 1})
    job.clients += [open_client(job.root.endpoint(), trusting, "token", f"only-trusts-{n}") for n in range(2)]
    try:
        for index in (1, 2):
            job.clients[index].wait_for(None, LIMIT_S)
        for step in (1, 2):
            job.publish(step)
            for index in (1, 2, 0):
                job.fetch(index, step)
        assert [job.clients[index]._reader._relay._service for index in (1, 2)] == [None, None]
    finally:
        job.close()


def test_an_endpoint_without_an_address_is_refused():
    config = WeightsConfig()
    for more in ({}, {"address": "h:1"}, {"address": 3, "tls": False}):
        endpoint = {"transport": "arrow_flight", "job": "job", "incarnation": "x"} | more
        with pytest.raises(WeightsError, match="address and tls"):
            open_client(endpoint, config, "token", "c")


def test_received_memory_is_used_again(job):
    addresses = []
    for step in range(1, 5):
        job.publish(step)
        addresses.append(job.fetch(0, step)["w"].ctypes.data)
    assert len(set(addresses)) <= 3 and SIZE * 4 > 1 << 20
