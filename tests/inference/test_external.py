import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.vllm_server import FakeVllm
from tests.inference.pools import WAIT_S, metric, pools
from tests.waiting import wait_until

from penstock.inference import RemoteContext, Server
from penstock.inference.codec import InterruptedAnswer, MalformedAnswer
from penstock.inference.config import ExternalConfig, InferenceConfig
from penstock.inference.external import (
    OpenAiDialect,
    SglangDialect,
    VllmDialect,
    adapter_name,
    dialect_of,
    label_of,
    version_of_label,
)
from penstock.model.language import save_decoder
from penstock.types import ConfigError, Decoding, EnvironmentFailure, GenerationCall, WeightVersion, fold

make_pool = pytest.fixture(pools, name="make_pool")

SGLANG = json.loads((Path(__file__).parents[1] / "fakes" / "sglang_answers.json").read_text())
"""As SGLang 0.5.23 writes them by its source, which was read: none was recorded."""

ANSWERS = json.loads((Path(__file__).parent.parent / "fakes" / "vllm_answers.json").read_text())
"""Recorded of vLLM 0.32.0, its CPU build: a model of 382 tokens that Penstock wrote."""

PROMPT = np.array([5, 6, 7], np.int32)
SERVER = Server("inference-0", 2, "http://127.0.0.1:1", version=WeightVersion(0, 17))
URL = ("http://127.0.0.1:1",)


class WordCodec:
    """As much of a tokenizer as answers of the recorded model need."""

    vocab_size = 382
    stop_token_ids = (2,)

    def decode(self, tokens, skip_special_tokens=True):
        return "".join({323: "a"}.get(int(token), "-") for token in tokens)

    def encode(self, text):
        return np.array([323 if letter == "a" else 1 for letter in text], np.int32)

    def token_bytes(self, token):
        return self.decode([token]).encode()

    def render(self, prompt, max_tokens=None, chat_template_kwargs=None, continue_final=False):
        return self.encode(self.render_text(prompt))

    def render_text(self, prompt, chat_template_kwargs=None, continue_final=False):
        return str(prompt)


def external(**keys):
    return ExternalConfig(**({"urls": URL} | keys))


def call(n=1, prompts=(PROMPT,), **decoding):
    return GenerationCall(prompts, n, Decoding(**({"max_output_tokens": 4, "temperature": 0.8} | decoding)), [9])


def asked(call, dialect=None, least=None, server=SERVER, codec=None):
    dialect = dialect or VllmDialect(external(), 128)
    requests = dialect.requests(call, codec or WordCodec(), "policy", least)
    return [request.bound_to(server) for request in requests]


def recorded(name, version="0-17", **choice):
    body = json.loads(json.dumps(ANSWERS[name]["body"]))
    body["choices"][0] |= choice
    if "weight_versions" not in choice:
        body["choices"][0]["weight_versions"] = [
            {"version": version, "start": 0, "end": len(body["choices"][0]["token_ids"])}
        ]
    return json.dumps(body).encode()


def test_a_call_becomes_a_request_per_response_with_a_seed_of_its_own():
    requests = asked(call(n=3, top_p=0.9, stop_strings=("a",)))
    bodies = [json.loads(request.body) for request in requests]
    assert [body["sampling_params"]["seed"] for body in bodies] == [fold(9, 0), fold(9, 1), fold(9, 2)]
    first = bodies[0]
    assert first["model"] == "policy" and first["token_ids"] == [5, 6, 7] and first["stream"] is False
    del first["sampling_params"]["seed"]
    assert first["sampling_params"] == {
        "temperature": 0.8, "top_p": 0.9, "max_tokens": 4, "stop": ["a"], "stop_token_ids": [2], "ignore_eos": True,
        "logprobs": 0, "detokenize": True,
    }  # fmt: skip
    assert {(request.path, request.tokens) for request in requests} == {(VllmDialect.path, 7)}


def test_a_response_has_no_more_tokens_than_fit():
    (request,) = asked(call(max_output_tokens=512))
    assert json.loads(request.body)["sampling_params"]["max_tokens"] == 125


