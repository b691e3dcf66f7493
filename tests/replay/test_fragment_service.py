"""An open buffer behind a service: messages of fragments, what a full one answers, lost calls, the learner's side."""

import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from tests.fragments_made import a_batch, make_fragment
from tests.replay.wire import Loop, Wire

from penstock.batch import FragmentBatchMaker
from penstock.replay import (
    FRAGMENTS,
    FragmentReplayConfig,
    OpenAdmission,
    RemoteBatches,
    RemoteSink,
    ReplayBuffer,
    ReplayService,
    RolloutStore,
    SampledBatches,
    fragments_from_buffer,
    fragments_to_buffer,
)
from penstock.replay.messages import in_messages, table_to_message
from penstock.rundir import RunDirectory
from penstock.types import InvalidRolloutError, NoProgressError, Stopped, SupersededError, TransferError


class Served:
    """A service over a store of two fragments per batch, of which four may wait; and its two clients."""

    def __init__(self, path, fault: Callable[[str], str | None] = lambda method: None, **more):
        config = FragmentReplayConfig(fragments_per_batch=2, max_waiting=4, max_age_s=None)
        self.store = RolloutStore(RunDirectory.create(path, {}), config.store, experience=FRAGMENTS)
        admission = OpenAdmission(self.store.open_ledger())
        self.buffer = ReplayBuffer(config.buffer_config(), self.store, FragmentBatchMaker("oldest", 1), admission)
        self.refused = []
        self.service = ReplayService(
            self.buffer,
            SampledBatches(self.buffer, 2),
            FRAGMENTS,
            lineage=0,
            on_refusal=lambda *told: self.refused.append(told),
            **more,
        )
        self.loop = Loop()
        self.wire = Wire(self.service, self.loop, fault)
        self.sink = RemoteSink(self.wire, "rollout-0", 1, None, experience=FRAGMENTS, limit_s=5.0)
        self.batches = RemoteBatches(self.wire, 0, limit_s=5.0)

    def update(self, step: int) -> list[str]:
        batch = self.batches.next_batch(step, 5.0)
        self.batches.finish_update(step)
        self.batches.set_current_step(step + 1)
        self.buffer.check_ledger()
        return [example.rollout_ids[0] for example in batch.examples]

    def close(self) -> None:
        self.sink.stop()
        self.buffer.close()
        self.store.close()
        self.loop.close()


@pytest.fixture
def served(tmp_path):
    made = Served(tmp_path / "run")
    yield made
    made.close()


def fragments(count: int, first: int = 0) -> list:
    return [make_fragment(f"cart-w0-0-{first + number}") for number in range(count)]


def groups_of(*made) -> list:
    return list(a_batch(*made).groups)


def test_a_message_gives_back_every_array_of_its_fragments_to_the_bit():
    sent = [make_fragment("a", 5, [1, 2, 2, 3, 3], faults=(1,)), make_fragment("b", 2)]
    got = [group.rollouts[0] for group in fragments_from_buffer(fragments_to_buffer(groups_of(*sent)))]
    assert [fragment.group_id for fragment in got] == ["a", "b"]
    for before, after in zip(sent, got, strict=True):
        assert before.metadata == after.metadata and before.slot == after.slot
        for name in ("rewards", "terminated", "faults", "first", "logprobs", "values", "weight_steps", "final_steps"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name), name)
        for name in ("observations", "actions", "final_observations", "initial_state"):
            for leaf, array in getattr(before, name).items():
                found = getattr(after, name)[leaf]
                assert found.dtype == array.dtype and not found.flags.writeable
                np.testing.assert_array_equal(found, array)


def test_what_is_cut_short_changed_too_large_or_foreign_is_refused():
    message = bytes(memoryview(fragments_to_buffer(groups_of(make_fragment()))))
    for broken in (message[:-1], message[:40], message[:100] + b"x" + message[101:], b""):
        with pytest.raises(TransferError):
            fragments_from_buffer(broken)
    with pytest.raises(InvalidRolloutError, match=r"has .* bytes, and 1,000 are the most: lower fleet.fragment_length"):
        fragments_from_buffer(message, 1000)
    with pytest.raises(TransferError, match="not those of fragments"):
        fragments_from_buffer(table_to_message(pa.table({"rewards": [1.0]})))


def test_fragments_travel_together_up_to_a_size():
    groups = groups_of(*fragments(5))
    assert [len(together) for together in in_messages(groups, 1 << 20)] == [5]
    assert [len(together) for together in in_messages(groups, 1)] == [1] * 5
    assert [len(together) for together in in_messages(groups, 800)] == [2, 2, 1]
    assert list(in_messages([], 1)) == []


