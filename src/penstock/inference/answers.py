"""Responses of the OpenAI-compatible API, built from completions.

A response's text ends before the stop string; its tokens, log-probabilities and usage count everything that was
sampled. `system_fingerprint` names the oldest weights behind the answer. With `return_token_ids` each choice has all
that the engine recorded: a log-probability's shortest decimal form reads back as the same float32; one that is not
finite, which JSON cannot say, is null.
"""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.types import Completion, TextCodec


def completion_answer(
    groups: Sequence[Sequence[Completion]],
    tokenizer: TextCodec,
    model: str,
    stop: Sequence[str],
    logprobs: bool,
    token_ids: bool,
) -> dict[str, Any]:
    """The answer of ``/v1/completions``: choices by prompt, then by sample."""
    choices: list[dict[str, Any]] = []
    for completion in (completion for group in groups for completion in group):
        choice: dict[str, Any] = {
            "index": len(choices),
            "text": _text_before_stop(completion, stop),
            "finish_reason": completion.finish_reason,
            "logprobs": _legacy_logprobs(completion, tokenizer) if logprobs else None,
        }
        if token_ids:
            choice |= _record(completion) | {"prompt_token_ids": completion.prompt_tokens.tolist()}
        choices.append(choice)
    return _envelope("cmpl", "text_completion", model, groups) | {"choices": choices}


def chat_answer(
    completions: Sequence[Completion],
    tokenizer: TextCodec,
    model: str,
    stop: Sequence[str],
    logprobs: bool,
    token_ids: bool,
) -> dict[str, Any]:
    """The answer of ``/v1/chat/completions``."""
    choices: list[dict[str, Any]] = []
    for index, completion in enumerate(completions):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": _text_before_stop(completion, stop), "refusal": None},
            "finish_reason": completion.finish_reason,
            "logprobs": {"content": _token_logprobs(completion, tokenizer), "refusal": None} if logprobs else None,
        }
        if token_ids:
            choice |= _record(completion)
        choices.append(choice)
    answer = _envelope("chatcmpl", "chat.completion", model, [completions]) | {"choices": choices}
    if token_ids:
        answer["prompt_token_ids"] = completions[0].prompt_tokens.tolist()
    return answer


def _envelope(prefix: str, kind: str, model: str, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
    """What both answers share. A prompt counts once, however many samples it has."""
    prompt_tokens = sum(len(group[0].prompt_tokens) for group in groups)
    completion_tokens = sum(len(completion.response_tokens) for group in groups for completion in group)
    oldest = min((c.lineage, c.oldest_weight_step) for group in groups for c in group)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"weights-{oldest[0]}-{oldest[1]}",
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _text_before_stop(completion: Completion, stop: Sequence[str]) -> str:
    """The text without the stop string that ended it (a completion's text ends with it)."""
    ending = max((s for s in stop if completion.text.endswith(s)), key=len, default="")
    return completion.text[: len(completion.text) - len(ending)]


def _record(completion: Completion) -> dict[str, Any]:
    """What the engine recorded of one response."""
    return {
        "token_ids": _ids(completion),
        "token_logprobs": _logprobs(completion),
        "weight_steps": completion.weight_steps.tolist(),
        "oldest_weight_step": completion.oldest_weight_step,
        "lineage": completion.lineage,
    }


def _logprobs(completion: Completion) -> list[float | None]:
    return [logprob if math.isfinite(logprob) else None for logprob in completion.response_logprobs.tolist()]


def _ids(completion: Completion) -> list[int]:
    return completion.response_tokens.tolist()


def _strings(completion: Completion, tokenizer: TextCodec) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in _ids(completion)]


def _token_logprobs(completion: Completion, tokenizer: TextCodec) -> list[dict[str, Any]]:
    strings = _strings(completion, tokenizer)
    return [
        {"token": string, "logprob": logprob, "bytes": list(string.encode()), "top_logprobs": []}
        for string, logprob in zip(strings, _logprobs(completion), strict=True)
    ]


def _legacy_logprobs(completion: Completion, tokenizer: TextCodec) -> dict[str, Any]:
    strings = _strings(completion, tokenizer)
    offsets = np.cumsum([0, *map(len, strings)])[:-1].tolist()
    return {
        "tokens": strings,
        "token_logprobs": _logprobs(completion),
        "top_logprobs": None,
        "text_offset": offsets,
    }
