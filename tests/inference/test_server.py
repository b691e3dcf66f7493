"""The API over real HTTP with the official client, and raw requests where the client would not misbehave."""

import asyncio
import logging
import threading
from concurrent.futures import Future
from importlib.metadata import version

import httpx
import numpy as np
import openai
import pytest

from penstock.inference import AccessRules, GenerationRequest, HttpServer, create_app
from penstock.model.arrays import digests_of
from penstock.model.language import named_arrays
from penstock.types import CheckpointError, Decoding, fold

TOKEN = "a test's token"
WAIT_S = 280.0


@pytest.fixture(scope="module")
def url(served_engine, codec):
    app = create_app(served_engine, codec, "tiny", AccessRules(TOKEN, max_body_bytes=10_000, max_waiting=2))
    server = HttpServer(app)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def raw(url):
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=WAIT_S) as raw:
        yield raw


def direct(engine, prompt, seed, n=1, **decoding):
    """What the engine says without HTTP."""
    request = GenerationRequest(np.array(prompt, np.int32), Decoding(**decoding), seed, n)
    return engine.submit([request])[0].result(WAIT_S)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError, match="model 'gpt' does not exist"):
        client.models.retrieve("gpt")


def test_a_client_without_the_token_and_one_of_an_unknown_model_are_told_as_openai_tells_them(client, url):
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0, timeout=WAIT_S) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert (refused.value.type, refused.value.code) == ("invalid_request_error", "invalid_api_key")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt", prompt="a")
    assert (unknown.value.type, unknown.value.code) == ("invalid_request_error", "model_not_found")


def test_a_completion_is_the_engines_own_answer(client, served_engine, codec):
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=9, seed=3, temperature=0.8, logprobs=1, n=2,
        extra_body={"return_token_ids": True, "top_k": 50, "min_p": 0.02},
    )  # fmt: skip
    expected = direct(served_engine, codec.encode("hello"), fold(3, 0), 2, temperature=0.8, top_k=50,
                      min_p=0.02, max_output_tokens=9)  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert choice.text == completion.text and choice.finish_reason == completion.finish_reason
        assert choice.token_ids == completion.response_tokens.tolist()
        assert choice.prompt_token_ids == list(b"hello")
        assert choice.logprobs.token_logprobs == pytest.approx(completion.response_logprobs.tolist(), abs=1e-5)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(choice.token_ids)
    tokens = sum(len(c.response_tokens) for c in expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, tokens)
    assert answer.usage.total_tokens == 5 + tokens
    assert answer.system_fingerprint == "weights-2-7"


def test_batches_and_token_id_prompts(client):
    texts = client.completions.create(model="tiny", prompt=["ab", "c"], n=2, seed=1, max_tokens=3)
    ids = client.completions.create(model="tiny", prompt=[[97, 98], [99]], n=2, seed=1, max_tokens=3)
    one = client.completions.create(model="tiny", prompt=[97, 98], n=2, seed=1, max_tokens=3)
    assert [c.text for c in texts.choices] == [c.text for c in ids.choices]
    assert [c.text for c in one.choices] == [c.text for c in ids.choices[:2]]
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
    assert texts.usage.prompt_tokens == 3


def test_a_seed_for_each_prompt_and_the_engines_whole_record(raw, served_engine, codec):
    body = {"model": "tiny", "prompt": ["hello", "you"], "max_tokens": 9, "seeds": [3, 2**62], "n": 2}
    choices = raw.post("/v1/completions", json=body | {"return_token_ids": True}).json()["choices"]
    expected = [
        *direct(served_engine, codec.encode("hello"), 3, 2, max_output_tokens=9),
        *direct(served_engine, codec.encode("you"), 2**62, 2, max_output_tokens=9),
    ]
    for choice, completion in zip(choices, expected, strict=True):
        assert choice["token_ids"] == completion.response_tokens.tolist()
        assert choice["token_logprobs"] == pytest.approx(completion.response_logprobs.tolist(), abs=1e-5)
        assert choice["weight_steps"] == [7] * len(completion.response_tokens)
        assert (choice["oldest_weight_step"], choice["lineage"]) == (7, 2)
    bare = raw.post("/v1/completions", json=body).json()["choices"][0]
    assert set(bare) == {"index", "text", "finish_reason", "logprobs"}


