"""The batch maker of simulator fleets: whole fragments, in order, as often as they may be used."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fragments_made import make_fragment

from penstock.batch import FragmentBatchMaker
from penstock.types import ConfigError, InvalidRolloutError


def filled(count=5, **arguments):
    maker = FragmentBatchMaker(**arguments)
    for number in range(count):
        maker.add_rollout(make_fragment(f"g{number}"))
    return maker


def taken(maker, batch_size):
    batch = maker.create_batch(batch_size)
    return None if batch is None else [example.fragment.group_id for example in batch]


def test_the_oldest_come_first_and_each_once():
    maker = filled()
    assert taken(maker, 2) == ["g0", "g1"] and taken(maker, 2) == ["g2", "g3"]
    assert taken(maker, 2) is None and len(maker) == 1
    maker.add_rollout(make_fragment("g9"))
    assert taken(maker, 2) == ["g4", "g9"] and len(maker) == 0


def test_or_the_newest():
    maker = filled(order="newest")
    assert taken(maker, 2) == ["g4", "g3"]
    maker.add_rollout(make_fragment("g9"))
    assert taken(maker, 2) == ["g9", "g2"]


def test_what_was_used_least_is_taken_before_it_is_used_again():
    maker = filled(3, max_samples=2)
    assert taken(maker, 2) == ["g0", "g1"]
    assert taken(maker, 2) == ["g2", "g0"]
    assert taken(maker, 2) == ["g1", "g2"]
    assert taken(maker, 1) is None
    endless = filled(1, max_samples=-1)
    assert [taken(endless, 1) for _ in range(9)] == [["g0"]] * 9


def test_what_the_buffer_drops_is_forgotten():
    maker = filled(4, max_samples=2)
    taken(maker, 1)
    maker.discard(["g0/0", "g2/0", "unknown/0"])
    assert len(maker) == 2 and taken(maker, 2) == ["g1", "g3"]
    assert maker.dropped() == []


def test_an_example_is_the_fragment_itself():
    maker, fragment = FragmentBatchMaker(), make_fragment("g0")
    maker.add_rollout(fragment)
    [example] = maker.create_batch(1)
    assert example.fragment is fragment and example.rollout_ids == ("g0/0",)


def test_what_cannot_be_trained_is_refused_and_said():
    maker = FragmentBatchMaker(environment_name="CartPole-v1")
    with pytest.raises(InvalidRolloutError, match="fragment g0/0 has no metadata"):
        maker.add_rollout(replace(make_fragment("g0"), metadata=None))
    with pytest.raises(InvalidRolloutError, match="g0/0 is of environment 'Pong', but this batch maker takes 'Cart"):
        maker.add_rollout(make_fragment("g0", env_name="Pong"))
    with pytest.raises(InvalidRolloutError, match="g0/0 cannot be trained on: all of its steps are faulty"):
        maker.add_rollout(make_fragment("g0", faults=(0, 1, 2, 3)))
    maker.add_rollout(make_fragment("g0"))
    with pytest.raises(InvalidRolloutError, match="g0/0 was added before"):
        maker.add_rollout(make_fragment("g0"))
    assert len(maker) == 1


def test_numbers_of_a_batch_count_steps_and_leave_faults_out():
    maker = FragmentBatchMaker()
    maker.add_rollout(make_fragment("g0", weight_steps=[2, 3, 3, 4], faults=(0,), reward=1.0))
    maker.add_rollout(make_fragment("g1", weight_steps=5, task="pole", reward=2.0))
    maker.set_step(6)
    facts = maker.get_batch_metadata(maker.create_batch(2))
    assert facts == {
        "group_ids": ("g0", "g1"),
        "rollout_ids": ("g0/0", "g1/0"),
        "metrics": {
            "train/steps": 7.0,
            "train/faulty_steps": 1.0,
            "train/step_staleness_mean": pytest.approx((3 + 3 + 2 + 4 * 1) / 7),
            "train/step_staleness_max": 3.0,  # the step of version 2 was faulty
            "train/fragment_reward_mean": 5.5,
            "train/fragments/cart": 1.0,
            "train/fragments/pole": 1.0,
        },
    }


def test_fragments_are_counted_by_task():
    maker = FragmentBatchMaker()
    for number, task in enumerate(["cart", "pole", "cart"]):
        maker.add_rollout(make_fragment(f"g{number}", task=task))
    metrics = maker.get_batch_metadata(maker.create_batch(3))["metrics"]
    assert (metrics["train/fragments/cart"], metrics["train/fragments/pole"]) == (2.0, 1.0)


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match="max_samples is 0"):
        FragmentBatchMaker(max_samples=0)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        FragmentBatchMaker().create_batch(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.sampled_from([1, 2, 3]), st.sampled_from(["oldest", "newest"]))
def test_no_schedule_uses_one_too_often_or_twice_in_a_batch(actions, most, order):
    maker, uses, made, rng = FragmentBatchMaker(order, most), {}, 0, np.random.default_rng(0)
    for action in actions:
        if action == 0 and uses:
            gone = list(uses)[int(rng.integers(len(uses)))]
            maker.discard([f"{gone}/0"])
            uses[gone] = most
        elif action < 3:
            uses[f"g{made}"] = 0
            maker.add_rollout(make_fragment(f"g{made}"))
            made += 1
        elif (groups := taken(maker, 2)) is not None:
            assert len(set(groups)) == 2
            least = sorted(count for count in uses.values() if count < most)[:2]
            assert sorted(uses[group] for group in groups) == least
            for group in groups:
                uses[group] += 1
        assert max(uses.values(), default=0) <= most
        assert len(maker) == sum(count < most for count in uses.values())
