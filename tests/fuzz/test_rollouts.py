"""Malformed rollouts: messages between processes, and Parquet parts."""

import itertools
import zlib

import numpy as np
import pytest
from tests.fuzz.fuzzing import COUNTS, damaged, fuzz

from penstock.replay import batch_from_buffer, batch_to_buffer
from penstock.replay.messages import MAGIC, TRAILER
from penstock.rundir import read_examples, read_parquet, read_records, write_records
from penstock.types import (
    Decoding,
    InvalidRolloutError,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    RolloutRecord,
    RunDirectoryError,
    SchemaVersionError,
    TransferError,
    Turn,
)

REFUSED_MESSAGE = (TransferError, SchemaVersionError, InvalidRolloutError)
REFUSED_PART = (RunDirectoryError, SchemaVersionError, InvalidRolloutError)


def rollout(index, length):
    rewards = np.zeros(length, np.float32)
    rewards[-1:] = 0.5
    return Rollout(
        "cats", "17", np.arange(3, dtype=np.int32), np.arange(length, dtype=np.int32),
        -np.arange(length, dtype=np.float32) / 3, rewards, float(rewards.sum()),
        RolloutMetadata("worker-0", 1700000000.25, 4, 1), f"cats-0-3/{index}", "cats",
        np.arange(length) % 2 == 0, np.full(length, 4, np.int32), 4,
        (Turn("user", "Say “cat”", 0, 3), Turn("assistant", "cat", 3, 3 + length)),
        Decoding(0.7, 40, 0.9, 32, (2, 3), ("\n\n", "END")), "length", timings={"generate_s": 0.4},
    )  # fmt: skip


ROLLOUTS = (rollout(0, 5), rollout(1, 9), rollout(2, 0))


def use(records):
    """Touches every array, as a learner would: a view of memory that is not ours would show here."""
    for one in records:
        arrays = (one.prompt_tokens, one.response_tokens, one.response_logprobs, one.token_rewards, one.response_mask)
        assert all(array.copy().ndim == 1 for array in arrays)
        assert len(one.response_tokens) == len(one.response_logprobs) == len(one.response_mask)
        str(one.turns), str(one.decoding), str(one.metadata)


def read_message(message):
    use(itertools.chain.from_iterable(group.rollouts for group in batch_from_buffer(message).groups))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("sealed", [False, True], ids=["torn", "forged"])
def test_messages_are_read_or_refused(count, sealed):
    """Forged ones have the right checksum: what Arrow makes of damaged columns is then all that stands."""
    message = bytes(batch_to_buffer(RolloutBatch.of((RolloutGroup("cats:17", ROLLOUTS, "cats-0-3"),))))

    def make(rng):
        if not sealed:
            return damaged(message, rng)
        stream = damaged(message[: -TRAILER.size], rng)
        return stream + TRAILER.pack(MAGIC, zlib.crc32(stream), len(stream))

    refused = fuzz(read_message, make, count, REFUSED_MESSAGE)
    assert refused > (0.5 if sealed else 0.9) * count


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_parts_are_read_or_refused(tmp_path, count, compression):
    path = tmp_path / "part-0.parquet"
    write_records(path, [RolloutRecord(one, "cats-0-3", "cats:17") for one in ROLLOUTS], compression)
    good = path.read_bytes()

    def target(content):
        path.write_bytes(content)
        use(record.rollout for record in read_records(path))

    assert fuzz(target, lambda rng: damaged(good, rng), count, REFUSED_PART) > 0.5 * count


@pytest.mark.parametrize("count", COUNTS)
def test_other_readers_of_parts_refuse_too(tmp_path, count):
    path = tmp_path / "part-0.parquet"
    write_records(path, [RolloutRecord(one, "cats-0-3", "cats:17") for one in ROLLOUTS])
    good = path.read_bytes()

    def target(content):
        path.write_bytes(content)
        read_parquet(path, ["rollout_id", "response_tokens", "no such column"]).to_pylist()
        read_examples(path)

    assert fuzz(target, lambda rng: damaged(good, rng), count, REFUSED_PART) > 0.5 * count
