"""Fragments on their way between processes: one message is any number of them, as the rows that files keep.

The columns are `penstock.rundir.FRAGMENT_SCHEMA`; frame, checksum and what is refused are those of `message_frame`.
Arrays that are read are read-only views of the message wherever their bytes lie as they must, so a message lives as
long as its fragments. Not covered: fragments stored without their observations, which nobody sends.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.replay.message_frame import FORGED, check_unpacked, checked_stream, table_to_message
from penstock.rundir.fragment_rows import FRAGMENT_SCHEMA, fragments_from_table, table_from_fragments
from penstock.rundir.parquet import schema_version
from penstock.types import (
    FRAGMENT_SCHEMA_VERSION,
    InvalidRolloutError,
    RolloutGroup,
    RolloutRecord,
    SampleFragment,
    SchemaVersionError,
    TransferError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_BYTES = 1 << 30
"""A larger message is refused before it is read."""


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


def fragments_from_buffer(message: "Buffer", most_bytes: int = MOST_BYTES) -> list[RolloutGroup[SampleFragment]]:
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
    stream = checked_stream(message)
    try:
        table = _read(stream)
        records = fragments_from_table(table, "message")
    except (InvalidRolloutError, TransferError, SchemaVersionError):
        raise
    except FORGED as error:
        raise TransferError(f"the message's checksum is right, but it holds no fragments: {error}") from error
    return [RolloutGroup(record.group_key, (record.rollout,), record.group_id) for record in records]


def _read(stream: pa.Buffer) -> pa.Table:
    check_unpacked(stream)
    with pa.ipc.open_stream(stream) as reader:
        version = schema_version(reader.schema)
        if version > FRAGMENT_SCHEMA_VERSION:
            raise SchemaVersionError(
                f"a message of fragments has schema version {version}, this Penstock reads up to "
                f"{FRAGMENT_SCHEMA_VERSION}: let workers and learner run the same Penstock"
            )
        if not reader.schema.equals(FRAGMENT_SCHEMA):
            raise TransferError(f"its columns are not those of fragments: {reader.schema.names}")
        table = reader.read_all()
    table.validate(full=True)  # offsets and text: views must never reach outside the message
    for field, column in zip(table.schema, table.columns, strict=True):
        if column.null_count and (not field.nullable or field.name in ("observations", "final_observations")):
            raise TransferError(f"column {field.name} has {column.null_count} nulls where none may be")
    return table
