"""Messages of other processes: what is not one is refused by name, whatever it is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import WeightsError, WeightVersion
from penstock.weights.flight_messages import (
    MAX_REQUEST_BYTES,
    FinishedRequest,
    OfferAnswer,
    OfferRequest,
    StreamTicket,
    WaitAnswer,
    WaitRequest,
    content_pair,
    pair,
    read_answer,
    read_request,
)

TICKET = StreamTicket(
    job="run",
    client="inference-0",
    incarnation="ab",
    version=(1, 7),
    base=((1, 6), "digest"),
    stream=3,
    streams=4,
    chunk_bytes=4096,
)
MESSAGES = [
    TICKET,
    WaitRequest(job="run", client="c", known=("ab", (0, 3)), timeout_s=1.5),
    WaitRequest(job="run", client="c", known=None, timeout_s=0.0),
    OfferRequest(job="run", client="c", version=(0, 3), base=None, failed=True, timeout_s=2.0),
    FinishedRequest(job="run", client="c", version=(0, 3), port=8123),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_requests_are_read_as_they_were_sent(message):
    assert read_request(type(message), message.to_bytes()) == message


def test_answers_are_read_as_they_were_sent():
    for answer in (WaitAnswer(newest=("ab", (0, 3))), OfferAnswer(parent=None), OfferAnswer(deltas=[3, 0], keep=True)):
        assert read_answer(type(answer), answer.to_bytes()) == answer


def test_versions_travel_as_pairs():
    assert pair(WeightVersion(2, 5)) == (2, 5)
    assert content_pair((WeightVersion(2, 5), "d")) == ((2, 5), "d") and content_pair(None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"stream": -1},
        {"stream": 64},
        {"streams": 0},
        {"streams": 65},
        {"chunk_bytes": 1},
        {"chunk_bytes": 1 << 31},
        {"version": [1]},
        {"version": [1, -1]},
        {"version": [1, 1 << 48]},
        {"version": [1, 2.5]},
        {"version": [True, 2]},
        {"base": [[0, 1], ""]},
        {"job": ""},
        {"job": "x" * 513},
        {"job": None},
        {"client": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_values_out_of_bounds_are_refused(change):
    values = json.loads(TICKET.to_bytes()) | change
    with pytest.raises(WeightsError, match=f"not a StreamTicket: {next(iter(change))}"):
        read_request(StreamTicket, json.dumps(values).encode())


def test_a_wait_without_end_is_refused():
    for timeout in ("1e9", "NaN", "Infinity", "-1"):
        text = f'{{"job":"run","client":"c","known":null,"timeout_s":{timeout}}}'
        with pytest.raises(WeightsError, match="WaitRequest"):
            read_request(WaitRequest, text.encode())


@pytest.mark.attack
def test_a_large_request_is_refused_before_it_is_read():
    text = b"[" * (MAX_REQUEST_BYTES + 1)
    with pytest.raises(WeightsError, match=f"{MAX_REQUEST_BYTES + 1} bytes is refused: at most {MAX_REQUEST_BYTES}"):
        read_request(StreamTicket, text)
    with pytest.raises(WeightsError, match="not a StreamTicket"):
        read_request(StreamTicket, b"[" * MAX_REQUEST_BYTES)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 200))
@pytest.mark.attack
def test_damaged_requests_are_read_as_others_or_refused(noise, start, end):
    text = TICKET.to_bytes()
    for damaged in (noise, text[:start] + noise + text[end:]):
        try:
            read_request(StreamTicket, damaged)
        except WeightsError:
            pass
