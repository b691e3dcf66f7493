"""Experience on its way between processes: one message is one uncompressed Arrow IPC stream, and a trailer.

The columns are those of a stored row. For rollouts (`penstock.rundir.ROLLOUT_SCHEMA`) there are two differences:
`response_mask` has a byte per token instead of a bit, so that it too can be read without a copy, and `group_index` says
which rows are one group (ids and keys may repeat). Any Arrow reader opens a message; it stops before the trailer.

Invariants: what is read is what was written, or an error; arrays that are read are read-only views of the message,
wherever their bytes lie as they must, and keep all of it alive, so who keeps them for long copies them
(`PackedRollout`); nothing of a message is executed (no pickle), and nothing is unpacked (no compression), so that
memory is bounded by its size. The checksum in the trailer is against accidents: it authenticates nobody.

Not covered: more than 2³¹ tokens in one message, `RolloutBatch.metadata`, which is made anew from the members, and
fragments stored without their observations, which nobody sends.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from penstock.rundir import ROLLOUT_SCHEMA, records_from_table, table_from_records
from penstock.rundir.fragment_rows import FRAGMENT_SCHEMA, fragments_from_table, table_from_fragments
from penstock.rundir.parquet import list_column, schema_version
from penstock.types import (
    FRAGMENT_SCHEMA_VERSION,
    SCHEMA_VERSION,
    FragmentExample,
    InvalidRolloutError,
    RolloutBatch,
    RolloutGroup,
    RolloutRecord,
    RunDirectoryError,
    SampleFragment,
    SchemaVersionError,
    TrainingBatch,
    TransferError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Record = TypeVar("_Record")
MOST_FRAGMENT_BYTES = 1 << 30
"""A larger message of fragments is refused before it is read."""
_MASK = ROLLOUT_SCHEMA.get_field_index("response_mask")
_MASK_FIELD = pa.field("response_mask", pa.list_(pa.uint8()), nullable=False)
_GROUP_FIELD = pa.field("group_index", pa.int32(), nullable=False)
TRANSFER_SCHEMA = ROLLOUT_SCHEMA.set(_MASK, _MASK_FIELD).append(_GROUP_FIELD)

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


@dataclass(frozen=True, slots=True)
class _Kind:
    """What messages of one kind of experience must be.

    Attributes:
        name: In words, for errors.
        schema: Of the newest version.
        newest: That version.
        upgrades: Whether messages of earlier versions are read, too.
        required: Nullable columns in which no null may be all the same.
    """

    name: str
    schema: pa.Schema
    newest: int
    upgrades: bool
    required: tuple[str, ...] = ()


_ROLLOUTS = _Kind("rollouts", TRANSFER_SCHEMA, SCHEMA_VERSION, upgrades=True)
_FRAGMENTS = _Kind("fragments", FRAGMENT_SCHEMA, FRAGMENT_SCHEMA_VERSION, False, ("observations", "final_observations"))


def batch_to_buffer(batch: RolloutBatch) -> "Buffer":
    """A batch of rollouts as one message, a `pyarrow.Buffer`; it goes wherever bytes go.

    Args:
        batch: Any number of groups; their rollouts have metadata.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    return rollouts_to_buffer(batch.groups)


def batch_from_buffer(message: "Buffer") -> RolloutBatch:
    """The batch of a message; its arrays are views of it.

    Args:
        message: Bytes, a memory view, a `pyarrow.Buffer`. The views are aligned if its first byte lies at a multiple
            of 8, as the memory of Python and Arrow does.

    Raises:
        TransferError: the message is cut short, changed, or no message of rollouts.
        SchemaVersionError: a newer Penstock wrote it.
        InvalidRolloutError: it is whole, but a rollout in it is not valid.
    """
    return RolloutBatch.of(tuple(rollouts_from_buffer(message)))


def rollouts_to_buffer(groups: Sequence[RolloutGroup]) -> "Buffer":
    """Groups of rollouts as one message; as `batch_to_buffer`."""
    records = [
        RolloutRecord(rollout, group.group_id, group_key=group.key) for group in groups for rollout in group.rollouts
    ]
    sizes = [len(group.rollouts) for group in groups]
    masks = [record.rollout.response_mask.view(np.uint8) for record in records]
    indices = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    table = table_from_records(records)
    table = table.set_column(_MASK, _MASK_FIELD, list_column(masks, pa.uint8()))
    return table_to_message(table.append_column(_GROUP_FIELD, pa.array(indices)))


def rollouts_from_buffer(message: "Buffer") -> list[RolloutGroup]:
    """The groups of a message; as `batch_from_buffer`."""
    return _read(message, _ROLLOUTS, _groups)


def fragments_to_buffer(groups: Sequence[RolloutGroup[SampleFragment]]) -> "Buffer":
    """Fragments as one message, a `pyarrow.Buffer`.

    Args:
        groups: Of one fragment each, with metadata.

    Raises:
        InvalidRolloutError: a fragment has no metadata, or an array of Python objects.
    """
    records = [
        RolloutRecord(fragment, group.group_id, group_key=group.key) for group in groups for fragment in group.rollouts
    ]
    return table_to_message(table_from_fragments(records))


def fragments_from_buffer(
    message: "Buffer", most_bytes: int = MOST_FRAGMENT_BYTES
) -> list[RolloutGroup[SampleFragment]]:
    """The fragments of a message, in its order.

    Args:
        message: Bytes, a memory view, a `pyarrow.Buffer`.
        most_bytes: Largest that is read.

    Raises:
        TransferError: the message is cut short, changed, or no message of fragments.
        SchemaVersionError: a newer Penstock wrote it.
        InvalidRolloutError: it is too large, or a fragment in it is not valid.
    """
    size = memoryview(message).nbytes
    if size > most_bytes:
        raise InvalidRolloutError(
            f"a message of fragments has {size:,} bytes, and {most_bytes:,} are the most: lower fleet.fragment_length, "
            "or let the simulator show smaller observations"
        )
    records = _read(message, _FRAGMENTS, partial(fragments_from_table, name="message"))
    return [RolloutGroup(record.group_key, (record.rollout,), record.group_id) for record in records]