def test_what_vllm_said_is_read_token_for_token():
    (request,) = asked(call())
    ((completion,),) = request.read(recorded("generate"))
    choice = ANSWERS["generate"]["body"]["choices"][0]
    assert completion.response_tokens.tolist() == choice["token_ids"]
    expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert completion.response_logprobs.tolist() == np.array(expected, np.float32).tolist()
    assert completion.weight_steps.tolist() == [17] * 4
    assert (completion.oldest_weight_step, completion.lineage, completion.engine) == (17, 0, "inference-0#2")
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("dialect", [VllmDialect(external(), 128), OpenAiDialect(128)])
def test_of_what_a_response_took_the_seconds_of_its_request_are_known(monkeypatch, dialect):
    now = [50.0]
    monkeypatch.setattr("penstock.inference.external.time.monotonic", lambda: now[0])
    (request,) = dialect.requests(call(), WordCodec(), "policy")
    now[0] += 3.0  # until there is room at a server
    sent = request.bound_to(SERVER)
    now[0] += 0.75
    choice = {"text": "aa"} if isinstance(dialect, OpenAiDialect) else {}
    ((completion,),) = sent.read(recorded("generate", **choice))
    assert completion.timings == {"decode_s": 0.75} and completion.finished_s == 53.75


def test_a_response_ends_at_the_token_that_completes_a_stop_string():
    (request,) = asked(call(max_output_tokens=40, stop_strings=("a",)))
    tokens = ANSWERS["stopped"]["body"]["choices"][0]["token_ids"]
    ((whole,),) = request.read(recorded("stopped"))
    assert whole.response_tokens.tolist() == tokens and whole.finish_reason == "stop" and whole.text.endswith("a")
    content = ANSWERS["stopped"]["body"]["choices"][0]["logprobs"]["content"]
    longer = recorded("stopped", token_ids=[*tokens, 9], logprobs={"content": [*content, content[0] | {"token_id": 9}]})
    ((cut,),) = request.read(longer)
    assert cut.response_tokens.tolist() == tokens and len(cut.response_logprobs) == len(cut.weight_steps) == len(tokens)


def test_spans_of_versions_become_weight_steps():
    spans = [{"version": "0-16", "start": 0, "end": 1}, {"version": "0-17", "start": 1, "end": 4}]
    (request,) = asked(call())
    ((completion,),) = request.read(recorded("generate", weight_versions=spans))
    assert completion.weight_steps.tolist() == [16, 17, 17, 17] and completion.oldest_weight_step == 16


def test_with_a_kept_cache_the_version_at_submission_counts_too():
    (request,) = asked(call(), VllmDialect(external(kv="keep"), 128))
    assert json.loads(request.body)["cache_salt"] == "0-17"
    ((completion,),) = request.read(recorded("generate", "0-18"))
    assert completion.weight_steps.tolist() == [18] * 4 and completion.oldest_weight_step == 17


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([{"version": "default", "start": 0, "end": 4}], "called 'default'"),
        ([{"version": "0-17x", "start": 0, "end": 4}], "no version of a run"),
        ([{"version": "0-17", "start": 0, "end": 3}], "versions of 3 tokens, and has 4"),
        ([{"version": "0-17", "start": 1, "end": 4}], "do not follow one another"),
        ([{"version": "0-17", "start": 0, "end": 5}], "do not follow one another"),
        ([{"version": "0-17", "start": 0, "end": 2}, {"version": "1-0", "start": 2, "end": 4}], "several lineages"),
        (None, "versions of 0 tokens"),
    ],
)
def test_an_answer_of_no_known_version_is_refused(spans, said):
    (request,) = asked(call())
    with pytest.raises(MalformedAnswer, match=said):
        request.read(recorded("generate", weight_versions=spans))


def test_what_is_older_than_asked_for_is_refused_and_a_server_behind_is_not_asked():
    (request,) = asked(call(), least=WeightVersion(0, 17))
    with pytest.raises(MalformedAnswer, match="step=16.*step=17"):
        request.read(recorded("generate", "0-16"))
    assert asked(call(), least=WeightVersion(0, 18)) == [None]
    assert asked(call(), least=WeightVersion(1, 0)) != [None]  # another lineage's, as the servers of ours say


def test_log_probabilities_of_other_tokens_are_refused_and_a_missing_one_is_not_a_number():
    (request,) = asked(call())
    choice = ANSWERS["generate"]["body"]["choices"][0]
    content = json.loads(json.dumps(choice["logprobs"]["content"]))
    content[1]["token_id"] += 1
    with pytest.raises(MalformedAnswer, match="other tokens"):
        request.read(recorded("generate", logprobs={"content": content}))
    content[1] |= {"token_id": choice["token_ids"][1], "logprob": -9999.0}
    ((completion,),) = request.read(recorded("generate", logprobs={"content": content}))
    assert math.isnan(completion.response_logprobs[1])


