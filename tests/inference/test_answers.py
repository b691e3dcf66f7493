"""Answers in pieces say what whole answers say, whatever their pieces end in."""

import json
from concurrent.futures import Future
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.conftest import ByteCodec
from tests.waiting import wait_until

from penstock.inference import AccessRules, HttpServer, create_app
from penstock.inference.answers import AnswerForm, AnswerStream, PromptForm, TextStream, text_before_stop
from penstock.inference.sequence import text_of
from penstock.types import Completion, RunFailed

WAIT_S = 280.0
CODEC = ByteCodec()
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6}}</tool_call>'


def completed(content: bytes, stop: tuple[str, ...] = ()) -> Completion:
    """As the engine would finish a response of these bytes."""
    tokens = np.frombuffer(content, np.uint8).astype(np.int32)
    return Completion(
        np.array([1, 2], np.int32), tokens, np.full(len(tokens), -0.5, np.float32), np.full(len(tokens), 7, np.int32),
        7, 2, text_of(CODEC, tokens.tolist(), stop), "stop", "engine#1",
    )  # fmt: skip


def pieces(content: bytes, cuts: list[int], stop: tuple[str, ...] = (), tools: bool = False) -> list[str]:
    stream = TextStream(CODEC, stop, tools)
    ends = sorted({cut % (len(content) + 1) for cut in cuts} | {len(content)})
    told = [stream.add(list(content[a:b])) for a, b in zip([0, *ends], ends, strict=False)]
    return [*told, stream.finish(text_before_stop(completed(content, stop), stop))]


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode), st.lists(st.integers(0, 40), max_size=8))
def test_any_bytes_in_any_pieces(content, cuts):
    assert "".join(pieces(content, cuts)) == CODEC.decode(list(content))


@given(st.text("ab\n", max_size=12), st.lists(st.integers(0, 12), max_size=6), st.sampled_from(["\n\n", "aba", "b"]))
def test_no_part_of_a_stop_string_is_ever_told(said, cuts, stop):
    content = (said.partition(stop)[0] + stop if stop in said else said).encode()  # where the engine ends it
    told = pieces(content, cuts, (stop,))
    assert "".join(told) == said.partition(stop)[0]


def test_half_of_a_character_waits_and_what_must_come_is_told_at_once():
    assert pieces("aé".encode() + b"b", [1, 2, 3]) == ["a", "", "é", "b", ""]
    assert pieces(b"so <tool", [3], tools=True) == ["so ", "", "<tool"]
    assert pieces(b'{"answer": 4}', [1], tools=True) == ["", "", '{"answer": 4}']


def events(stream: AnswerStream, content: bytes, stop: tuple[str, ...] = ()) -> list[dict]:
    """Byte by byte, without the end of the stream, which must be there."""
    told = [*stream.begin(), *(stream.add(0, ([byte], [-0.5], None)) for byte in content)]
    told += stream.end([[completed(content, stop)]])
    assert told[-1] == b"data: [DONE]\n\n"
    return [json.loads(each.removeprefix(b"data: ")) for each in told[:-1] if each]


def read(calls: list[dict]) -> list[tuple[str, dict]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        (f"I will. {CALL}", "I will. ", [("multiply", {"a": 6})]),
        (CALL + CALL, "", [("multiply", {"a": 6})] * 2),
        ('{"name": "multiply", "parameters": {"a": 6}}', "", [("multiply", {"a": 6})]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("no call", "no call", []),
    ],
)
def test_calls_are_told_alike_whole_and_in_pieces(text, before, calls):
    form = AnswerForm(CODEC, "tiny", True, tools=9)
    (choice,) = form.answer([[completed(text.encode())]])["choices"]
    found = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in choice["message"].get("tool_calls", [])
    ]
    assert (choice["message"]["content"] or "", found) == (before, calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    told = [event["choices"][0] for event in events(AnswerStream(form, [PromptForm()]), text.encode())]
    deltas = [each["delta"] for each in told]
    assert "".join(delta.get("content") or "" for delta in deltas) == before
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert read(streamed) == calls
    assert [call["index"] for call in streamed] == list(range(len(calls)))
    assert [each["finish_reason"] for each in told] == [None] * (len(told) - 1) + [choice["finish_reason"]]


def test_without_tools_a_call_is_text():
    (choice,) = AnswerForm(CODEC, "tiny", True).answer([[completed(CALL.encode())]])["choices"]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]


