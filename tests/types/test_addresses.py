"""Which addresses are this machine's alone, and how they stand in URLs."""

from penstock.types.addresses import bracketed, is_loopback


def test_loopback_addresses():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.example.org", "127.example.org", "")))


def test_ipv6_stands_in_brackets():
    assert [bracketed(host) for host in ("::1", "127.0.0.1", "localhost")] == ["[::1]", "127.0.0.1", "localhost"]