def test_an_aborted_answer_is_asked_again_and_an_error_is_a_fault():
    (request,) = asked(call())
    with pytest.raises(InterruptedAnswer):
        request.read(recorded("generate", finish_reason="abort"))
    for content in (b"[]", b'{"choices": []}', b"\xff", recorded("generate", finish_reason="repetition")):
        with pytest.raises(MalformedAnswer):
            request.read(content)


def test_an_adapter_is_asked_for_by_name_and_must_have_answered():
    dialect = VllmDialect(external(weights="lora"), 128)
    (request,) = asked(call(), dialect)
    assert json.loads(request.body)["model"] == "policy-0-17"
    assert 404 in request.behind and 404 not in asked(call())[0].behind, "of any other model it is a fault"
    content = json.loads(recorded("generate", "default"))
    ((completion,),) = request.read(json.dumps(content | {"model": "policy-0-17"}).encode())
    assert completion.weight_steps.tolist() == [17] * 4
    with pytest.raises(MalformedAnswer, match="'policy', and 'policy-0-17'"):
        request.read(json.dumps(content).encode())


@pytest.mark.parametrize("prompt", [[], [1] * 128, [382], [-1]])
def test_a_prompt_that_cannot_be_answered_fails_alone(prompt):
    with pytest.raises(EnvironmentFailure):
        asked(call(prompts=(np.array(prompt, np.int32),)))


def test_sglang_is_asked_in_its_own_words():
    """Its ``ignore_eos`` would ignore the stop tokens, too."""
    requests = asked(call(n=2, top_p=0.9, stop_strings=("a",)), SglangDialect(external(), 128))
    bodies = [json.loads(request.body) for request in requests]
    assert [body["sampling_params"].pop("sampling_seed") for body in bodies] == [fold(9, 0), fold(9, 1)]
    assert bodies[0] == bodies[1] == {
        "input_ids": [[5, 6, 7]], "return_logprob": True, "sampling_params": {
            "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 4, "stop": ["a"], "stop_token_ids": [2], "n": 1,
            "no_stop_trim": True,
        },
    }  # fmt: skip
    assert {(request.path, request.tokens) for request in requests} == {("/generate", 7)}
    (kept,) = asked(call(), SglangDialect(external(kv="keep"), 128))
    assert json.loads(kept.body)["cache_salt"] == "0-17"


def sglang_said(name="generate", tokens=None, **meta):
    answer = json.loads(json.dumps(SGLANG[name]))
    answer[0]["meta_info"] |= meta
    answer[0] |= {} if tokens is None else {"output_ids": tokens}
    return json.dumps(answer).encode()


def test_what_sglang_said_is_read_token_for_token():
    (request,) = asked(call(), SglangDialect(external(), 128), least=WeightVersion(0, 16))
    ((completion,),) = request.read(sglang_said())
    assert completion.response_tokens.tolist() == [187, 217, 11, 2] and completion.finish_reason == "stop"
    expected = [entry[0] for entry in SGLANG["generate"][0]["meta_info"]["output_token_logprobs"]]
    assert completion.response_logprobs.tolist() == np.array(expected, np.float32).tolist()
    assert completion.weight_steps.tolist() == [16, 17, 17, 17] and completion.oldest_weight_step == 16
    ended = {"type": "length", "length": 4}
    ((longer,),) = request.read(sglang_said(finish_reason=ended))
    assert longer.finish_reason == "length"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (sglang_said(finish_reason={"type": "stop", "matched": 11}), "ended at token 11, an end of the model's own"),
        (sglang_said(tokens=[187, 217, 11]), "other tokens"),
        (sglang_said(weight_versions=None), "versions of 0 tokens"),
        (sglang_said(weight_versions=[{"version": "default", "start": 0, "end": 4}]), "called 'default'"),
        (b"[]", "does not hold one response"), (b'{"error": {}}', "does not hold one response"), (b"[3]", "TypeError"),
    ],
)  # fmt: skip
def test_what_sglang_said_of_another_form_is_refused(said, why):
    (request,) = asked(call(), SglangDialect(external(), 128))
    with pytest.raises(MalformedAnswer, match=why):
        request.read(said)


def test_what_sglang_aborted_is_asked_again():
    (request,) = asked(call(), SglangDialect(external(), 128))
    with pytest.raises(InterruptedAnswer):
        request.read(sglang_said("aborted"))


def test_labels_are_versions():
    version = WeightVersion(3, 41)
    assert version_of_label(label_of(version)) == version and adapter_name(version) == "policy-3-41"
    assert [
        version_of_label(label) for label in ("default", "3-", "-1", "3-4-5", None, "9" * 30 + "-1", "0-2147483648")
    ] == [None] * 7


