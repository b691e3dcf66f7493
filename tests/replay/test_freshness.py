"""The freshness window, and which members of a delivered group may be trained."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replay import FreshnessRules, FreshnessWindow, ReplayBufferConfig
from penstock.replay.freshness import IngestRules, judge_group
from penstock.types import RolloutMetadata, Ticket, WeightVersion


def fate(window, step, timestamp, current, now):
    verdict = window.judge(RolloutMetadata("w", timestamp, step), current, now)
    return None if verdict is None else verdict.fate


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (7, "stale_step"),
        (8, None),  # current − delay is fresh
        (10, None),  # current is fresh
        (11, "invalid"),  # the future is not
    ],
)
def test_both_ends_of_the_step_window(step, expected):
    assert fate(FreshnessWindow(2, None), step, 0.0, current=10, now=1e9) == expected


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (99.999, "stale_time"),
        (100.0, "stale_time"),  # timestamp > now − limit must hold
        (100.001, None),
        (5000.0, None),  # a clock that runs ahead makes nothing stale
    ],
)
def test_the_end_of_the_time_window(timestamp, expected):
    assert fate(FreshnessWindow(0, 60.0), 3, timestamp, current=3, now=160.0) == expected


def test_no_time_limit_keeps_a_rollout_for_ever():
    assert fate(FreshnessWindow(0, None), 3, -1e12, current=3, now=1e12) is None


def test_the_reason_names_the_numbers():
    window = FreshnessWindow(1, 60.0)
    future = window.judge(RolloutMetadata("w", 0.0, 9), 4, 0.0)
    assert future is not None and future.reason == "weight_step 9 is from the future: the learner is at version 4"
    stale = window.judge(RolloutMetadata("w", 0.0, 2), 4, 0.0)
    assert stale is not None and "sampled by version 2, more than 1 updates before the learner's 4" in stale.reason


@given(
    st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.one_of(st.none(), st.integers(0, 50)),
    st.integers(0, 100), st.integers(0, 100),
)  # fmt: skip
def test_the_window_is_the_formula(delay, step, current, limit, timestamp, now):
    fresh = current - delay <= step <= current and (limit is None or timestamp > now - limit)
    assert (fate(FreshnessWindow(delay, limit), step, timestamp, current, now) is None) == fresh


TICKET = Ticket("easy-0-4", "easy", 4, 99, deadline_step=6, admitted_step=5)
EXPECTED = ["easy-0-4/0", "easy-0-4/1", "easy-0-4/2"]


@pytest.fixture
def judge(sim):
    """Judges a sound group of three at version 6 and time 100, after `change` was applied to its members."""

    def run(change, survives=lambda version: True):
        group = sim.make_group(TICKET, [0, 1, 0], timestamp=50.0)
        members = change(list(group.rollouts))
        freshness = FreshnessRules(ReplayBufferConfig(max_rollout_timestamp_delay=60.0))
        rules = IngestRules(freshness, survives, 6, 100.0)
        return judge_group(replace(group, rollouts=tuple(members)), TICKET.lesson_id, EXPECTED, rules)

    return run


def outcome(judged):
    trainable = [rollout.rollout_id[-1] for rollout in judged.trainable]
    return trainable, {i[-1]: verdict.fate for i, verdict in judged.rejected.items()}


def with_metadata(member, **changes):
    return replace(member, metadata=replace(member.metadata, **changes))


def test_a_sound_group_passes_whole(judge):
    judged = judge(lambda members: members)
    assert outcome(judged) == (["0", "1", "2"], {}) and len(judged.storable) == 3


@pytest.mark.parametrize(
    ("change", "fate", "stored"),
    [
        (lambda m: with_metadata(m, weight_step=4), "stale_step", True),
        (lambda m: with_metadata(m, timestamp=40.0), "stale_time", True),
        (lambda m: with_metadata(m, weight_step=7), "invalid", True),
        (lambda m: replace(m, metadata=None), "invalid", False),
        (lambda m: replace(m, rollout_id="easy-0-5/1"), "invalid", False),
        (lambda m: replace(m, rollout_id="easy-0-4/0"), "invalid", False),
        (lambda m: replace(m, rollout_id=""), "invalid", False),
        (lambda m: replace(m, lesson_id="hard"), "invalid", True),
        (lambda m: replace(m, response_mask=np.zeros(2, np.bool_)), "invalid", True),
        (lambda m: replace(m, finish_reason="aborted"), "invalid", True),
    ],
)  # fmt: skip
def test_one_bad_member_leaves_and_the_others_stay(judge, change, fate, stored):
    judged = judge(lambda members: [members[0], change(members[1]), members[2]])
    assert outcome(judged) == (["0", "2"], {"1": fate})
    assert ("easy-0-4/1" in [rollout.rollout_id for rollout in judged.storable]) == stored
    assert judged.rejected["easy-0-4/1"].reason


def test_a_member_that_was_not_delivered_is_invalid(judge):
    assert outcome(judge(lambda members: members[:2])) == (["0", "1"], {"2": "invalid"})


def test_a_member_too_many_is_nobodys(judge):
    judged = judge(lambda members: [*members, replace(members[0], rollout_id="easy-0-4/3")])
    assert outcome(judged) == (["0", "1", "2"], {})


def test_weights_of_a_dead_lineage_are_rolled_back_by_their_newest_token(judge):
    def change(members):
        steps = np.array([5, 6], np.int32)
        return [members[0], replace(members[1], response_weight_steps=steps), members[2]]

    def until_the_fork(version):
        return version == WeightVersion(0, 5)

    assert outcome(judge(change, until_the_fork)) == (["0", "2"], {"1": "rolled_back"})


def test_a_group_of_nothing_but_bad_members(judge):
    judged = judge(lambda members: [replace(member, metadata=None) for member in members])
    assert outcome(judged) == ([], {"0": "invalid", "1": "invalid", "2": "invalid"})
    assert isinstance(judged.storable, tuple) and not judged.storable
