"""Bodies and errors of the OpenAI-compatible API.

*Bodies* are read strictly. What the API knows but this engine cannot do is refused by name, never ignored: a silently
dropped penalty would change what is sampled. Beyond OpenAI's own: the other `SAMPLING_FIELDS`, named as vLLM names
them, `stop_token_ids`, `return_token_ids`, `chat_template_kwargs`, `seeds` (one per prompt), prompts as token ids.
Tools go through the chat template. Reading a body
costs time in proportion to its size and no more: lists and objects are counted before they are validated, and
validation ends at the first error (pydantic would otherwise make one for each entry, and each arm of a union).
"""

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from penstock.inference.sequence import MOST_ALTERNATIVES, MOST_STOP_STRINGS, TOO_LONG
from penstock.types import SAMPLING_FIELDS, Decoding, EnvironmentFailure, PromptTooLong, WeightVersion, fold

LONGEST_MESSAGE = 1000
"""In characters: an error repeats what a client sent, but not all of it."""


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: What is wrong and what to do.
        param: The parameter at fault.
        code: A short name of the failure.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        of_client = "requests" if self.status == 429 else "invalid_request_error"  # which OpenAI's 401 and 404 are, too
        error = {
            "message": _encodable(self.message),
            "type": "server_error" if self.status >= 500 else of_client,
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return {"error": error}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The answer that it is."""
        return JSONResponse(self.body, status_code=self.status, headers=headers)


def _encodable(text: str) -> str:
    """What a client sent may hold half of a surrogate pair, and an error repeats it: shown by its escape."""
    return text[:LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode()


async def respond(request: Request, error: Exception) -> JSONResponse:
    """The exception handler of the application; what is unexpected is also logged with its traceback."""
    headers = None
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.scope['path']}: {error.detail}"
        message += "; a client's base_url is http://HOST:PORT/v1" if error.status_code == 404 else ""
        error, headers = ApiError(error.status_code, message), error.headers
    if not isinstance(error, ApiError):
        error = ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
    return error.response(headers)


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    # vLLM's
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    "truncate_prompt_tokens": (),
    "documents": (),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "bad_words": ([],),
    "priority": (0,),
    "return_prompt_text": (False,),
    "return_token_strs": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
}
"""Parameters that are accepted only with these values (or null), which ask for nothing."""

IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "request_id")
)  # fmt: skip
"""Parameters that do not change what is generated."""

IDLE_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "type": ("text", "message"),
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": ("",),
}
"""Fields of messages that other servers' answers have, and that clients send back: taken with these values, or null."""

MOST_RESPONSES = 4096
"""Of one request, over all its prompts."""

MOST_ENTRIES = 4096
"""Of any list in a body but a prompt's token ids, whose most is the sequence length."""

_Entry = TypeVar("_Entry")
_Listed = Annotated[list[_Entry], Field(fail_fast=True)]


_SAMPLING: dict[str, Any] = {name: (field.kind | None, None) for name, field in SAMPLING_FIELDS.items()}
_Sampling = create_model("_Sampling", __config__=ConfigDict(frozen=True, extra="forbid", strict=True), **_SAMPLING)


class StreamOptions(BaseModel):
    """How an answer is streamed.

    Attributes:
        include_usage: A last event counts tokens.
        continuous_usage_stats: With it, each event counts them, as far as it goes.
        include_obfuscation: OpenAI's padding of events, which nothing here adds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class _Body(_Sampling):
    model: str
    n: int = Field(default=1, ge=1, le=MOST_RESPONSES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = False
    seed: int | None = None
    stop: str | _Listed[str] | None = None
    stop_token_ids: _Listed[int] | None = None
    return_token_ids: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)

    @model_validator(mode="after")
    def _can_be_answered(self) -> "_Body":
        if self.stream and self.prompt_logprobs is not None:
            raise _refused("prompt_logprobs", "is not told by streams: leave out it or stream")
        for name, field in SAMPLING_FIELDS.items():
            value = getattr(self, name)
            if not (field.asks_nothing(value) or field.allows(value)):
                raise _refused(name, f"is {value}: it must be {field.expected}")
        if "" in self._stops:
            raise _refused("stop", "holds an empty string, which would stop every response at once")
        return self

    @property
    def _stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def named(self) -> frozenset[str]:
        """The sampling parameters that it has, those that ask for nothing too."""
        return frozenset(name for name in SAMPLING_FIELDS if getattr(self, name) is not None)

    def decoding(self, max_output_tokens: int) -> Decoding:
        """How to sample."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return Decoding(
            **{name: value for name, value in given.items() if not SAMPLING_FIELDS[name].asks_nothing(value)},
            max_output_tokens=max_output_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_strings=tuple(self._stops),
        )


