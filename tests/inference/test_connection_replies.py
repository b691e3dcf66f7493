import json

import pytest

from penstock.inference.codec import MalformedAnswer, ServerRequest
from penstock.inference.connection import (
    LONGEST_MESSAGE,
    MOST_BAD_ANSWERS,
    Answer,
    BadAnswer,
    Refused,
    Trials,
    Unanswered,
    judged,
)
from penstock.inference.routing import Server
from penstock.types import ConfigError, EnvironmentFailure, RunFailed

A, B = (Server(f"inference-{i}", 0, f"http://h:{i}") for i in range(2))


def judge(status, message="because", code="some_code"):
    def read(content):
        raise MalformedAnswer("not an answer")

    content = json.dumps({"error": {"message": message, "code": code}}).encode()
    return judged(Answer(status, content), ServerRequest(b"", 1, read))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, BadAnswer), (301, BadAnswer), (400, ConfigError), (401, BadAnswer), (404, BadAnswer), (429, Refused),
        (500, BadAnswer), (502, Unanswered), (503, Unanswered), (504, Unanswered),
    ],
)  # fmt: skip
def test_what_a_status_means(status, error):
    with pytest.raises(error) as raised:
        judge(status)
    assert type(raised.value) is error


def test_a_prompt_at_fault_is_a_result():
    for failure in (judge(400, code="invalid_prompt"), judge(413)):
        assert isinstance(failure, EnvironmentFailure) and str(failure) == "because"


def test_a_servers_message_is_repeated_up_to_a_length():
    with pytest.raises(BadAnswer) as raised:
        judge(500, "x" * 10**6)
    assert str(raised.value) == "status 500, " + "x" * LONGEST_MESSAGE


def test_the_story_of_a_request():
    trials = Trials()
    assert str(trials) == "none that may be asked was there and had room"
    trials.begin(A)
    trials.add(A, Unanswered("it hung up"))
    trials.begin(A)
    trials.add(A, Refused("busy"))
    trials.begin(B)
    assert str(trials) == (
        "asked inference-0#0 (times: 2, at last: busy), inference-1#0 (times: 1, at last: no answer yet)"
    )


def test_bad_answers_have_an_end_and_others_do_not():
    trials = Trials()
    for _ in range(100):
        trials.begin(A)
        trials.add(A, Unanswered("x"))
    for _ in range(MOST_BAD_ANSWERS - 1):
        trials.add(A, BadAnswer("nonsense"))
    with pytest.raises(RunFailed, match="cannot be used: asked inference-0#0 .times: 100, at last: nonsense"):
        trials.add(A, BadAnswer("nonsense"))
