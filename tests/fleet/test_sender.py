"""The queue between worker and buffer: its two policies, its account, and the cutting of stale steps."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.fake_pool import ListSink

from penstock.fleet.accounting import StepAccount, StepBooks
from penstock.fleet.fragments import UnsentFragment
from penstock.fleet.sender import FragmentQueue, Sender, cut_stale
from penstock.types import NoProgressError, RolloutMetadata, SampleFragment, WeightVersion

pytestmark = pytest.mark.timeout(60)


def fragment(number=0, versions=(0, 0, 0, 0), *, ends=(), faults=(), states=None, lineage=0) -> UnsentFragment:
    steps = len(versions)
    made = SampleFragment(
        task="t", env_name="e", group_id=f"w-0-0-{number}", slot=0,
        observations={"": np.arange(steps + 1, dtype=np.float32)},
        actions={"": np.arange(steps)},
        rewards=np.arange(steps, dtype=np.float32),
        terminated=np.isin(np.arange(steps), ends), truncated=np.zeros(steps, bool),
        faults=np.isin(np.arange(steps), faults),
        first=np.isin(np.arange(steps + 1) - 1, [-2, *ends]),
        logprobs=np.arange(steps, dtype=np.float32), values=np.arange(steps + 1, dtype=np.float32),
        weight_steps=np.array(versions, np.int32), episodes=np.arange(steps),
        final_steps=np.array(ends, np.int32),
        final_observations={"": 100 + np.array(ends, np.float32)},
        initial_state={} if states is None else {"h": np.full(2, -1.0)},
        metadata=RolloutMetadata("w", 5.0, min(versions), lineage),
    )  # fmt: skip
    return UnsentFragment(made, states or {})


def queue_of(capacity=2, policy="block", timeout_s=10.0):
    """One that is told of what it is given, as a cutter would."""
    queue = FragmentQueue(capacity, policy, timeout_s, StepBooks())
    put = queue.put

    def noted(unsent):
        queue.books.add(waiting=unsent.fragment.length)
        return put(unsent)

    queue.put = noted
    return queue


def test_a_full_queue_blocks_until_there_is_room_and_counts_the_seconds():
    queue = queue_of()
    queue.put(fragment(0))
    queue.put(fragment(1))
    put = threading.Thread(target=queue.put, args=(fragment(2),))
    put.start()
    while queue.metrics()["fleet/blocked_s"] < 0.05:
        assert put.is_alive()
        time.sleep(0.001)
    assert [unsent.fragment.group_id for unsent in queue.take(1, 0)] == ["w-0-0-0"]
    put.join(5)
    assert not put.is_alive() and queue.metrics()["fleet/blocked_s"] >= 0.05
    assert queue.metrics()["fleet/queue_depth"] == 2 and queue.books.account().waiting == 12


def test_a_queue_that_stays_full_is_an_error_that_names_the_setting():
    queue = queue_of(1, timeout_s=0.02)
    queue.put(fragment(0))
    with pytest.raises(NoProgressError, match=r"1 fragments stayed full for 0.02 s \(fleet.send_timeout_s\)"):
        queue.put(fragment(1))
    assert (queue.books.account().waiting, queue.books.account().abandoned) == (4, 4)


def test_what_is_not_to_block_any_more_abandons_what_finds_no_room():
    queue, put_away = queue_of(1, timeout_s=30.0), []
    queue.put(fragment(0))
    put = threading.Thread(target=lambda: put_away.append(queue.put(fragment(1))))
    put.start()
    while queue.metrics()["fleet/blocked_s"] == 0:
        assert put.is_alive()
        time.sleep(0.001)
    queue.stop_blocking()
    put.join(5)
    assert put_away == [False] and not queue.put(fragment(2)), "neither the one that waited, nor the next"
    assert (queue.books.account().waiting, queue.books.account().abandoned) == (4, 8)
    assert [unsent.fragment.group_id for unsent in queue.take(9, 0)] == ["w-0-0-0"]
    assert queue.put(fragment(3)), "there is room again"


def test_dropping_takes_the_oldest_and_counts_it():
    queue = queue_of(2, "drop_oldest")
    for number in range(5):
        assert queue.put(fragment(number))
    assert [unsent.fragment.group_id for unsent in queue.take(9, 0)] == ["w-0-0-3", "w-0-0-4"]
    counts = queue.books.account()
    assert (counts.dropped, counts.waiting) == (12, 8)
    metrics = queue.metrics()
    assert (metrics["fleet/fragments_dropped"], metrics["fleet/blocked_s"]) == (3, 0)


def test_closing_wakes_the_blocked_and_what_waits_is_still_sent():
    queue, sink, refused = queue_of(1), ListSink(), []
    queue.put(fragment(0))
    put = threading.Thread(target=lambda: refused.append(queue.put(fragment(1))))
    put.start()
    queue.close()
    put.join(5)
    Sender(queue, sink, lambda: None, None).run()
    assert refused == [False] and [f.group_id for f in sink.fragments] == ["w-0-0-0"]
    assert (queue.books.account().sent, queue.books.account().abandoned, queue.books.account().waiting) == (4, 4, 0)


def test_the_sink_gets_groups_of_one_with_their_key_and_metadata():
    queue, batches = queue_of(), []
    queue.put(fragment(3, faults=(1,)))

    class Sink:
        def add_batches(self, given):
            batches.extend(given)

    Sender(queue, Sink(), lambda: WeightVersion(0, 2), None).send_some(0)
    (batch,) = batches
    (group,) = batch.groups
    assert (group.key, group.group_id, len(group.rollouts)) == ("t", "w-0-0-3", 1)
    assert batch.metadata.weight_step == 0
    assert (queue.books.account().sent, queue.books.account().sent_faults, queue.metrics()["fleet/fragments_sent"]) == (
        3,
        1,
        1,
    )


def test_a_sink_that_raises_leaves_its_fragments_to_be_abandoned():
    queue = queue_of(4)
    for number in range(3):
        queue.put(fragment(number))
    with pytest.raises(ValueError, match="the sink broke"):
        Sender(queue, ListSink(fails_at=0), lambda: None, None).run()
    assert queue.books.account().waiting == 12
    queue.abandon()
    assert (queue.books.account().waiting, queue.books.account().abandoned) == (0, 12)
    assert not queue.put(fragment(9)) and queue.books.account().abandoned == 16


def test_lag_is_told_by_step():
    queue, lags = queue_of(), []
    queue.put(fragment(0, (1, 1, 2, 3)))
    Sender(queue, ListSink(), lambda: WeightVersion(0, 3), None, lags.append).send_some(0)
    assert [lag.tolist() for lag in lags] == [[2, 2, 1, 0]]


def test_staleness_goes_by_step_and_is_judged_when_it_is_sent():
    queue, sink, newest = queue_of(9), ListSink(), [WeightVersion(0, 3)]
    sender = Sender(queue, sink, lambda: newest[0], 2)
    for number, versions in enumerate([(0, 0, 1, 1), (1, 1, 2, 3), (0, 0, 0, 0)]):
        queue.put(fragment(number, versions))
    sender.send_some(0)
    assert [f.weight_steps.tolist() for f in sink.fragments] == [[1, 1], [1, 1, 2, 3]]
    queue.put(fragment(4, (1, 2, 2, 2)))
    newest[0] = WeightVersion(0, 4)
    sender.send_some(0)
    assert sink.fragments[-1].weight_steps.tolist() == [2, 2, 2]
    counts = queue.books.account()
    assert (counts.stale, counts.sent, counts.waiting) == (2 + 4 + 1, 2 + 4 + 3, 0)


def test_an_older_lineage_is_left_to_the_buffer():
    queue, sink = queue_of(9), ListSink()
    queue.put(fragment(0, (0, 0)))
    Sender(queue, sink, lambda: WeightVersion(1, 9), 0).send_some(0)
    assert sink.fragments[0].length == 2


def test_a_cut_fragment_keeps_what_belongs_to_its_steps():
    cut = cut_stale(fragment(0, (1, 1, 2, 2), ends=(0, 2), faults=(3,), states={2: {"h": np.full(2, 7.0)}}), 2)
    assert cut is not None
    assert cut.observations[""].tolist() == [2, 3, 4] and cut.values.tolist() == [2, 3, 4]
    assert cut.rewards.tolist() == [2, 3] and cut.faults.tolist() == [False, True]
    assert cut.final_steps.tolist() == [0] and cut.final_observations[""].tolist() == [102]
    assert cut.first.tolist() == [False, True, False] and cut.initial_state["h"].tolist() == [7, 7]
    assert cut.metadata is not None and cut.metadata.weight_step == 2 and cut.group_id == "w-0-0-0"


@settings(max_examples=60, deadline=None)
@given(versions=st.lists(st.integers(0, 6), min_size=1, max_size=9), oldest=st.integers(0, 8))
def test_no_stale_step_is_left_and_no_fresh_one_before_which_none_is_stale_is_lost(versions, oldest):
    versions = tuple(sorted(versions))
    cut = cut_stale(fragment(0, versions), oldest)
    kept = [] if cut is None else cut.weight_steps.tolist()
    assert kept == [version for version in versions if version >= oldest]


def test_an_account_closes_or_says_that_it_does_not():
    account = StepAccount(started=10, acting=2, buffered=1, waiting=3, sent=2, sent_faults=1, stale=1)
    assert account.closes and account.in_flight == 6
    assert account.ended() == StepAccount(started=10, sent=2, sent_faults=1, stale=1, abandoned=6)
    assert not StepAccount(started=11, sent=10).closes and not StepAccount(sent=1, stale=-1).closes
    assert StepAccount.total([account, account]).waiting == 6