class CompletionBody(_Body):
    """``POST /v1/completions``: one prompt or several, each a text or token ids.

    Attributes:
        add_special_tokens: Whether a text begins with what the tokenizer puts before any text (BOS).
    """

    prompt: str | _Listed[str] | _Listed[int] | _Listed[_Listed[int]]
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool = False
    add_special_tokens: bool = True
    seeds: _Listed[int] | None = None
    least_weights: _Listed[int] | None = Field(default=None, min_length=2, max_length=2)

    @model_validator(mode="after")
    def _asks_for_something(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.only_scores:
            raise _refused("max_tokens", "is 0, which goes with echo or prompt_logprobs only: ask for at least one")
        return self

    @property
    def only_scores(self) -> bool:
        """Whether nothing is sampled."""
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)

    @property
    def scored(self) -> int | None:
        """How many alternatives are told beside each token of the prompts; None where these are not scored."""
        told = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in told if each is not None), default=None)

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
    """One message of a conversation; only one that calls tools may be without content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    role: str
    content: str | _Listed[TextPart] | None = None
    name: str | None = None
    tool_calls: _Listed[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        idle = {name for name in given if name in IDLE_IN_MESSAGES and given[name] in IDLE_IN_MESSAGES[name]}
        return {name: value for name, value in given.items() if value is not None and name not in idle}

    @model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise ValueError("give content, which only a message with tool_calls may be without")
        return self

    def as_mapping(self) -> dict[str, Any]:
        """The message as a chat template takes it: content as one text, arguments of tool calls as objects."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [_with_object_arguments(call) for call in self.tool_calls]
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in named.items() if value is not None}


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call, with the arguments read that OpenAI's form holds as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        message = f"messages: the arguments of a tool call are not JSON: {error}"
        raise ApiError(400, message, "messages", "invalid_value") from error
    return call | {"function": function | {"arguments": arguments}}