def test_what_is_delivered_is_trained_in_order_and_counted(served):
    served.sink.add_batches([a_batch(*fragments(4))])
    assert served.update(0) == ["cart-w0-0-0/0", "cart-w0-0-1/0"]
    assert served.update(1) == ["cart-w0-0-2/0", "cart-w0-0-3/0"]
    numbers = served.service.metrics()
    assert numbers["replay/received_fragments"] == 4 and numbers["replay/received_bytes"] == served.sink.sent_bytes
    assert numbers["replay/ledger/trained"] == 4 and numbers["replay/ledger/in_flight"] == 0
    assert served.wire.calls.count("deliver") == 1


def test_a_full_buffer_answers_at_once_and_is_asked_again_until_there_is_room(served):
    sending = threading.Thread(target=served.sink.add_batches, args=([a_batch(*fragments(7))],))
    message = bytes(memoryview(fragments_to_buffer(groups_of(*fragments(7)))))
    assert served.service.deliver("rollout-0", 1, None, 1, message) == "full"
    sending.start()  # the same ones again: those that were taken are not taken twice
    assert [*served.update(0), *served.update(1)] == [f"cart-w0-0-{number}/0" for number in range(4)]
    assert served.update(2) == ["cart-w0-0-4/0", "cart-w0-0-5/0"]
    sending.join(10)
    assert not sending.is_alive() and not served.sink.waiting
    assert served.service.metrics()["replay/ledger/started"] == 7
    assert served.wire.calls.count("deliver") < 5


def test_a_buffer_that_stays_full_is_an_error_within_the_limit(served):
    sink = RemoteSink(served.wire, "rollout-0", 1, None, experience=FRAGMENTS, limit_s=60.0, full_limit_s=0.1)
    with pytest.raises(NoProgressError, match=r"waited 0 s to hand fragments over: .* full; .*replay.max_waiting_s"):
        sink.add_batches([a_batch(*fragments(5))])
    assert sink.blocked_s >= 0.1


def test_each_fragment_that_the_buffer_takes_is_told_of_once(tmp_path):
    calls, told = iter(range(1000)), []
    served = Served(
        tmp_path / "run", lambda method: ("request", "answer", None)[next(calls) % 3],
        on_delivery=lambda fragment: told.append(fragment.group_id),
    )  # fmt: skip
    served.sink.add_batches([a_batch(*fragments(3))])
    message = bytes(memoryview(fragments_to_buffer(groups_of(*fragments(5)))))
    assert served.service.deliver("rollout-0", 1, None, 2, message) == "full"
    assert told == [f"cart-w0-0-{number}" for number in range(4)], "the last one had no room, the others came again"
    assert served.service.metrics()["replay/repeated_messages"] > 0
    served.close()


def test_answers_that_are_lost_lose_and_repeat_nothing(tmp_path):
    calls = iter(range(1000))
    served = Served(tmp_path / "run", lambda method: ("request", "answer", None)[next(calls) % 3])
    try:
        trained = []
        for step in range(4):
            served.sink.add_batches([a_batch(*fragments(2, 2 * step))])
            trained += served.update(step)
        assert trained == [f"cart-w0-0-{number}/0" for number in range(8)]
        numbers = served.service.metrics()
        assert numbers["replay/ledger/started"] == numbers["replay/ledger/trained"] == 8
        assert numbers["replay/repeated_messages"] > 0
    finally:
        served.close()


def test_the_learner_gets_the_same_batch_again_and_one_of_another_lineage_none(served):
    served.sink.add_batches([a_batch(*fragments(4))])
    first, second = (served.service.next_batch(0, 0, 1.0) for _ in range(2))
    assert first is second
    with pytest.raises(SupersededError, match="lineage 1"):
        served.service.next_batch(1, 0, 1.0)
    with pytest.raises(NoProgressError):
        served.update(0), served.update(1), served.batches.next_batch(2, 0.1)


def test_a_damaged_message_is_told_and_nothing_of_it_is_taken(served):
    message = bytes(memoryview(fragments_to_buffer(groups_of(make_fragment()))))
    with pytest.raises(TransferError):
        served.service.deliver("rollout-3", 1, None, 1, message[:-3])
    assert [worker for worker, _ in served.refused] == ["rollout-3"]
    assert served.service.metrics()["replay/ledger/started"] == 0


def test_a_closed_service_ends_its_clients_in_good_order(served):
    served.buffer.close()
    with pytest.raises(Stopped):
        served.sink.add_batches([a_batch(make_fragment())])