def test_a_logprob_that_is_not_finite_is_null(raw, served_engine, monkeypatch, codec):
    (finished,) = direct(served_engine, codec.encode("a"), 0, max_output_tokens=2, stop_token_ids=(999,))
    object.__setattr__(finished, "response_logprobs", np.array([np.nan, -0.5], np.float32))
    future = Future()
    future.set_result([finished])
    monkeypatch.setattr(served_engine, "submit", lambda requests: [future])
    body = {"model": "tiny", "prompt": "a", "return_token_ids": True, "logprobs": 1}
    (choice,) = raw.post("/v1/completions", json=body).json()["choices"]
    assert choice["token_logprobs"] == choice["logprobs"]["token_logprobs"] == [None, -0.5]


def test_chat(client, served_engine, codec):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], seed=5,
        max_completion_tokens=7, logprobs=True, user="somebody", extra_body={"return_token_ids": True},
    )  # fmt: skip
    (expected,) = direct(served_engine, codec.encode("user: hi\n"), fold(5, 0), max_output_tokens=7)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.token_ids == expected.response_tokens.tolist()
    assert choice.weight_steps == [7] * 7 and choice.lineage == 2
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(
        expected.response_logprobs.tolist(), abs=1e-5
    )
    assert answer.prompt_token_ids == list(b"user: hi\n")
    assert answer.usage.prompt_tokens == 9


def test_chat_without_a_limit_fills_the_room(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x" * 50}], extra_body={"stop_token_ids": [999]}
    )
    assert answer.usage.total_tokens == 64 and answer.choices[0].finish_reason == "length"


def test_the_text_ends_before_the_stop_string(client):
    asked = {"model": "tiny", "prompt": "go", "max_tokens": 30, "seed": 4}
    asked["extra_body"] = {"stop_token_ids": [999], "return_token_ids": True}
    free = client.completions.create(**asked).choices[0]
    at = next(i for i in range(1, 29) if max(free.token_ids[i : i + 2]) < 128)
    stop = bytes(free.token_ids[at : at + 2]).decode()
    ended = client.completions.create(**asked, stop=["never", stop]).choices[0]
    assert ended.finish_reason == "stop" and stop not in ended.text
    assert ended.token_ids == free.token_ids[: free.text.index(stop) and len(ended.token_ids)]
    assert free.text.startswith(ended.text + stop)


def test_without_a_seed_answers_differ(client):
    asked = {"model": "tiny", "prompt": "go", "max_tokens": 12}
    assert client.completions.create(**asked).choices[0].text != client.completions.create(**asked).choices[0].text


def test_values_of_others_extras_that_ask_for_nothing_are_taken(raw):
    asked = {"model": "tiny", "prompt": "go", "max_tokens": 12, "seed": 1}
    neutral = {
        "top_k": -1, "min_p": 0.0, "top_p": 1.0, "min_tokens": 0, "repetition_penalty": 1.0, "length_penalty": 1.0,
        "ignore_eos": False, "skip_special_tokens": True, "prompt_logprobs": None, "stop": None, "guided_json": None,
    }  # fmt: skip
    plain, extras = (raw.post("/v1/completions", json=asked | more).json() for more in ({}, neutral))
    assert extras["choices"] == plain["choices"]