class _Conversation(BaseModel):
    """What the chat template is given beside the messages.

    Attributes:
        continue_final_message: The answer goes on with the last message, instead of being the next one.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: _Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The same as `TextCodec.render` takes it."""
        return {**(self.chat_template_kwargs or {}), **({"tools": self.tools} if self.tools else {})}

    @model_validator(mode="after")
    def _with_functions(self) -> "_Conversation":
        for place, tool in enumerate(self.tools or ()):
            function = tool.get("function")
            named = isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])
            if tool.get("type", "function") != "function" or not named:
                raise _refused("tools", f'holds at {place} no {{"type": "function", "function": {{"name": …}}}}')
        return self

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> "_Conversation":
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise ValueError(
                "add_generation_prompt is false, which goes with continue_final_message only: leave it out"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other: leave one out")
        return self


class ChatBody(_Body, _Conversation):
    """``POST /v1/chat/completions``."""

    messages: _Listed[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _beside_what(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise _refused("top_logprobs", "goes with logprobs: true only: give both or none")
        return self

    @property
    def most_tokens(self) -> int | None:
        """Of the answer, by whichever name; None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_calls(self) -> int:
        """Calls of tools that are read out of the answer.

        Raises:
            ApiError: status 400: a call is demanded, which nothing here can force.
        """
        if self.tool_choice not in (None, "auto", "none"):
            message = "tool_choice can be auto or none: this server forces no calls; leave it out"
            raise ApiError(400, message, "tool_choice", "unsupported_parameter")
        if not self.tools or self.tool_choice == "none":
            return 0
        return MOST_ENTRIES if self.parallel_tool_calls else 1


class DetokenizeBody(BaseModel):
    """``POST /detokenize``: token ids to text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    tokens: _Listed[int]


class TokenizeBody(_Conversation):
    """``POST /tokenize``: a text, or messages as a chat request would send them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: _Listed[ChatMessage] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _templates_write_their_own(self) -> "TokenizeBody":
        if self.messages is not None and self.add_special_tokens:
            raise _refused("add_special_tokens", "goes with prompt only: a chat template writes its own")
        return self


class ControlBody(BaseModel):
    """What the routes that drive a server are sent, each its own part."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str | None = None
    kwargs: dict[str, str] | None = None
    new_version: str | None = None
    action: str | None = None
    args: list[Any] = Field(default=[], max_length=0)


_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
"""As vLLM reads truth in a query, in whatever case: Python's clients write ``True``."""


def read_pause(query: Mapping[str, str]) -> tuple[Literal["keep", "wait", "abort"], bool]:
    """What becomes of what runs (``mode``), and whether it computes its cache anew (``clear_cache``).

    Raises:
        ApiError: status 400, naming the parameter.
    """
    mode, clear = query.get("mode", "abort"), query.get("clear_cache", "true").lower()
    if mode not in ("keep", "wait", "abort"):
        raise ApiError(400, f"mode is {mode!r:.100}: it must be keep, wait or abort", "mode", "invalid_value")
    if clear not in _YES + _NO:
        message = f"clear_cache is {clear!r:.100}: it must be true or false"
        raise ApiError(400, message, "clear_cache", "invalid_value")
    return mode, clear in _YES


def prompt_error(error: EnvironmentFailure, param: str | None) -> ApiError:
    """Of a prompt that cannot be answered, as the API says it."""
    return ApiError(400, str(error), param, TOO_LONG if isinstance(error, PromptTooLong) else "invalid_prompt")


_Read = TypeVar("_Read", bound=BaseModel)


def read_body(kind: type[_Read], content: bytes, max_seq_len: int) -> _Read:
    """Parses and checks a JSON body.

    Args:
        kind: What it should be.
        content: Of bounded size: parsing holds the interpreter.
        max_seq_len: No prompt may have more tokens.

    Raises:
        ApiError: status 400, naming the parameter.
    """
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    wanted = {name: value for name, value in parsed.items() if value is not None and name not in IGNORED}
    for name in [name for name in wanted if name not in kind.model_fields]:
        _refuse_unless_neutral(name, wanted.pop(name))
    _count_entries(wanted, max_seq_len)
    try:
        return kind.model_validate(wanted)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(errors, key=lambda each: len(each["loc"]))  # of a union's arms the one that fits best
        param = str(first["loc"][0]) if first["loc"] else None
        path = ".".join(str(part) for part in first["loc"])
        message = (f"{path}: " if path else "") + first["msg"].removeprefix("Value error, ")
        raise ApiError(400, message, param=param, code="invalid_value") from error


def _refuse_unless_neutral(name: str, value: Any) -> None:
    if name not in NEUTRAL:
        raise ApiError(400, f"{name}: Extra inputs are not permitted", param=name, code="invalid_value")
    if value not in NEUTRAL[name]:
        raise ApiError(400, _unsupported(name), param=name, code="unsupported_parameter")


def _count_entries(wanted: dict[str, Any], max_seq_len: int) -> None:
    """Refuses lists that are too long for what they are, whatever they hold."""
    for name, value in wanted.items():
        if isinstance(value, list) and name not in ("prompt", "tokens"):
            _at_most(MOST_STOP_STRINGS if name == "stop" else MOST_ENTRIES, value, name)
    prompt, messages = wanted.get("prompt"), wanted.get("messages")
    if isinstance(prompt, list):
        one = bool(prompt) and type(prompt[0]) is int
        for tokens in [prompt] if one else [each for each in prompt if isinstance(each, list)]:
            _check_length(tokens, max_seq_len)
        if not one:
            _at_most(MOST_ENTRIES, prompt, "prompt")
    if isinstance(messages, list):
        _count_parts(messages)
    if isinstance(tokens := wanted.get("tokens"), list):
        _at_most(max_seq_len, tokens, "tokens")


def _check_length(tokens: list[Any], max_seq_len: int) -> None:
    if len(tokens) > max_seq_len:
        said = f"prompt is too long: it has {len(tokens)} tokens, which leaves no room for a response within "
        raise ApiError(400, f"{said}max_seq_len = {max_seq_len}: shorten it", "prompt", TOO_LONG)


def _count_parts(messages: list[Any]) -> None:
    """An object of unknown names has one error for each, so those are counted too."""
    objects = [message for message in messages if isinstance(message, dict)]
    contents = [message["content"] for message in objects if isinstance(message.get("content"), list)]
    parts = [part for content in contents for part in content]
    _at_most(MOST_ENTRIES, parts, "messages: content")
    names = len(ChatMessage.model_fields) + len(IDLE_IN_MESSAGES)
    for each in [*objects, *(part for part in parts if isinstance(part, dict))]:
        if len(each) > names:
            message = f"messages: an object in it has {len(each)} names: at most {names} are known"
            raise ApiError(400, message, "messages", "invalid_value")


def _at_most(most: int, entries: list[Any], name: str) -> None:
    if len(entries) > most:
        param = name.partition(":")[0]
        raise ApiError(400, f"{name} has {len(entries)} entries: give at most {most}", param, "invalid_value")


def folded_seeds(seed: int | None, prompts: int) -> list[int]:
    """A seed for each prompt, derived from one; from none that anybody knows where there is none."""
    root = secrets.randbits(63) if seed is None else seed
    return [fold(root, i) for i in range(prompts)]


def _refused(name: str, why: str) -> ApiError:
    """Of a value that does not go with others."""
    return ApiError(400, f"{name} {why}", name, "invalid_value")


def _unsupported(name: str) -> str:
    return f"{name} is not supported by this server: leave it out"


def _token_array(tokens: Any) -> np.ndarray:
    try:
        return np.array(tokens, np.int32)
    except OverflowError as error:
        raise ApiError(400, "prompt: a token id does not fit 32 bits", "prompt", "invalid_value") from error
