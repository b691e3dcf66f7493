from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replay import FATES, STATES, Ledger
from penstock.replay.ledger import rollout_ids
from penstock.rundir import JsonLinesLog, read_json_lines
from penstock.types import RunFailed, Ticket


def ticket(index=0):
    return Ticket(f"cats-0-{index}", "cats", index, 5, deadline_step=3, admitted_step=2)


def begin(ledger, index=0, size=2):
    ledger.count_started(ticket(index), size)
    ledger.open(f"cats-0-{index}", size)
    return rollout_ids(f"cats-0-{index}", size)


def test_a_rollout_is_in_flight_then_waiting_then_at_its_end():
    ledger = Ledger()
    first, second = begin(ledger)
    assert ledger.snapshot() == {"started": 2, **dict.fromkeys(STATES, 0), "in_flight": 2}
    ledger.deliver("cats-0-0")
    ledger.settle([first], "trained", 2, "")
    assert ledger.snapshot() == {"started": 2, **dict.fromkeys(STATES, 0), "waiting": 1, "trained": 1}
    ledger.check({second})


def test_the_states_are_those_of_the_design():
    assert STATES == (
        "in_flight", "waiting", "trained", "stale_step", "stale_time", "evicted", "filtered", "invalid", "aborted",
        "rolled_back",
    )  # fmt: skip


def test_what_generators_count_is_independent_of_the_sum():
    ledger = Ledger()
    ledger.count_started(ticket(), 3)
    ledger.open("cats-0-0", 2)  # one rollout was lost on the way
    with pytest.raises(RunFailed, match=r"3 rollouts were started, 2 are accounted for \(in_flight 2\).*cats-0-0/0"):
        ledger.check()


@pytest.mark.attack
def test_a_second_fate_or_a_second_start_is_an_error_that_names_the_rollout():
    ledger = Ledger()
    first, _ = begin(ledger)
    ledger.settle([first], "invalid", 0, "")
    with pytest.raises(RunFailed, match="cats-0-0/0 is not live"):
        ledger.settle([first], "trained", 0, "")
    with pytest.raises(RunFailed, match="cats-0-0 was started twice"):
        ledger.open("cats-0-0", 2)


def test_ids_that_nobody_holds_are_named():
    ledger = Ledger()
    first, second = begin(ledger)
    with pytest.raises(RunFailed, match=r"held but not live \[x/0\], live but held by nobody \[cats-0-0/1\]"):
        ledger.check({first, "x/0"})
    ledger.check({first, second})


def test_starts_and_fates_are_logged(tmp_path):
    tickets, fates = JsonLinesLog(tmp_path / "tickets.jsonl"), JsonLinesLog(tmp_path / "fates.jsonl")
    ledger = Ledger(2, tickets, fates, clock=lambda: 7.5)
    ids = begin(ledger)
    ledger.settle(ids, "aborted", 4, "it hung")
    ledger.sync()
    assert list(read_json_lines(tickets.path)) == [
        {"ticket_id": "cats-0-0", "lesson_id": "cats", "index": 0, "rollouts": 2, "admitted_step": 2,
         "deadline_step": 3, "lineage": 2, "time": 7.5}
    ]  # fmt: skip
    assert list(read_json_lines(fates.path)) == [
        {"rollout_id": i, "fate": "aborted", "reason": "it hung", "step": 4, "lineage": 2, "time": 7.5} for i in ids
    ]
    tickets.close()
    fates.close()


def test_a_rebuilt_ledger_goes_on():
    ledger = Ledger()
    ledger.rebuild(5, Counter(trained=3), ["a/0", "b/0"])
    ledger.check({"a/0", "b/0"})
    ledger.settle(["a/0"], "trained", 9, "")
    assert ledger.snapshot()["trained"] == 4


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["start", "deliver", *FATES])), max_size=60))
def test_the_books_close_under_any_sequence(steps):
    """Illegal steps are refused and change nothing; legal ones keep every rollout in exactly one state."""
    ledger, model = Ledger(), {}
    for index, action in steps:
        group, state = f"cats-0-{index}", model.get(index)
        try:
            if action == "start":
                ledger.open(group, 1)
                ledger.count_started(ticket(index), 1)
                assert state not in ("in_flight", "waiting")
                if state is not None:  # a ticket id is used once in a run; here it starts a further rollout
                    continue
                model[index] = "in_flight"
            else:
                before = ledger.snapshot()
                if action == "deliver":
                    ledger.deliver(group)
                else:
                    ledger.settle([f"{group}/0"], action, 0, "")
                assert sum(ledger.snapshot().values()) == sum(before.values())
                model[index] = "waiting" if action == "deliver" else action
        except RunFailed:
            pass
        ledger.check()
