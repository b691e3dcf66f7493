"""What pydantic found wrong with a config, said in one line per mistake.

A line names the dotted key as the user wrote it, the value, what is expected there, and the remedy. Where a value may
be one of several types, pydantic reports every failed alternative; those are joined into one line.
"""

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.overseer.config_keys import is_secret, keys_at, nearest_key

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a section of keys",
    "mapping": "a section of keys",
    "model": "a section of keys",
    "path": "a path",
    "none": "null",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
    "multiple_of": ("multiple_of", "a multiple of {}"),
    "too_short": ("min_length", "a list of at least {} entries"),
    "too_long": ("max_length", "a list of at most {} entries"),
    "string_too_short": ("min_length", "text of at least {} characters"),
    "string_too_long": ("max_length", "text of at most {} characters"),
}
_LONGEST_VALUE = 60
_BRIEF = reprlib.Repr()
"""Does not write out what is nested deeply or refers to one value many times."""
_BRIEF.maxlevel, _BRIEF.maxdict, _BRIEF.maxlist, _BRIEF.maxtuple = 4, 8, 12, 12
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 4 * _LONGEST_VALUE


def describe_validation_error(
    model: type[BaseModel], values: Mapping[str, Any], error: ValidationError
) -> list[tuple[str, str]]:
    """Translates every mistake.

    Args:
        model: The model that refused.
        values: What it refused.
        error: What pydantic said.

    Returns:
        (dotted key, one line) per mistake, at least one: unknown keys first, for a misspelt key is often the
        cause of a missing one; otherwise in the order of the config.
    """
    by_path: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_written_path(details, values), []).append(details)
    mistakes = sorted(by_path.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    return [(dotted(path), _line(model, path, group)) for path, group in mistakes]


def dotted(path: Sequence[str | int]) -> str:
    """``("lessons", 0, "id")`` as ``lessons.0.id``: the form that overrides take."""
    return ".".join(str(part) for part in path) or "the config"


def _written_path(details: ErrorDetails, values: Any) -> tuple[str | int, ...]:
    """The location without the type names that pydantic puts in for the members of a union."""
    location = details["loc"]
    if details["type"] in ("missing", "extra_forbidden"):
        return (*_existing(location[:-1], values), location[-1])
    return _existing(location, values)


def _existing(location: Sequence[str | int], values: Any) -> tuple[str | int, ...]:
    path: list[str | int] = []
    for part in location:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, (list, tuple)) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _line(model: type[BaseModel], path: tuple[str | int, ...], group: list[ErrorDetails]) -> str:
    first = group[0]
    name = dotted(path)
    if first["type"] == "extra_forbidden":
        return _unknown_key(model, path)
    if first["type"] == "missing":
        return f"{name} is missing: add it"
    if first["type"] in ("value_error", "assertion_error"):
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        return f"{name}: {' '.join(message.split())}" if path else " ".join(message.split())
    expected = " or ".join(dict.fromkeys(_expected(details) for details in group))
    value = "(hidden)" if is_secret(model, path) else _shown(first["input"])
    return f"{name} is {value}: it must be {expected}{_nearest_literal(first)}"


def _unknown_key(model: type[BaseModel], path: tuple[str | int, ...]) -> str:
    meant = nearest_key(model, path)
    if meant is not None:
        return f"unknown key {dotted(path)}: did you mean {meant}?"
    known = ", ".join(keys_at(model, path[:-1])) or "none"
    return f"unknown key {dotted(path)}: remove it; the keys known here are {known}"


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        key, text = _BOUNDS[kind]
        bound = context[key]
        return text.format(f"{bound:g}" if isinstance(bound, float) else bound)
    if kind in ("literal_error", "enum"):
        return f"one of {context['expected']}"
    family = kind.split("_")[0]
    if family in _EXPECTED:
        return _EXPECTED[family]
    message = details["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
    return " ".join(message.split())


def _nearest_literal(details: ErrorDetails) -> str:
    if details["type"] not in ("literal_error", "enum") or not isinstance(details["input"], str):
        return ""
    options = details.get("ctx", {})["expected"].replace(" or ", ", ").split(", ")
    close = difflib.get_close_matches(details["input"], [option.strip("'") for option in options], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _shown(value: Any) -> str:
    try:
        text = "null" if value is None else " ".join(_BRIEF.repr(value).split())
    except ValueError:  # of a number with thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
