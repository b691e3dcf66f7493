"""Messages of other processes, tokens, certificates, addresses, and errors that cross a socket."""

import hmac
import json
import socket

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights import WeightsConfig, flight_messages
from penstock.weights.flight_messages import (
    MAX_REQUEST_BYTES,
    Access,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    host_of,
    join_address,
    local_error,
    open_channel,
    own_address,
    peer_host,
    read_answer,
    read_request,
    serving_options,
    wire_error,
)


@pytest.fixture
def named(monkeypatch):
    """What the machine's name stands for; None: nothing."""

    def named(address):
        def look_up(name):
            if address is None:
                raise socket.gaierror("unknown")
            return address

        monkeypatch.setattr(socket, "gethostbyname", look_up)

    return named


def test_the_name_of_the_machine_decides(named):
    named("10.1.2.3")
    assert own_address() == "10.1.2.3"


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_a_name_for_loopback_or_nothing_gives_the_address_of_outgoing_connections(named, address, monkeypatch):
    named(address)
    monkeypatch.setattr(flight_messages, "_outgoing", lambda otherwise: "10.1.2.4")
    assert own_address() == "10.1.2.4"


def test_without_a_network_it_is_loopback(named, monkeypatch):
    class Unconnected(socket.socket):
        def connect(self, address):
            raise OSError("network is unreachable")

    named("127.0.1.1")
    monkeypatch.setattr(socket, "socket", Unconnected)
    assert own_address() == "127.0.1.1"


LIMIT_S = flight.FlightCallOptions(timeout=10)


class Echo(flight.FlightServerBase):
    """Answers with what it was asked, or raises what it was given."""

    def __init__(self, access, error=None):
        self.asked, self.error = [], error
        super().__init__(**serving_options(access, "127.0.0.1", 0))

    def do_action(self, context, action):
        self.asked.append(action.type)
        if self.error is not None:
            raise self.error
        return [action.body.to_pybytes()]


def ask(server, access, tls=False, body=b"hello", limit=1 << 20):
    channel = open_channel(f"127.0.0.1:{server.port}", tls, access, limit)
    try:
        return [result.body.to_pybytes() for result in channel.do_action(flight.Action("echo", body), LIMIT_S)]
    except (pa.ArrowException, OSError) as error:
        raise local_error(error, "there") from error
    finally:
        channel.close()


@pytest.mark.parametrize("token", ["s3cret", ""])
def test_the_right_token_passes(token):
    with Echo(Access(token)) as server:
        assert ask(server, Access(token)) == [b"hello"]


@pytest.mark.parametrize("given", ["", "s3cre", "s3cret2", "S3CRET"])
@pytest.mark.attack
def test_a_call_without_the_token_never_reaches_the_server(given):
    with Echo(Access("s3cret")) as server:
        with pytest.raises(WeightsError, match="refused the token"):
            ask(server, Access(given))
        assert server.asked == []


@pytest.mark.attack
def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    with Echo(Access("s3cret")) as server:
        ask(server, Access("s3cret"))
    assert compared == [(b"Bearer s3cret", b"Bearer s3cret")]


@pytest.mark.attack
def test_a_certificate_that_is_trusted_passes_and_others_do_not(tls_config):
    access = Access.from_config(tls_config, "s3cret")
    with Echo(access) as server:
        assert ask(server, access, tls=True) == [b"hello"]
        with pytest.raises(UnreachableError):
            ask(server, Access("s3cret"), tls=True)  # the system does not trust it
        with pytest.raises(UnreachableError):
            ask(server, access.named("another.example"), tls=True)
        with pytest.raises(UnreachableError):
            ask(server, access, tls=False)


@pytest.mark.attack
def test_a_message_beyond_the_limit_is_refused_by_the_client():
    with Echo(Access("t")) as server:
        assert ask(server, Access("t"), body=b"x" * (1 << 20), limit=1 << 20) == [b"x" * (1 << 20)]
        with pytest.raises(UnreachableError):
            ask(server, Access("t"), body=b"x" * (3 << 20), limit=1 << 20)


def test_a_superseded_version_crosses_with_the_newest_one():
    for newest in ((2, 7), None):
        with Echo(Access("t"), wire_error(SupersededVersionError("gone", newest))) as server:
            with pytest.raises(SupersededVersionError, match="gone") as told:
                ask(server, Access("t"))
            assert told.value.newest == newest


def test_other_errors_cross_by_their_message():
    with Echo(Access("t"), wire_error(WeightsError("no such job"))) as server:
        with pytest.raises(WeightsError, match="no such job") as told:
            ask(server, Access("t"))
        assert type(told.value) is WeightsError


@pytest.mark.parametrize("told", [b"[", b"{}", b"[1]", b'{"message": 1, "superseded_by": [1]}', b"[" * 100_000])
def test_an_error_that_cannot_be_read_is_an_error_still(told):
    error = local_error(flight.FlightServerError("x", extra_info=told), "there")
    assert type(error) is WeightsError and "cannot be read" in str(error)


