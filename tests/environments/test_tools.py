"""Tools: schemas from signatures, calls in the forms that models write, answers to them, and whole conversations."""

import asyncio
import json
import threading
from functools import partial

import numpy as np
import pytest
from tests.text.test_chat_templates import directory  # noqa: F401  (a fixture)

from penstock.environments import Example, ToolEnvironment
from penstock.environments.tools import MOST_RESULT_CHARACTERS, tool_schema
from penstock.inference import ScriptedContext
from penstock.text import Tokenizer
from penstock.types import Decoding


def multiply(a: int, b: int = 2) -> int:
    """The product of two whole numbers."""
    return a * b


def fails(reason: str) -> str:
    raise RuntimeError(reason)


def hangs() -> None:
    RELEASED.wait(20)


def long() -> str:
    return "x" * 20_000


def table() -> dict[str, float]:
    return {"a": 1.5}


async def waits(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


RELEASED = threading.Event()
ALL = [multiply, fails, hangs, long, table, waits]


class Product(ToolEnvironment):
    def __init__(self, tools=ALL, **limits):
        super().__init__(tools, name="product", **limits)

    def train_examples(self):
        return [Example("6*7", "6*7=", "42")]

    def eval_examples(self):
        return [Example("2*2", "2*2=", "4")]

    def score(self, conversation):
        return float(conversation.text == conversation.example.answer)

    def solution(self, example):
        a, b = example.example_id.split("*")
        return [call("multiply", a=int(a), b=int(b)), example.answer]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_tool_is_said_in_json_schema():
    schema = tool_schema(multiply)
    assert schema["type"] == "function"
    function = schema["function"]
    assert (function["name"], function["description"]) == ("multiply", "The product of two whole numbers.")
    assert function["parameters"]["type"] == "object" and function["parameters"]["required"] == ["a"]
    assert {name: each["type"] for name, each in function["parameters"]["properties"].items()} == {
        "a": "integer", "b": "integer"
    }  # fmt: skip
    assert tool_schema(table)["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (lambda a: a, "argument 'a' must be an annotated one with a name"),
        (lambda *a: a, "argument 'a' must be an annotated one with a name"),
        (lambda **a: a, "argument 'a' must be an annotated one with a name"),
        (partial(table), "tool functools.partial.* has no name by which it could be called: write a function"),
    ],
)
def test_a_tool_that_cannot_be_said_is_refused(tool, message):
    with pytest.raises(ValueError, match=message):
        tool_schema(tool)


def test_an_argument_that_json_cannot_say_is_refused():
    def draws(source: np.random.Generator) -> float:
        return source.random()

    with pytest.raises(ValueError, match="tool draws: its arguments cannot be said in JSON"):
        tool_schema(draws)


@pytest.mark.parametrize("tools", [[], [multiply, multiply]])
def test_tools_have_names_of_their_own(tools):
    with pytest.raises(ValueError, match="give one or more, by different names"):
        Product(tools)


class Short(ToolEnvironment):
    """In the fewest lines."""

    tools = [multiply]
    examples = [Example(f"{a}*{b}", f"{a}*{b}=", str(a * b)) for a in range(9) for b in range(9)]

    def score(self, conversation):
        return float(conversation.text == conversation.example.answer)


