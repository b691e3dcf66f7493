"""What is asked of the engine, and its validation before anything runs.

A request that cannot be served is refused at submission, so that nothing invalid reaches the engine's thread.
"""

from dataclasses import dataclass

import numpy as np

from penstock.inference.config import EngineConfig
from penstock.types import SAMPLING_FIELDS, ConfigError, Decoding, EnvironmentFailure

MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 1024
"""Every sampled token is compared with all of them."""

TOKEN_ID_LIMIT = 2**31
"""One past the largest int32."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One prompt and how often to answer it.

    Attributes:
        prompt: int32 [p], at least one token.
        decoding: How to sample; no `stop_token_ids` means the tokenizer's.
        seed: Sample j draws from ``fold(seed, j)``, and from nothing else.
        n: Responses; they share the prompt's prefill.
    """

    prompt: np.ndarray
    decoding: Decoding
    seed: int
    n: int = 1


def check_request(request: GenerationRequest, config: EngineConfig, vocab_size: int) -> None:
    """Refuses what the engine cannot serve.

    Raises:
        EnvironmentFailure: the prompt is empty, has unknown tokens, or leaves no room for a response.
        ConfigError: the decoding parameters are out of range.
    """
    _check_prompt(request.prompt, config.max_seq_len, vocab_size)
    _check_decoding(request.decoding, config.max_stop_token_ids)
    if request.n < 1:
        raise ConfigError(f"n is {request.n}: ask for at least one response")


def _check_prompt(prompt: np.ndarray, max_seq_len: int, vocab_size: int) -> None:
    if prompt.dtype != np.int32 or prompt.ndim != 1:
        raise EnvironmentFailure(f"prompt is {prompt.dtype}{list(prompt.shape)}: it must be int32 [p]")
    if len(prompt) == 0:
        raise EnvironmentFailure("prompt is empty: a policy needs at least one token to condition on")
    if len(prompt) >= max_seq_len:
        raise EnvironmentFailure(
            f"prompt has {len(prompt)} tokens, which leaves no room for a response within max_seq_len = "
            f"{max_seq_len}: shorten the prompt or raise inference.max_seq_len"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise EnvironmentFailure(
            f"prompt holds token id {_outside(prompt, vocab_size)}, but the model's vocabulary has {vocab_size}"
        )


def _outside(prompt: np.ndarray, vocab_size: int) -> int:
    return int(prompt[(prompt < 0) | (prompt >= vocab_size)][0])


def _check_decoding(decoding: Decoding, max_stop_token_ids: int) -> None:
    """Ranges of the sampling parameters, named as in `Decoding`."""
    stops = decoding.stop_strings
    if len(stops) > MOST_STOP_STRINGS or any(len(each) > LONGEST_STOP_STRING for each in stops):
        raise ConfigError(
            f"stop has {len(stops)} strings, the longest of {max(map(len, stops))} characters: give at most "
            f"{MOST_STOP_STRINGS} of at most {LONGEST_STOP_STRING}"
        )
    for name, field in SAMPLING_FIELDS.items():
        if not field.allows(value := getattr(decoding, name)):
            raise ConfigError(f"{name} is {value}: it must be {field.expected}")
    if decoding.max_output_tokens < 1:
        raise ConfigError(f"max_output_tokens is {decoding.max_output_tokens}: it must be at least 1")
    if len(decoding.stop_token_ids) > max_stop_token_ids:
        raise ConfigError(
            f"stop_token_ids has {len(decoding.stop_token_ids)} entries: at most {max_stop_token_ids} fit; raise "
            "inference.max_stop_token_ids"
        )
    if any(not 0 <= token < TOKEN_ID_LIMIT for token in decoding.stop_token_ids):
        raise ConfigError(f"stop_token_ids holds {max(decoding.stop_token_ids, key=abs)}: a token id is an int32")
    if any(not stop for stop in decoding.stop_strings):
        raise ConfigError("stop_strings holds an empty string, which would stop every response at once")
