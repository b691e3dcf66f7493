"""The same prompts, seeds and weights locally and over HTTP: the same completions."""

import time

import numpy as np
import pytest
from tests.inference.fake_servers import serving

from penstock.inference import (
    AccessRules,
    EngineContext,
    HttpServer,
    RemoteContext,
    Server,
    ServerPool,
    create_app,
)
from penstock.inference import codec as module
from penstock.inference.access import SMALL_BODY_BYTES
from penstock.inference.sequence import LONGEST_STOP_STRING, MOST_STOP_STRINGS
from penstock.types import (
    ConfigError,
    Decoding,
    EnvironmentFailure,
    GenerationCall,
    ManyInferenceContext,
    UnreachableError,
    WeightVersion,
)

TOKEN = "a test's token"

start = pytest.fixture(serving)


@pytest.fixture(scope="module")
def remote(served_engine, codec):
    server = HttpServer(create_app(served_engine, codec, "policy", AccessRules(TOKEN)))
    server.start()
    pool = ServerPool(TOKEN, request_timeout_s=60.0)
    pool.set_servers([Server("inference-0", 0, server.url)])
    yield RemoteContext(pool, codec)
    pool.close()
    server.stop()


@pytest.fixture
def local(served_engine, codec):
    return EngineContext(served_engine, codec)


def prompts(*texts):
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def assert_same(completion, other):
    """Everything but the very last bits of log-probabilities, which depend on what else the engine decodes."""
    assert completion.prompt_tokens.tolist() == other.prompt_tokens.tolist()
    assert completion.response_tokens.tolist() == other.response_tokens.tolist()
    np.testing.assert_allclose(completion.response_logprobs, other.response_logprobs, atol=1e-5)
    assert completion.weight_steps.tolist() == other.weight_steps.tolist()
    for name in ("oldest_weight_step", "lineage", "text", "finish_reason", "engine"):
        assert getattr(completion, name) == getattr(other, name)
    for name in ("prompt_tokens", "response_tokens", "response_logprobs", "weight_steps"):
        assert getattr(completion, name).dtype == getattr(other, name).dtype


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(max_output_tokens=12),
        Decoding(0.7, 20, 0.9, 12),
        Decoding(temperature=0.0, max_output_tokens=5),
        Decoding(max_output_tokens=12, stop_token_ids=tuple(range(100, 108))),
    ],
)
def test_completions_are_those_of_the_engine(remote, local, decoding):
    asked = (prompts("hello", "a", "hello"), 2, decoding, [5, 6, 2**62])
    begun = time.monotonic()
    groups, answered = remote.generate(*asked), time.monotonic()
    expected = local.generate(*asked)
    assert [len(group) for group in groups] == [2, 2, 2]
    for completion in (each for group in groups for each in group):
        assert begun < completion.finished_s <= answered
        assert list(completion.timings) == ["wait_s", "prefill_s", "decode_s"]
        assert 0 < sum(completion.timings.values()) <= answered - begun
    for group, other in zip(groups, expected, strict=True):
        for completion, same in zip(group, other, strict=True):
            assert_same(completion, same)
    assert groups[0][0].lineage == 2 and groups[0][0].oldest_weight_step == 7
    assert groups[0][0].engine == "inference-0#3"
    assert groups[0][0].response_tokens.tolist() != groups[2][0].response_tokens.tolist() or not decoding.temperature


def test_logprobs_arrive_to_the_last_bit(remote, served_engine, monkeypatch):
    answers, submit = [], served_engine.submit

    def submit_and_keep(requests):
        futures = submit(requests)
        answers.extend(futures)
        return futures

    monkeypatch.setattr(served_engine, "submit", submit_and_keep)
    ((completion,),) = remote.generate(prompts("exactly"), 1, Decoding(max_output_tokens=20), [3])
    (original,) = answers[0].result(0)
    assert completion.response_logprobs.tobytes() == original.response_logprobs.tobytes()


def test_a_stop_string_ends_the_text_where_it_does_locally(remote, local):
    free = local.generate(prompts("go"), 1, Decoding(max_output_tokens=30, stop_token_ids=(999,)), [4])[0][0]
    at = next(i for i in range(1, 29) if max(free.response_tokens[i : i + 2]) < 128)
    stop = bytes(free.response_tokens[at : at + 2].tolist()).decode()
    decoding = Decoding(max_output_tokens=30, stop_token_ids=(999,), stop_strings=("never", stop))
    ((completion,),) = remote.generate(prompts("go"), 1, decoding, [4])
    assert completion.text.endswith(stop) and completion.finish_reason == "stop"
    assert_same(completion, local.generate(prompts("go"), 1, decoding, [4])[0][0])


