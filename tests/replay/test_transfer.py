"""Messages of rollouts: exact, without copies on reading, and never read when they are not whole."""

import dataclasses
import struct
import zlib
from multiprocessing import Pipe

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay import batch_from_buffer, batch_to_buffer
from penstock.types import (
    Decoding,
    InvalidRolloutError,
    PackedRollout,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    SchemaVersionError,
    TransferError,
    Turn,
)

ARRAYS = (
    "prompt_tokens", "response_tokens", "response_logprobs", "token_rewards", "response_mask", "response_weight_steps",
)  # fmt: skip


def make_rollout(rollout_id: str = "cats-0-3/0", length: int = 5, **changes) -> Rollout:
    rewards = np.zeros(length, np.float32)
    rewards[-1:] = 0.75
    fields = dict(
        env_name="cats",
        env_example_id="17",
        prompt_tokens=np.arange(3, dtype=np.int32),
        response_tokens=np.arange(length, dtype=np.int32),
        response_logprobs=-np.arange(length, dtype=np.float32) / 3,
        token_rewards=rewards,
        episode_reward=float(rewards.sum()),
        metadata=RolloutMetadata("worker-0", 1700000000.25, 4, 1),
        rollout_id=rollout_id,
        lesson_id="cats",
        response_mask=np.arange(length) % 2 == 0,
        response_weight_steps=np.full(length, 4, np.int32),
        oldest_weight_step=4,
        turns=(Turn("user", "Say “cat”", 0, 3), Turn("assistant", "cat", 3, 3 + length)),
        decoding=Decoding(0.7, 40, 0.9, 32, (2, 3), ("\n\n", "END")),
        finish_reason="length",
        timings={"decode_s": 0.25, "generate_s": length / 2},
    )
    return Rollout(**(fields | changes))


def make_batch() -> RolloutBatch:
    """Two groups of one problem, whose ids repeat, and a rollout with next to nothing in it."""
    bare = make_rollout(
        "b/0", 0, response_weight_steps=None, oldest_weight_step=None, turns=(), decoding=Decoding(), timings={}
    )
    twins = [RolloutGroup("cats:17", (make_rollout("a/0"), make_rollout("a/1", 9)), "a") for _ in range(2)]
    return RolloutBatch.of((*twins, RolloutGroup("cats:18", (bare,), "b")))


def assert_same(left: RolloutBatch, right: RolloutBatch) -> None:
    assert left.metadata == right.metadata
    assert [(g.key, g.group_id, len(g.rollouts)) for g in left.groups] == [
        (g.key, g.group_id, len(g.rollouts)) for g in right.groups
    ]
    for a, b in zip(left.rollouts(), right.rollouts(), strict=True):
        for field in dataclasses.fields(Rollout):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), field.name
            else:
                assert x == y, field.name


def sealed(stream: bytes) -> bytes:
    """A stream with a right trailer, whatever it holds."""
    return stream + struct.pack("<4sIQ", b"PSR1", zlib.crc32(stream), len(stream))


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def table_of(batch: RolloutBatch) -> pa.Table:
    with pa.ipc.open_stream(batch_to_buffer(batch)) as reader:
        return reader.read_all()


texts = st.text(max_size=8)
small = st.integers(0, 2**31 - 1)


@st.composite
def rollouts(draw) -> Rollout:
    length = draw(st.integers(0, 6))
    floats = st.floats(-100, 0, width=32)
    rewards = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, -1.0]), min_size=length, max_size=length)), np.float32)
    steps = draw(st.none() | st.lists(st.integers(-1, 9), min_size=length, max_size=length))
    span = st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts, st.integers(0, 9), st.integers(0, 9))
    return make_rollout(
        draw(texts),
        length,
        env_name=draw(texts),
        env_example_id=draw(texts),
        prompt_tokens=np.array(draw(st.lists(small, min_size=1, max_size=4)), np.int32),
        response_logprobs=np.array(draw(st.lists(floats, min_size=length, max_size=length)), np.float32),
        token_rewards=rewards,
        episode_reward=float(rewards.sum()),
        metadata=RolloutMetadata(draw(texts), draw(st.floats(0, 2e9)), draw(st.integers(0, 99)), draw(small)),
        response_mask=np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), np.bool_),
        response_weight_steps=None if steps is None else np.array(steps, np.int32),
        oldest_weight_step=draw(st.none() | st.integers(0, 99)),
        turns=tuple(Turn(*turn) for turn in draw(st.lists(span, max_size=3))),
        decoding=Decoding(draw(st.floats(0, 2)), draw(st.none() | st.integers(1, 99)), stop_strings=(draw(texts),)),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
    )


groups = st.builds(RolloutGroup, texts, st.lists(rollouts(), min_size=1, max_size=3).map(tuple), texts)


@given(st.lists(groups, max_size=3))
@settings(max_examples=60)
def test_every_batch_comes_back_exactly(members):
    batch = RolloutBatch.of(tuple(members))
    assert_same(batch_from_buffer(batch_to_buffer(batch)), batch)