def test_tokens_by_their_ids_and_bytes(raw, client):
    asked = {"model": "tiny", "prompt": "go", "max_tokens": 9, "seed": 1, "logprobs": 1, "return_token_ids": True}
    (choice,) = raw.post("/v1/completions", json=asked | {"return_tokens_as_token_ids": True}).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    said = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=24, seed=2, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    told = [entry.bytes for entry in said.choices[0].logprobs.content]
    assert told == [[token] if token < 256 else list(b"<end>") for token in said.choices[0].token_ids]
    assert any(entry[0] > 127 for entry in told)  # a part of a character, whose text alone would be U+FFFD


def test_a_last_message_is_continued(raw):
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    going_on = body | {"continue_final_message": True, "add_generation_prompt": False}
    assert raw.post("/tokenize", json=going_on).json()["tokens"] == list(b"user: a\nassistant: b")
    for wrong in ({"add_generation_prompt": False}, {"add_generation_prompt": True, "continue_final_message": True}):
        assert raw.post("/tokenize", json=body | wrong).status_code == 400


def test_detokenize_version_and_ready(raw):
    assert raw.post("/detokenize", json={"tokens": [104, 105, 256]}).json() == {"prompt": "hi<end>"}
    assert raw.post("/detokenize", json={"tokens": [1] * 65}).status_code == 400
    for token in (-1, 1 << 70):
        error = raw.post("/detokenize", json={"tokens": [104, token]}).json()["error"]
        assert error["param"] == "tokens" and f"holds {token}, but token ids are 0 to " in error["message"]
    assert raw.get("/version").json() == {"version": version("penstock")}
    assert raw.get("/ready").json() == {"status": "ok"}


def test_metrics(raw, served_engine):
    def read() -> dict[str, float]:
        lines = raw.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = read()
    body = {"model": "tiny", "prompt": "metrics", "max_tokens": 20, "n": 3, "stop_token_ids": [999]}
    raw.post("/v1/completions", json=body)
    raw.post("/v1/completions", json=body)
    grown = {name: value - before[name] for name, value in read().items()}
    assert grown["penstock_inference_responses_total"] == 6 and grown["penstock_inference_tokens_total"] == 120
    for name, times in (("queue", 6), ("first_token", 6), ("whole", 6)):
        assert grown[f"penstock_inference_{name}_seconds_count"] == times
        assert grown[f'penstock_inference_{name}_seconds_bucket{{le="+Inf"}}'] == times
        assert grown[f"penstock_inference_{name}_seconds_sum"] > 0
    first = 6 * served_engine.config.steps_per_dispatch  # which came with the first token
    assert grown["penstock_inference_between_tokens_seconds_count"] == 120 - first
    assert "penstock_inference_running" in grown and "penstock_inference_kv_used" in grown


