import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.inference import codec as module
from penstock.inference.codec import MalformedAnswer, PenstockDialect, largest_body_bytes
from penstock.inference.sequence import LONGEST_STOP_STRING, MOST_STOP_STRINGS
from penstock.types import Decoding, EnvironmentFailure, GenerationCall, WeightVersion


def prompt(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def call(prompts=("ab", "c"), n=2, seeds=(11, 12), **decoding):
    return GenerationCall([prompt(p) for p in prompts], n, Decoding(**decoding), seeds)


def choice(index, text="x", **changes):
    tokens = list(text.encode())
    return {
        "index": index, "finish_reason": "stop", "token_ids": tokens, "token_logprobs": [-0.5] * len(tokens),
        "weight_steps": [3] * len(tokens), "oldest_weight_step": 2, "lineage": 1,
    } | changes  # fmt: skip


def test_a_request_says_everything_that_is_asked_for(codec):
    (request,) = PenstockDialect().requests(
        call(temperature=0.7, top_k=5, top_p=0.9, max_output_tokens=30, stop_strings=("x", "y"), min_p=0.1), codec,
        "policy", WeightVersion(2, 40),
    )  # fmt: skip
    assert json.loads(request.body) == {
        "model": "policy", "prompt": [[97, 98], [99]], "n": 2, "seeds": [11, 12], "temperature": 0.7, "top_k": 5,
        "top_p": 0.9, "min_p": 0.1, "max_tokens": 30, "stop": ["x", "y"], "stop_token_ids": [256],
        "return_token_ids": True, "least_weights": [2, 40],
    }  # fmt: skip
    assert request.tokens == 3 + 4 * 30


def test_stop_tokens_of_the_call_win_over_the_tokenizers(codec):
    (request,) = PenstockDialect().requests(call(stop_token_ids=(7, 9)), codec, "policy")
    assert json.loads(request.body)["stop_token_ids"] == [7, 9] and "least_weights" not in json.loads(request.body)


def test_a_large_call_goes_in_several_requests(codec, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_TOKENS", 50)
    sizes = [1, 1, 45, 60, 1]
    large = call(["a" * size for size in sizes], 1, range(5), max_output_tokens=4)
    requests = PenstockDialect().requests(large, codec, "policy")
    assert [[len(p) for p in json.loads(r.body)["prompt"]] for r in requests] == [[1, 1], [45], [60], [1]]
    assert [json.loads(r.body)["seeds"] for r in requests] == [[0, 1], [2], [3], [4]]
    assert [r.tokens for r in requests] == [10, 49, 64, 5]
    monkeypatch.setattr(module, "REQUEST_RESPONSES", 4)
    few = PenstockDialect().requests(call(["a"] * 5, 2, range(5), max_output_tokens=1), codec, "policy")
    assert [len(json.loads(r.body)["prompt"]) for r in few] == [2, 2, 1]


def test_an_answer_becomes_completions_in_order(codec):
    asked = call(stop_strings=("!",))
    (request,) = PenstockDialect().requests(asked, codec, "policy")
    exact = np.float32(-1 / 3)
    choices = [
        choice(0, "hi!?"),
        choice(1),
        choice(2, "", finish_reason="length"),
        choice(3, "zz", weight_steps=[4, 5], engine="inference-1#2"),
    ]
    choices[1]["token_logprobs"] = [float(exact)]
    groups = request.read(json.dumps({"choices": choices}).encode())
    assert [len(group) for group in groups] == [2, 2]
    first, second, third, fourth = (completion for group in groups for completion in group)
    assert first.prompt_tokens is asked.prompts[0] and third.prompt_tokens is asked.prompts[1]
    assert first.text == "hi!", "the stop string belongs to it, and nothing after"
    assert first.response_tokens.tolist() == list(b"hi!?") and first.response_tokens.dtype == np.int32
    assert second.response_logprobs.dtype == np.float32 and second.response_logprobs[0] == exact
    assert (third.finish_reason, len(third.response_tokens), third.text) == ("length", 0, "")
    assert fourth.weight_steps.tolist() == [4, 5] and fourth.weight_steps.dtype == np.int32
    assert (fourth.oldest_weight_step, fourth.lineage) == (2, 1)
    assert (first.engine, fourth.engine) == ("", "inference-1#2")


def test_a_logprob_that_is_not_finite_stays_so(codec):
    (request,) = PenstockDialect().requests(call(["a"], 1, [1]), codec, "policy")
    answer = {"choices": [choice(0, "ab", token_logprobs=[None, -1])]}
    ((completion,),) = request.read(json.dumps(answer).encode())
    assert np.isnan(completion.response_logprobs).tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"index": 1}, "choice 0 says that it is choice 1"),
        ({"token_ids": [1, 2]}, "2 tokens, 1 weight steps and 1 log-prob"),
        ({"token_ids": [-1]}, "token_ids is not a list of natural numbers"),
        ({"token_ids": [1.5]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [1 << 40]}, "below 2"),
        ({"token_ids": "ab"}, "token_ids"),
        ({"weight_steps": [None]}, "weight_steps"),
        ({"token_logprobs": ["0.5"]}, "token_logprobs is not"),
        ({"token_logprobs": [[1]]}, "token_logprobs is not"),
        ({"token_logprobs": None}, "token_logprobs is not"),
        ({"token_logprobs": [1e300]}, "no float32"),
        ({"token_logprobs": [10**400]}, "OverflowError"),
        ({"oldest_weight_step": -1}, "oldest_weight_step is -1"),
        ({"lineage": "1"}, "lineage is '1'"),
        ({"engine": 3}, "engine is 3, not a name"),
        ({"age_s": -0.1}, "age_s is -0.1, not a number of seconds"),
        ({"age_s": "now"}, "age_s is 'now', not a number of seconds"),
        ({"timings": [1.0]}, r"timings is \[1.0\], not an object"),
        ({"timings": {"decode_s": -1}}, "decode_s is -1, not a number of seconds"),
        ({"engine": "e" * 257}, "engine is 'e.*, not a name of at most 256"),
        ({"finish_reason": "aborted"}, "finish_reason is 'aborted'"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(codec, change, said):
    (request,) = PenstockDialect().requests(call(["a"], 1, [1]), codec, "policy")
    with pytest.raises(MalformedAnswer, match=said):
        request.read(json.dumps({"choices": [choice(0) | change]}).encode())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b'{"choices": 5}', b'{"choices": [[]]}',
                                     b'{"choices": []}', b'{"choices": [5]}', b"[" * 100_000, b"\xff\xfe"])  # fmt: skip