def test_groups_with_the_same_id_and_key_stay_apart():
    assert [len(group.rollouts) for group in batch_from_buffer(batch_to_buffer(make_batch())).groups] == [2, 2, 1]


def test_packed_rollouts_travel_like_others():
    batch = make_batch()
    packed = [RolloutGroup(g.key, tuple(PackedRollout(r) for r in g.rollouts), g.group_id) for g in batch.groups]
    assert_same(batch_from_buffer(batch_to_buffer(RolloutBatch.of(tuple(packed)))), batch)


@pytest.mark.parametrize("form", [lambda m: m, bytes, bytearray, memoryview], ids=["arrow", "bytes", "array", "view"])
def test_every_array_is_a_read_only_view_of_the_message(form):
    message = form(batch_to_buffer(make_batch()))
    start = np.frombuffer(message, np.uint8).__array_interface__["data"][0]
    stop = start + len(memoryview(message))
    seen = 0
    for rollout in batch_from_buffer(message).rollouts():
        for name in ARRAYS:
            array = getattr(rollout, name)
            if array is not None and array.size:
                address = array.__array_interface__["data"][0]
                assert start <= address and address + array.nbytes <= stop, name
                assert not array.flags.writeable and array.flags.aligned, name
                seen += 1
    assert seen == 4 * 6 + 1  # four full rollouts, and the bare one's prompt


def test_any_arrow_reader_opens_a_message():
    table = table_of(make_batch())
    assert table.num_rows == 5 and table.column("group_index").to_pylist() == [0, 0, 1, 1, 2]
    assert table.column("response_mask").to_pylist()[0] == [1, 0, 1, 0, 1]
    assert table.schema.metadata == {b"penstock.schema_version": b"1"}


@pytest.mark.parametrize("form", [lambda r: r, PackedRollout], ids=["plain", "packed"])
def test_records_survive_the_pickling_of_other_transports(form):
    """As a pipe between two processes does it, or a cluster's own transport."""
    read = batch_from_buffer(batch_to_buffer(make_batch()))
    groups = [RolloutGroup(g.key, tuple(form(r) for r in g.rollouts), g.group_id) for g in read.groups]
    here, there = Pipe()
    with here, there:
        here.send(RolloutBatch.of(tuple(groups)))
        assert_same(there.recv(), read)


def test_a_rollout_without_metadata_is_refused():
    group = RolloutGroup("cats:17", (make_rollout(metadata=None),), "a")
    with pytest.raises(InvalidRolloutError, match="'cats-0-3/0' has no metadata"):
        batch_to_buffer(RolloutBatch((group,)))


@pytest.mark.attack
def test_a_message_cut_anywhere_is_refused():
    message = bytes(batch_to_buffer(make_batch()))
    for length in range(len(message)):
        with pytest.raises(TransferError, match="cut short|was written with"):
            batch_from_buffer(message[:length])


@pytest.mark.attack
def test_a_flip_anywhere_is_noticed():
    message = bytearray(batch_to_buffer(make_batch()))
    for position in range(len(message)):
        message[position] ^= 1 << position % 8
        with pytest.raises(TransferError):
            batch_from_buffer(message)
        message[position] ^= 1 << position % 8
    assert_same(batch_from_buffer(message), make_batch())


STREAM = bytes(batch_to_buffer(make_batch()))[:-16]