def test_tokenize_and_health(raw):
    assert raw.post("/tokenize", json={"prompt": "ab"}).json() == {
        "count": 2, "max_model_len": 64, "tokens": [97, 98],
    }  # fmt: skip
    messages = [{"role": "user", "content": "a"}]
    assert raw.post("/tokenize", json={"messages": messages}).json()["tokens"] == list(b"user: a\n")
    assert raw.post("/tokenize", json={}).status_code == 400
    healthy = httpx.get(f"{raw.base_url}/health")  # no token needed
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"stream_options": {"chunks": 3}}, 400, "stream_options", "Extra inputs"),
        ({"min_tokens": 2}, 400, "min_tokens", "not supported"),
        ({"ignore_eos": True}, 400, "ignore_eos", "not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
        ({"best_of": 3}, 400, "best_of", "not supported"),
        ({"nonsense": 1}, 400, "nonsense", "Extra inputs"),
        ({"temperature": "hot"}, 400, "temperature", "valid number"),
        ({"temperature": -1}, 400, "temperature", "temperature is -1"),
        ({"top_p": 0}, 400, "top_p", "top_p is 0"),
        ({"min_p": 2}, 400, "min_p", "min_p is 2"),
        ({"stop": ["a", ""]}, 400, "stop", "stop holds an empty string"),
        ({"max_tokens": -1}, 400, "max_tokens", "greater than or equal to 0"),
        ({"min_p": "a"}, 400, "min_p", "valid number"),
        ({"max_tokens": 0}, 400, "max_tokens", "goes with echo or prompt_logprobs only"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs", "greater than or equal to 0"),
        ({"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "is not told by streams"),
        ({"prompt": "x" * 65, "echo": True, "logprobs": 1, "max_tokens": 0}, 400, "prompt", "more than 64 tokens"),
        ({"prompt": "x" * 64}, 400, "prompt", "leaves no room"),
        ({"prompt": []}, 400, "prompt", "at least one"),
        ({"prompt": [1 << 40]}, 400, "prompt", "32 bits"),
        ({"prompt": [300]}, 400, "prompt", "token id 300"),
        ({"prompt": ""}, 400, "prompt", "prompt is empty"),
        ({"model": "other"}, 404, "model", "does not exist"),
    ],
)
def test_bad_requests_get_an_error_object(raw, change, status, param, message):
    response = raw.post("/v1/completions", json={"model": "tiny", "prompt": "a"} | change)
    error = response.json()["error"]
    assert response.status_code == status
    assert error["param"] == param and message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("least", "status"), [([2, 7], 200), ([2, 6], 200), ([1, 9], 200), ([3, 0], 200), ([2, 8], 503)]
)
def test_older_weights_than_were_asked_for_do_not_answer(raw, least, status):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "least_weights": least}
    answer = raw.post("/v1/completions", json=body)
    assert answer.status_code == status
    if status == 503:
        error = answer.json()["error"]
        assert error["code"] == "weights_behind" and "[2, 8] were asked for" in error["message"]


def test_neutral_parameters_are_accepted(raw):
    neutral = {"stream": False, "best_of": 1, "presence_penalty": 0, "logit_bias": None, "echo": False, "audio": None}
    assert raw.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1} | neutral).is_success


@pytest.mark.attack
@pytest.mark.parametrize("header", [None, "Bearer wrong", TOKEN, f"bearer {TOKEN}", "Bearer té"])
def test_a_wrong_token_is_refused(url, header):
    headers = {} if header is None else {b"authorization": header.encode()}
    response = httpx.get(f"{url}/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.attack
def test_bodies_are_bounded_and_declared_as_json(raw):
    assert raw.post("/v1/completions", json={"model": "x" * 20_000}).status_code == 413
    chunks = (b"x" * 4000 for _ in range(5))  # no content-length
    streamed = raw.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert streamed.status_code == 413
    assert raw.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    broken = raw.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, "not JSON" in broken.json()["error"]["message"]) == (400, True)
    assert raw.post("/v1/completions", json=[1]).status_code == 400


def test_unknown_paths_get_an_error_object_too(raw):
    for response, status in ((raw.get("/v2"), 404), (raw.get("/v1/completions"), 405)):
        assert (response.status_code, set(response.json()["error"])) == (status, {"message", "type", "param", "code"})
    assert raw.get("/v1/completions").headers["allow"] == "POST"


@pytest.mark.attack
def test_too_many_responses_are_refused(raw):
    body = {"model": "tiny", "prompt": ["a"] * 100, "n": 100}
    assert "at most 4096" in raw.post("/v1/completions", json=body).json()["error"]["message"]


class Watch(logging.Handler):
    """Knows when a text has been logged."""

    def __init__(self, text):
        super().__init__()
        self._text, self.seen = text, threading.Event()

    def emit(self, record):
        if self._text in self.format(record):
            self.seen.set()


def test_an_unexpected_error_is_an_error_object_and_logged(raw, served_engine, monkeypatch):
    monkeypatch.setattr(served_engine, "submit", lambda requests: 1 / 0)
    watch = Watch("ZeroDivisionError")
    logging.getLogger("uvicorn.error").addHandler(watch)
    try:
        response = raw.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert watch.seen.wait(WAIT_S)  # logged with its traceback, after the answer
    finally:
        logging.getLogger("uvicorn.error").removeHandler(watch)
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error: ZeroDivisionError")


