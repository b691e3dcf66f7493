import numpy as np
import pytest

from penstock.inference.config import EngineConfig, ServedEngineConfig
from penstock.inference.sequence import GenerationRequest, check_request
from penstock.types import ConfigError, Decoding, EnvironmentFailure

CONFIG = EngineConfig(max_seq_len=8, max_stop_token_ids=2)


def check(prompt=(1, 2), n=1, **decoding):
    request = GenerationRequest(np.array(prompt, np.int32), Decoding(**decoding), 0, n)
    check_request(request, CONFIG, vocab_size=10)


def test_what_fits_is_accepted():
    check(prompt=[9] * 7, temperature=0.0, top_k=1, top_p=1.0, stop_token_ids=(1, 2), stop_strings=("x",))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1] * 8, "it has 8 tokens, which leaves no room .* max_seq_len = 8"),
        ([1, 10], "token id 10, but the model's vocabulary has 10"),
        ([-1, 1], "token id -1"),
    ],
)
def test_an_unusable_prompt_is_the_environments_failure(prompt, message):
    with pytest.raises(EnvironmentFailure, match=message):
        check(prompt)


def test_what_to_raise_is_named_as_the_callers_config_has_it():
    request = GenerationRequest(np.arange(8, dtype=np.int32), Decoding(), 0)
    for config, key in ((CONFIG, "inference.max_seq_len"), (ServedEngineConfig(max_seq_len=8), "engine.max_seq_len")):
        with pytest.raises(EnvironmentFailure, match=f"raise {key}$"):
            check_request(request, config, 10)
    stops = GenerationRequest(np.ones(2, np.int32), Decoding(stop_token_ids=tuple(range(9))), 0)
    with pytest.raises(ConfigError, match=r"at most 8 fit; raise engine\.max_stop_token_ids$"):
        check_request(stops, ServedEngineConfig(), 10)


def test_a_prompt_of_another_dtype_is_refused():
    with pytest.raises(EnvironmentFailure, match=r"prompt is int64\[1\]: it must be int32"):
        check_request(GenerationRequest(np.array([1]), Decoding(), 0), CONFIG, 10)


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e-6}, "temperature is 1e-06: it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e300}, "temperature is 1e\\+300: .* to 1e\\+06"),
        ({"top_k": 0}, "top_k is 0: it must be from 1 to 2147483647, or absent to keep all"),
        ({"top_k": 2**31}, "top_k is 2147483648: it must be from 1"),
        ({"top_p": 1e-40}, "top_p is 1e-40"),
        ({"stop_token_ids": (1, 2**31)}, "stop_token_ids holds 2147483648: a token id is an int32"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1: it must be from 0 to 1, or absent to keep all"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"stop_token_ids": (1, 2, 3)}, "stop_token_ids has 3 entries: at most 2"),
        ({"stop_strings": ("x", "")}, "empty string"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_decoding_out_of_range_is_bad_input(decoding, message):
    with pytest.raises(ConfigError, match=message):
        check(**decoding)


@pytest.mark.parametrize("stops", [("a",) * 65, ("a" * 1025,)])
def test_stop_strings_are_bounded(stops):
    with pytest.raises(ConfigError, match="stop has .* at most 64 of at most 1024"):
        check(stop_strings=stops)
