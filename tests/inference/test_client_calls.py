"""The calls that clients make of a server of this kind, each with what it must be: done, or refused by name.

By the official client where it has the call, else as raw HTTP. What answers say is tested beside their own modules.
"""

import json

import httpx
import numpy as np
import openai
import pytest

from penstock.inference import HttpServer, create_app
from penstock.text import Tokenizer

WAIT_S = 280.0
CALCULATE = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def url(served_engine, codec):
    server = HttpServer(create_app(served_engine, codec, "tiny"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def raw(url):
    with httpx.Client(base_url=url, timeout=WAIT_S) as raw:
        yield raw


def served_prompt(tokens):
    return np.array(list(tokens), np.int32)


def chat(client, **body):
    return client.chat.completions.create(**{"model": "tiny", "messages": [USER], "max_tokens": 3, "seed": 1} | body)


def complete(client, **body):
    return client.completions.create(**{"model": "tiny", "prompt": "go", "max_tokens": 3, "seed": 1} | body)


BOTH = pytest.mark.parametrize("call", [chat, complete])


# --- what works ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        {"n": 3},
        {"temperature": 0},
        {"stop": "e"},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"max_tokens": 10**9},
        {"extra_body": {"top_k": 5}},
        {"extra_body": {"min_p": 0.1}},
        {"extra_body": {"return_tokens_as_token_ids": True}},
    ],
    ids=str,
)
def test_sampling(client, call, body):
    answer = call(client, **body)
    assert len(answer.choices) == body.get("n", 1)
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@BOTH
def test_a_seed_repeats_exactly(client, call):
    said = [call(client, seed=seed, max_tokens=12).choices[0].to_dict() for seed in (5, 5, 6)]
    assert said[0] == said[1] != said[2]


def test_max_completion_tokens(client):
    answer = chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=2, extra_body={"stop_token_ids": [999]})
    assert answer.usage.completion_tokens == 2


def test_min_p_is_honoured(client):
    free = {complete(client, seed=seed, max_tokens=1, temperature=9.0).choices[0].text for seed in range(12)}
    kept = {
        complete(client, seed=seed, max_tokens=1, temperature=9.0, extra_body={"min_p": 1.0}).choices[0].text
        for seed in range(12)
    }
    assert len(free) > 1 and kept == {complete(client, max_tokens=1, temperature=0).choices[0].text}


def test_prompts_as_token_ids_and_lists(client):
    for prompt, choices in (([103, 111], 1), (["go", "on"], 2), ([[103, 111], [111]], 2)):
        assert len(complete(client, prompt=prompt).choices) == choices


def test_return_token_ids(client):
    (choice,) = complete(client, extra_body={"return_token_ids": True}).choices
    assert choice.prompt_token_ids == list(b"go") and len(choice.token_ids) == len(choice.token_logprobs)
    answer = chat(client, extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == list(b"user: hi\n") and answer.choices[0].token_ids


def test_models_health_and_tokenize(client, raw):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 64)
    assert raw.get("/health").status_code == raw.get("/ready").status_code == 200
    asked = {"prompt": "go", "return_token_strs": False}
    assert raw.post("/tokenize", json=asked).json()["tokens"] == list(b"go")
    asked = {"model": "tiny", "messages": [USER], "add_generation_prompt": True}
    assert raw.post("/tokenize", json=asked).json()["count"] == len(b"user: hi\n")


@BOTH
def test_streams(client, call):
    whole = call(client, max_tokens=12)
    *chunks, last = call(client, max_tokens=12, stream=True, stream_options={"include_usage": True})
    pieces = [getattr(choice, "text", None) or getattr(getattr(choice, "delta", None), "content", None) or ""
              for chunk in chunks for choice in chunk.choices]  # fmt: skip
    choice = whole.choices[0]
    assert "".join(pieces) == (choice.text if hasattr(choice, "text") else choice.message.content)
    assert last.usage == whole.usage and last.choices == []
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_logprobs_and_top_logprobs_of_a_conversation(client):
    asked = {"logprobs": True, "temperature": 0, "max_tokens": 6}
    bare = chat(client, **asked).choices[0].logprobs.content
    assert [each.top_logprobs for each in bare] == [[]] * len(bare)
    content = chat(client, **asked, top_logprobs=5).choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx([each.logprob for each in bare], abs=1e-5)
    for each in content:
        numbers = [top.logprob for top in each.top_logprobs]
        assert len(numbers) == 5 and numbers == sorted(numbers, reverse=True)
        assert (each.token, each.bytes, each.logprob) == tuple(
            getattr(each.top_logprobs[0], name) for name in ("token", "bytes", "logprob")
        )  # greedy: the most probable one, and the same number
        for top in each.top_logprobs:
            assert bytes(top.bytes).decode(errors="replace") == top.token
    chunks = chat(client, **asked, top_logprobs=5, stream=True)
    told = [each for chunk in chunks for choice in chunk.choices if choice.logprobs for each in choice.logprobs.content]
    assert told == content


