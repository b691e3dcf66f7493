import socket

import pytest

from penstock.weights import own_address as module
from penstock.weights.own_address import own_address


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
    monkeypatch.setattr(module, "_outgoing", lambda otherwise: "10.1.2.4")
    assert own_address() == "10.1.2.4"


def test_without_a_network_it_is_loopback(named, monkeypatch):
    class Unconnected(socket.socket):
        def connect(self, address):
            raise OSError("network is unreachable")

    named("127.0.1.1")
    monkeypatch.setattr(socket, "socket", Unconnected)
    assert own_address() == "127.0.1.1"
