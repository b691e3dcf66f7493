import numpy as np
import pytest

from penstock.inference.dispatch import HostSamples
from penstock.inference.scheduler import SlotTable
from penstock.inference.sequence import GenerationRequest, PendingRequest, Response
from penstock.types import Decoding, WeightVersion, fold


@pytest.fixture
def table():
    return SlotTable(slots=3, max_stop_token_ids=4)


@pytest.fixture
def make_response(codec):
    def make(max_tokens=5, prompt=(7, 8, 9), stops=(50,), **decoding):
        request = GenerationRequest(np.array(prompt, np.int32), Decoding(**decoding), seed=2)
        return Response.of(PendingRequest(request, stops, max_tokens), 1, codec)

    return make


def sampled(*columns):
    """Tokens by slot; their log-probabilities are minus a tenth of the token."""
    steps = max(map(len, columns))
    tokens = np.array([list(column) + [99] * (steps - len(column)) for column in columns], np.int32).T
    return HostSamples(tokens, (tokens * -0.1).astype(np.float32), np.array([len(c) for c in columns], np.int32))


def test_assigning_writes_what_the_device_needs(table, make_response):
    slot = table.assign(make_response(max_tokens=5, temperature=0.5, top_k=7, top_p=0.9))
    rows = table.rows
    assert slot == 0
    assert [column[0] for column in (rows.tokens, rows.positions, rows.budget)] == [9, 2, 5]
    asked = rows.sampling["top_k"][0], rows.sampling["temperature"][0], rows.sampling["top_p"][0]
    assert asked == (7, np.float32(0.5), np.float32(0.9))
    assert rows.stop_token_ids[0].tolist() == [50, -1, -1, -1]
    seed = fold(2, 1)
    assert (int(rows.seeds[0, 0]) << 32) + int(rows.seeds[0, 1]) == seed


def test_what_is_not_asked_for_is_the_neutral_value(table, make_response):
    table.assign(make_response())
    asked = table.rows.sampling
    assert asked["top_k"].tolist() == [2**31 - 1] * 3 and asked["top_p"].tolist() == [1, 1, 1]


def test_the_lowest_free_slot_is_taken(table, make_response):
    assert [table.assign(make_response()) for _ in range(3)] == [0, 1, 2]
    for slot in (2, 0):
        table.release(slot)
    assert (table.free, table.running) == (2, 1)
    assert [table.assign(make_response()) for _ in range(2)] == [0, 2]


def test_a_released_slot_is_dead_and_asks_for_nothing(table, make_response):
    table.release(table.assign(make_response(temperature=0.0, top_k=3, top_p=0.2)))
    asked = (table.rows.sampling[name][0] for name in ("temperature", "top_k", "top_p"))
    assert table.rows.budget[0] == 0 and tuple(asked) == (1, 2**31 - 1, 1)


def test_advance_takes_what_was_sampled_and_says_why_responses_ended(table, make_response):
    cut, stopped, going = make_response(max_tokens=2), make_response(max_tokens=9), make_response(max_tokens=9)
    for response in (cut, stopped, going):
        table.assign(response)
    ended = table.advance(sampled([1, 2], [3, 50], [4, 5, 6]), WeightVersion(1, 4))
    assert ended == [(0, cut), (1, stopped)]
    assert [response.finish_reason for response in (cut, stopped, going)] == ["length", "stop", None]
    assert going.tokens == [4, 5, 6] and going.versions == [WeightVersion(1, 4)] * 3
    assert going.logprobs == pytest.approx([-0.4, -0.5, -0.6])
    rows = table.rows
    assert (rows.tokens[2], rows.positions[2], rows.budget[2]) == (6, 5, 6)


def test_reach_is_the_longest_live_sequence_after_a_dispatch(table, make_response):
    assert table.reach(4) == 0
    table.assign(make_response(max_tokens=1, prompt=[1] * 10))
    assert table.reach(4) == 10
    table.assign(make_response(max_tokens=9, prompt=[1] * 8))
    assert table.reach(4) == 11
    assert table.cached_tokens == 9 + 7
    table.release(1)
    assert table.reach(4) == 10


def test_tokens_after_the_end_of_a_stop_string_are_dropped_with_their_logprobs(table, make_response):
    response = make_response(max_tokens=9, stop_strings=("cat", "dog"))
    table.assign(response)
    assert table.advance(sampled(list(b"a do"), [], []), WeightVersion(0, 1)) == []
    ended = table.advance(sampled(list(b"g ca"), [], []), WeightVersion(0, 2))
    assert ended == [(0, response)]
    assert bytes(response.tokens) == b"a dog"
    assert len(response.logprobs) == len(response.versions) == 5
    assert response.finish_reason == "stop"
