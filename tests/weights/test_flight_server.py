"""The root: what it tells clients of itself, of new versions, and of their places."""

import threading
import time

import numpy as np
import pytest

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig
from penstock.weights.flight_access import Access
from penstock.weights.flight_channel import Channel
from penstock.weights.flight_messages import (
    FinishedAnswer,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
)
from penstock.weights.flight_server import FlightStore
from penstock.weights.manifest import describe
from penstock.weights.publishing import Publication

LIMIT_S = 20.0


class Root:
    def __init__(self, **config):
        self.now = 0.0
        self.store = FlightStore(WeightsConfig(**config), "job", "token", "ab", clock=lambda: self.now)
        self.channel = Channel(self.store.endpoint()["address"], False, Access("token"), 1, 4096)

    def put(self, step):
        arrays = {"x": np.full(3, step, np.int32)}
        self.store.put(Publication(describe("job", "ab", WeightVersion(0, step), arrays), arrays, {}))

    def wait(self, known=None, timeout_s=0.0, job="job"):
        request = WaitRequest(job=job, client="c", known=known, timeout_s=timeout_s)
        return self.channel.ask("wait", request, WaitAnswer, LIMIT_S).newest

    def offer(self, client, step, **more):
        values = {"job": "job", "base": None, "timeout_s": 0.0} | more
        request = OfferRequest(client=client, version=(0, step), **values)
        return self.channel.ask("offer", request, OfferAnswer, LIMIT_S)

    def finished(self, client, step, port):
        request = FinishedRequest(job="job", client=client, version=(0, step), port=port)
        self.channel.ask("finished", request, FinishedAnswer, LIMIT_S)

    def close(self):
        self.channel.close()
        self.store.close()
        self.store.close()


@pytest.fixture
def root():
    made = Root(fanout=1)
    yield made
    made.close()


def test_what_is_known_is_no_news_until_there_is_more(root):
    assert root.wait() is None
    root.put(1)
    assert root.wait() == ("ab", (0, 1))
    began = time.monotonic()
    assert root.wait(("ab", (0, 1)), timeout_s=0.2) == ("ab", (0, 1)) and time.monotonic() - began >= 0.2
    assert root.wait(("another", (0, 1)), timeout_s=LIMIT_S) == ("ab", (0, 1))


def test_a_publication_wakes_who_waits(root):
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(root.wait(None, timeout_s=LIMIT_S)))
    waiter.start()
    root.put(1)
    waiter.join(LIMIT_S)
    assert seen == [("ab", (0, 1))]


def test_closing_ends_waits(root):
    failures = []

    def wait():
        try:
            root.wait(None, timeout_s=LIMIT_S)
        except UnreachableError as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while root.store.metrics()["weights/clients"] == 0:
        time.sleep(0.01)
    root.store.close()
    waiter.join(LIMIT_S)
    assert len(failures) == 1


def test_places_are_given_and_passed_on(root):
    root.put(1)
    for client in ("a", "b"):
        root.offer(client, 1)
    assert root.offer("a", 1).parent == "" and root.offer("b", 1).parent is None
    assert root.offer("a", 1).keep  # there are more clients than the root serves
    root.finished("a", 1, 8123)
    answer = root.offer("b", 1)
    assert answer.parent == "127.0.0.1:8123" and answer.deltas is None
    assert answer.read_manifest(1 << 20).version == WeightVersion(0, 1)
    assert root.offer("b", 1, failed=True).parent == ""


def test_an_offer_waits_for_a_place(root):
    root.put(1)
    root.offer("a", 1)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(root.offer("b", 1, timeout_s=LIMIT_S)))
    waiter.start()
    root.finished("a", 1, 8123)
    waiter.join(LIMIT_S)
    assert [answer.parent for answer in answers] == ["127.0.0.1:8123"]


def test_a_stream_keeps_the_place_of_its_client(root):
    root.put(1)
    root.offer("a", 1)
    root.now += 59.0
    ticket = StreamTicket(
        job="job", client="a", incarnation="ab", version=(0, 1), base=None, stream=0, streams=1, chunk_bytes=4096
    )
    root.channel.begin(ticket, [np.empty(12, np.uint8)], time.monotonic() + LIMIT_S).wait(None)
    root.now += 59.0
    assert root.offer("b", 1).parent is None
    root.now += 2.0
    assert root.offer("b", 1).parent == ""


def test_a_superseded_version_is_not_offered(root):
    root.put(1)
    root.put(2)
    for step in (1, 3):
        with pytest.raises(SupersededVersionError) as refusal:
            root.offer("a", step)
        assert refusal.value.newest == (0, 2)


def test_another_jobs_requests_are_refused(root):
    root.put(1)
    with pytest.raises(WeightsError, match="job 'other' asks the weight server of job 'job'"):
        root.wait(job="other")
    with pytest.raises(WeightsError, match="job 'other'"):
        root.offer("a", 1, job="other")


def test_the_lag_of_the_slowest_client_is_measured(root):
    root.put(1)
    for client in ("a", "b"):
        root.offer(client, 1)
        root.finished(client, 1, None)
    root.put(2)
    root.put(4)
    root.offer("a", 4)
    root.finished("a", 4, None)
    assert root.store.metrics()["weights/slowest_lag"] == 3.0 and root.store.metrics()["weights/clients"] == 2.0
    root.now += 59.0
    root.wait()  # as client c
    root.now += 2.0
    root.wait()
    assert root.store.metrics()["weights/slowest_lag"] == 0.0 and root.store.metrics()["weights/clients"] == 1.0


def test_the_endpoint_names_where_clients_connect():
    for config, address in (({"advertise": "gateway:9000"}, "gateway:9000"), ({"host": "0.0.0.0"}, None)):
        root = FlightStore(WeightsConfig(**config), "job", "token", "ab")
        told = root.endpoint()["address"]
        assert told == address or (address is None and not told.startswith("0.0.0.0:"))
        assert root.endpoint()["tls"] is False
        root.close()


def test_an_open_address_without_a_token_is_refused():
    with pytest.raises(ConfigError, match="needs a token"):
        FlightStore(WeightsConfig(host="0.0.0.0"), "job", None, "ab")
