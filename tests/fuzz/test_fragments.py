"""Malformed fragments: messages between processes, and Parquet parts."""

import zlib

import pyarrow as pa
import pytest
from tests.fragments_made import make_fragment
from tests.fuzz.fuzzing import COUNTS, altered, damaged, fuzz

from penstock.replay import fragments_from_buffer, fragments_to_buffer
from penstock.replay.messages import MAGIC, TRAILER
from penstock.rundir import (
    fragments_from_table,
    read_parquet,
    table_from_fragments,
    table_from_uses,
    uses_from_table,
    write_parquet,
)
from penstock.types import (
    FragmentExample,
    InvalidRolloutError,
    RolloutGroup,
    RolloutRecord,
    RunDirectoryError,
    SchemaVersionError,
    TransferError,
)

REFUSED_MESSAGE = (TransferError, SchemaVersionError, InvalidRolloutError)
REFUSED_PART = (RunDirectoryError, SchemaVersionError, InvalidRolloutError)
FRAGMENTS = (make_fragment("cart-w0-0-0", faults=(2,)), make_fragment("cart-w0-0-1", steps=7), make_fragment(steps=1))
RECORDS = [RolloutRecord(one, one.group_id, group_key="CartPole-v1:3") for one in FRAGMENTS]

OTHER_TYPES = [
    pa.int64(),
    pa.float64(),
    pa.string(),
    pa.list_(pa.float64()),
    pa.list_(pa.int64()),
    pa.list_(pa.string()),
]


def use(fragments):
    """Touches every array, and what the buffer asks: a view of memory that is not ours would show here."""
    for one in fragments:
        leaves = (one.observations, one.actions, one.final_observations, one.initial_state)
        assert all(array.copy().flags.aligned for arrays in leaves for array in arrays.values())
        assert one.rewards.copy().shape == one.weight_steps.copy().shape == (one.length,)
        assert one.values.copy().shape == one.first.copy().shape == (one.length + 1,)
        assert one.oldest_weight_step <= one.newest_weight_step
        assert all(isinstance(text, str) for text in (one.task, one.env_name, one.group_id))
        assert one.metadata is not None and isinstance(one.metadata.timestamp, float)
        numbers = (one.slot, one.metadata.weight_step, one.metadata.lineage)
        assert all(isinstance(number, int) for number in numbers)
        str(one.defect), str(one.episode_reward)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("sealed", [False, True], ids=["torn", "forged"])
def test_messages_are_read_or_refused(count, sealed):
    """Forged ones have the right checksum: what Arrow makes of damaged columns is then all that stands."""
    groups = [RolloutGroup("CartPole-v1:3", (one,), one.group_id) for one in FRAGMENTS]
    message = bytes(memoryview(fragments_to_buffer(groups)))

    def target(content):
        use(group.rollouts[0] for group in fragments_from_buffer(content))

    def make(rng):
        if not sealed:
            return damaged(message, rng)
        stream = damaged(message[: -TRAILER.size], rng)
        return stream + TRAILER.pack(MAGIC, zlib.crc32(stream), len(stream))

    refused = fuzz(target, make, count, REFUSED_MESSAGE)
    assert refused > (0.4 if sealed else 0.9) * count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_parts_are_read_or_refused(tmp_path, count, compression):
    path = tmp_path / "part-0.parquet"
    write_parquet(path, table_from_fragments(RECORDS), compression)
    good = path.read_bytes()

    def target(content):
        path.write_bytes(content)
        use(record.rollout for record in fragments_from_table(read_parquet(path), path.stem))

    assert fuzz(target, lambda rng: damaged(good, rng), count, REFUSED_PART) > 0.5 * count


@pytest.mark.parametrize("count", COUNTS)
def test_tables_of_odd_values_are_read_or_refused(count):
    """What no checksum of a part finds: values, columns and types that no writer of ours makes."""
    table = table_from_fragments(RECORDS)
    columns = table.to_pydict()

    def make(rng):
        name = rng.choice(table.column_names)
        field = table.schema.field(name)
        values = altered(columns[name], rng)
        if rng.random() < 0.1 or not isinstance(values, list):
            return table.drop_columns([name])
        values = (values * len(FRAGMENTS))[: len(FRAGMENTS)] if values else [None] * len(FRAGMENTS)
        for of_type in (field.type, *rng.sample(OTHER_TYPES, len(OTHER_TYPES))):
            try:
                column = pa.array(values, of_type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                continue
            return table.set_column(table.column_names.index(name), name, column)
        return table.set_column(table.column_names.index(name), name, pa.nulls(len(FRAGMENTS)))

    def target(given):
        use(record.rollout for record in fragments_from_table(given))

    assert 0.2 * count < fuzz(target, make, count, REFUSED_PART) < count


@pytest.mark.parametrize("count", COUNTS)
def test_batches_are_read_or_refused(tmp_path, count):
    path = tmp_path / "batch-0.parquet"
    write_parquet(path, table_from_uses([FragmentExample(one) for one in FRAGMENTS], "batch-0", 3, 0))
    good = path.read_bytes()

    def target(content):
        path.write_bytes(content)
        assert all(isinstance(rollout_id, str) for rollout_id in uses_from_table(read_parquet(path), path.stem))

    assert fuzz(target, lambda rng: damaged(good, rng), count, REFUSED_PART) > 0.5 * count