def test_tools_and_name_are_those_of_the_class_unless_others_are_given():
    assert (Short().name, Short().tools) == ("Short", [multiply])
    assert Short([table], name="other").tools == [table] and Short.tools == [multiply]


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({}, True),
        ({"shown": False}, False),
        ({"system_prompt": "Call multiply."}, False),
        ({"template": "chat"}, False),
    ],
)
def test_tools_that_nobody_is_shown_are_warned_of_before_anything_is_sampled(given, warned, caplog):
    environment = Short(**given)
    environment.least_reported = 0
    n = environment.training_set().size
    said = f"environment Short: no policy is shown its tools (multiply) in {n} of {n} prompts, which are plain text"
    assert (said in caplog.text and "set template: chat, or say in system_prompt" in caplog.text) is warned
    assert warned or caplog.text == ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("multiply", a=6, b=7), "42"),
        (call("multiply", a=6), "12"),
        (call("multiply", a="6"), "12"),
        (call("multiply", a="six"), "error: multiply: a: Input should be a valid integer"),
        (call("multiply"), "error: multiply: a: Missing required argument"),
        (call("multiply", a=1, c=3), "error: multiply: c: Unexpected keyword argument"),
        (call("divide", a=1), "error: there is no tool 'divide'; there are multiply, fails, hangs, long, table, waits"),
        (call("fails", reason="so it is"), "error: fails: RuntimeError: so it is"),
        (call("hangs"), "error: hangs: no answer within 0.1 s"),
        (call("long"), "x" * MOST_RESULT_CHARACTERS),
        (call("table"), '{"a": 1.5}'),
        (call("waits", seconds=0), "waited"),
        (call("waits", seconds=20), "error: waits: no answer within 0.1 s"),
        ("<tool_call>no</tool_call>", 'error: a call is JSON: {"name": …, "arguments": {…}}'),
    ],
)
def test_a_call_is_answered_and_what_is_wrong_with_it_too(said, told):
    context = ScriptedContext(Tokenizer.load("penstock"), [said, "42"], max_seq_len=30_000)
    environment = Product(tool_seconds=0.1)
    groups, metrics = environment.sample(context, 1, 1, Decoding(max_output_tokens=30_000), 0, "train")
    rollout = groups[0].rollouts[0]
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "tool", "assistant"]
    assert rollout.turns[2].content.startswith(f"<tool_response>{told}")
    assert (metrics["tool_calls"], metrics["tool_errors"]) == (1.0, float(told.startswith("error")))
    assert rollout.episode_reward == 1.0
    RELEASED.set() if "hangs" in said else RELEASED.clear()


def test_the_template_shows_the_tools_and_their_results(directory):  # noqa: F811
    codec = Tokenizer.load(directory("qwen2.5"))
    context = ScriptedContext(codec, [call("multiply", a=6, b=7), "42"])
    environment = Product(tools=[multiply], template="chat")
    groups, metrics = environment.sample(context, 1, 1, Decoding(max_output_tokens=600), 0, "train")
    rollout = groups[0].rollouts[0]
    shown = codec.decode(context.calls[1].prompts[0], skip_special_tokens=False)
    assert '"description": "The product of two whole numbers."' in shown
    assert "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n" in shown
    messages = [
        {"role": "user", "content": "6*7="}, {"role": "assistant", "content": call("multiply", a=6, b=7)},
        {"role": "tool", "name": "multiply", "content": "42"},
    ]  # fmt: skip
    given = {"tools": [tool_schema(multiply)]}
    np.testing.assert_array_equal(context.calls[1].prompts[0], codec.render(messages, chat_template_kwargs=given))
    assert (metrics["rewritten"], metrics["turns"], rollout.episode_reward) == (0.0, 2.0, 1.0)
    assert call("multiply", a=6) not in shown


def test_who_calls_nothing_is_done_at_once():
    context = ScriptedContext(Tokenizer.load("penstock"), ["41"])
    groups, metrics = Product().sample(context, 1, 2, Decoding(max_output_tokens=100), 0, "train")
    assert [len(rollout.turns) for rollout in groups[0].rollouts] == [2, 2]
    assert metrics["tool_calls"] == 0.0 and "tool_errors" not in metrics


def test_the_solution_calls_and_answers():
    first, second = Product().reference_examples(2, 0)
    assert (first.response, first.ends) == (call("multiply", a=6, b=7), False)
    told = "<tool_response>42</tool_response>"
    assert (second.response, second.earlier) == ("42", (call("multiply", a=6, b=7), told))