def test_what_is_no_answer_is_refused(codec, content):
    (request,) = PenstockDialect().requests(call(["a"], 1, [1]), codec, "policy")
    with pytest.raises(MalformedAnswer):
        request.read(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted(choice(0))), value=json_values)
def test_any_value_in_any_place_is_read_or_refused(codec, name, value):
    (request,) = PenstockDialect().requests(call(["a"], 1, [1]), codec, "policy")
    content = json.dumps({"choices": [choice(0) | {name: value}]}).encode()
    try:
        ((completion,),) = request.read(content)
    except MalformedAnswer:
        return
    assert len(completion.response_tokens) == len(completion.response_logprobs) == len(completion.weight_steps)


@pytest.mark.parametrize("bad", [np.zeros(2), np.zeros((1, 2), np.int32), np.zeros(2, np.int64)])
def test_a_prompt_must_be_int32(codec, bad):
    with pytest.raises(EnvironmentFailure, match="must be int32"):
        PenstockDialect().requests(GenerationCall([bad], 1, Decoding(), [1]), codec, "policy")


def test_a_prompt_without_a_seed_is_a_mistake(codec):
    with pytest.raises(ValueError, match="2 prompts have 1 seeds"):
        PenstockDialect().requests(call(seeds=(1,)), codec, "policy")


@pytest.mark.parametrize("max_seq_len", [64, 1024, pytest.param(131_072, marks=pytest.mark.slow)])
def test_the_largest_round_fits_the_servers_limit(codec, max_seq_len):
    """As many prompts, as long prompts, and as awkward stop strings as there may be, with the largest seeds."""
    wide = GenerationCall(
        [np.full(3, 256, np.int32)] * module.REQUEST_RESPONSES, 1,
        Decoding(max_output_tokens=1, stop_strings=("\x00" * LONGEST_STOP_STRING,) * MOST_STOP_STRINGS),
        [2**63] * module.REQUEST_RESPONSES,
    )  # fmt: skip
    long = GenerationCall([np.full(max_seq_len, 256, np.int32)] * 40, 4, wide.decoding, [2**63] * 40)
    newest = WeightVersion(2**31 - 1, 2**31 - 1)
    sizes = [
        len(request.body)
        for call in (wide, long)
        for request in PenstockDialect().requests(call, codec, "policy", newest)
    ]
    most = largest_body_bytes(max_seq_len, codec.vocab_size)
    assert max(sizes) <= most < 2 * max(sizes)


def test_half_of_a_surrogate_pair_in_a_stop_string_arrives(codec):
    (request,) = PenstockDialect().requests(call(stop_strings=("\ud800", "\U0001f600")), codec, "policy")
    assert json.loads(request.body)["stop"] == ["\ud800", "\U0001f600"]
