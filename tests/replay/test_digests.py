"""Rollouts wait until it is known that their engines served what the learner made; those of other weights are refused.

The register by itself, then a paced buffer whose engines are told of by hand.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.replay.memory_store import MemoryStore
from tests.replay.stored import HandClock
from tests.waiting import wait_until

from penstock.replay import PacedReplayBuffer, ReplayBufferConfig, TicketIssuer, TicketRules, training_pool
from penstock.replay.digests import WeightDigests
from penstock.replay.freshness import Verdict
from penstock.replay.ledger import NotifyingCondition
from penstock.replay.paced import VERIFY_S
from penstock.types import MismatchError

LIMIT_S = 280.0
MADE = {"embedding": "e0", "layers.query": "q0", "layers.value": "v0"}
STALE = {**MADE, "layers.query": "q9"}
SWAPPED = {"embedding": "e0", "layers.query": "v0", "layers.value": "q0"}
A, B = "inference-0#0", "inference-1#2"


@pytest.fixture
def digests() -> WeightDigests:
    return WeightDigests(NotifyingCondition(), lineage=1)


@pytest.fixture
def rollout_of(sim):
    def make(*engines: str, step: int = 0, newest: int | None = None):
        made = sim.make_rollout("easy-1-0/0", weight_step=step, newest_step=newest, lineage=1)
        return replace(made, metadata=replace(made.metadata, engines=engines))

    return make


def test_while_the_learner_says_nothing_everything_is_verified(digests, rollout_of):
    assert digests.proof_of(rollout_of(A)) == "verified"
    assert not digests.tell_digests(A, 1, 0, MADE)


@pytest.mark.parametrize("first", ["learner", "engine"])
def test_a_rollout_is_verified_when_both_have_told_the_same(digests, rollout_of, first):
    telling = [lambda: digests.expect_digests(1, 0, MADE), lambda: digests.tell_digests(A, 1, 0, dict(MADE))]
    assert (telling[0]() if first == "learner" else telling[1]()) in (None, False)
    digests.expect_digests(1, 5, MADE)
    assert digests.proof_of(rollout_of(A)) == "unknown"
    assert (telling[1]() if first == "learner" else telling[0]()) in (None, True)
    assert digests.proof_of(rollout_of(A)) == "verified"
    assert digests.tell_digests(A, 1, 0, MADE)


@pytest.mark.parametrize(("served", "names"), [(STALE, "layers.query"), (SWAPPED, "layers.query, layers.value")])
def test_other_arrays_are_named_to_the_engine_and_to_its_rollouts(digests, rollout_of, served, names):
    digests.expect_digests(1, 0, MADE)
    count = names.count(",") + 1
    reason = (
        f"{A} serves version 0 with other weights than the learner made: the digests of {count} of 3 arrays differ "
        f"({names})"
    )
    with pytest.raises(MismatchError) as refused:
        digests.tell_digests(A, 1, 0, served)
    assert str(refused.value) == reason
    assert digests.proof_of(rollout_of(A)) == Verdict("invalid", reason)
    assert digests.tell_digests(B, 1, 0, MADE) and digests.proof_of(rollout_of(B)) == "verified"
    assert digests.proof_of(rollout_of(B, A)) == Verdict("invalid", reason)
    assert digests.proof_of(rollout_of()) == Verdict("invalid", reason)  # it could be of either


def test_only_a_few_of_many_names_are_told(digests):
    made = {f"array{number}": "0" for number in range(9)}
    digests.expect_digests(1, 0, made)
    with pytest.raises(MismatchError, match=r"9 of 9 arrays differ \(array0, array1, array2, array3, array4 and 4 mo"):
        digests.tell_digests(A, 1, 0, {})


def test_every_version_behind_the_tokens_counts_and_the_cache_of_the_prompt(digests, rollout_of):
    for step in range(3):
        digests.expect_digests(1, step, {"a": str(step)})
    digests.tell_digests(A, 1, 2, {"a": "2"})
    assert digests.proof_of(rollout_of(A, step=2)) == "verified"
    never = Verdict("invalid", f"{A} answered, and never served version 1")  # it would have told of it before
    assert digests.proof_of(rollout_of(A, step=1, newest=2)) == never
    digests.tell_digests(A, 1, 1, {"a": "1"})
    assert digests.proof_of(rollout_of(A, step=1, newest=2)) == "verified"
    cached = rollout_of(A, step=2)  # all its tokens are of version 2, its prompt was read by 0
    cached = replace(cached, metadata=replace(cached.metadata, weight_step=0))
    assert digests.proof_of(cached) == Verdict("invalid", f"{A} answered, and never served version 0")
    masked = replace(cached, response_mask=np.array([True, False]), response_weight_steps=np.array([2, 0], np.int32))
    masked = replace(masked, metadata=replace(masked.metadata, weight_step=2))
    assert digests.proof_of(masked) == "verified"  # nobody sampled what is masked


def test_of_several_engines_each_version_needs_one_that_served_it_and_none_that_is_unknown(digests, rollout_of):
    for step in (0, 1):
        digests.expect_digests(1, step, {"a": str(step)})
    digests.tell_digests(A, 1, 0, {"a": "0"})
    both = rollout_of(A, B, step=0, newest=1)
    assert digests.proof_of(both) == "unknown"
    digests.tell_digests(B, 1, 1, {"a": "1"})  # B came later: version 0 is A's
    assert digests.proof_of(both) == "unknown"  # version 1 may be A's, too
    digests.tell_digests(A, 1, 1, {"a": "1"})
    assert digests.proof_of(both) == "verified"


def test_an_engine_that_ends_before_it_told_leaves_its_rollouts_invalid_but_not_what_it_told(digests, rollout_of):
    digests.expect_digests(1, 0, MADE)
    digests.expect_digests(1, 1, MADE)
    digests.tell_digests(B, 1, 0, MADE)
    digests.forget_engine("inference-1", 1)  # the one before
    assert digests.proof_of(rollout_of(B, step=1)) == "unknown"
    digests.forget_engine("inference-1", 2)
    ended = Verdict("invalid", f"{B} ended before it told what it served as version 1")
    assert digests.proof_of(rollout_of(B, step=1)) == ended
    assert digests.proof_of(rollout_of(B, step=0)) == "verified"
    assert digests.proof_of(rollout_of("inference-1#3", step=1)) == "unknown"


def test_a_version_that_is_offered_anew_is_waited_for_by_who_served_it_before(digests, rollout_of):
    """As after a warm start: what was right is no fault, and no proof either."""
    digests.expect_digests(1, 0, MADE)
    assert digests.tell_digests(A, 1, 0, MADE)
    digests.expect_digests(1, 0, STALE)
    assert digests.proof_of(rollout_of(A)) == "unknown" and not digests.tell_digests(A, 1, 0, MADE)
    assert digests.tell_digests(A, 1, 0, STALE) and digests.proof_of(rollout_of(A)) == "verified"


def test_a_canarys_verdict_counts_for_an_engine_that_tells_nothing(digests, rollout_of):
    digests.expect_digests(1, 0, MADE)
    digests.mark_engine(A, 1, 0)
    digests.mark_engine(B, 1, 0, "it disagrees")
    assert digests.proof_of(rollout_of(A)) == "verified"
    assert digests.proof_of(rollout_of(B)) == Verdict("invalid", "it disagrees")
    assert digests.tell_digests(B, 1, 0, MADE) and digests.proof_of(rollout_of(B)) == "verified"


def test_words_of_another_lineage_count_for_nothing(digests, rollout_of):
    digests.expect_digests(0, 0, STALE)
    assert digests.proof_of(rollout_of(A)) == "verified"
    digests.expect_digests(1, 0, MADE)
    assert not digests.tell_digests(A, 0, 0, STALE)
    digests.mark_engine(A, 0, 0)
    assert digests.proof_of(rollout_of(A)) == "unknown"


def test_what_was_told_of_stale_versions_is_dropped(digests, rollout_of):
    for step in range(50):
        digests.expect_digests(1, step, MADE)
        digests.tell_digests(A, 1, step, MADE)
        digests.mark_engine(B, 1, step)
        digests.drop_before(step - 1)
    assert sorted(digests._expected) == sorted(digests._served[A]) == [48, 49] and len(digests._marks) == 2
    assert digests.proof_of(rollout_of("unheard-of#0", step=3)) == "verified"  # it is stale, which is another's word
    assert digests.tell_digests(A, 1, 3, STALE)
    digests.forget_engine("inference-0", 0)
    digests.drop_before(60)
    assert digests._served == {} and digests._newest == {}


# --- a buffer ----------------------------------------------------------------------------------------------------


class Paced:
    """A buffer, its issuer and what the curriculum was told; tickets are acquired and groups delivered by hand."""

    def __init__(self, sim, **config):
        self.sim, self.clock = sim, HandClock(1000.0)
        settings = ReplayBufferConfig(**{"groups_per_batch": 2, "staleness_budget": 1, **config})
        self.curriculum, self.store = sim.Curriculum(), MemoryStore()
        rules = TicketRules(7, self.curriculum, sim.GROUP_SIZES.__getitem__)
        self.issuer = TicketIssuer(settings, rules, 0, self.store.open_ledger(0), self.clock)
        maker = sim.make_batch_maker(
            settings.batch_maker, advantage="rloo", max_tokens=16, max_samples=1, ordered=settings.synchronous,
            allow_truncated_sampling=False, seed=7,
        )  # fmt: skip
        self.buffer = PacedReplayBuffer(settings, self.store, maker, self.issuer, self.clock)
        self.buffer.pool.on_group = self.curriculum.update
        self.digests = self.buffer.digests
        self.digests.expect_digests(0, 0, MADE)
        self.issuer.set_serving_step(0)

    def deliver(self, ticket, *engines: str) -> None:
        rewards = [float(i) for i in range(self.sim.GROUP_SIZES[ticket.lesson_id])]
        group = self.sim.make_group(ticket, rewards, timestamp=self.clock.now)
        rollouts = [replace(each, metadata=replace(each.metadata, engines=engines)) for each in group.rollouts]
        self.sim.deliver(self.buffer, replace(group, rollouts=tuple(rollouts)))

    @property
    def counts(self) -> dict[str, int]:
        counts = self.issuer.ledger.snapshot()
        self.buffer.check_ledger()
        return {state: count for state, count in counts.items() if count and state not in ("started", "in_flight")}

    def unverified(self) -> float:
        return self.buffer.metrics()["replay/unverified"]

    def reasons(self) -> set[str]:
        return {row["reason"] for row in self.store.fates.rows}


@pytest.fixture
def paced(sim):
    def make(**config):
        return Paced(sim, **config)

    return make


def test_groups_whose_digests_come_late_wait_uningested_and_the_news_lets_them_in(paced):
    run = paced()
    first, second, third, *_ = run.issuer.acquire(4, 0)
    run.deliver(first, B)
    run.deliver(second, A)
    size = run.sim.GROUP_SIZES[first.lesson_id] + run.sim.GROUP_SIZES[second.lesson_id]
    assert run.counts == {"waiting": size} and run.unverified() == size
    assert run.curriculum.groups == [] and run.buffer.try_next_batch(0) is None
    assert "waiting for digests of their engines' weights: 2" in run.buffer.waiting_for()
    assert f"(oldest {third.ticket_id}, for" in run.buffer.waiting_for(), "what was delivered runs no longer"
    run.digests.tell_digests(A, 0, 0, MADE)
    assert run.curriculum.groups == [second.ticket_id]  # the other's engine holds nobody else up
    run.digests.tell_digests(B, 0, 0, MADE)
    assert run.unverified() == 0 and run.counts == {"waiting": size}
    assert set(run.buffer.try_next_batch(0).group_ids) == {first.ticket_id, second.ticket_id}


def test_who_waits_for_a_batch_is_woken_by_the_news(paced, monkeypatch):
    monkeypatch.setattr(training_pool, "RECHECK_S", 10 * LIMIT_S)
    run = paced()
    for ticket in run.issuer.acquire(2, 0):
        run.deliver(ticket, A)
    batches = []
    learner = threading.Thread(target=lambda: batches.append(run.buffer.next_batch(0, 10 * LIMIT_S)), daemon=True)
    learner.start()
    wait_until(lambda: run.issuer.changed._waiters)
    run.digests.tell_digests(A, 0, 0, MADE)
    learner.join(LIMIT_S)
    assert len(batches[0].group_ids) == 2


@pytest.mark.parametrize("told_first", [False, True])
def test_what_a_stale_engine_sampled_is_invalid_and_its_tickets_places_are_free(paced, told_first):
    run = paced()
    bad, good, *_ = run.issuer.acquire(4, 0)

    def tell():
        with pytest.raises(MismatchError):
            run.digests.tell_digests(A, 0, 0, SWAPPED)

    if told_first:
        tell()
    run.deliver(bad, A)
    if not told_first:
        tell()
    run.digests.tell_digests(B, 0, 0, MADE)
    run.deliver(good, B)
    sizes = run.sim.GROUP_SIZES
    assert run.counts == {"invalid": sizes[bad.lesson_id], "waiting": sizes[good.lesson_id]}
    (reason,) = run.reasons()
    assert reason.startswith(f"{A} serves version 0") and "2 of 3 arrays differ (layers.query, layers.val" in reason
    assert run.issuer.outstanding.get(bad.ticket_id) is None and reason in run.issuer.last_failure
    assert run.curriculum.groups == [good.ticket_id]


def test_an_engine_that_dies_before_it_tells_leaves_what_it_sampled_invalid(paced):
    run = paced()
    ticket, *_ = run.issuer.acquire(1, 0)
    run.deliver(ticket, B)
    run.digests.forget_engine("inference-1", 2)
    assert run.counts == {"invalid": run.sim.GROUP_SIZES[ticket.lesson_id]} and run.unverified() == 0
    assert run.reasons() == {f"{B} ended before it told what it served as version 0"}


def test_a_checkpoint_may_be_taken_while_the_tickets_of_a_dead_holder_wait_for_another(paced):
    run = paced()
    tickets = run.issuer.offer(2, holder="a#1")
    assert run.issuer.reissue("a#1") == [ticket.ticket_id for ticket in tickets]
    assert run.counts == {}
    with run.buffer.boundary():
        run.buffer.state()
        assert sorted(row[0] for row in run.issuer.state()["outstanding"]) == sorted(t.ticket_id for t in tickets)


def test_digests_are_waited_for_only_so_long(paced):
    run = paced()
    ticket, *_ = run.issuer.acquire(1, 0)
    run.deliver(ticket, A)
    run.clock.now += VERIFY_S - 1
    assert run.buffer.try_next_batch(0) is None and run.unverified()
    run.clock.now += 1
    assert run.buffer.try_next_batch(0) is None and not run.unverified()
    assert run.counts == {"invalid": run.sim.GROUP_SIZES[ticket.lesson_id]}
    assert run.reasons() == {f"the digests of what {A} served as version 0 did not come within {VERIFY_S:g} s"}


def test_at_staleness_zero_the_turn_is_kept_whenever_digests_come(paced):
    run = paced(staleness_budget=0, groups_per_batch=4)
    tickets = run.issuer.acquire(4, 0)
    for ticket, engine in zip(tickets, (A, B, B, A), strict=True):
        run.deliver(ticket, engine)
    run.digests.tell_digests(B, 0, 0, MADE)
    assert run.curriculum.groups == [] and run.unverified() > 0
    run.digests.tell_digests(A, 0, 0, MADE)
    order = [ticket.ticket_id for ticket in tickets]
    assert run.curriculum.groups == order
    assert set(run.buffer.try_next_batch(0).group_ids) == set(order)


def test_what_waits_for_digests_is_generated_again_after_a_resume(paced):
    """It is in no file, and its ticket is outstanding."""
    run = paced()
    ticket, *_ = run.issuer.acquire(1, 0)
    run.deliver(ticket, A)
    with run.buffer.boundary():
        issuer, replay = run.issuer.state(), run.buffer.state()
    assert [row[0] for row in issuer["outstanding"]] == [ticket.ticket_id] and replay["alive"] == {}
    assert not run.buffer.is_stored(ticket.ticket_id)
    run.buffer.close()
    run.digests.tell_digests(A, 0, 0, MADE)  # too late: nothing is ingested after the end
    assert run.curriculum.groups == []


def test_stale_versions_are_forgotten_as_the_learner_goes_on(paced):
    run = paced(max_rollout_step_delay=2)
    for step in range(1, 9):
        run.digests.expect_digests(0, step, MADE)
        run.buffer.set_current_step(step)
    assert sorted(run.digests._expected) == [6, 7, 8]