def test_logprobs_of_a_completion(client):
    asked = {"max_tokens": 6, "seed": 3}
    none = complete(client, **asked, logprobs=0).choices[0].logprobs
    assert none.top_logprobs is None
    logprobs = complete(client, **asked, logprobs=5).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(none.token_logprobs, abs=1e-5)
    for token, number, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert number <= max(top.values()) and token in top and 1 <= len(top) <= 6
    parts = [chunk.choices[0].logprobs for chunk in complete(client, **asked, logprobs=5, stream=True)]
    assert [top for part in parts if part for top in part.top_logprobs] == logprobs.top_logprobs


def test_echo_scores_given_tokens_as_evaluation_harnesses_ask(client, served_engine):
    """The requests of lm-evaluation-harness: a batch of token ids, one token more, temperature 0."""
    prompts = [list(b"hello you"), list(b"go")]
    asked = {"prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    scores = [future.result(WAIT_S) for future in served_engine.score([served_prompt(p) for p in prompts], 0.0)]
    for max_tokens in (1, 0):
        answer = complete(client, **asked, max_tokens=max_tokens)
        for choice, prompt, score in zip(answer.choices, prompts, scores, strict=True):
            logprobs = choice.logprobs
            assert choice.text.startswith(bytes(prompt).decode())
            assert logprobs.tokens[: len(prompt)] == [chr(token) for token in prompt]
            assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
            assert len(logprobs.tokens) == len(prompt) + max_tokens
            assert logprobs.text_offset[: len(prompt)] == list(range(len(prompt)))
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert logprobs.token_logprobs[1 : len(prompt)] == score.logprobs.tolist()
            pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
            greedy = [number == max(top.values()) for number, top in pairs]
            assert greedy[: len(prompt) - 1] == (score.ranks == 1).tolist()
            assert greedy[len(prompt) - 1 :] == [True] * max_tokens
        assert answer.usage.completion_tokens == 2 * max_tokens and answer.usage.prompt_tokens == 11
        assert answer.system_fingerprint == "weights-2-7"


def test_echo_computes_a_prompt_once(client, served_engine):
    before = served_engine.stats()
    complete(client, prompt="computed once", echo=True, logprobs=0)
    after = served_engine.stats()
    assert after["inference/scored_tokens_total"] - before["inference/scored_tokens_total"] == len("computed once") - 1
    assert after["inference/prefill_tokens_total"] == before["inference/prefill_tokens_total"]


def test_echo_repeats_the_text_and_streams_it_first(client):
    said = complete(client).choices[0].text
    assert complete(client, echo=True, n=2).choices[0].text == "go" + said
    assert complete(client, echo=True, max_tokens=0).choices[0].to_dict() == {
        "index": 0, "text": "go", "finish_reason": "length", "logprobs": None,
    }  # fmt: skip
    asked = {"prompt": "gé", "echo": True, "logprobs": 2, "max_tokens": 30}  # whose answers have halves of characters
    whole = complete(client, **asked).choices[0]
    parts = [chunk.choices[0] for chunk in complete(client, **asked, stream=True)]
    assert parts[0].text == "gé" and parts[0].logprobs.token_logprobs[0] is None
    assert "".join(part.text for part in parts) == whole.text
    told = [number for part in parts if part.logprobs for number in part.logprobs.token_logprobs]
    assert told == whole.logprobs.token_logprobs
    offsets = [offset for part in parts if part.logprobs for offset in part.logprobs.text_offset]
    assert len(parts) > 4 and offsets == whole.logprobs.text_offset
    only = list(complete(client, echo=True, max_tokens=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in only) == "go" and only[-1].choices[0].finish_reason == "length"


def test_prompt_logprobs_as_vllm_tells_them(client, served_engine):
    (score,) = (f.result(WAIT_S) for f in served_engine.score([served_prompt(b"go on")], alternatives=2))
    found = complete(client, prompt="go on", extra_body={"prompt_logprobs": 2}).choices[0].prompt_logprobs
    assert found[0] is None and len(found) == 5
    for token, entry, logprob, rank, best in zip(
        b"o on", found[1:], score.logprobs, score.ranks, score.alternatives.tokens, strict=True
    ):
        assert entry[str(token)] == {"logprob": float(logprob), "rank": int(rank), "decoded_token": chr(token)}
        assert set(map(int, entry)) == {token, *best.tolist()}
    answer = chat(client, extra_body={"prompt_logprobs": 0})
    assert [len(entry) for entry in answer.prompt_logprobs[1:]] == [1] * (len(b"user: hi\n") - 1)


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": None, "tool_calls": [ASKED]},
         {"role": "tool", "tool_call_id": "call_1", "content": "3"}],
        [USER, {"role": "assistant", "content": "", "tool_calls": [ASKED], "refusal": None, "annotations": [],
                "audio": None, "function_call": None, "reasoning_content": None},
         {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": [{"type": "text", "text": "3"}]}],
        [USER, {"role": "assistant", "tool_calls": [ASKED | {"function": {"name": "add", "arguments": ""}}]},
         {"role": "tool", "tool_call_id": "call_1", "content": "3"}],
        [{"type": "text", **USER}],
    ],
    ids=["OpenAI's", "as answers are sent back", "without arguments", "lm-evaluation-harness's"],
)  # fmt: skip
def test_tools_and_histories_with_their_calls(client, messages):
    answer = chat(client, messages=messages, tools=[CALCULATE], tool_choice="auto", parallel_tool_calls=False)
    assert answer.choices[0].message.role == "assistant"
    answered = [*messages, answer.choices[0].message, USER]  # as the client's own loops do
    assert chat(client, messages=answered).choices[0].finish_reason


NEUTRAL = [
    {"top_k": -1}, {"min_p": 0.0}, {"min_p": None}, {"min_tokens": 0}, {"repetition_penalty": 1.0},
    {"ignore_eos": False}, {"skip_special_tokens": True}, {"length_penalty": 1.0}, {"prompt_logprobs": None},
    {"return_token_ids": True, "top_k": -1, "min_p": 0.0}, {"n": None, "stream": None, "stop": None, "seed": None},
    {"verbosity": None, "include_reasoning": True, "return_prompt_text": False, "return_token_offsets": False},
    {"routed_experts_prompt_start": 0}, {"prompt_cache_key": "a", "prompt_cache_retention": "24h"},
    {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}, {"response_format": {"type": "text"}},
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("extra", NEUTRAL, ids=str)
def test_neutral_values_ask_for_nothing(client, call, extra):
    assert call(client, extra_body=extra).choices[0].finish_reason


@pytest.mark.parametrize(
    "extra",
    [{"chat_template_kwargs": {}}, {"add_generation_prompt": True}, {"top_logprobs": None}, {"top_logprobs": 0},
     {"tools": []}, {"tool_choice": "none"}, {"echo": False}],
    ids=str,
)  # fmt: skip
def test_neutral_values_of_conversations(client, extra):
    assert chat(client, extra_body=extra).choices[0].finish_reason


def test_chat_template_kwargs_reach_the_template(client):
    prompts = [
        bytes(chat(client, extra_body={"return_token_ids": True, **extra}).prompt_token_ids)
        for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
    ]
    assert prompts == [b"user: hi\n", b"user: hi\nhush\n"]


def test_tokens_are_called_by_their_ids(client):
    asked = {"logprobs": 1, "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
    (choice,) = complete(client, **asked).choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]


def test_a_text_begins_as_the_tokenizer_says_unless_it_is_asked_not_to(served_engine, codec):
    class WithBeginning(type(codec)):
        def render(self, prompt, *others):
            tokens = super().render(prompt, *others)
            return served_prompt([1, *tokens]) if isinstance(prompt, str) else tokens

    server = HttpServer(create_app(served_engine, WithBeginning(), "tiny"))
    server.start()
    asked = {"model": "tiny", "max_tokens": 1, "return_token_ids": True}
    messages = {"messages": [USER]}
    try:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as raw:
            for extra, begins in (({}, [1]), ({"add_special_tokens": True}, [1]), ({"add_special_tokens": False}, [])):
                answer = raw.post("/v1/completions", json=asked | {"prompt": "go"} | extra).json()
                assert answer["choices"][0]["prompt_token_ids"] == [*begins, *b"go"]
                assert raw.post("/tokenize", json={"prompt": "go"} | extra).json()["tokens"] == [*begins, *b"go"]
            for path, body in (("/v1/chat/completions", asked | messages), ("/tokenize", messages)):
                assert raw.post(path, json=body | {"add_special_tokens": False}).is_success
                refused = raw.post(path, json=body | {"add_special_tokens": True})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")
    finally:
        server.stop()


def test_continue_final_message(client):
    messages = [USER, {"role": "assistant", "content": "I"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    assert chat(client, messages=messages, extra_body=extra).prompt_token_ids == list(b"user: hi\nassistant: I")


def test_metrics_version_and_detokenize(raw):
    assert "penstock_inference_scored_tokens_total" in raw.get("/metrics").text
    assert raw.get("/version").json()["version"]
    assert raw.post("/detokenize", json={"tokens": list(b"go")}).json() == {"prompt": "go"}


# --- what is refused, by name -----------------------------------------------------------------------------------------

IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        (chat, {"messages": [IMAGE]}, "messages"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format"),
        (chat, {"top_logprobs": 5}, "top_logprobs"),
        (chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (chat, {"tools": [CALCULATE], "tool_choice": "required"}, "tool_choice"),
        (chat, {"extra_body": {"echo": True}}, "echo"),
        (chat, {"presence_penalty": 0.5}, "presence_penalty"),
        (complete, {"presence_penalty": 0.5}, "presence_penalty"),
        (complete, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (complete, {"logit_bias": {"5": 1}}, "logit_bias"),
        (complete, {"suffix": "x"}, "suffix"),
        (complete, {"best_of": 3}, "best_of"),
        (complete, {"max_tokens": 0}, "max_tokens"),
        *((each, {"extra_body": {name: value}}, name) for each in (chat, complete) for name, value in (
            ("guided_json", {"type": "object"}), ("min_tokens", 2), ("ignore_eos", True), ("repetition_penalty", 1.1),
            ("skip_special_tokens", False), ("length_penalty", 2.0), ("nonsense", 1), ("prompt_logprobs", 21),
        )),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(client, call, body, param):
    with pytest.raises(openai.BadRequestError) as refused:
        call(client, **body)
    assert refused.value.param == param and param in refused.value.body["message"]
    assert refused.value.type == "invalid_request_error" and refused.value.code


LONG = {"role": "user", "content": "x" * 70}


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [(complete, {"prompt": "x" * 64}, "prompt"), (complete, {"prompt": [5] * 65}, "prompt"),
     (complete, {"prompt": "x" * 64, "stream": True}, "prompt"), (chat, {"messages": [LONG]}, "messages"),
     (chat, {"messages": [USER | {"content": "x" * 58}], "stream": True}, "messages")],
    ids=["a text", "tokens", "a stream", "a conversation", "a conversation whose answer has no room"],
)  # fmt: skip
def test_a_prompt_that_is_too_long_is_known_by_openais_code(client, call, body, param):
    """Agents cut the conversation short by it; LangChain looks for the code, LiteLLM for words."""
    with pytest.raises(openai.BadRequestError) as refused:
        call(client, **body)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)


def test_a_prompt_that_is_too_long_and_an_unknown_model(client, raw):
    with pytest.raises(openai.BadRequestError, match="prompt is too long: it has 64 tokens, which leaves no room"):
        complete(client, prompt="x" * 64)
    with pytest.raises(openai.NotFoundError, match="model 'gpt-4' does not exist"):
        chat(client, model="gpt-4")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
        assert [raw.post(path, json=body | {"model": name}).status_code for name in ("tiny", "gpt-4")] == [200, 404]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [("/v1/chat/completions", {"messages": [IMAGE]}, "type: Input should be 'text'"),
     ("/v1/completions", {"prompt": ["a", 1]}, "1: Input should be a valid string"),
     ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0: give content"),
     ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt is false")],
    ids=["a part of a message", "an entry of a list", "a message", "two values"],
)  # fmt: skip
def test_what_is_wrong_is_said_of_the_part_that_is_wrong(raw, path, body, said):
    message = raw.post(path, json={"model": "tiny"} | body).json()["error"]["message"]
    assert said in message and not message.startswith(":") and "Value error" not in message


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"model": "tiny", "input": "a"}), ("/v1/responses", {"model": "tiny", "input": "a"}),
     ("/chat/completions", {"model": "tiny", "messages": [USER]}), ("/v1/v1/completions", {"prompt": "a"}),
     ("/pause", {}), ("/collective_rpc", {"method": "reload_weights"}), ("/update_weight_version", {})],
)  # fmt: skip
def test_routes_that_are_not_there(raw, path, body):
    answer = raw.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 404 and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    told = f"POST {path}: Not Found; a client's base_url is http://HOST:PORT/v1"
    assert answer.json()["error"]["message"] == told and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("extra", "param", "said"),
    [({"tools": [CALCULATE]}, "tools", "the policy would not see them"),
     ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "takes no 'enable_thinking'"),
     ({"messages": [USER | {"role": 7}]}, "messages", "valid string")],
    ids=["tools", "a switch", "messages"],
)  # fmt: skip
def test_what_a_template_does_not_read_is_refused_under_the_name_of_the_request(served_engine, extra, param, said):
    server = HttpServer(create_app(served_engine, Tokenizer.load("penstock"), "tiny"))
    server.start()
    try:
        body = {"model": "tiny", "messages": [USER], "max_tokens": 1} | extra
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S)
    finally:
        server.stop()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert said in answer.json()["error"]["message"] and answer.json()["error"]["code"] == "invalid_value"
