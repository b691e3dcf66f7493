"""Malformed requests to the API: in process, where an unexpected exception shows, and as bytes on a socket.

And wide and expensive ones against a server in a process of its own, judged by what everybody else sees of it.
"""

import asyncio
import json
import logging
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest
from tests.fuzz.fuzzing import COUNTS, LIMIT_S, damaged, fuzz, json_bytes
from tests.inference.served import served, withstands, write_checkpoint

from penstock.inference import AccessRules, EngineConfig, GenerationRequest, HttpServer, InferenceEngine, create_app
from penstock.model.language import Decoder, ModelConfig
from penstock.text import Tokenizer
from penstock.types import Decoding, WeightVersion

TOKEN = "a fuzzer's token"
MAX_BODY_BYTES = 100_000
SAMPLING = {
    "model": "tiny", "n": 1, "seed": 3, "stop": ["zz", "\n"], "stop_token_ids": [5], "temperature": 0.7, "top_k": 9,
    "top_p": 0.9, "min_p": 0.05, "return_token_ids": True, "user": "someone", "stream": False,
}  # fmt: skip
BODIES = {
    "/v1/completions": [
        SAMPLING | {"prompt": "Who purrs?", "max_tokens": 3, "logprobs": 1, "echo": True, "prompt_logprobs": 2},
        SAMPLING | {"prompt": [[5, 6, 7], [8]], "max_tokens": 2, "least_weights": [0, 0]},
    ],
    "/v1/chat/completions": [
        SAMPLING | {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
            "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "parallel_tool_calls": False,
        },
        SAMPLING | {
            "messages": [
                {"role": "user", "content": "6 * 7?"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": [6, 7]}"}}]},
                {"role": "tool", "content": "42", "tool_call_id": "a", "name": "f"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "max_completion_tokens": 3,
        },
    ],
    "/tokenize": [{"prompt": "Who purrs?"}, {"messages": [{"role": "user", "content": "Who?"}]}],
}  # fmt: skip
PATHS = (
    "/health",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/%ff",
    "//",
    "/v1/models/\u00e9",
)
METHODS = ("POST",) * 12 + ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "X" * 300)
FINE = (200, 400, 401, 404, 405, 413, 415, 429, 503)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Whose chat template reads tools."""
    return Tokenizer.load(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(tokenizer):
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    config = EngineConfig(
        max_slots=8, max_seq_len=256, windows=(256,), steps_per_dispatch=4, prefill_lengths=(8,), request_timeout_s=60.0
    )
    engine = InferenceEngine(Decoder.initialise(shape, jax.random.key(0)), WeightVersion(0, 0), tokenizer, config)
    engine.start()
    engine.wait_until_ready(120.0)
    text = np.array([5, 6], np.int32)  # what is compiled for who asks first is there
    engine.score([text])[0].result(120.0)
    engine.submit([GenerationRequest(text, Decoding(max_output_tokens=1), 0, alternatives=1)])[0].result(120.0)
    yield engine
    engine.stop(30.0)


@pytest.fixture(scope="module")
def app(engine, tokenizer):
    return create_app(engine, tokenizer, "tiny", AccessRules(TOKEN, max_body_bytes=MAX_BODY_BYTES))


def make_request(rng):
    path = rng.choice([*BODIES] * 6 + list(PATHS))
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    if rng.random() < 0.05:
        odd = rng.choice((b"", b"text/plain", b"Bearer", rng.randbytes(20).translate(None, b"\r\n\0"), b"a" * 9000))
        headers[rng.choice(list(headers))] = odd
    body = json_bytes(rng.choice(BODIES.get(path, [{}])), rng)
    if rng.random() < 0.01:
        body = body.ljust(MAX_BODY_BYTES + rng.randint(0, 1))
    return rng.choice(METHODS), path, headers, body


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
def test_every_request_gets_an_answer(app, engine, count):
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://penstock")
        answered = dict.fromkeys(FINE, 0)

        def target(given):
            method, path, headers, body = given
            request = client.request(method, path, headers=headers, content=body)
            answer = runner.run(asyncio.wait_for(request, LIMIT_S))
            answered[answer.status_code] += 1
            if method != "HEAD":
                content = json.loads(answer.content)
                assert answer.status_code == 200 or content["error"]["message"]
                assert answer.status_code != 503 or content["error"]["code"] == "weights_behind"

        fuzz(target, make_request, count, ())
        runner.run(client.aclose())
    assert answered[200] > 0.02 * count and answered[400] > 0.2 * count
    assert engine.stats()["inference/waiting"] == engine.stats()["inference/running"] == 0
    engine.raise_if_failed()


@pytest.mark.attack
@pytest.mark.parametrize("count", COUNTS)
def test_bytes_that_are_no_http_close_or_are_answered(app, count, caplog):
    """Each connection is closed by the client's end; the server must not keep it, and must go on serving."""
    body = json.dumps(BODIES["/v1/completions"][0]).encode()
    good = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer " + TOKEN.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
    chunked = good.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked").replace(
        body, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    )
    caplog.set_level(logging.CRITICAL, "uvicorn.error")  # pytest would keep a record of every request
    server = HttpServer(app)
    server.start()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

    def target(content):
        with socket.create_connection(address, timeout=LIMIT_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.settimeout(LIMIT_S)
            try:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            except (ConnectionResetError, BrokenPipeError):
                return  # it was refused before all of it was sent

    try:
        fuzz(target, lambda rng: damaged(rng.choice((good, chunked)), rng), count, ())
        assert httpx.get(f"{server.url}/health", trust_env=False, timeout=LIMIT_S).status_code == 200
    finally:
        server.stop()


WIDTH_BYTES = 262_144
"""Bodies are made up to the limit and a little beyond."""
ENTRIES = (
    "{}", "[]", "1", "-1", "1e5", "[[]]", "[{}]", '{"a":{}}', '""', '"a"', "null", "true", "9" * 300, "0." + "9" * 300,
    '{"role":"user","content":"a"}', '{"role":"user","content":[{"type":"text","text":"a"}]}', '"\\ud800"', '"\\u00e9"',
)  # fmt: skip
PIECES = (
    "a", " ", "\n", "<|im_end|>", "<|im_start|>user\n", "hello world ", "\u00e9", "\U0001f600", "\x00", "a b", "{{",
)  # fmt: skip


def make_wide_list(rng):
    """One value many times, now and then after others that fit, flat or in one more list."""
    entry = rng.choice(ENTRIES)
    first = rng.choice(ENTRIES) if rng.random() < 0.3 else entry
    count = rng.randint(1, WIDTH_BYTES) // (len(entry) + 1)
    listed = "[" + ",".join([first] * (count // 2) + [entry] * (count - count // 2)) + "]"
    return f"[{listed}]" if rng.random() < 0.2 else listed


def make_long_text(rng):
    piece = rng.choice(PIECES)
    return json.dumps(piece * (rng.randint(1, WIDTH_BYTES) // len(json.dumps(piece))))


def make_deep(rng):
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"a":[', "]}]")))
    depth = rng.randint(1, WIDTH_BYTES) // len(opening + closing)
    return opening * depth + "0" + closing * (depth if rng.random() < 0.5 else 0)


def make_many_names(rng):
    return "{" + ",".join(f'"x{i}":0' for i in range(rng.randint(1, 20_000))) + "}"


def make_expensive(rng):
    """A path and a body, one field of which is wide, long, deep or full of names."""
    path = rng.choice(list(BODIES))
    fields = {name: json.dumps(value) for name, value in rng.choice(BODIES[path]).items()}
    value = rng.choice((make_wide_list, make_wide_list, make_long_text, make_long_text, make_deep, make_many_names))(
        rng
    )
    fields[rng.choice([*fields, "prompt", "messages", "stop", "seeds", "metadata", "odd"])] = value
    if rng.random() < 0.1:
        fields["messages"] = '[{"role":"user","content":' + value + "}]"
    return path, ("{" + ",".join(f'"{name}":{each}' for name, each in fields.items()) + "}").encode()


@pytest.mark.attack
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_wide_and_expensive_bodies_cost_nobody_else_anything(count, tmp_path):
    """In rounds, a few bodies at a time and some connections that stay half open, so that each round is judged."""
    with served(write_checkpoint(tmp_path / "tiny")) as server, ThreadPoolExecutor(4) as threads:
        for first in range(0, count, 40):
            given = [make_expensive(random.Random(number)) for number in range(first, min(first + 40, count))]

            def attack(given=given):
                half_open = [socket.create_connection(server.address, timeout=LIMIT_S) for _ in range(10)]
                try:
                    for connection, (path, body) in zip(half_open, given, strict=False):
                        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                        connection.sendall(
                            head % path.encode() + b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body
                        )
                    return [status for status, _ in threads.map(lambda each: server.ask(*each), given)]
                finally:
                    for connection in half_open:
                        connection.close()

            statuses = withstands(server, attack)
            odd = [first + at for at, status in enumerate(statuses) if status not in FINE]
            assert not odd, f"inputs {odd} of these had status {statuses}"
