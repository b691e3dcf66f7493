"""Tokens, certificates, addresses, and errors that cross a socket."""

import hmac

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError
from penstock.weights import WeightsConfig
from penstock.weights.flight_access import (
    Access,
    host_of,
    is_loopback,
    join_address,
    local_error,
    open_channel,
    peer_host,
    serving_options,
    wire_error,
)

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
    assert is_loopback("127.0.0.9") and is_loopback("::1") and not is_loopback("0.0.0.0")


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
