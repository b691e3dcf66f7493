"""What Flight clients and servers of weights ask and answer: JSON, with every number and text bounded.

Requests are the bodies of actions and tickets; answers are the bodies of results. The arrays themselves travel as
record batches of one column of bytes, in the order of `streams.cut`.
"""

from typing import Annotated, Any, Self, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.types import WeightsError, WeightVersion
from penstock.weights.manifest import MAX_MANIFEST_BYTES, MAX_NAME_CHARACTERS, Manifest

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
Version = tuple[Count, Count]
"""Lineage and step."""
Announced = tuple[Text, Version]
"""Incarnation of a broadcaster, and its newest version."""
Content = tuple[Version, Text]
"""`Manifest.content`: version and digest."""


class Message(BaseModel):
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


class _Request(Message):
    """Attributes: job: whose weights; client: who asks, the same name in every request."""

    job: Text
    client: Text


class WaitRequest(_Request):
    """What is there? Answered when that differs from `known`, or after `timeout_s`.

    Attributes:
        known: What the client was told last; None for nothing.
        timeout_s: Longest wait.
    """

    known: Announced | None
    timeout_s: float = Field(ge=0, le=MAX_WAIT_S)


class WaitAnswer(Message):
    """What is there; None before the first publication."""

    newest: Announced | None


class OfferRequest(_Request):
    """How can I have this version?

    Attributes:
        version: Which.
        base: What the client holds, for a difference to it; None asks for whole arrays.
        failed: The parent that was assigned last gave nothing.
        timeout_s: Longest wait for a place in the tree.
    """

    version: Version
    base: Content | None
    failed: bool = False
    timeout_s: float = Field(ge=0, le=MAX_WAIT_S)


class OfferAnswer(Message):
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
        """The manifest, checked; see `Manifest.from_values`."""
        return Manifest.from_values(self.manifest, max_bytes)


class FinishedRequest(_Request):
    """The client has the whole version, and serves it on `port` of the host that it calls from (None: it does not)."""

    version: Version
    port: Annotated[int, Field(ge=1, le=65535)] | None


class FinishedAnswer(Message):
    """Empty: it was noted."""


class StreamTicket(_Request):
    """One stream of a fetch.

    Attributes:
        incarnation: The broadcaster whose version it is.
        version: Which.
        base: What the deltas start from; None asks for the whole arrays.
        stream: Which stream, from 0.
        streams: Of how many.
        chunk_bytes: Largest message.
        asks: Has the stream begin with the answer to an `OfferRequest` for the same, where that is not too long.
    """

    incarnation: Text
    version: Version
    base: Content | None
    stream: int = Field(ge=0, lt=MAX_STREAMS)
    streams: int = Field(ge=1, le=MAX_STREAMS)
    chunk_bytes: int = Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)
    asks: bool = False


AnyMessage = TypeVar("AnyMessage", bound=Message)


def read_request(kind: type[AnyMessage], text: pa.Buffer | bytes) -> AnyMessage:
    """A request, of bounded size. Raises WeightsError."""
    return kind.from_bytes(text, MAX_REQUEST_BYTES)


def read_answer(kind: type[AnyMessage], text: pa.Buffer | bytes) -> AnyMessage:
    """An answer, of bounded size. Raises WeightsError."""
    return kind.from_bytes(text, MAX_MANIFEST_BYTES)


def pair(version: WeightVersion) -> Version:
    """A version as it travels."""
    return version.lineage, version.step


def content_pair(content: tuple[WeightVersion, str] | None) -> Content | None:
    """A content as it travels."""
    return None if content is None else (pair(content[0]), content[1])
