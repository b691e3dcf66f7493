import json

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.inference.schema import ApiError, ChatBody, CompletionBody, TokenizeBody
from penstock.inference.schema import read_body as read_bytes
from penstock.types import Decoding, fold


def read_body(kind, body, max_seq_len=64):
    return read_bytes(kind, json.dumps(body).encode(), max_seq_len)


def test_decoding_takes_every_parameter():
    body = read_body(
        CompletionBody,
        {"model": "m", "prompt": "p", "temperature": 0, "top_k": 5, "top_p": 0.5, "stop": ["a", "b"],
         "stop_token_ids": [3], "min_p": 0.05},
    )  # fmt: skip
    assert body.decoding(9) == Decoding(0.0, 5, 0.5, 9, (3,), ("a", "b"), 0.05)


def test_defaults_are_openais():
    body = read_body(CompletionBody, {"model": "m", "prompt": "p", "temperature": None, "stop": "x", "top_p": 1})
    assert body.max_tokens == 16
    assert body.decoding(16) == Decoding(1.0, None, None, 16, (), ("x",))  # top_p 1 is no truncation


def test_prompts_one_or_many():
    def prompts(prompt):
        return [p if isinstance(p, str) else p.tolist() for p in read(prompt).prompts]

    def read(prompt):
        return read_body(CompletionBody, {"model": "m", "prompt": prompt})

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]
    assert read([[1]]).prompts[0].dtype == np.int32


@pytest.mark.parametrize("prompt", [[1, "a"], [["a"]], 3, [True]])
def test_mixed_prompts_are_refused(prompt):
    with pytest.raises(ApiError) as raised:
        read_body(CompletionBody, {"model": "m", "prompt": prompt})
    assert raised.value.param == "prompt"


def test_messages_with_parts_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_body(ChatBody, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert body.messages[0].as_mapping() == {"role": "user", "content": "ab"}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_tools_and_what_became_of_their_calls_are_read():
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    switch = {"enable_thinking": False}
    body = read_body(ChatBody, {"model": "m", "messages": messages, "tools": [TOOL], "chat_template_kwargs": switch})
    assert body.given == {"enable_thinking": False, "tools": [TOOL]}
    call = CALL | {"function": {"name": "add", "arguments": {"a": 1}}}
    assert [message.as_mapping() for message in body.messages] == [
        messages[0], {"role": "assistant", "content": "", "tool_calls": [call]}, messages[2],
    ]  # fmt: skip
    tokenized = read_body(TokenizeBody, {"messages": messages[:1], "tools": [], "chat_template_kwargs": None})
    assert tokenized.given == {}


@pytest.mark.parametrize(
    "tool", [{}, {"type": "web_search"}, {"name": "add"}, {"function": "add"}, {"function": {"name": ""}},
             {"type": "x", "function": {"name": "add"}}],
)  # fmt: skip
def test_a_tool_without_a_function_is_refused_before_a_template_sees_it(tool):
    with pytest.raises(ApiError, match=r'^tools holds at 1 no {"type": "function"') as refused:
        read_body(ChatBody, {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": [TOOL, tool]})
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": None}, "messages.0: .*give content"),
        ({"role": "assistant"}, "messages.0: .*give content"),
        ({"role": "assistant", "tool_calls": []}, "messages.0: .*give content"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages.0.tool_calls.0: Input should be a valid dictionary"),
        ({"role": "tool", "content": "2", "odd": 1}, "messages.0.odd: Extra inputs"),
    ],
)
def test_messages_that_say_nothing_are_refused(message, said):
    with pytest.raises(ApiError, match=said):
        read_body(ChatBody, {"model": "m", "messages": [message]})


def test_arguments_that_are_not_json_are_refused():
    call = CALL | {"function": {"name": "add", "arguments": "{a"}}
    body = read_body(ChatBody, {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(ApiError, match="the arguments of a tool call are not JSON"):
        body.messages[0].as_mapping()


def test_images_are_refused_by_name():
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ApiError, match="messages.0.content") as raised:
        read_body(ChatBody, {"model": "m", "messages": [{"role": "user", "content": image}]})
    assert raised.value.status == 400


def test_seeds_are_the_prompts_own_or_derived_from_one():
    def seeds(**fields):
        return read_body(CompletionBody, {"model": "m", "prompt": ["a", "b"]} | fields).prompt_seeds(2)

    assert seeds(seeds=[7, 2**62]) == [7, 2**62]
    assert seeds(seed=7) == [fold(7, 0), fold(7, 1)]
    assert seeds() != seeds(), "nobody can foresee the noise"


@pytest.mark.parametrize("fields", [{"seeds": [1]}, {"seeds": []}, {"seeds": [1, 2], "seed": 1}, {"seeds": [1, "2"]}])
def test_seeds_that_do_not_fit_the_prompts_are_refused(fields):
    with pytest.raises(ApiError, match="seeds") as raised:
        read_body(CompletionBody, {"model": "m", "prompt": ["a", "b"]} | fields).prompt_seeds(2)
    assert (raised.value.status, raised.value.param) == (400, "seeds")


def chat(messages):
    return ChatBody, {"model": "m", "messages": messages}


def completion(**fields):
    return CompletionBody, {"model": "m", "prompt": "p"} | fields


@pytest.mark.attack
@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        (completion(prompt=[1] * 65), "prompt", "it has 65 tokens, which leaves no room"),
        (completion(prompt=[[1], [1] * 65]), "prompt", "it has 65 tokens, which leaves no room"),
        (completion(prompt=["a"] * 4097), "prompt", "prompt has 4097 entries: give at most 4096"),
        (completion(prompt=[{}] * 4096), "prompt", "prompt.list[str].0: Input should be a valid string"),
        (completion(stop=["a"] * 65), "stop", "stop has 65 entries: give at most 64"),
        (completion(seeds=[1] * 4097), "seeds", "seeds has 4097 entries"),
        (completion(stop_token_ids=[1] * 4097), "stop_token_ids", "stop_token_ids has 4097 entries"),
        (completion(odd=1, odder=2), "odd", "odd: Extra inputs are not permitted"),
        (chat([{"role": "user", "content": "a"}] * 4097), "messages", "messages has 4097 entries"),
        (chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}]), "messages", "4097 entries"),
        (chat([dict.fromkeys(map(str, range(100)))]), "messages", "has 100 names: at most 11 are known"),
        (chat([{"content": [dict.fromkeys(map(str, range(100)))]}]), "messages", "has 100 names: at most 11 are known"),
    ],
)
def test_lists_are_counted_before_they_are_validated(given, param, said):
    with pytest.raises(ApiError) as raised:
        read_body(*given)
    assert (raised.value.status, raised.value.param) == (400, param) and said in raised.value.message


@pytest.mark.attack
@pytest.mark.parametrize(
    "field", [{"prompt": [{}] * 4000}, {"stop": [{}] * 64}, {"seeds": [{}] * 4000}, {"stop_token_ids": [{}] * 4000}]
)
def test_the_first_error_ends_the_validation(field):
    """One for each arm of a union, however many entries there are."""
    with pytest.raises(ApiError) as raised:
        read_body(*completion(**field))
    assert isinstance(raised.value.__cause__, ValidationError) and raised.value.__cause__.error_count() <= 4
