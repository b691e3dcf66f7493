"""Malformed answers of inference servers, as a client judges them."""

import numpy as np
import pytest
from tests.fuzz.fuzzing import COUNTS, ODD, damaged, fuzz, json_bytes

from penstock.inference.codec import PenstockDialect
from penstock.inference.server_pool import HttpReply, RetryableFailure, ServerFault, result_of
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, EnvironmentFailure, GenerationCall

PROMPTS, N = [np.array([5, 6, 7], np.int32), np.array([8], np.int32)], 2
ERROR = {"error": {"message": "max_tokens is 0: give at least 1", "type": "invalid_request_error", "code": "bad_value"}}
CODES = ("invalid_prompt", "context_length_exceeded", "rate_limit_exceeded", None)
STATUSES = (400, 401, 404, 413, 429, 500, 502, 503, 504, 302)


def choice(index, length):
    return {
        "index": index, "text": "purrs", "finish_reason": "stop" if index % 2 else "length",
        "token_ids": list(range(9, 9 + length)), "token_logprobs": [-0.25, None, -3.5, -1e-7][:length],
        "weight_steps": [3] * length, "oldest_weight_step": 2, "lineage": 0,
    }  # fmt: skip


GOOD = {"id": "a", "object": "text_completion", "choices": [choice(index, index + 1) for index in range(2 * N)]}


@pytest.fixture(scope="module")
def request_():
    call = GenerationCall(PROMPTS, N, Decoding(stop_strings=("zz", "\n")), (1, 2))
    (request,) = PenstockDialect().requests(call, Tokenizer.load("penstock"), "tiny")
    return request


def check(groups):
    """What passes can be trained on: as many as were asked for, of the dtypes that records have, one number each."""
    assert [len(group) for group in groups] == [N] * len(PROMPTS)
    for group, prompt in zip(groups, PROMPTS, strict=True):
        for completion in group:
            arrays = (completion.response_tokens, completion.response_logprobs, completion.weight_steps)
            assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32]
            assert len({array.shape for array in arrays}) == 1 and arrays[0].ndim == 1
            assert not np.isinf(completion.response_logprobs).any()
            assert completion.prompt_tokens is prompt and completion.finish_reason in ("stop", "length")
            completion.text.encode()
            np.array([completion.oldest_weight_step, completion.lineage]).astype(np.int32, casting="same_kind")


def with_odd_field(rng):
    """The answer with one field of one choice changed: in type, in length, or in one of its numbers."""
    choices = [dict(one) for one in GOOD["choices"]]
    changed = rng.choice(choices)
    field = rng.choice(list(changed))
    if isinstance(changed[field], list) and rng.random() < 0.8:
        values = list(changed[field])
        values[rng.randrange(len(values))] = rng.choice(ODD)()
        changed[field] = values[:-1] if rng.random() < 0.2 else values
    else:
        changed[field] = rng.choice(ODD)()
    return {"choices": choices}


@pytest.mark.parametrize("count", COUNTS)
def test_completions_are_read_or_asked_for_again(request_, count):
    def make(rng):
        return json_bytes(with_odd_field(rng) if rng.random() < 0.5 else GOOD, rng)

    def target(content):
        check(result_of(HttpReply(200, content), request_))

    assert 0.3 * count < fuzz(target, make, count, ServerFault) < count


@pytest.mark.parametrize("count", COUNTS)
def test_errors_are_told_whatever_they_are(request_, count):
    def make(rng):
        error = {"error": ERROR["error"] | {"code": rng.choice(CODES)}}
        content = json_bytes(error, rng) if rng.random() < 0.8 else damaged(b"<html>502 Bad Gateway</html>", rng)
        return rng.choice(STATUSES), content

    def target(given):
        assert isinstance(result_of(HttpReply(*given), request_), EnvironmentFailure)

    assert fuzz(target, make, count, (RetryableFailure, ConfigError)) > 0.5 * count
