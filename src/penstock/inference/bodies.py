"""Request bodies of the OpenAI-compatible API, read strictly.

What the API knows but this engine cannot do is refused by name, never ignored: a silently dropped penalty would
change what is sampled. Beyond OpenAI's own: `top_k`, `stop_token_ids`, `return_token_ids`, `seeds` (one per prompt),
prompts as token ids.
"""

import secrets
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.inference.api_errors import ApiError
from penstock.types import Decoding, WeightVersion, fold

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
}
"""Parameters that are accepted only with these values (or null), which ask for nothing."""

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"})
"""Parameters that do not change what is generated."""

MOST_RESPONSES = 4096
"""Of one request, over all its prompts."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    n: int = Field(default=1, ge=1, le=MOST_RESPONSES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    return_token_ids: bool = False

    def decoding(self, max_output_tokens: int) -> Decoding:
        """How to sample; ranges are the engine's to check."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Decoding(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=None if self.top_p == 1 else self.top_p,
            max_output_tokens=max_output_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_strings=tuple(stops),
        )


class CompletionBody(_Body):
    """``POST /v1/completions``: one prompt or several, each a text or token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = Field(default=None, ge=0, le=1)
    seeds: list[int] | None = None
    least_weights: list[int] | None = Field(default=None, min_length=2, max_length=2)

    def is_ahead_of(self, version: WeightVersion) -> bool:
        """Whether `least_weights`, a lineage and a step, asks for newer weights than these of the same lineage."""
        if self.least_weights is None:
            return False
        lineage, step = self.least_weights
        return lineage == version.lineage and step > version.step

    @property
    def prompts(self) -> list[str | np.ndarray]:
        """The prompts one by one, token ids as int32 arrays."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or len(self.prompt) * self.n > MOST_RESPONSES and not isinstance(self.prompt[0], int):
            limits = f"it must hold at least one prompt, and prompts times n at most {MOST_RESPONSES}"
            raise ApiError(400, f"prompt: {limits}", "prompt", "invalid_value")
        if isinstance(self.prompt[0], int):
            return [_token_array(self.prompt)]
        return [one if isinstance(one, str) else _token_array(one) for one in self.prompt]

    def prompt_seeds(self, prompts: int) -> list[int]:
        """One seed for each prompt, of which sample j draws from ``fold(seed, j)``.

        Without `seeds`, prompt i has ``fold(seed, i)``; without either, nobody can foresee the noise.

        Raises:
            ApiError: status 400: not as many as prompts, or both are given.
        """
        if self.seeds is None:
            return folded_seeds(self.seed, prompts)
        if self.seed is not None or len(self.seeds) != prompts:
            found = f"{len(self.seeds)} for {prompts} prompts" + (" beside seed" if self.seed is not None else "")
            raise ApiError(400, f"seeds: {found}: give one for each prompt, or seed", "seeds", "invalid_value")
        return self.seeds


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def as_mapping(self) -> dict[str, str]:
        """Role and content as a chat template takes them."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatBody(_Body):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None


class TokenizeBody(BaseModel):
    """``POST /tokenize``: a text, or messages as a chat request would send them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


_Read = TypeVar("_Read", bound=BaseModel)


def read_body(kind: type[_Read], parsed: Any) -> _Read:
    """Checks a parsed JSON body.

    Raises:
        ApiError: status 400, naming the parameter.
    """
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    wanted = {name: value for name, value in parsed.items() if name not in IGNORED}
    for name in [name for name in wanted if name in NEUTRAL and name not in kind.model_fields]:
        value = wanted.pop(name)
        if value is not None and value not in NEUTRAL[name]:
            raise ApiError(400, _unsupported(name), param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        path = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{path}: {first['msg']}", param=param, code="invalid_value") from error


def folded_seeds(seed: int | None, prompts: int) -> list[int]:
    """A seed for each prompt, derived from one; from none that anybody knows where there is none."""
    root = secrets.randbits(63) if seed is None else seed
    return [fold(root, i) for i in range(prompts)]


def _unsupported(name: str) -> str:
    if name == "stream":
        return "stream is not supported: leave it out and take the whole response"
    return f"{name} is not supported by this server: leave it out"


def _token_array(tokens: Any) -> np.ndarray:
    try:
        return np.array(tokens, np.int32)
    except OverflowError as error:
        raise ApiError(400, "prompt: a token id does not fit 32 bits", "prompt", "invalid_value") from error