def test_text_offsets_say_where_a_token_begins_in_the_text_also_amid_a_character():
    """Whole and streamed, with a prompt before it and a token that is no UTF-8."""
    said = "a😀b".encode() + b"\xffc\xf0\x9fd"
    form, prompt = AnswerForm(CODEC, "tiny", False, logprobs=0), PromptForm()
    (choice,) = form.answer([[completed(said)]])["choices"]
    assert choice["text"] == "a😀b\ufffdc\ufffdd"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 4, 5, 5, 6]
    stream, told = AnswerStream(form, [prompt]), []
    for piece in (said[:3], said[3:4], said[4:10], said[10:]):
        event = stream.add(0, (list(piece), [0.0] * len(piece), None))
        told += json.loads(event.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert told == choice["logprobs"]["text_offset"]


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(served_engine, codec):
    server = HttpServer(create_app(served_engine, codec, "tiny", AccessRules("a test's token")))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="a test's token", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_a_streamed_completion_is_the_whole_one(client):
    asked = {"model": "tiny", "prompt": ["hello", "you"], "n": 2, "max_tokens": 30, "seed": 4, "logprobs": 1}
    asked |= {"extra_body": {"return_token_ids": True}, "stop": ["e"]}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert chunks[-2].system_fingerprint == whole.system_fingerprint
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert len(parts) > 2 or len(choice.token_ids) < 9
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in getattr(part, "token_ids", [])] == choice.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        numbers = [number for part in parts if part.logprobs for number in part.logprobs.token_logprobs]
        assert numbers == choice.logprobs.token_logprobs


def test_streams_tell_the_tokens_of_their_prompts_once(client):
    asked = {"model": "tiny", "max_tokens": 9, "n": 2, "stream": True, "extra_body": {"return_token_ids": True}}
    chunks = client.completions.create(prompt=["hello", "you"], **asked)
    told = [(c.index, c.prompt_token_ids) for chunk in chunks for c in chunk.choices if hasattr(c, "prompt_token_ids")]
    prompts = [list(b"hello")] * 2 + [list(b"you")] * 2
    assert sorted(told) == list(enumerate(prompts))
    chunks = list(client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **asked))
    told = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    assert told == [list(b"user: hi\n")] and hasattr(chunks[0], "prompt_token_ids")
    asked["extra_body"] = {}
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in client.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], **asked))  # fmt: skip


def test_a_stream_counts_tokens_with_every_event_where_it_is_asked_to(client):
    asked = {"model": "tiny", "prompt": ["hello", "you"], "n": 2, "max_tokens": 30, "seed": 4, "stream": True}
    options = {"include_usage": True, "include_obfuscation": False}
    *chunks, last = client.completions.create(**asked, stream_options=options)
    assert all(chunk.to_dict()["usage"] is None for chunk in chunks) and last.usage.prompt_tokens == 8
    *chunks, last = client.completions.create(**asked, stream_options=options | {"continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {8}
    assert all("usage" not in chunk.to_dict() for chunk in client.completions.create(**asked))


def test_a_streamed_conversation(client):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "seed": 5}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len({chunk.id for chunk in chunks}) == 1


def test_a_stream_that_cannot_begin_is_an_error_as_ever(client):
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        client.completions.create(model="tiny", prompt="x" * 64, stream=True)


def test_who_leaves_a_stream_frees_its_slots(url, served_engine, monkeypatch):
    future: Future = Future()
    monkeypatch.setattr(served_engine, "submit", lambda requests: [future])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"authorization": "Bearer a test's token"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_S) as answer:
        assert next(answer.iter_bytes()).startswith(b"data: ") and not future.cancelled()
    wait_until(future.cancelled, "the future is cancelled")


@pytest.mark.parametrize(
    ("failure", "code"), [(RunFailed("device lost"), "engine_unavailable"), (None, "engine_unavailable")]
)
def test_a_stream_that_breaks_off_says_why(url, served_engine, monkeypatch, failure, code):
    future: Future = Future()
    if failure is None:  # the engine was stopped
        future.set_result([replace(completed(b"a"), finish_reason="aborted")])
    else:
        future.set_exception(failure)
    monkeypatch.setattr(served_engine, "submit", lambda requests: [future])
    body = {"model": "tiny", "prompt": "go", "stream": True}
    headers = {"authorization": "Bearer a test's token"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    (told,) = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert (answer.status_code, told["error"]["code"]) == (200, code)


def test_a_stream_has_a_limit(url, served_engine, monkeypatch):
    monkeypatch.setattr(served_engine, "submit", lambda requests: [Future()])
    monkeypatch.setattr(served_engine, "_config", served_engine.config.model_copy(update={"request_timeout_s": 0.05}))
    body = {"model": "tiny", "prompt": "go", "stream": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": "Bearer a test's token"})
    assert '"code":"timeout"' in answer.text and "within 0.05 s" in answer.text
