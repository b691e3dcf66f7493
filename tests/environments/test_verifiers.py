"""Environments of verifiers, against the real package: one turn, several, tools, rubrics, and what is refused."""

import signal
import sys
import textwrap
from typing import Any

import pytest
from tests.text.test_chat_templates import directory  # noqa: F401  (a fixture)

from penstock.environments import VerifiersEnvironment, load_environment
from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, EnvironmentFailure, EnvironmentSpec

CLASS = "penstock.environments.VerifiersEnvironment"

MODULE = '''
import asyncio

import verifiers as vf
from datasets import Dataset

EVENTS = []


def rows(n=10, start=0):
    return Dataset.from_list(
        [{"question": f"Say {i}.", "answer": str(i), "info": {"twice": 2 * i}} for i in range(start, start + n)]
    )


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


async def brief(completion, state, prompt, info, weight=3, **rest):
    await asyncio.sleep(0)
    assert prompt[-1]["content"].startswith("Say") and info["twice"] == 2 * int(state["answer"]) and "answer" in rest
    return 1.0 if len(completion[-1]["content"]) <= 2 else 0.0


def single(n=10, held_out=0, system=None):
    rubric = vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(
        dataset=rows(n), eval_dataset=rows(held_out, n - 1) if held_out else None, rubric=rubric, system_prompt=system
    )


def broken():
    def fails(completion):
        raise KeyError("what")

    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[exact, fails]))


def group():
    def best(completions, answers):
        return [1.0] * len(completions)

    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[best]))


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        EVENTS.append("setup")
        state["heard"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        said = int(messages[-1]["content"])
        state["heard"].append(said)
        if said == 99:
            state["final_env_response"] = [{"role": "user", "content": "enough"}]
        return [{"role": "user", "content": "higher" if said < int(state["answer"]) else "lower"}]

    @vf.stop
    async def is_right(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    @vf.cleanup
    async def tidy(self, state):
        EVENTS.append("cleanup")

    @vf.teardown
    async def end(self):
        EVENTS.append("teardown")


async def quick(state, completion):
    assert completion[0]["role"] == "assistant" and state["is_completed"]
    return 1 / len(state["trajectory"]) if state["stop_condition"] == "is_right" else 0.0


def guess(max_turns=4):
    return Guess(dataset=rows(6), rubric=vf.Rubric(funcs=[quick]), max_turns=max_turns)


def same(n=64, answers=True):
    hidden = [{"answer": str(i)} if answers else {"info": {"hidden": i}} for i in range(n)]
    data = Dataset.from_list([{"question": "Guess my number.", **each} for each in hidden for _ in range(2)])
    return Guess(dataset=data, rubric=vf.Rubric(funcs=[quick]))


def multiply(a: int, b: int) -> int:
    """The product.

    Args:
        a: One factor.
        b: The other.
    """
    return a * b


async def divide(a: int, b: int) -> float:
    """The quotient."""
    return a / b


def tools():
    data = Dataset.from_list([{"question": f"{i}*7=", "answer": str(7 * i)} for i in range(10)])
    return vf.ToolEnv(tools=[multiply, divide], dataset=data, rubric=vf.Rubric(funcs=[exact]), max_turns=5)


class Moving(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["prompt"] = [vf.UserMessage(content="another")]
        return state

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "?"}]


class Rewriting(Moving):
    async def setup_state(self, state):
        return state

    async def get_prompt_messages(self, state):
        return [vf.UserMessage(content="all is new")]


def moving():
    return Moving(dataset=rows(), rubric=vf.Rubric(funcs=[exact]))


def rewriting():
    return Rewriting(dataset=rows(), rubric=vf.Rubric(funcs=[exact]))


def members():
    return vf.EnvGroup([single(), guess()])


load_environment = single
'''


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"verifiers cannot be imported .*: pip install 'penstock\[verifiers\]'"):
        load_environment(EnvironmentSpec(CLASS, {"env_id": "wordle"}))


