"""The benchmark of serving: what a right stream is, what it promises, and that a short run keeps it."""

import argparse
import json
from collections import Counter

import pytest
from benchmarks.serving import Found, events_of, gauge, judged, quantiles

from benchmarks import serving

OPTIONS = argparse.Namespace(requests=4, slots=2)


def stream(*changes: dict) -> list[str]:
    first = {"id": "a", "choices": [{"finish_reason": None, "token_ids": [3, 4]}]}
    last = {"id": "a", "choices": [{"finish_reason": "stop", "token_ids": [5]}]}
    usage = {"id": "a", "choices": [], "usage": {"completion_tokens": 3}}
    events = [event | (changes[at] if at < len(changes) else {}) for at, event in enumerate((first, last, usage))]
    return [*map(json.dumps, events), "[DONE]"]


@pytest.mark.parametrize(
    ("lines", "ended"),
    [
        (stream(), "complete"),
        (stream()[:-1], "no [DONE]"),
        ([], "no [DONE]"),
        (stream({"id": "b"}), "events of several ids"),
        (stream({}, {"choices": []}), "finish reasons []"),
        (stream({}, {}, {"usage": {"completion_tokens": 4}}), "usage is not what was streamed"),
        (stream({"error": {"message": "the engine stopped"}}), "the engine stopped"),
    ],
)
def test_a_stream_is_complete_where_it_ends_as_it_says(lines, ended):
    assert events_of(lines) == ended


def test_every_promise_is_a_mark():
    good = Found(Counter(complete=3, cancelled=1), versions={"0-0", "0-1"})
    assert judged(good, OPTIONS, True, True).missed == 0
    assert judged(good, OPTIONS, False, True).missed == judged(good, OPTIONS, True, False).missed == 1
    assert judged(Found(Counter(complete=3), versions={"0-0", "0-1"}), OPTIONS, True, True).missed == 1
    assert judged(Found(Counter(complete=4), versions={"0-0"}), OPTIONS, True, True).missed == 1
    errors = judged(Found(Counter({"complete": 3, "503: full": 1}), versions={"0-0", "0-1"}), OPTIONS, True, True)
    assert errors.missed == 1 and errors.lines[-1].strip() == "1 × 503: full"


def test_numbers_are_read_and_shown():
    text = '# HELP x\nx_total 4.0\nx 3.0\ny{le="1"} 2.0\n'
    assert gauge(text, "x") == 3.0
    assert quantiles([0.1] * 99 + [0.3]) == "p50    100.0 ms   p99    102.0 ms"
    assert quantiles([0.1]) == "too few"


@pytest.mark.slow
def test_a_short_run_loses_no_request_and_no_slot(capsys):
    words = ["--clients", "8", "--requests", "60", "--slots", "4", "--tokens", "16", "--swap-s", "0.2"]
    assert serving.main(words) == 0
    assert "60 requests, 4 slots" in capsys.readouterr().out