def test_the_dialect_is_that_of_the_engine():
    assert type(dialect_of(InferenceConfig())).__name__ == "PenstockDialect"
    vllm = InferenceConfig(engine="vllm", external=external())
    openai = InferenceConfig(engine="openai", external=external(weights="none"))
    assert isinstance(dialect_of(InferenceConfig(engine="sglang", external=external())), SglangDialect)
    assert isinstance(dialect_of(vllm), VllmDialect) and isinstance(dialect_of(openai), OpenAiDialect)


def test_openai_answers_are_texts_and_say_nothing_of_probabilities():
    (request,) = asked(call(top_p=1.0), OpenAiDialect(128))
    body = json.loads(request.body)
    assert body == {
        "model": "policy", "prompt": "---", "n": 1, "temperature": 0.8, "max_tokens": 4, "seed": fold(9, 0)
    }  # fmt: skip
    answer = {"choices": [{"index": 0, "text": "-a", "finish_reason": "stop"}]}
    ((completion,),) = request.read(json.dumps(answer).encode())
    assert completion.text == "-a" and completion.response_tokens.tolist() == [1, 323]
    assert completion.response_logprobs.tolist() == [0, 0] and completion.weight_steps.tolist() == [0, 0]


# --- against a server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory, decoder, tmp_tokenizer):
    folder = tmp_path_factory.mktemp("policy") / "model"
    save_decoder(decoder, folder, tmp_tokenizer)
    return folder


@pytest.fixture(scope="module")
def tmp_tokenizer(codec):
    class Saved:
        vocab_size, eos_token_id, pad_token_id, stop_token_ids = codec.vocab_size, 256, 0, codec.stop_token_ids

        def save(self, directory):
            pass

    return Saved()


@pytest.fixture(scope="module")
def fake(directory, codec, config):
    server = FakeVllm(directory, codec, config)
    server._labels[0] = "0-0"
    server.start()
    yield server
    server.stop()


@pytest.fixture
def context(fake, codec, make_pool):
    fake.full = False
    served = Server("inference-0", 0, fake.server.url, version=WeightVersion(0, 0))
    pool = make_pool(served)
    pool.dialect = VllmDialect(external(), 64)
    return RemoteContext(pool, codec)


def test_groups_come_back_in_order_with_n_responses_each(context, codec):
    prompts = [codec.encode("one"), codec.encode("another")]
    groups = context.generate(prompts, 3, Decoding(max_output_tokens=5), [1, 2])
    assert [[done.prompt_tokens.tolist() for done in group] for group in groups] == [
        [prompt.tolist()] * 3 for prompt in prompts
    ]
    assert len({tuple(done.response_tokens) for group in groups for done in group}) == 6
    again = context.generate(prompts, 3, Decoding(max_output_tokens=5), [1, 2])
    assert [d.response_tokens.tolist() for g in again for d in g] == [
        d.response_tokens.tolist() for g in groups for d in g
    ]


def test_a_full_server_is_busy_and_not_broken(context, codec, fake):
    fake.full = True
    pool = context._pool
    future = pool._thread.submit(pool._ask_all(pool.dialect.requests(
        GenerationCall([codec.encode("one")], 1, Decoding(max_output_tokens=2), [1]), codec, "policy"
    ), None, None))  # fmt: skip
    while not metric(pool, "refusals_total"):
        assert not future.done()
    fake.full = False
    (((completion,),),) = future.result(WAIT_S)
    assert len(completion.response_tokens) and metric(pool, "refusals_total") >= 1


def test_a_server_that_is_behind_is_asked_as_soon_as_it_has_the_version(fake, codec, make_pool):
    """Meanwhile the pool's loop must hear of it: a request that is turned away may not be tried again at once."""
    behind = Server("inference-0", 0, fake.server.url, version=WeightVersion(0, 0))
    pool = make_pool(behind)
    pool.dialect = VllmDialect(external(), 64)
    context = RemoteContext(pool, codec).for_session("a ticket", WeightVersion(0, 1))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(context.generate, [codec.encode("one")], 1, Decoding(max_output_tokens=3), [1])
        wait_until(lambda: metric(pool, "retries_total") >= 1, "a refusal", WAIT_S)
        assert not asked.done()
        fake.rename_to("0-1")
        pool.set_servers([replace(behind, version=WeightVersion(0, 1))])
        ((completion,),) = asked.result(WAIT_S)
    assert set(completion.weight_steps.tolist()) == {1}


def test_out_of_range_decoding_is_a_config_error(context, codec):
    with pytest.raises(ConfigError, match="temperature"):
        context.generate([codec.encode("one")], 1, Decoding(temperature=-1.0), [1])
