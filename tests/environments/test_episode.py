"""Rollouts built turn by turn."""

import numpy as np
import pytest

from penstock.environments import EpisodeBuilder
from penstock.types import Completion, Decoding, EnvironmentFailure

PROMPT = np.array([10, 11, 12], np.int32)


def said(tokens, logprobs, steps, oldest, text="hello", reason="stop"):
    return Completion(
        PROMPT,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(steps, np.int32),
        oldest,
        0,
        text,
        reason,
    )


def test_two_turns_with_a_tool_between_them():
    episode = EpisodeBuilder("ask", PROMPT, Decoding())
    episode.say(said([20, 21], [-1.0, -2.0], [4, 5], 4, "call"))
    episode.credit(0.25)
    episode.hear("told", np.array([30], np.int32))
    assert episode.tokens.tolist() == [10, 11, 12, 20, 21, 30]
    episode.say(said([40], [-3.0], [6], 3, "answer", "length"))
    episode.credit(0.5)
    rollout = episode.rollout("env", "problem")

    assert rollout.response_tokens.tolist() == [20, 21, 30, 40]
    assert rollout.response_mask.tolist() == [True, True, False, True]
    assert rollout.response_logprobs.tolist() == [-1.0, -2.0, 0.0, -3.0]
    assert rollout.response_weight_steps.tolist() == [4, 5, 5, 6]
    assert rollout.oldest_weight_step == 3
    assert rollout.token_rewards.tolist() == [0.0, 0.25, 0.0, 0.5]
    assert rollout.episode_reward == 0.75
    assert rollout.finish_reason == "length"
    spans = [(turn.role, turn.content, turn.start, turn.stop) for turn in rollout.turns]
    assert spans == [
        ("user", "ask", 0, 3),
        ("assistant", "call", 3, 5),
        ("tool", "told", 5, 6),
        ("assistant", "answer", 6, 7),
    ]


@pytest.mark.parametrize(("tokens", "reason"), [([20], "aborted"), ([], "stop")])
def test_an_answer_that_did_not_come_about_has_no_reward(tokens, reason):
    episode = EpisodeBuilder("ask", PROMPT, Decoding())
    with pytest.raises(EnvironmentFailure, match="no answer to score"):
        episode.say(said(tokens, [-1.0] * len(tokens), [1] * len(tokens), 1, reason=reason))
