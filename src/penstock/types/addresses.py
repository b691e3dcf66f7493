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


def bracketed(host: str) -> str:
    """As it stands in a URL and before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
