"""Tool calls in what a policy said, in the forms that the chat templates of open models teach.

``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen, SmolLM), any number in a turn, or JSON alone
(Llama 3's ``{"name": …, "parameters": {…}}``, several with semicolons between; Mistral's list). JSON alone that names
no arguments is an answer, such as ``{"name": "Ada", "age": 36}``. What the policy wrote is read, never evaluated.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_DECODER, _BETWEEN = json.JSONDecoder(), re.compile(r"\s*(?:;\s*|\Z)")
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One that the policy wrote.

    Attributes:
        name: Of the tool; empty where it cannot be read.
        arguments: By name.
        error: What is wrong with it; empty where nothing is.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in what a policy said, in order; none where it calls nothing."""
    written = _CALL.findall(text)
    if written:
        return [call for each in written for call in _calls_of(each)]
    alone = text.removeprefix(PYTHON_TAG).removeprefix("[TOOL_CALLS]").strip()
    if not alone.startswith(("{", "[")):
        return []
    found = [_call_of(value, alone=True) for value in _values_of(alone)]
    return [] if any(call.error for call in found) else found  # JSON that is no call is an answer


def said_beside(text: str) -> str:
    """What a policy said before its first call; nothing where all that it said is calls."""
    return text.partition(CALL_BEGIN)[0].strip() if CALL_BEGIN in text else ""


def _calls_of(text: str) -> list[ToolCall]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return [ToolCall("", {}, 'a call is JSON: {"name": …, "arguments": {…}}')]
    return [_call_of(value) for value in (values if isinstance(values, list) else [values])]


def _values_of(text: str) -> list[Any]:
    """JSON values with semicolons between, a list's one by one; none where something else is there."""
    values, at = list[Any](), 0
    while at < len(text):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        between = _BETWEEN.match(text, end)
        if between is None:
            return []
        values, at = values + (value if isinstance(value, list) else [value]), between.end()
    return values


def _call_of(value: Any, alone: bool = False) -> ToolCall:
    given = value.get("arguments", value.get("parameters", None if alone else {})) if isinstance(value, dict) else None
    if not isinstance(given, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a call is JSON: {"name": …, "arguments": {…}}')
    return ToolCall(value["name"], given)