def test_a_large_call_goes_in_portions_and_comes_back_whole(remote, local, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_TOKENS", 20)
    asked = (prompts("one", "two", "three", "4"), 2, Decoding(max_output_tokens=4), [1, 2, 3, 4])
    before = remote._pool.metrics()["inference_client/requests_total"]
    groups = remote.generate(*asked)
    assert remote._pool.metrics()["inference_client/requests_total"] == before + 4
    for group, other in zip(groups, local.generate(*asked), strict=True):
        for completion, same in zip(group, other, strict=True):
            assert_same(completion, same)


def test_many_calls_are_served_beside_one_that_cannot_be(remote, local):
    assert isinstance(remote, ManyInferenceContext)
    calls = [
        GenerationCall(prompts("a"), 2, Decoding(max_output_tokens=3), [1]),
        GenerationCall(prompts("b", "x" * 64), 1, Decoding(max_output_tokens=3), [1, 2]),
        GenerationCall([np.zeros(2, np.int64)], 1, Decoding(max_output_tokens=3), [1]),
        GenerationCall(prompts("c"), 1, Decoding(0.5, max_output_tokens=4), [9]),
        GenerationCall([], 1, Decoding(), []),
    ]
    first, too_long, wrong_type, last, nothing = remote.generate_many(calls)
    assert_same(first[0][1], local.generate_many(calls[:1])[0][0][1])
    assert_same(last[0][0], local.generate_many(calls[3:4])[0][0][0])
    assert isinstance(too_long, EnvironmentFailure) and "leaves no room" in str(too_long)
    assert isinstance(wrong_type, EnvironmentFailure) and "must be int32" in str(wrong_type)
    assert nothing == [] and remote.generate_many([]) == []


def test_an_ordered_context_asks_for_one_thing_at_a_time_and_for_as_much_as_fits(remote, monkeypatch):
    """So that the engine of a server that nobody else asks sees the same batches in every run."""
    asked: list[list[tuple[int, ...]]] = []
    ask = remote._pool.ask

    def noted(requests, *where):
        asked.append([tuple(len(prompt) for prompt in request.read.prompts) for request in requests])
        return ask(requests, *where)

    monkeypatch.setattr(remote._pool, "ask", noted)
    monkeypatch.setattr(module, "REQUEST_TOKENS", 20)
    ordered = RemoteContext(remote._pool, remote.tokenizer, ordered=True)
    short, long = Decoding(max_output_tokens=3), Decoding(max_output_tokens=4)
    calls = [
        GenerationCall(prompts("a"), 2, short, [1]),
        GenerationCall(prompts("bc", "def"), 2, short, [2, 3]),
        GenerationCall(prompts("g"), 2, long, [4]),
    ]
    answers = ordered.for_session("one").generate_many(calls)
    assert asked == [[(1, 2)], [(3,)], [(1,)]]
    for answer, expected in zip(answers, remote.generate_many(calls), strict=True):
        for group, other in zip(answer, expected, strict=True):
            for completion, same in zip(group, other, strict=True):
                assert_same(completion, same)
    beside = [calls[0], GenerationCall(prompts("x" * 64), 2, short, [1]), calls[1]]
    first, failed, last = ordered.generate_many(beside)
    assert isinstance(failed, EnvironmentFailure) and [len(answer) for answer in (first, last)] == [1, 2]
    assert ordered.generate_many([]) == []


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "prompt is empty"), ("x" * 64, "leaves no room"), ("é", None)]
)  # fmt: skip
def test_a_prompt_that_cannot_be_used_is_the_environments_failure(remote, local, prompt, said):
    asked = (prompts(prompt), 1, Decoding(max_output_tokens=2), [1])
    if said is None:
        assert len(remote.generate(*asked)[0]) == 1
        return
    for context in (remote, local):
        with pytest.raises(EnvironmentFailure, match=said):
            context.generate(*asked)


def test_decoding_out_of_range_is_a_mistake_of_the_config(remote, local):
    for context in (remote, local):
        with pytest.raises(ConfigError, match="temperature is -1"):
            context.generate(prompts("a"), 1, Decoding(temperature=-1.0), [1])


def test_more_responses_than_openai_allows(remote):
    ((*completions,),) = remote.generate(prompts("a"), 150, Decoding(max_output_tokens=1), [1])
    assert len(completions) == 150


def test_the_tokenizer_is_the_policys(remote, codec):
    assert remote.tokenizer is remote.for_session("talk").tokenizer is codec


def test_a_session_stays_and_only_goes_where_it_is_told(start, codec):
    servers = [start() for _ in range(3)]
    pool = ServerPool(request_timeout_s=20.0)
    pool.set_servers([server.known_as(f"inference-{i}", i) for i, server in enumerate(servers)])
    try:
        context = RemoteContext(pool, codec)
        for turn in range(4):
            context.for_session("talk").generate(prompts("a", "b"), 1, Decoding(), [turn, turn])
        assert sorted(len(server.bodies) for server in servers) == [0, 0, 4]
        for _ in range(3):
            context.only("inference-1").generate(prompts("a"), 2, Decoding(), [1])
            context.for_session("talk").only("inference-1", 1).generate(prompts("a"), 2, Decoding(), [1])
        context.for_session("talk", WeightVersion(2, 9)).generate(prompts("a"), 1, Decoding(), [1])
        newest = [body["least_weights"] for server in servers for body in server.bodies if "least_weights" in body]
        assert newest == [[2, 9]]
        assert sum(len(server.bodies) for server in servers) == 11 and len(servers[1].bodies) in (6, 11)
        with pytest.raises(UnreachableError, match="inference-1#0 does not live"):
            context.only("inference-1", 0).generate(prompts("a"), 1, Decoding(), [1])
    finally:
        pool.close()


def test_the_largest_request_of_a_run_is_taken(remote, local):
    """Its body is larger than a server without a token would read: 64 stop strings of escaped characters."""
    stops = tuple("\x01" * (LONGEST_STOP_STRING - number) for number in range(MOST_STOP_STRINGS))
    decoding = Decoding(max_output_tokens=2, stop_strings=stops)
    (request,) = module.PenstockDialect().requests(
        GenerationCall(prompts("a"), 1, decoding, [1]), remote.tokenizer, "policy", None
    )
    assert len(request.body) > SMALL_BODY_BYTES
    answers = [context.generate(prompts("a", "b"), 1, decoding, [1, 2]) for context in (remote, local)]
    for (one,), (other,) in zip(*answers, strict=True):
        assert_same(one, other)