class Held:
    """Takes the engine's place in accepting requests; nothing is answered until the test says so."""

    def __init__(self, engine, monkeypatch):
        self.futures, self.arrived = [], threading.Semaphore(0)
        monkeypatch.setattr(engine, "submit", self.submit)

    def submit(self, requests):
        futures = [Future() for _ in requests]
        self.futures += futures
        self.arrived.release()
        return futures


@pytest.mark.attack
def test_overload_is_refused_while_other_requests_wait_and_the_loop_stays_free(
    raw, client, url, served_engine, monkeypatch, codec
):
    finished = direct(served_engine, codec.encode("a"), 0, max_output_tokens=1)
    held = Held(served_engine, monkeypatch)
    body = {"model": "tiny", "prompt": "a"}
    headers = {"authorization": f"Bearer {TOKEN}"}
    statuses = []

    def ask():
        statuses.append(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert all(held.arrived.acquire(timeout=WAIT_S) for _ in threads)
    assert raw.get("/health").status_code == 200  # both requests hang, the loop does not
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**body)
    assert (refused.value.type, refused.value.code) == ("requests", "rate_limit_exceeded")  # as OpenAI's own
    for future in held.futures:
        future.set_result(finished)
    for thread in threads:
        thread.join(WAIT_S)
    assert statuses == [200, 200]


@pytest.mark.attack
def test_a_client_that_leaves_cancels_its_request(url, served_engine, monkeypatch):
    held = Held(served_engine, monkeypatch)
    headers = {"authorization": f"Bearer {TOKEN}"}

    async def leave():
        async with httpx.AsyncClient(headers=headers) as client:
            ask = asyncio.ensure_future(client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"}))
            assert await asyncio.to_thread(held.arrived.acquire, timeout=WAIT_S)
            ask.cancel()

    asyncio.run(leave())
    cancelled = threading.Event()
    held.futures[0].add_done_callback(lambda _: cancelled.set())
    assert cancelled.wait(WAIT_S) and held.futures[0].cancelled()


def test_an_engine_that_failed_is_reported(raw, served_engine, monkeypatch):
    monkeypatch.setattr(served_engine, "_failure", ValueError("device lost"))
    response = raw.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert response.status_code == 503 and "device lost" in response.json()["error"]["message"]
    health = raw.get("/health")
    assert health.status_code == 503 and "device lost" in health.json()["reason"]


def test_an_aborted_response_is_an_error_not_an_answer(raw, served_engine, monkeypatch, codec):
    (finished,) = direct(served_engine, codec.encode("a"), 0, max_output_tokens=1)
    object.__setattr__(finished, "finish_reason", "aborted")
    future = Future()
    future.set_result([finished])
    monkeypatch.setattr(served_engine, "submit", lambda requests: [future])
    assert raw.post("/v1/completions", json={"model": "tiny", "prompt": "a"}).status_code == 503


# --- routes that drive a server -------------------------------------------------------------------------------------

ROUTES = [("POST", "/pause"), ("POST", "/resume"), ("GET", "/is_paused"), ("GET", "/weight_info"),
          ("POST", "/collective_rpc"), ("POST", "/update_weight_version"), ("POST", "/weight_checker")]  # fmt: skip


RELOAD = {"method": "reload_weights"}


@pytest.fixture
def driven(start_engine, decoder, make_decoder, codec):
    """A server that may be driven, whose directory "other" holds another policy."""

    def load(path):
        if path.name == "wider":
            return make_decoder(hidden_size=64)
        if path.name != "other":
            raise CheckpointError(f"{path} holds no config.json")
        return make_decoder(9)

    engine = start_engine(decoder)
    server = HttpServer(create_app(engine, codec, "tiny", AccessRules(TOKEN), load))
    server.start()
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=WAIT_S) as client:
        client.engine = engine
        yield client
    server.stop()


