"""Malformed rewards, groups and metrics."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.environments import validate_groups, validate_metrics
from penstock.environments.base import check_function_rewards, check_rewards
from penstock.types import EnvironmentFailure, Rollout, RolloutGroup, Turn


def rollout(**changes):
    fields = {
        "env_name": "e",
        "env_example_id": "1",
        "prompt_tokens": np.array([1, 2], np.int32),
        "response_tokens": np.array([3, 4], np.int32),
        "response_logprobs": np.array([-1, 0], np.float32),
        "token_rewards": np.zeros(2, np.float32),
        "episode_reward": 0.0,
        "response_mask": np.array([True, False]),
    }
    return Rollout(**{**fields, **changes})


@pytest.mark.parametrize(
    "rewards", [[1, 0.5], (1.0, 0.5), np.array([1, 0.5]), [np.float32(1), np.float64(0.5)], [True, 0.5]]
)
def test_rewards_in_any_numeric_form(rewards):
    assert check_rewards(rewards, 2, "f") == check_function_rewards(rewards, 2, "f") == [1.0, 0.5]


def test_only_a_reward_function_may_say_none():
    assert check_function_rewards([None, 0.5], 2, "f") == [None, 0.5]
    with pytest.raises(EnvironmentFailure, match="f returned None as reward 0"):
        check_rewards([None, 0.5], 2, "f")
    with pytest.raises(EnvironmentFailure, match="f returned nan as reward 0"):
        check_function_rewards([float("nan"), None], 2, "f")


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
        ([1.0, float("nan")], "returned nan as reward 1"),
        ([float("inf"), 1.0], "returned inf as reward 0"),
        ([1.0, None], "returned None as reward 1"),
        ([1.0, "0.5"], r"returned '0.5' \(str\) as reward 1"),
        (None, "returned None:"),
        (1.0, "returned 1.0:"),
        ("ab", r"returned 'ab' \(str\):"),
        ({"a": 1.0, "b": 2.0}, r"returned \{.*\} \(dict\):"),
    ],
)
def test_malformed_rewards_are_one_line_with_source_and_remedy(rewards, found):
    with pytest.raises(EnvironmentFailure, match=found) as failure:
        check_rewards(rewards, 2, "reward function r.py:f")
    message = str(failure.value)
    assert message.startswith("reward function r.py:f returned ")
    assert message.endswith("it must return a list of 2 finite numbers, one per completion")
    assert "\n" not in message


def test_well_formed_groups_pass():
    groups = [RolloutGroup("e:1", (rollout(), rollout()))]
    assert validate_groups(groups, 1, 2, "e") == groups
    assert validate_groups([], 1, 2, "e") == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "returned None: expected a list of RolloutGroup"),
        (["group"], r"group 0 is 'group' \(str\): expected a RolloutGroup"),
        ([RolloutGroup("", (rollout(), rollout()))], "group 0: key is '' "),
        ([RolloutGroup("e:1", (rollout(),))], "group 0: rollouts has 1 members, expected 2"),
        ([RolloutGroup("e:1", (rollout(), "x"))], "group 0, rollout 1 is 'x'"),
        ([RolloutGroup("e:1", (rollout(), rollout()))] * 2, "returned 2 groups for 1 examples"),
        (
            [RolloutGroup("e:1", (rollout(), rollout(response_mask=np.zeros(2, np.bool_))))],
            "rollout 1: response_mask is all false",
        ),
        (
            [RolloutGroup("e:1", (rollout(), rollout(response_logprobs=np.array([-1, -1], np.float32))))],
            "rollout 1: response_logprobs must be 0 where response_mask is false",
        ),
        (
            [RolloutGroup("e:1", (rollout(), replace(rollout(), turns=(Turn("user", "", 0, 9),))))],
            r"rollout 1: turns has the span 0\.\.9 in 4 tokens",
        ),
        (
            [RolloutGroup("e:1", (rollout(), replace(rollout(), env_example_id=7)))],
            r"rollout 1: env_example_id is 7 \(int\): it must be text",
        ),
        (
            [RolloutGroup("e:1", (rollout(), replace(rollout(), rewards_by_function=(("a", None), ("b", "x")))))],
            r"rollout 1: rewards_by_function has 'x' \(str\) of 'b': not a number",
        ),
    ],
)
def test_malformed_groups_name_the_field(groups, message):
    with pytest.raises(EnvironmentFailure, match=message):
        validate_groups(groups, 1, 2, "e")


def test_metrics():
    assert validate_metrics({"calls": np.float32(0.5), "n": 2}, "e") == {"calls": 0.5, "n": 2.0}
    for metrics, message in (
        ([1], "expected a dict"),
        ({"x": "y"}, "metric 'x'"),
        ({"x": float("nan")}, "not a finite"),
    ):
        with pytest.raises(EnvironmentFailure, match=message):
            validate_metrics(metrics, "e")


@pytest.mark.attack
@pytest.mark.parametrize("reward", [1e30, -1e30, 1000001, 1e308])
def test_a_reward_beyond_the_limit_names_the_completion_and_the_limit(reward):
    with pytest.raises(EnvironmentFailure) as failure:
        check_rewards([0.0, reward], 2, "reward function r.py:f")
    expected = f"reward function r.py:f returned {reward:g} as reward 1: rewards lie within ±1e+06, so scale it"
    assert str(failure.value) == expected
    assert check_rewards([-1e6, 1e6], 2, "f") == [-1e6, 1e6]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_rewards": np.array([0, 2e6], np.float32), "episode_reward": 2e6}, "episode_reward is 2e+06"),
        ({"token_rewards": np.array([-2e6, 2e6], np.float32)}, "token_rewards[0] is -2e+06"),
    ],
)
def test_a_rollout_with_a_reward_beyond_the_limit_is_refused_whatever_made_it(changes, field):
    groups = [RolloutGroup("e:1", (rollout(), rollout(**changes)))]
    with pytest.raises(EnvironmentFailure) as failure:
        validate_groups(groups, 1, 2, "e")
    assert str(failure.value) == (
        f"environment 'e', group 0, rollout 1: {field}: rewards lie within ±1e+06, so scale it"
    )