@pytest.fixture
def made(tmp_path, monkeypatch):
    reason = "needs the extra verifiers (docs/decisions/019-adapters-are-extras.md): make test-adapters"
    pytest.importorskip("verifiers", reason=reason)
    import datasets

    datasets.disable_progress_bars()
    file = tmp_path / "say_numbers.py"
    file.write_text(textwrap.dedent(MODULE), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    environments: list[Any] = []

    def make(function: str, **arguments: Any) -> VerifiersEnvironment:
        given = {"env_id": f"{file}:{function}" if function != "say-numbers" else function, **arguments}
        environments.append(load_environment(EnvironmentSpec(CLASS, given)))
        return environments[-1]

    yield make
    for environment in environments:
        environment.close()
    sys.modules.pop("say_numbers", None)


def play(environment, answers, n=1, codec=None, n_examples=1, tokens=96, mode="train", ordered=True):
    context = ScriptedContext(codec or Tokenizer.load("penstock"), answers, ordered=ordered)
    groups, metrics = environment.sample(context, n_examples, n, Decoding(max_output_tokens=tokens), 3, mode)
    return [rollout for group in groups for rollout in group.rollouts], metrics, context


def test_by_the_name_of_a_module_with_its_arguments(made):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    environment = made("say-numbers", args={"n": 20}, template="plain")
    assert environment.name == "say-numbers" and environment.max_turns == 1
    assert len(environment.train_examples()) + len(environment.eval_examples()) == 20
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before, "they are the run's"


def test_weighted_functions_by_name_async_ones_too(made):
    environment = made("single", template="plain")
    rollouts, metrics, _ = play(environment, lambda prompt, _: prompt[4:-1], n_examples=4)
    assert [rollout.episode_reward for rollout in rollouts] == [1.25] * 4
    assert metrics["rewards/exact/mean"] == metrics["rewards/brief/mean"] == metrics["turns"] == 1.0
    rollouts, metrics, _ = play(environment, ["no", "neither"], n=2)
    assert [rollout.episode_reward for rollout in rollouts] == [0.25, 0.0]
    assert metrics["rewards/exact/mean"] == 0.0 and metrics["rewards/brief/mean"] == 0.5


def test_rows_that_are_held_out_are_not_trained_on(made):
    environment = made("single", args={"n": 10, "held_out": 3, "system": "Be brief."})
    assert [example.answer for example in environment.eval_examples()] == ["9", "10", "11"]
    assert [example.answer for example in environment.train_examples()] == [str(i) for i in range(9)]
    first = environment.train_examples()[0]
    assert first.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 0."}]


@pytest.mark.parametrize("answers", [True, False])
def test_games_that_begin_with_the_same_words_are_problems_by_what_is_hidden(made, answers):
    environment = made("same", args={"answers": answers})

    def hidden(examples):
        return {each.answer or str(each.columns["info"]) for each in examples}

    train, held_out = environment.train_examples(), environment.eval_examples()
    assert len(train) + len(held_out) == 128 and 2 <= len(held_out) <= 32
    assert hidden(train).isdisjoint(hidden(held_out)) and len(hidden(train) | hidden(held_out)) == 64


def test_a_reward_function_that_raises_fails_its_group(made):
    with pytest.raises(EnvironmentFailure, match="reward function fails raised KeyError: 'what'"):
        play(made("broken", template="plain"), ["1"])


@pytest.mark.parametrize("ordered", [True, False], ids=["in rounds", "at their own pace"])
def test_several_turns_with_stop_conditions_setup_and_cleanup(made, ordered):
    environment = made("guess", template="plain")
    events = sys.modules[type(environment.environment).__module__].EVENTS
    first = environment.train_examples()[0]
    right = {f"Say {i}.": i for i in range(6)}

    def answers(text, seed):
        prompt = text[: text.index(".") + 1]
        return str(right[prompt]) if "lower" in text else "9"

    rollouts, metrics, _ = play(environment, answers, n=3, ordered=ordered)
    assert [rollout.episode_reward for rollout in rollouts] == [0.5] * 3
    tokens = Tokenizer.load("penstock")
    for rollout in rollouts:
        whole = [*rollout.prompt_tokens, *rollout.response_tokens]
        said = [tokens.decode(whole[turn.start : turn.stop]) for turn in rollout.turns]
        assert said[1:3] == ["9", "lower"] and said[0] == f"Say {said[3]}."
        masks = [bool(rollout.response_mask[t.start - len(rollout.prompt_tokens)]) for t in rollout.turns[1:]]
        assert masks == [True, False, True]
    assert metrics["turns"] == 2.0 and metrics["rewards/quick/mean"] == 0.5 and metrics["rewards/num_turns/mean"] == 2
    assert sorted(events) == ["cleanup"] * 3 + ["setup"] * 3
    environment.close()
    environment.close()
    assert events[-1] == "teardown" and events.count("teardown") == 1
    assert first.answer in "012345"


def test_its_own_limits_and_last_words_end_a_conversation(made):
    environment = made("guess", args={"max_turns": 3}, template="plain")
    (rollout,), metrics, _ = play(environment, ["77"])
    assert metrics["turns"] == 3.0 and rollout.episode_reward == 0.0
    (rollout,), metrics, _ = play(environment, ["99"])
    assert metrics["turns"] == 1.0 and [turn.role for turn in rollout.turns] == ["user", "assistant"]
    (rollout,), metrics, _ = play(made("guess", template="plain", max_turns=2), ["77"])
    assert metrics["turns"] == 2.0 and metrics["ended_by_turns"] == 1.0, "ours holds, too"
    (rollout,), metrics, _ = play(environment, ["7" * 50], tokens=20)
    assert rollout.finish_reason == "length" and metrics["ended_by_tokens"] == 1.0 and rollout.episode_reward == 0.0


def test_a_conversation_that_fails_is_cleaned_up(made):
    environment = made("guess", template="plain")
    events = sys.modules[type(environment.environment).__module__].EVENTS
    with pytest.raises(EnvironmentFailure, match=r"is_done raised ValueError.*invalid literal for int.*'x'"):
        play(environment, ["x"])
    assert events == ["setup", "cleanup"]


def test_tools_are_shown_called_and_told_of_errors(made, directory):  # noqa: F811
    environment = made("tools")
    tools = environment.chat_template_kwargs(environment.train_examples()[0])["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["multiply", "divide"]
    assert tools[0]["function"]["description"] == "The product."
    assert set(tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}

    def answers(text, seed):
        factor = text.split("*7=")[0].split()[-1].split(">")[-1].strip("\n")
        calls = [
            f'<tool_call>{{"name": "multiply", "arguments": {{"a": {factor}, "b": 7}}}}</tool_call>',
            '<tool_call>{"name": "divide", "arguments": {"a": 1, "b": 0}}</tool_call>',
            "<tool_call>multiply(3, 7)</tool_call>",
            '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        ]
        turn = text.count("</tool_call>")
        return calls[turn] if turn < 4 else str(int(factor) * 7)

    (rollout,), metrics, _ = play(environment, answers, codec=Tokenizer.load(str(directory("qwen2.5"))), tokens=900)
    told = [turn.content for turn in rollout.turns if turn.role == "tool"]
    assert len(told) == 4 and rollout.episode_reward == 1.0
    product = rollout.turns[-1].content
    assert product in told[0] and "division by zero" in told[1] and "Expecting value" in told[2] and "add" in told[3]
    assert metrics["rewards/total_tool_calls/mean"] == 4.0 and metrics["rewards/multiply_calls/mean"] == 1.0


def test_plain_prompts_stop_at_a_call_and_read_tagged_answers(made):
    environment = made("tools", template="plain")
    assert environment.stop_strings(True) == ("</tool_call>",)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
    (rollout,), _, _ = play(environment, [call, "6"], tokens=300)
    assert rollout.turns[2].content == "<tool_response>6</tool_response>"


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("moving", "its setup_state changes the prompt: this is not supported"),
        ("rewriting", "it writes its conversation anew"),
    ],
)
def test_conversations_that_cannot_be_kept_token_by_token_fail_with_a_line(made, function, line):
    with pytest.raises(EnvironmentFailure, match=line):
        play(made(function, template="plain"), ["1"])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"function": "group"}, r"reward functions of whole groups \(best\) are not supported"),
        ({"function": "members"}, r"is a EnvGroup: SingleTurnEnv, MultiTurnEnv, ToolEnv"),
        ({"function": "singel"}, r"has no 'singel' \(did you mean 'single'\?\)"),
        ({"function": "single", "args": {"m": 3}}, r"refused env_args: TypeError: .*'m'"),
        ({"function": "single", "eval_fraction": 0.0}, r"env_args.eval_fraction is 0.0: it takes a number between"),
        ({"function": "single", "max_turn": 3}, r"refused env_args: TypeError: .*'max_turn'"),
    ],
)
def test_mistakes_are_one_line(made, given, line):
    with pytest.raises(ConfigError, match=line):
        made(**given)


def test_a_module_that_is_not_installed_is_named(made):
    with pytest.raises(ConfigError, match=r"env_args.env_id 'say-number': no module named 'say_number'"):
        load_environment(EnvironmentSpec(CLASS, {"env_id": "say-number"}))
