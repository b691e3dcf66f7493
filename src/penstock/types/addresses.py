"""Addresses that servers listen on."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_url(source: object) -> bool:
    """Whether that is a server, where it could be a path as well."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def bracketed(host: str) -> str:
    """As it stands in a URL and before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
