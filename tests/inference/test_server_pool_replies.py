import json

import pytest

from penstock.inference.codec import MalformedAnswer, ServerRequest
from penstock.inference.routing import Server
from penstock.inference.server_pool import (
    LONGEST_MESSAGE,
    MOST_SERVER_FAULTS,
    HttpReply,
    RetryableFailure,
    RetryState,
    ServerBusy,
    ServerFault,
    result_of,
)
from penstock.types import ConfigError, EnvironmentFailure, PromptTooLong, RunFailed

A, B = (Server(f"inference-{i}", 0, f"http://h:{i}") for i in range(2))


def judge(status, message="because", code="some_code"):
    def read(content):
        raise MalformedAnswer("not an answer")

    content = json.dumps({"error": {"message": message, "code": code}}).encode()
    return result_of(HttpReply(status, content), ServerRequest(b"", 1, read))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, ServerFault), (301, ServerFault), (400, ConfigError), (401, ServerFault), (404, ServerFault),
        (429, ServerBusy), (500, ServerFault), (502, RetryableFailure), (503, RetryableFailure),
        (504, RetryableFailure),
    ],
)  # fmt: skip
def test_what_a_status_means(status, error):
    with pytest.raises(error) as raised:
        judge(status)
    assert type(raised.value) is error


def test_a_prompt_at_fault_is_a_result():
    for failure in (judge(400, code="invalid_prompt"), judge(413)):
        assert type(failure) is EnvironmentFailure and str(failure) == "because"
    longer = judge(400, code="context_length_exceeded")
    assert isinstance(longer, PromptTooLong) and str(longer) == "because"


def test_a_servers_message_is_repeated_up_to_a_length():
    with pytest.raises(ServerFault) as raised:
        judge(500, "x" * 10**6)
    assert str(raised.value) == "status 500, " + "x" * LONGEST_MESSAGE


def test_the_story_of_a_request():
    attempts = RetryState()
    assert str(attempts) == "none that may be asked was there and had room"
    attempts.begin(A)
    attempts.add(A, RetryableFailure("it hung up"))
    attempts.begin(A)
    attempts.add(A, ServerBusy("busy"))
    attempts.begin(B)
    assert str(attempts) == (
        "asked inference-0#0 (times: 2, at last: busy), inference-1#0 (times: 1, at last: no answer yet)"
    )


def test_bad_answers_have_an_end_and_others_do_not():
    attempts = RetryState()
    for _ in range(100):
        attempts.begin(A)
        attempts.add(A, RetryableFailure("x"))
    for _ in range(MOST_SERVER_FAULTS - 1):
        attempts.add(A, ServerFault("nonsense"))
    with pytest.raises(RunFailed, match="cannot be used: asked inference-0#0 .times: 100, at last: nonsense"):
        attempts.add(A, ServerFault("nonsense"))
