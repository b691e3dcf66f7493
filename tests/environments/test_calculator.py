"""The calculator as a tool in two turns."""

import pytest

from penstock.environments import CalculatorEnvironment
from penstock.environments.calculator import tool_reply
from penstock.types import Decoding, EnvironmentFailure

from .conftest import CLOSE_CALL, EOS

RIGHT = "right"


def script(call="<calc>{}</calc>", answer=RIGHT):
    """First turn: a call with the prompt's expression; second turn: the tool's result, or a fixed answer."""

    def reply(conversation, j, seed):
        if "<result>" not in conversation:
            return call.format(conversation.rstrip("="))
        result = conversation.rpartition("<result>")[2].removesuffix("</result>")
        return (result if answer == RIGHT else answer) + "<eos>"

    return reply


def sample(context, n_examples=1, n=1, tokens=128, **arguments):
    environment = CalculatorEnvironment(**arguments)
    return environment.sample(context, n_examples, n, Decoding(max_output_tokens=tokens), 3, "train")


def test_a_whole_conversation_token_by_token(policy):
    context = policy(script())
    groups, metrics = sample(context)
    rollout = groups[0].rollouts[0]
    expression = rollout.env_example_id
    tokenizer = context.tokenizer
    roles = [turn.role for turn in rollout.turns]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert metrics == {"failed_groups": 0.0, "tool_calls": 1.0}

    user, call, tool, answer = rollout.turns
    everything = [*rollout.prompt_tokens, *rollout.response_tokens]
    spans = [everything[turn.start : turn.stop] for turn in rollout.turns]
    assert [s for span in spans for s in span] == everything
    assert tokenizer.decode(spans[0]) == f"{expression}="
    assert tokenizer.decode(spans[1]) == f"<calc>{expression}</calc>" and spans[1][-1] == CLOSE_CALL
    assert tokenizer.decode(spans[2]) == tool_reply(f"<calc>{expression}</calc>")
    assert spans[3][-1] == EOS and f"<result>{tokenizer.decode(spans[3])}</result>" == tool.content

    p = len(rollout.prompt_tokens)
    told = range(tool.start - p, tool.stop - p)
    for position in range(len(rollout.response_tokens)):
        assert rollout.response_mask[position] == (position not in told)
        assert rollout.response_logprobs[position] == (0.0 if position in told else -0.5)
    assert rollout.episode_reward == pytest.approx(1.0)
    rewards = rollout.token_rewards
    assert rewards[call.stop - p - 1] == pytest.approx(0.4) and rewards[-1] == pytest.approx(0.6)
    assert rollout.finish_reason == "stop"


def test_sampled_tokens_are_the_next_prompt_as_they_are(policy):
    context = policy(script())
    rollout = sample(context)[0][0].rollouts[0]
    told = rollout.turns[2]
    second_prompt = context.calls[1][0][0]
    whole = [*rollout.prompt_tokens, *rollout.response_tokens]
    assert second_prompt.tolist() == whole[: told.stop]


@pytest.mark.parametrize(
    ("call", "answer", "reward", "turns"),
    [
        ("<calc>{}</calc>", "-999", 0.4, 4),  # right call, wrong answer
        ("<calc>1+1</calc>", "-999", 0.2, 4),  # a call that computes something else
        ("<calc>1/0</calc>", "-999", 0.0, 4),  # a call that fails is answered all the same
        ("<calc>import os</calc>", "-999", 0.0, 4),
        ("no idea<eos>", RIGHT, 0.0, 2),
        ("<calc>1+1", RIGHT, 0.0, 2),  # cut before the call was complete
    ],
)
def test_partial_credit(policy, call, answer, reward, turns):
    rollout = sample(policy(script(call, answer)))[0][0].rollouts[0]
    assert rollout.episode_reward == pytest.approx(reward)
    assert len(rollout.turns) == turns


def test_a_right_answer_without_a_call_counts(policy):
    from penstock.environments.expressions import calculate, show_number

    context = policy(lambda prompt, *_: show_number(calculate(prompt.rstrip("="))) + "<eos>")
    rollout = sample(context)[0][0].rollouts[0]
    assert rollout.episode_reward == pytest.approx(0.6)
    assert len(context.calls) == 1


def test_a_failed_call_is_told_so():
    assert tool_reply("<calc>1/0</calc>") == "<result>error</result>"
    assert tool_reply("x <calc>2*3</calc>") == "<result>6</result>"


def test_the_whole_response_keeps_to_its_budget(policy):
    def babble(conversation, j, seed):
        return "<calc>1+1</calc>" if "<result>" not in conversation else "9" * 500

    context = policy(babble)
    rollout = sample(context, tokens=128)[0][0].rollouts[0]
    assert len(rollout.response_tokens) <= 128
    assert rollout.finish_reason == "length"
    assert [call[2].max_output_tokens for call in context.calls] == [64, 32]


def test_a_result_too_long_for_the_budget_ends_the_episode(policy):
    context = policy(script("<calc>9999*9</calc>"))
    rollout = sample(context, tokens=48)[0][0].rollouts[0]  # a quarter: 12 tokens, the result takes 23
    assert [turn.role for turn in rollout.turns] == ["user", "assistant"]
    assert rollout.finish_reason == "length" and len(context.calls) == 1


def test_a_budget_without_room_for_a_call_is_refused(policy):
    with pytest.raises(EnvironmentFailure, match="max_output_tokens is 3"):
        sample(policy(script()), tokens=3)


def test_each_rollout_continues_with_a_seed_of_its_own(policy):
    def some_call(conversation, j, seed):
        return script()(conversation, j, seed) if j != 1 else "no idea<eos>"

    context = policy(some_call)
    groups, metrics = sample(context, n_examples=2, n=3)
    assert metrics["tool_calls"] == pytest.approx(2 / 3)
    assert [len(rollout.turns) for group in groups for rollout in group.rollouts] == [4, 2, 4] * 2
    prompts, n, _, seeds = context.calls[1]
    assert n == 1 and len(prompts) == 4 and len(set(seeds)) == 4


def test_stop_strings_of_the_lesson_are_kept(policy):
    context = policy(script())
    environment = CalculatorEnvironment()
    decoding = Decoding(max_output_tokens=128, stop_strings=("\n",))
    environment.sample(context, 1, 1, decoding, 3, "train")
    assert [call[2].stop_strings for call in context.calls] == [("\n", "</calc>"), ("\n",)]
