"""What every message of experience is wrapped in: one uncompressed Arrow IPC stream, and a trailer with its checksum.

Invariants: what is read is what was written, or an error; nothing of a message is executed (no pickle) and nothing is
unpacked (no compression), so that memory is bounded by the message's size. The checksum is against accidents: it
authenticates nobody. Not covered: what the columns mean (`transfer`, `fragment_transfer`).
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import struct
import zlib
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.types import RunDirectoryError, TransferError

if TYPE_CHECKING:
    from typing_extensions import Buffer

TRAILER = struct.Struct("<4sIQ")
"""Magic, CRC-32 of the stream, length of the stream in bytes."""
MAGIC = b"PSR1"
_INT32, _UINT32, _UINT16 = struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<H")
_HEADER, _COMPRESSION = 2, 3
"""Fields of Arrow's `Message`, and of its `RecordBatch` (https://github.com/apache/arrow/tree/main/format)."""
FORGED = (
    pa.ArrowException, RunDirectoryError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError,
    OverflowError, struct.error,
)  # fmt: skip
"""What reading columns of other types and shapes than ours may raise."""


def table_to_message(table: pa.Table) -> "Buffer":
    """A table as one message, a `pyarrow.Buffer`."""
    sizes = pa.MockOutputStream()
    _write(sizes, table)
    length = sizes.size()
    message = pa.allocate_buffer(length + TRAILER.size)
    with pa.FixedSizeBufferWriter(message) as stream:
        _write(stream, table)
        checksum = zlib.crc32(memoryview(message)[:length])
        stream.write(TRAILER.pack(MAGIC, checksum, length))
    return message


def _write(stream: pa.NativeFile, table: pa.Table) -> None:
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def checked_stream(message: "Buffer") -> pa.Buffer:
    """The message without its trailer, which agrees with it.

    Raises:
        TransferError: it is cut short, changed, or no message.
    """
    return _without_trailer(message if isinstance(message, pa.Buffer) else pa.py_buffer(message))


def _without_trailer(buffer: pa.Buffer) -> pa.Buffer:
    length = buffer.size - TRAILER.size
    if length < 0:
        raise TransferError(f"the message has {buffer.size} bytes: it is cut short")
    magic, checksum, expected = TRAILER.unpack(memoryview(buffer)[length:])
    if magic != MAGIC:
        raise TransferError(f"the message of {buffer.size} bytes does not end as one does: it is cut short or foreign")
    if expected != length:
        raise TransferError(f"the message has {length} bytes before its trailer, but was written with {expected}")
    stream = buffer.slice(0, length)
    found = zlib.crc32(memoryview(stream))
    if found != checksum:
        raise TransferError(f"the message's checksum is {found:#010x}, but was {checksum:#010x} when it was written")
    return stream


def check_unpacked(stream: pa.Buffer) -> None:
    """Refuses compressed columns, which would be unpacked to whatever size they name, and dictionaries.

    Raises:
        TransferError: there are some.
    """
    for message in pa.ipc.MessageReader.open_stream(stream):
        if message.type not in ("schema", "record batch"):
            raise TransferError(f"a {message.type} in a message of rollouts: no writer makes one")
        if message.type == "record batch" and _is_compressed(memoryview(message.metadata)):
            raise TransferError("its columns are compressed, which no writer of messages does")


def _is_compressed(metadata: memoryview) -> bool:
    """Whether a record batch's header, a flatbuffer that Arrow has verified, names a compression."""
    message = _UINT32.unpack_from(metadata)[0]
    batch = _field(metadata, message, _HEADER)
    return (
        batch is not None
        and _field(metadata, batch + _UINT32.unpack_from(metadata, batch)[0], _COMPRESSION) is not None
    )


def _field(metadata: memoryview, table: int, number: int) -> int | None:
    """Where a field of a flatbuffer's table lies; None where it is left out."""
    fields = table - _INT32.unpack_from(metadata, table)[0]
    entry = _UINT16.size * (2 + number)  # after the sizes of the list of fields and of the table
    offset = 0
    if entry < _UINT16.unpack_from(metadata, fields)[0]:
        offset = _UINT16.unpack_from(metadata, fields + entry)[0]
    return table + offset if offset else None
