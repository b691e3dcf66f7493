"""What Flight clients and servers of weights say to each other, and how they meet: token, TLS, errors.

Requests are the bodies of actions and tickets, answers the bodies of results: JSON, with every number and text bounded.
The arrays travel as record batches of one column of bytes, in the order of `flight_connection.chunks_of`.

A call without the token is refused before any of our code reads it; tokens are compared in constant time. What Arrow
does not let us bound is the size of a *request*, which gRPC reads before it asks for the token: whoever can connect can
make a server hold a large one. So servers listen on loopback by default, and on open networks they want TLS with a
firewall in front.
"""

import hmac
import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.flight as flight
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from penstock.types import ConfigError, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.types.addresses import bracketed, is_loopback
from penstock.weights.config import WeightsConfig
from penstock.weights.manifest import MAX_MANIFEST_BYTES, MAX_NAME_CHARACTERS, Manifest, version_from_values

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
MAX_REQUEST_BYTES = 64 * 1024
MAX_STREAMS = 64
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4096, 1 << 30
MAX_WAIT_S = 60.0
OFFER_KEY = b"offer"
"""In the metadata of a stream's schema: the `OfferAnswer` to a ticket that asks."""
MAX_RIDING_OFFER_BYTES = 512 * 1024
"""One with a longer manifest does not travel with a stream, and must be asked for by itself."""

Text = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Version = Annotated[
    WeightVersion,
    PlainValidator(lambda value: value if isinstance(value, WeightVersion) else version_from_values(value)),
    PlainSerializer(lambda version: [version.lineage, version.step]),
]
WireContent = tuple[Version, Text]
"""`Manifest.content`."""
WireLatest = tuple[Text, Version]
"""`LatestVersion`."""

_HEADER = "authorization"
_MESSAGE_SLACK_BYTES = 1 << 20
_REFUSED = (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError)
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that nobody has (RFC 5737). Nothing is sent there: the system only says from where it would be."""


class FlightMessage(BaseModel):
    """Frozen, strict, and with no field but those it names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """As JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, text: bytes | memoryview | pa.Buffer, most: int) -> Self:
        """Reads a message of another process.

        Raises:
            WeightsError: it is larger than `most` bytes, or not such a message.
        """
        size = memoryview(text).nbytes
        if size > most:
            raise WeightsError(f"a {cls.__name__} of {size} bytes is refused: at most {most} are read")
        try:
            return cls.model_validate_json(bytes(text))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3]]
            raise WeightsError(f"not a {cls.__name__}: {'; '.join(problems):.600}") from error


class Request(FlightMessage):
    """Attributes: job: whose weights; client: who asks, the same name in every request."""

    job: Text
    client: Text


class WaitRequest(Request):
    """What is there? Answered when that differs from `known`, or after `timeout_s`.

    Attributes:
        known: What the client knows already; None for nothing.
        timeout_s: Longest wait.
    """

    known: WireLatest | None
    timeout_s: float = Field(ge=0, le=MAX_WAIT_S)


class WaitAnswer(FlightMessage):
    """What is there; None before the first publication."""

    newest: WireLatest | None


class OfferRequest(Request):
    """How can I have this version?

    Attributes:
        version: Of which weights.
        base: What the client holds, for a difference to it; None asks for whole arrays.
        failed: The parent that was assigned last gave nothing.
        timeout_s: Longest wait for a place in the tree.
    """

    version: Version
    base: WireContent | None
    failed: bool = False
    timeout_s: float = Field(ge=0, le=MAX_WAIT_S)


class OfferAnswer(FlightMessage):
    """What there is.

    Attributes:
        manifest: `Manifest.to_values`; None from a relay, whose clients have it from the root.
        parent: ``host:port`` to ask instead; empty: fetch here; None: no place yet, ask again.
        keep: Whether the client shall serve others with what it fetches.
        deltas: Bytes of each message of the way from `base`, the oldest first; None: the arrays are sent whole.
    """

    manifest: Any = None
    parent: str | None = Field(default="", max_length=MAX_NAME_CHARACTERS)
    keep: bool = False
    deltas: list[Count] | None = Field(default=None, max_length=1024)

    def read_manifest(self, max_bytes: int) -> Manifest:
        """The manifest, checked. Raises as `Manifest.from_values`."""
        return Manifest.from_values(self.manifest, max_bytes)


class FinishedRequest(Request):
    """The client has the whole version, and serves it on `port` of the host that it calls from (None: it does not)."""

    version: Version
    port: Annotated[int, Field(ge=1, le=65535)] | None


class FinishedAnswer(FlightMessage):
    """Empty: it was noted."""


class StreamTicket(Request):
    """One stream of a fetch.

    Attributes:
        incarnation: The broadcaster whose version it is.
        version: Of which weights.
        base: What the deltas start from; None asks for the whole arrays.
        stream: Its number, from 0.
        streams: Of how many.
        chunk_bytes: Largest message.
        asks: Has the stream begin with the answer to an `OfferRequest` for the same, where that is not too long.
    """

    incarnation: Text
    version: Version
    base: WireContent | None
    stream: int = Field(ge=0, lt=MAX_STREAMS)
    streams: int = Field(ge=1, le=MAX_STREAMS)
    chunk_bytes: int = Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)
    asks: bool = False


AnyFlightMessage = TypeVar("AnyFlightMessage", bound=FlightMessage)
AnyRequest = TypeVar("AnyRequest", bound=Request)


def read_request(kind: type[AnyRequest], text: pa.Buffer | bytes) -> AnyRequest:
    """A request, of bounded size. Raises WeightsError."""
    return kind.from_bytes(text, MAX_REQUEST_BYTES)


def read_answer(kind: type[AnyFlightMessage], text: pa.Buffer | bytes) -> AnyFlightMessage:
    """An answer, of bounded size. Raises WeightsError."""
    return kind.from_bytes(text, MAX_MANIFEST_BYTES)


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
    return f"{bracketed(host)}:{port}"


def host_of(address: str) -> str:
    """The host of ``host:port``, without brackets."""
    return address.rpartition(":")[0].strip("[]")


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
    extra_info: bytes = getattr(error, "extra_info", b"")
    if isinstance(error, flight.FlightServerError) and extra_info:
        return _server_error(extra_info, address)
    return UnreachableError(f"the weight server at {address} is dead, silent or broken: {str(error):.300}")


def _server_error(extra_info: bytes, address: str) -> WeightsError:
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