def test_nobody_there_is_unreachable():
    with Echo(Access("t")) as server:
        port = server.port
    channel = open_channel(f"127.0.0.1:{port}", False, Access("t"), 1 << 20)
    with pytest.raises(pa.ArrowException) as failure:
        list(channel.do_action(flight.Action("echo", b""), LIMIT_S))
    assert isinstance(local_error(failure.value, "there"), UnreachableError)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:\x00", "\ud800:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(WeightsError, match="is no address of a weight server"):
        open_channel(address, False, Access("t"), 1 << 20)


def test_addresses():
    assert join_address("127.0.0.1", 8) == "127.0.0.1:8" and join_address("::1", 8) == "[::1]:8"
    assert host_of("10.0.0.7:8") == "10.0.0.7" and host_of("[::1]:8") == "::1"
    assert peer_host("ipv4:10.0.0.7:40742") == "10.0.0.7" and peer_host("ipv6:%5B::1%5D:40742") == "::1"


def test_an_open_address_needs_a_token():
    with pytest.raises(ConfigError, match="weights.host=0.0.0.0 is open to other machines and needs a token"):
        Access.from_config(WeightsConfig(host="0.0.0.0"), "")


def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"weights.tls_ca=.*none.pem cannot be read"):
        Access.from_config(WeightsConfig(tls_ca=missing), "t")


@pytest.mark.attack
def test_no_secret_is_shown(tls_config):
    shown = repr(Access.from_config(tls_config, "s3cret"))
    assert shown == "Access(tls=True, server_name=None)"


TICKET = StreamTicket(
    job="run",
    client="inference-0",
    incarnation="ab",
    version=WeightVersion(1, 7),
    base=(WeightVersion(1, 6), "digest"),
    stream=3,
    streams=4,
    chunk_bytes=4096,
)
MESSAGES = [
    TICKET,
    WaitRequest(job="run", client="c", known=("ab", WeightVersion(0, 3)), timeout_s=1.5),
    WaitRequest(job="run", client="c", known=None, timeout_s=0.0),
    OfferRequest(job="run", client="c", version=WeightVersion(0, 3), base=None, failed=True, timeout_s=2.0),
    FinishedRequest(job="run", client="c", version=WeightVersion(0, 3), port=8123),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_requests_are_read_as_they_were_sent(message):
    assert read_request(type(message), message.to_bytes()) == message


def test_answers_are_read_as_they_were_sent():
    for answer in (
        WaitAnswer(newest=("ab", WeightVersion(0, 3))),
        OfferAnswer(parent=None),
        OfferAnswer(deltas=[3, 0], keep=True),
    ):
        assert read_answer(type(answer), answer.to_bytes()) == answer


def test_versions_travel_as_pairs():
    request = OfferRequest(
        job="j", client="c", version=WeightVersion(2, 5), base=(WeightVersion(2, 4), "d"), timeout_s=0
    )
    values = json.loads(request.to_bytes())
    assert (values["version"], values["base"]) == ([2, 5], [[2, 4], "d"])
    for wrong in ([2], [2, -1], [2, "5"], {"lineage": 2, "step": 5}, None):
        with pytest.raises(WeightsError, match="version"):
            read_request(OfferRequest, json.dumps(values | {"version": wrong}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"stream": -1},
        {"stream": 64},
        {"streams": 0},
        {"streams": 65},
        {"chunk_bytes": 1},
        {"chunk_bytes": 1 << 31},
        {"version": [1]},
        {"version": [1, -1]},
        {"version": [1, 1 << 48]},
        {"version": [1, 2.5]},
        {"version": [True, 2]},
        {"base": [[0, 1], ""]},
        {"job": ""},
        {"job": "x" * 513},
        {"job": None},
        {"client": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(change):
    values = json.loads(TICKET.to_bytes()) | change
    with pytest.raises(WeightsError, match=f"not a StreamTicket: {next(iter(change))}"):
        read_request(StreamTicket, json.dumps(values).encode())


def test_a_wait_without_end_is_refused():
    for timeout in ("1e9", "NaN", "Infinity", "-1"):
        text = f'{{"job":"run","client":"c","known":null,"timeout_s":{timeout}}}'
        with pytest.raises(WeightsError, match="WaitRequest"):
            read_request(WaitRequest, text.encode())


@pytest.mark.attack
def test_a_large_request_is_refused_before_it_is_read():
    text = b"[" * (MAX_REQUEST_BYTES + 1)
    with pytest.raises(WeightsError, match=f"{MAX_REQUEST_BYTES + 1} bytes is refused: at most {MAX_REQUEST_BYTES}"):
        read_request(StreamTicket, text)
    with pytest.raises(WeightsError, match="not a StreamTicket"):
        read_request(StreamTicket, b"[" * MAX_REQUEST_BYTES)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 200))
@pytest.mark.attack
def test_damaged_requests_are_read_as_others_or_refused(noise, start, end):
    text = TICKET.to_bytes()
    for damaged in (noise, text[:start] + noise + text[end:]):
        try:
            read_request(StreamTicket, damaged)
        except WeightsError:
            pass
