"""Rollouts on their way between processes: one batch is one Arrow IPC stream of one record batch, and a trailer.

The columns are those of a stored row (`penstock.rundir.ROLLOUT_SCHEMA`) with two differences: `response_mask` has a
byte per token instead of a bit, so that it too can be read without a copy, and `group_index` says which rows are one
group (ids and keys may repeat). Any Arrow reader opens a message; it stops before the trailer.

Invariants: what is read is what was written, or an error; every array that is read is a read-only view of the
message and keeps all of it alive, so who keeps rollouts for long copies them (`PackedRollout`); nothing of a message
is executed (no pickle), and nothing is unpacked (no compression), so that memory is bounded by its size. The checksum
is against accidents: it authenticates nobody.

Not covered: a batch with more than 2³¹ tokens, and `RolloutBatch.metadata`, which is made anew from the members.
"""

# pyarrow comes without types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from penstock.replay.message_frame import FORGED, check_unpacked, checked_stream, table_to_message
from penstock.rundir import ROLLOUT_SCHEMA, records_from_table, table_from_records
from penstock.rundir.parquet import list_column, schema_version
from penstock.types import (
    SCHEMA_VERSION,
    InvalidRolloutError,
    RolloutBatch,
    RolloutGroup,
    RolloutRecord,
    SchemaVersionError,
    TransferError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MASK = ROLLOUT_SCHEMA.get_field_index("response_mask")
_MASK_FIELD = pa.field("response_mask", pa.list_(pa.uint8()), nullable=False)
_GROUP_FIELD = pa.field("group_index", pa.int32(), nullable=False)
TRANSFER_SCHEMA = ROLLOUT_SCHEMA.set(_MASK, _MASK_FIELD).append(_GROUP_FIELD)


def batch_to_buffer(batch: RolloutBatch) -> "Buffer":
    """A batch as one message.

    Args:
        batch: Any number of groups; their rollouts have metadata.

    Returns:
        A `pyarrow.Buffer`; it goes wherever bytes go.

    Raises:
        InvalidRolloutError: a rollout has no metadata.
    """
    return table_to_message(_table(batch))


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
    stream = checked_stream(message)
    try:
        return _batch(_read(stream))
    except InvalidRolloutError:
        raise
    except FORGED as error:
        raise TransferError(f"the message's checksum is right, but it holds no rollouts: {error}") from error


def _table(batch: RolloutBatch) -> pa.Table:
    records = [
        RolloutRecord(rollout, group.group_id, group_key=group.key)
        for group in batch.groups
        for rollout in group.rollouts
    ]
    sizes = [len(group.rollouts) for group in batch.groups]
    masks = [record.rollout.response_mask.view(np.uint8) for record in records]
    groups = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    table = table_from_records(records)
    table = table.set_column(_MASK, _MASK_FIELD, list_column(masks, pa.uint8()))
    return table.append_column(_GROUP_FIELD, pa.array(groups))


def _read(stream: pa.Buffer) -> pa.Table:
    check_unpacked(stream)
    with pa.ipc.open_stream(stream) as reader:
        version = schema_version(reader.schema)
        if version > SCHEMA_VERSION:
            raise SchemaVersionError(
                f"a message of rollouts has schema version {version}, this Penstock reads up to {SCHEMA_VERSION}: "
                "let workers and learner run the same Penstock, the learner's no older than the workers'"
            )
        if version == SCHEMA_VERSION and not reader.schema.equals(TRANSFER_SCHEMA):
            raise TransferError(f"its columns are not those of schema version {version}: {reader.schema.names}")
        odd = [field.name for field in reader.schema if version < SCHEMA_VERSION and not _has_elements(field.type)]
        if odd:
            raise TransferError(f"columns {odd} are of types that no writer makes")
        table = reader.read_all()
    table.validate(full=True)  # offsets and text: views must never reach outside the message
    return table


def _has_elements(kind: pa.DataType) -> bool:
    """Whether each element of a column takes memory of its own, so that there are not more than the message holds."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _has_elements(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_has_elements(field.type) for field in kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_primitive(kind)


def _batch(table: pa.Table) -> RolloutBatch:
    for field, column in zip(table.schema, table.columns, strict=True):
        if column.null_count and not field.nullable:
            raise TransferError(f"column {field.name} has {column.null_count} nulls where none may be")
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
    return RolloutBatch.of(tuple(groups))


def _check_flags(column: pa.ChunkedArray) -> None:
    for chunk in column.chunks:
        flags = chunk.values.to_numpy()
        if flags.size and flags.max() > 1:
            raise TransferError(f"response_mask holds {flags.max()}: a flag is 0 or 1")