def test_a_trainer_drives_a_server_by_the_routes_of_vllm(driven, make_decoder):
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "seed": 1, "return_token_ids": True}
    before = driven.post("/v1/completions", json=asked).json()["choices"][0]
    assert driven.get("/weight_info").json() == {"weight_version": "0-0"}
    assert driven.post("/pause?mode=keep&clear_cache=true").json() == {"status": "paused"}
    assert driven.get("/is_paused").json() == {"is_paused": True}
    assert (driven.get("/ready").status_code, driven.get("/health").status_code) == (503, 200)
    reload = RELOAD | {"kwargs": {"weights_path": "/checkpoints/other"}}
    assert driven.post("/collective_rpc", json=reload).json() == {"results": [None]}
    assert driven.post("/update_weight_version", json={"new_version": "1-17"}).json()["success"]
    assert driven.post("/resume").json() == {"status": "resumed"}
    assert driven.get("/ready").status_code == 200
    after = driven.post("/v1/completions", json=asked).json()["choices"][0]
    assert (after["weight_steps"], after["lineage"]) == ([17] * 6, 1) and before["weight_steps"] == [0] * 6
    assert after["token_logprobs"] != before["token_logprobs"]
    checksums = driven.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    assert checksums == digests_of(named_arrays(make_decoder(9)))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/pause?mode=sleep", {}, 400, "mode is 'sleep'"),
        ("/pause?mode=keep&clear_cache=maybe", {}, 400, "clear_cache is 'maybe'"),
        ("/collective_rpc", RELOAD | {"args": [1]}, 400, "args: List should have at most 0 items"),
        ("/collective_rpc", {"method": "shutdown"}, 400, "method must be reload_weights"),
        ("/collective_rpc", RELOAD | {"kwargs": {}}, 400, "kwargs.weights_path"),
        ("/collective_rpc", RELOAD | {"kwargs": {"weights_path": "/nowhere"}}, 400, "no config.json"),
        (
            "/collective_rpc",
            RELOAD | {"kwargs": {"weights_path": "/wider"}},
            400,
            "do not fit the engine: embedding is float32[257, 64]",
        ),
        ("/update_weight_version", {"new_version": "default"}, 400, "<lineage>-<step>"),
        ("/update_weight_version", {"new_version": "1-" + "9" * 40}, 400, "<lineage>-<step>"),
        ("/update_weight_version", {"new_version": "0-2147483648"}, 400, "<lineage>-<step>"),
        ("/weight_checker", {"action": "corrupt"}, 400, "action must be checksum"),
    ],
)
def test_what_a_trainer_says_wrongly_changes_nothing(driven, path, body, status, said):
    answer = driven.post(path, json=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]
    assert driven.get("/weight_info").json() == {"weight_version": "0-0"} and not driven.engine.paused


@pytest.mark.parametrize(("written", "cleared"), [("True", True), ("1", True), ("False", False), ("off", False)])
def test_a_pause_reads_truth_as_the_clients_of_vllm_write_it(driven, monkeypatch, written, cleared):
    asked = []
    monkeypatch.setattr(driven.engine, "pause", lambda mode, clear_cache, timeout_s: asked.append((mode, clear_cache)))
    assert driven.post("/pause", params={"mode": "wait", "clear_cache": written}).status_code == 200
    assert asked == [("wait", cleared)]


@pytest.mark.attack
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nobody_drives_a_server_without_its_token(driven, served_engine, codec, method, path):
    body = {} if method == "GET" else {"json": {}}
    assert httpx.request(method, f"{driven.base_url}{path}", **body).status_code == 401
    for access, load in ((None, lambda path: None), (AccessRules(TOKEN), None)):  # no token; a run's own server
        server = HttpServer(create_app(served_engine, codec, "tiny", access, load))
        server.start()
        headers = {"authorization": f"Bearer {TOKEN}"}
        try:
            assert httpx.request(method, f"{server.url}{path}", headers=headers, **body).status_code == 404
        finally:
            server.stop()