def in_messages(
    groups: Iterable[RolloutGroup[SampleFragment]], most_bytes: int
) -> Iterator[list[RolloutGroup[SampleFragment]]]:
    """Groups in their order, as many together as stay below the limit, and at least one."""
    together: list[RolloutGroup[SampleFragment]] = []
    size = 0
    for group in groups:
        more = sum(_nbytes(fragment) for fragment in group.rollouts)
        if together and size + more > most_bytes:
            yield together
            together, size = [], 0
        together.append(group)
        size += more
    if together:
        yield together


def _nbytes(fragment: SampleFragment) -> int:
    leaves = (fragment.observations, fragment.actions, fragment.final_observations, fragment.initial_state)
    return 64 * fragment.length + sum(array.nbytes for arrays in leaves for array in arrays.values())


class BatchMessage(NamedTuple):
    """A training batch of fragments on its way to the learner: a `TrainingBatch` whose examples are a message.

    Attributes:
        batch_id: As of `TrainingBatch`.
        step: As of `TrainingBatch`.
        group_ids: As of `TrainingBatch`.
        metrics: As of `TrainingBatch`.
        fragments: The examples' fragments, in their order.
    """

    batch_id: str
    step: int
    group_ids: tuple[str, ...]
    metrics: dict[str, float]
    fragments: bytes

    @classmethod
    def of(cls, batch: TrainingBatch[FragmentExample]) -> "BatchMessage":
        """Writes a batch."""
        fragments = [example.fragment for example in batch.examples]
        groups = [RolloutGroup(fragment.task, (fragment,), fragment.group_id) for fragment in fragments]
        message = bytes(memoryview(fragments_to_buffer(groups)))
        return cls(batch.batch_id, batch.step, batch.group_ids, batch.metrics, message)

    def read(self) -> TrainingBatch[FragmentExample]:
        """The batch.

        Raises:
            TransferError: the message was damaged on its way.
        """
        groups = fragments_from_buffer(self.fragments)
        examples = tuple(FragmentExample(group.rollouts[0]) for group in groups)
        return TrainingBatch(self.batch_id, self.step, examples, self.group_ids, self.metrics)


# --- reading, checked ------------------------------------------------------------------------------------------------


def _read(message: "Buffer", kind: _Kind, read: Callable[[pa.Table], list[_Record]]) -> list[_Record]:
    stream = checked_stream(message)
    try:
        return read(_table(stream, kind))
    except (InvalidRolloutError, TransferError, SchemaVersionError):
        raise
    except FORGED as error:
        raise TransferError(f"the message's checksum is right, but it holds no {kind.name}: {error}") from error


def _table(stream: pa.Buffer, kind: _Kind) -> pa.Table:
    check_unpacked(stream)
    with pa.ipc.open_stream(stream) as reader:
        version = schema_version(reader.schema)
        if version > kind.newest:
            raise SchemaVersionError(
                f"a message of {kind.name} has schema version {version}, this Penstock reads up to {kind.newest}: let "
                "workers and learner run the same Penstock, the learner's no older than the workers'"
            )
        if (version == kind.newest or not kind.upgrades) and not reader.schema.equals(kind.schema):
            raise TransferError(
                f"its columns are not those of {kind.name} of schema version {kind.newest}: {reader.schema.names}"
            )
        odd = [field.name for field in reader.schema if version < kind.newest and not _has_elements(field.type)]
        if odd:
            raise TransferError(f"columns {odd} are of types that no writer makes")
        table = reader.read_all()
    table.validate(full=True)  # offsets and text: views must never reach outside the message
    for field, column in zip(table.schema, table.columns, strict=True):
        if column.null_count and (not field.nullable or field.name in kind.required):
            raise TransferError(f"column {field.name} has {column.null_count} nulls where none may be")
    return table


def _has_elements(kind: pa.DataType) -> bool:
    """Whether each element of a column takes memory of its own, so that there are not more than the message holds."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_elements(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_has_elements(field.type) for field in kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_primitive(kind)


def _groups(table: pa.Table) -> list[RolloutGroup]:
    if table.schema.get_field_index(_GROUP_FIELD.name) >= 0:
        indices = table.column(_GROUP_FIELD.name).to_pylist()
        _check_flags(table.column(_MASK_FIELD.name))
        records = records_from_table(table.drop_columns([_GROUP_FIELD.name]), "message")
    else:  # of version 0: rows of one group stand together
        records = records_from_table(table, "message")
        indices = [record.group_id for record in records]
    groups: list[RolloutGroup] = []
    for _, members in groupby(zip(indices, records, strict=True), key=lambda pair: pair[0]):
        rows = [record for _, record in members]
        groups.append(RolloutGroup(rows[0].group_key, tuple(row.rollout for row in rows), rows[0].group_id))
    return groups


def _check_flags(column: pa.ChunkedArray) -> None:
    for chunk in column.chunks:
        flags = chunk.values.to_numpy()
        if flags.size and flags.max() > 1:
            raise TransferError(f"response_mask holds {flags.max()}: a flag is 0 or 1")


# --- the frame -------------------------------------------------------------------------------------------------------


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
    buffer: pa.Buffer = pa.py_buffer(message)
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
            raise TransferError(f"a {message.type} in a message of experience: no writer makes one")
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
