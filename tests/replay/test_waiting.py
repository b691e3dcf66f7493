"""The index of waiting groups against a plain list that is scanned."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay.freshness import FreshnessWindow
from penstock.replay.waiting import WaitingGroup, WaitingGroups
from penstock.types import RolloutGroup


@pytest.fixture(scope="module")
def group_of(sim):
    def make(number, members, env_name="words"):
        rollouts = tuple(
            sim.make_rollout(f"a-0-{number}/{i}", weight_step=step, timestamp=timestamp)
            for i, (step, timestamp) in enumerate(members)
        )
        group = WaitingGroup.of(RolloutGroup("words:1", rollouts, f"a-0-{number}"), deadline_step=9)
        group.env_name = env_name
        return group

    return make


MEMBERS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 100)), min_size=1, max_size=4)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), MEMBERS),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("expire"), st.tuples(st.integers(0, 6), st.integers(0, 40))),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(OPERATIONS, st.integers(0, 3), st.one_of(st.none(), st.integers(1, 60)))
def test_expiry_finds_exactly_what_a_scan_finds(group_of, operations, delay, limit):
    window = FreshnessWindow(delay, limit)
    waiting, model = WaitingGroups(window, 10_000), {}
    current, now, number = 12, 100, 0
    for name, argument in operations:
        if name == "add":
            group = group_of(number, argument)
            waiting.add(group)
            model[group.group_id] = list(group.rollouts)
            number += 1
        elif name == "remove" and f"a-0-{argument}" in model:
            waiting.remove(f"a-0-{argument}")
            del model[f"a-0-{argument}"]
        elif name == "expire":
            current, now = current + argument[0], now + argument[1]
            expected = {
                r.rollout_id for members in model.values() for r in members if window.judge(r.metadata, current, now)
            }
            found = waiting.expired(current, now)
            assert {rollout.rollout_id for _, rollout, _ in found} == expected and len(found) == len(expected)
            for group_id, rollout, verdict in found:
                assert verdict == window.judge(rollout.metadata, current, now)
                waiting.drop(group_id, rollout)
                model[group_id].remove(rollout)
            model = {group_id: members for group_id, members in model.items() if members}
        assert sorted(waiting.ids()) == sorted(model)
        assert waiting.rollouts == sum(len(members) for members in model.values())


def test_capacity_counts_rollouts_by_environment_and_names_the_oldest_group(group_of):
    waiting = WaitingGroups(FreshnessWindow(1, None), capacity=4)
    for number, environment in enumerate(["x", "x", "y", "x"]):
        waiting.add(group_of(number, [(0, 0), (0, 0)], environment))
    assert waiting.over_capacity("y") is None and waiting.over_capacity("z") is None
    assert waiting.over_capacity("x") == "a-0-0"
    waiting.remove("a-0-0")
    assert waiting.over_capacity("x") is None


def test_the_time_index_does_not_grow_with_what_has_left(group_of):
    waiting = WaitingGroups(FreshnessWindow(1, 60.0), 10_000)
    for number in range(500):
        waiting.add(group_of(number, [(0, 50)] * 4))
        if number >= 3:
            waiting.remove(f"a-0-{number - 3}")
    assert len(waiting._by_time) <= 2 * waiting.rollouts + 64
