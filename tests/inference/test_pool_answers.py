"""The pool and what servers say: refusals of one prompt, mistakes of the caller, and nonsense."""

import pytest
from tests.inference.fake_servers import answer, refusal, serving
from tests.inference.pools import metric, pools, read, request

from penstock.inference import server_pool as module
from penstock.inference.codec import MalformedAnswer, ServerRequest
from penstock.types import ConfigError, EnvironmentFailure, RunFailed

start, make_pool = pytest.fixture(serving), pytest.fixture(pools)


def test_a_prompt_that_does_not_fit_fails_alone(start, make_pool):
    def behave(body):
        return refusal(400, "prompt is too long", "invalid_prompt") if body["seeds"] == [1] else answer(body)

    pool = make_pool(start(behave).known_as("inference-0"))
    first, second, third = pool.ask([request(0), request(1), request(2)])
    assert (first, third) == ([0], [2])
    assert isinstance(second, EnvironmentFailure) and str(second) == "prompt is too long"
    assert metric(pool, "retries_total") == 0


def test_a_body_that_is_too_large_fails_alone(start, make_pool):
    pool = make_pool(start(lambda body: refusal(413, "larger than 9 bytes")).known_as("inference-0"))
    (failure,) = pool.ask([request(0)])
    assert isinstance(failure, EnvironmentFailure) and "larger than 9" in str(failure)


def test_a_parameter_out_of_range_is_the_callers_mistake(start, make_pool):
    server = start(lambda body: refusal(400, "temperature is -1", "invalid_value"))
    pool = make_pool(server.known_as("inference-0"))
    with pytest.raises(ConfigError, match="refused the request: temperature is -1"):
        pool.ask([request(0)])
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (refusal(401, "missing or wrong token"), "status 401, missing or wrong token"),
        (refusal(500, "internal error: KeyError"), "status 500, internal error"),
        ((404, b"<html>"), "status 404, with a body of 6 bytes that is no error object"),
        ((200, {"choices": []}), "it holds no choices"),
    ],
)
def test_servers_that_answer_nonsense_end_it_soon(start, make_pool, monkeypatch, reply, said):
    monkeypatch.setattr(module, "MOST_SERVER_FAULTS", 3)
    server = start(lambda body: reply)
    pool = make_pool(server.known_as("inference-0"))
    with pytest.raises(RunFailed, match=rf"cannot be used: asked inference-0#0 \(times: 3, at last: {said}"):
        pool.ask([request(0)])
    assert len(server.bodies) == 3


def test_one_bad_answer_is_no_end(start, make_pool):
    replies = iter([(200, b"\x00"), (200, b"{}"), refusal(500)])
    server = start()
    server.behave = lambda body: next(replies, None) or answer(body)
    pool = make_pool(server.known_as("inference-0"))

    def strict(content):
        try:
            return read(content)
        except (ValueError, KeyError) as error:
            raise MalformedAnswer(str(error)) from error

    assert pool.ask([ServerRequest(request(6).body, 1, strict)]) == [[6]]
