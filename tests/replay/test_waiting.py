"""The index of waiting groups against a plain list that is scanned."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay import FreshnessRules, ReplayBufferConfig
from penstock.replay.waiting_groups import WaitingGroup, WaitingGroups


@pytest.fixture(scope="module")
def group_of(sim):
    def make(number, members, env_name="words"):
        rollouts = tuple(
            sim.make_rollout(f"a-0-{number}/{i}", weight_step=step, timestamp=timestamp)
            for i, (step, timestamp) in enumerate(members)
        )
        return WaitingGroup(f"a-0-{number}", "words:1", env_name, "a", list(rollouts), deadline_step=9)

    return make


def rules_of(delay, limit):
    config = ReplayBufferConfig(
        staleness_budget=min(delay, 1) or 1,
        max_rollout_step_delay=max(delay, 1),
        max_rollout_timestamp_delay=-1 if limit is None else limit,
        tolerances={"a": {"max_rollout_step_delay": delay}},
    )
    return FreshnessRules(config)


def remove(waiting, group_id):
    group = waiting.get(group_id)
    for rollout in list(group.rollouts):
        waiting.drop(group, rollout)


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
    rules = rules_of(delay, limit)
    window = rules.of("a")
    waiting, model = WaitingGroups(rules, 10_000), {}
    current, now, number = 12, 100, 0
    for name, argument in operations:
        if name == "add":
            group = group_of(number, argument)
            waiting.add(group)
            model[group.group_id] = list(group.rollouts)
            number += 1
        elif name == "remove" and f"a-0-{argument}" in model:
            remove(waiting, f"a-0-{argument}")
            del model[f"a-0-{argument}"]
        elif name == "expire":
            current, now = current + argument[0], now + argument[1]
            expected = {
                r.rollout_id for members in model.values() for r in members if window.judge(r.metadata, current, now)
            }
            found = waiting.expired(current, now)
            assert {rollout.rollout_id for _, rollout, _ in found} == expected and len(found) == len(expected)
            for group, rollout, verdict in found:
                assert verdict == window.judge(rollout.metadata, current, now)
                waiting.drop(group, rollout)
                model[group.group_id].remove(rollout)
            model = {group_id: members for group_id, members in model.items() if members}
        assert sorted(group.group_id for group in waiting) == sorted(model)
        assert waiting.rollouts == sum(len(members) for members in model.values())


def test_capacity_counts_rollouts_by_environment_and_names_the_oldest_group(group_of):
    waiting = WaitingGroups(rules_of(1, None), capacity=4)
    for number, environment in enumerate(["x", "x", "y", "x"]):
        waiting.add(group_of(number, [(0, 0), (0, 0)], environment))
    assert waiting.over_capacity("y") is None and waiting.over_capacity("z") is None
    assert waiting.over_capacity("x").group_id == "a-0-0"
    remove(waiting, "a-0-0")
    assert waiting.over_capacity("x") is None


def test_the_indices_do_not_grow_with_what_has_left(group_of):
    waiting = WaitingGroups(rules_of(1, 60.0), 10_000)
    for number in range(500):
        waiting.add(group_of(number, [(0, 50)] * 4))
        if number >= 3:
            remove(waiting, f"a-0-{number - 3}")
    [files] = waiting._files.values()
    assert len(files.by_time) < 80 and sum(len(ids) for ids in files.by_step.values()) < 80
    assert len(waiting._by_environment["words"]) < 80


def test_each_lesson_has_its_own_window(group_of):
    config = ReplayBufferConfig(
        max_rollout_step_delay=2,
        max_rollout_timestamp_delay=50,
        tolerances={"b": {"max_rollout_step_delay": 5, "max_rollout_timestamp_delay": -1}},
    )
    waiting = WaitingGroups(FreshnessRules(config), 100)
    patient = group_of(1, [(0, 0)])
    patient.lesson_id = "b"
    waiting.add(group_of(0, [(0, 0)]))
    waiting.add(patient)

    def expired(current, now):
        found = waiting.expired(current, now)
        for group, rollout, _ in found:
            waiting.drop(group, rollout)
        return [(group.lesson_id, verdict.fate) for group, _, verdict in found]

    assert expired(2, 49.9) == []
    assert expired(2, 50.0) == [("a", "stale_time")]
    assert expired(5, 1e9) == []
    assert expired(6, 1e9) == [("b", "stale_step")]