@given(st.lists(st.tuples(st.integers(0, len(STREAM) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=200)
@pytest.mark.attack
def test_forged_messages_with_a_right_checksum_do_no_harm(changes):
    """Changed, and sealed again: what comes back is a batch or one of our errors, and every array can be read."""
    stream = bytearray(STREAM)
    for position, value in changes:
        stream[position] = value
    try:
        batch = batch_from_buffer(sealed(bytes(stream)))
    except (TransferError, InvalidRolloutError, SchemaVersionError):
        return
    for rollout in batch.rollouts():
        assert rollout.sampled_tokens <= len(rollout.response_tokens)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(content):
    for message in (content, sealed(content)):
        with pytest.raises(TransferError):
            batch_from_buffer(message)


def test_a_newer_version_is_refused_by_name():
    table = table_of(make_batch()).replace_schema_metadata({b"penstock.schema_version": b"99"})
    with pytest.raises(SchemaVersionError, match="schema version 99, this Penstock reads up to 1"):
        batch_from_buffer(sealed(stream_of(table)))


def test_the_original_form_is_read():
    """Version 0: metadata on the batch only, no mask, no versions per token, no ids."""
    table = pa.table(
        {
            "env_name": ["cats"] * 3,
            "env_example_id": ["7", "7", "8"],
            "prompt_tokens": pa.array([[1], [1], [2]], pa.list_(pa.int32())),
            "response_tokens": pa.array([[3, 4], [5], [6]], pa.list_(pa.int32())),
            "response_logprobs": pa.array([[-1.0, -2.0], [-0.5], [-3.0]], pa.list_(pa.float32())),
            "token_rewards": pa.array([[0.0, 1.0], [0.0], [0.5]], pa.list_(pa.float32())),
            "episode_reward": [1.0, 0.0, 0.5],
        }
    ).replace_schema_metadata({b"penstock.batch_metadata": b'{"worker_id": "w", "timestamp": 9.5, "weight_step": 3}'})
    batch = batch_from_buffer(sealed(stream_of(table)))
    assert [(g.key, len(g.rollouts)) for g in batch.groups] == [("cats:7", 2), ("cats:8", 1)]
    assert batch.metadata == RolloutMetadata("w", 9.5, 3, 0, 0)
    assert [r.response_mask.all() for r in batch.rollouts()] == [True] * 3


def original(**changes):
    """A row of version 0."""
    columns = dict(
        env_name=["cats"], env_example_id=["7"], prompt_tokens=[[1]], response_tokens=[[3]], response_logprobs=[[-1.0]],
        token_rewards=[[0.0]], episode_reward=[0.0],
    )  # fmt: skip
    return pa.table({**columns, **changes})


@pytest.mark.parametrize("error", [AttributeError("x"), IndexError("x")])
def test_whatever_foreign_columns_raise_is_a_transfer_error(monkeypatch, error):
    monkeypatch.setattr("penstock.replay.messages.records_from_table", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(TransferError, match="holds no rollouts"):
        batch_from_buffer(batch_to_buffer(make_batch()))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of(make_batch()).drop_columns(["turns"]), "its columns are not those of rollouts of schema version 1"),
        (table_of(make_batch()).replace_schema_metadata({b"penstock.schema_version": b"one"}), "which is no number"),
        (pa.table({"a": [1]}), "holds no rollouts"),
        (original(prompt_tokens=[5]), "holds no rollouts"),
        (original().replace_schema_metadata({b"penstock.batch_metadata": b"[]"}), "which is not a JSON object"),
        (original().replace_schema_metadata({b"penstock.schema_version": b"-1"}), "holds no rollouts"),
    ],
    ids=["column", "version", "unversioned", "numbers for lists", "metadata", "negative version"],
)
def test_tables_of_something_else_are_refused(table, message):
    with pytest.raises(TransferError, match=message):
        batch_from_buffer(sealed(stream_of(table)))


def test_flags_and_nulls_that_no_writer_makes_are_refused():
    table = table_of(make_batch())
    index = table.schema.get_field_index("response_mask")
    flags = pa.array([[2] * len(row) for row in table.column(index).to_pylist()], pa.list_(pa.uint8()))
    with pytest.raises(TransferError, match="response_mask holds 2"):
        batch_from_buffer(sealed(stream_of(table.set_column(index, table.schema.field(index), flags))))
    nulls = pa.nulls(5, pa.list_(pa.uint8()))
    with pytest.raises(TransferError, match="response_mask has 5 nulls"):
        batch_from_buffer(sealed(stream_of(table.set_column(index, table.schema.field(index), nulls))))


def test_a_whole_message_with_an_invalid_rollout_says_so():
    table = table_of(make_batch())
    index = table.schema.get_field_index("episode_reward")
    rewards = pa.array([float("nan")] * 5)
    with pytest.raises(InvalidRolloutError, match="episode_reward is nan"):
        batch_from_buffer(sealed(stream_of(table.set_column(index, table.schema.field(index), rewards))))


@pytest.mark.attack
def test_offsets_that_reach_outside_the_message_are_refused():
    table = table_of(make_batch())
    index = table.schema.get_field_index("env_name")
    offsets = pa.py_buffer(np.array([0, 10**9, 8, 12, 16, 20], np.int32))
    names = pa.StringArray.from_buffers(5, offsets, pa.py_buffer(b"cats" * 5))
    with pytest.raises(TransferError, match="ffset"):
        batch_from_buffer(sealed(stream_of(table.set_column(index, table.schema.field(index), names))))


def packed_stream(table: pa.Table, compression: str) -> bytes:
    target = pa.BufferOutputStream()
    with pa.ipc.new_stream(target, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return target.getvalue().to_pybytes()


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.attack
def test_compressed_columns_are_refused_before_they_are_unpacked(compression):
    """A message of 100 kB would take a gigabyte; peers' numbers decide about no memory."""
    table = pa.table({"env_name": pa.array(np.zeros(1 << 30, np.uint8))})
    message = sealed(packed_stream(table, compression))
    del table
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    peak = pool.max_memory()
    assert len(message) < 1 << 23
    with pytest.raises(TransferError, match="compressed"):
        batch_from_buffer(message)
    assert pa.total_allocated_bytes() == before and pool.max_memory() == peak


@pytest.mark.parametrize(
    "column",
    [pa.nulls(1000), pa.array([{}] * 1000, pa.struct([])), pa.array(["x"] * 1000, pa.string_view())],
    ids=lambda column: str(column.type),
)
@pytest.mark.attack
def test_columns_whose_elements_take_no_memory_are_refused(column):
    with pytest.raises(TransferError, match="types that no writer makes"):
        batch_from_buffer(sealed(stream_of(pa.table({"env_name": column}))))


@pytest.mark.attack
def test_dictionaries_are_refused():
    with pytest.raises(TransferError, match="a dictionary in a message"):
        batch_from_buffer(sealed(stream_of(pa.table({"env_name": pa.array(["a"]).dictionary_encode()}))))
