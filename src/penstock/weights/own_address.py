"""By which address other machines reach this one."""

import ipaddress
import socket

_ELSEWHERE = ("192.0.2.1", 9)
"""An address that nobody has (RFC 5737). Nothing is sent there: the system only says from where it would be."""


def own_address() -> str:
    """This machine's IPv4 address for others.

    What its name stands for; where that is loopback only, as systems with one address often have it, or nothing, the
    address that a connection to elsewhere would come from. Loopback where there is no network.
    """
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    return _outgoing(named) if ipaddress.ip_address(named).is_loopback else named


def _outgoing(otherwise: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return otherwise
        return str(probe.getsockname()[0])
