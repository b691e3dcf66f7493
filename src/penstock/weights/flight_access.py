"""How Flight servers and clients of weights meet: token, certificates, addresses, and errors on the wire.

A call without the token is refused before any of our code reads it; tokens are compared in constant time. What Arrow
does not let us bound is the size of a *request*, which gRPC reads before it asks for the token: whoever can connect can
make a server hold a large one. So servers listen on loopback unless told otherwise, and on open networks they want
TLS with a firewall in front.
"""

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError
from penstock.weights.config import WeightsConfig
from penstock.weights.manifest import version_from_values

_HEADER = "authorization"
_MESSAGE_SLACK_BYTES = 1 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REFUSED = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)


@dataclass(frozen=True, slots=True)
class Access:
    """The token and the certificates by which all servers and clients of one job know each other.

    Attributes:
        token: Every call carries it. Not in `repr`.
        certificate: PEM chain of a server, with `key`; None without TLS.
        key: Its private key.
        roots: PEM certificates that clients trust; None trusts those of the system.
        server_name: What the certificate must name, whatever address is connected to; None takes the address.
    """

    token: str
    certificate: bytes | None = None
    key: bytes | None = None
    roots: bytes | None = None
    server_name: str | None = None

    def __repr__(self) -> str:
        """Without secrets."""
        return f"Access(tls={self.certificate is not None}, server_name={self.server_name!r})"

    def named(self, server_name: str) -> "Access":
        """For servers whose certificate names another host than their address."""
        return replace(self, server_name=server_name)

    @classmethod
    def from_config(cls, config: WeightsConfig, token: str) -> "Access":
        """Reads the files that the config names.

        Raises:
            ConfigError: a file cannot be read, or a server on an open address has no token.
        """
        if not token and not is_loopback(config.host):
            raise ConfigError(f"weights.host={config.host} is open to other machines and needs a token; none was given")
        return cls(
            token,
            _read("weights.tls_cert", config.tls_cert),
            _read("weights.tls_key", config.tls_key),
            _read("weights.tls_ca", config.tls_ca),
        )


def serving_options(access: Access, host: str, port: int) -> dict[str, Any]:
    """Arguments for `FlightServerBase`: where it listens, and whom it lets in."""
    tls = access.certificate is not None and access.key is not None
    return {
        "location": flight_uri(join_address(host, port), tls),
        "tls_certificates": [(access.certificate, access.key)] if tls else None,
        "middleware": {"token": _TokenCheck(access.token)},
    }


def open_channel(address: str, tls: bool, access: Access, max_message_bytes: int) -> flight.FlightClient:
    """A connection of its own, even where there is one to the same address; connects at the first call.

    Args:
        address: ``host:port``.
        tls: Whether the server speaks TLS.
        access: Token and trust.
        max_message_bytes: Largest payload of a message that is accepted.

    Raises:
        WeightsError: that is no address.
    """
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", max_message_bytes + _MESSAGE_SLACK_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    trust = {"tls_root_certs": access.roots, "override_hostname": access.server_name} if tls else {}
    sender = _TokenSender(access.token)
    try:
        return flight.FlightClient(flight_uri(address, tls), middleware=[sender], generic_options=options, **trust)
    except (pa.ArrowException, ValueError) as error:
        raise WeightsError(f"{address!r:.300} is no address of a weight server: {error!s:.300}") from error


def flight_uri(address: str, tls: bool) -> str:
    """The URI of ``host:port``."""
    return f"grpc{'+tls' if tls else ''}://{address}"


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of ``host:port``, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether only processes of the same machine reach it."""
    return host in _LOOPBACK or host.startswith("127.")


def peer_host(peer: str) -> str:
    """The host of gRPC's name for a peer, such as ``ipv4:10.0.0.7:40742`` or ``ipv6:%5B::1%5D:40742``."""
    return host_of(unquote(peer.partition(":")[2]))


def wire_error(error: WeightsError) -> flight.FlightServerError:
    """One of our errors as a server raises it; `local_error` is its inverse."""
    values: dict[str, Any] = {"message": str(error)}
    if isinstance(error, SupersededVersionError):
        values["superseded_by"] = error.newest
    return flight.FlightServerError(str(error), extra_info=json.dumps(values).encode())


def local_error(error: Exception, address: str) -> WeightsError | UnreachableError:
    """What a failed call means: refused, superseded, silent, or broken."""
    if isinstance(error, _REFUSED):
        return WeightsError(f"the weight server at {address} refused the token: it serves another job")
    told: bytes = getattr(error, "extra_info", b"")
    if isinstance(error, flight.FlightServerError) and told:
        return _told_error(told, address)
    return UnreachableError(f"the weight server at {address} is dead, silent or broken: {str(error):.300}")


def _told_error(extra_info: bytes, address: str) -> WeightsError:
    try:
        values: Mapping[str, Any] = json.loads(extra_info)
        message = f"{str(values['message']):.2000} (weight server at {address})"
        if "superseded_by" not in values:
            return WeightsError(message)
        newest = values["superseded_by"]
        version = None if newest is None else version_from_values(newest)
        return SupersededVersionError(message, None if version is None else (version.lineage, version.step))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return WeightsError(f"the weight server at {address} sent an error that cannot be read: {error}")


class _TokenCheck(flight.ServerMiddlewareFactory):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = _header(token).encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[str]]) -> None:
        given = headers.get(_HEADER, [""])[0]
        if not hmac.compare_digest(given.encode(errors="replace"), self._expected):
            raise flight.FlightUnauthenticatedError("missing or wrong token")


class _TokenSender(flight.ClientMiddlewareFactory):
    def __init__(self, token: str) -> None:
        super().__init__()
        self._header = {_HEADER: _header(token)}

    def start_call(self, info: flight.CallInfo) -> flight.ClientMiddleware:
        return _TokenHeader(self._header)


class _TokenHeader(flight.ClientMiddleware):
    def __init__(self, header: dict[str, str]) -> None:
        super().__init__()
        self._header = header

    def sending_headers(self) -> dict[str, str]:
        return self._header


def _header(token: str) -> str:
    return f"Bearer {token}".strip()  # as gRPC strips it


def _read(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}={path} cannot be read: {error}") from error
