"""Rollouts built turn by turn."""

import time
from dataclasses import replace

import numpy as np
import pytest

from penstock.environments import EpisodeBuilder, Example, GroupScoredEnvironment, Scores, SingleTurnEnvironment
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


def test_what_its_responses_took_is_summed_and_what_else_it_spent_stands_beside():
    episode = EpisodeBuilder("ask", PROMPT, Decoding())
    episode.say(replace(said([20], [-1.0], [4], 4), timings={"wait_s": 0.5, "decode_s": 1.0}))
    episode.spend("tool_s", 0.125)
    episode.hear("told", np.array([30], np.int32))
    episode.say(replace(said([40], [-3.0], [6], 3), timings={"prefill_s": 0.25, "decode_s": 2.0}))
    expected = {"wait_s": 0.5, "prefill_s": 0.25, "decode_s": 3.0, "tool_s": 0.125}
    assert episode.rollout("env", "problem").timings == expected


def test_each_turn_of_a_conversation_has_its_own_seconds_and_those_before_it(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("penstock.environments.episode.time.monotonic", lambda: now[0])
    episode = EpisodeBuilder("ask", PROMPT, Decoding())
    timings = {"wait_s": 0.5, "decode_s": 1.0}
    episode.say(replace(said([20], [-1.0], [4], 4), timings=timings, finished_s=103.5))  # 2 s before it
    one = episode.rollout("env", "problem")
    assert [turn.timings for turn in one.turns] == [
        (),
        (),
    ] and one.timings == timings  # of one response they are the same
    now[0] = 104.0
    episode.hear("told", np.array([30], np.int32))
    episode.spend("tool_s", 0.5)
    now[0] = 108.25
    episode.say(replace(said([40], [-3.0], [6], 3), timings={"prefill_s": 0.25, "decode_s": 3.0}))
    now[0] = 109.0
    episode.spend("reward_s", 0.75)
    rollout = episode.rollout("env", "problem")
    assert [turn.timings for turn in rollout.turns] == [
        (),
        (("rest_s", 2.0), ("wait_s", 0.5), ("decode_s", 1.0)),
        (("tool_s", 0.5),),
        (("rest_s", 1.0), ("prefill_s", 0.25), ("decode_s", 3.0), ("reward_s", 0.75)),
    ]
    assert rollout.timings == {"wait_s": 0.5, "decode_s": 4.0, "tool_s": 0.5, "prefill_s": 0.25, "reward_s": 0.75}


@pytest.mark.parametrize(("tokens", "reason"), [([20], "aborted"), ([], "stop")])
def test_an_answer_that_did_not_come_about_has_no_reward(tokens, reason):
    episode = EpisodeBuilder("ask", PROMPT, Decoding())
    with pytest.raises(EnvironmentFailure, match="no answer to score"):
        episode.say(said(tokens, [-1.0] * len(tokens), [1] * len(tokens), 1, reason=reason))


class Counting(GroupScoredEnvironment):
    """Rewards the longest answer, and says how long it is; one problem has nothing to say."""

    def train_examples(self):
        return [Example(letter, letter) for letter in "ab"]

    def eval_examples(self):
        return [Example("c", "c")]

    def score_group(self, example, completions):
        lengths = [len(completion.text) for completion in completions]
        rewards = [float(length == max(lengths)) for length in lengths]
        return rewards if example.prompt == "b" else Scores(rewards, {"longest": max(lengths)})


def test_answers_that_are_scored_together_have_the_seconds_of_all(policy, decoding):
    class Slow(Counting):
        def score_group(self, example, completions):
            time.sleep(0.03)
            return super().score_group(example, completions)

    groups, _ = Slow("counting").sample(policy("x<eos>"), 2, 3, decoding, 0, "train")
    for group in groups:
        (reward_s,) = {rollout.timings["reward_s"] for rollout in group.rollouts}
        assert reward_s >= 0.03


def test_metrics_of_a_group_are_averaged_over_the_groups_that_have_them(policy, decoding):
    said = policy(lambda prompt, j, seed: "x" * (j + 1 if prompt == "a" else 9) + "<eos>")
    groups, metrics = Counting("counting").sample(said, 2, 3, decoding, 0, "train")
    rewards = {group.key: group.rewards.tolist() for group in groups}
    assert rewards == {"counting:a": [0.0, 0.0, 1.0], "counting:b": [1.0] * 3}
    assert metrics == {"longest": 3.0, "failed_groups": 0.0}


@pytest.mark.parametrize("score", [None, "0.5", float("nan"), [0.5]])
def test_a_score_that_is_no_number_is_told_as_what_it_is(policy, decoding, score):
    class Single(SingleTurnEnvironment):
        examples = [Example(str(n), f"{n}?") for n in range(9)]

        def score(self, example, text, completion):
            return score

    with pytest.raises(EnvironmentFailure, match=r"^Single\.score returned .*: it must return a finite number$"):
        Single().sample(policy("yes<eos>"), 1, 2, decoding, 0, "train")


def test_a_score_that_is_async_is_refused(policy, decoding):
    class Single(SingleTurnEnvironment):
        examples = [Example(str(n), f"{n}?") for n in range(9)]

        async def score(self, example, text, completion):
            return 0.5

    with pytest.raises(EnvironmentFailure, match=r"^Single\.score is async: write it without$"):
        Single().sample(policy("yes<eos>"), 1, 2, decoding, 0, "train")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (Scores([1.0, None]), "Broken returned None as reward 1"),
        (Scores([1.0, 1.0], {"x": float("nan")}), "environment 'broken': metric 'x' is nan: not a finite number"),
    ],
)
def test_malformed_scores_fail_their_group(policy, decoding, scores, message):
    class Broken(Counting):
        def score_group(self, example, completions):
            return scores

    with pytest.raises(EnvironmentFailure, match=message):
        Broken("broken").sample(policy("x<eos>"), 1, 2, decoding, 0, "train")
