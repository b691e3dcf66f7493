"""JSON that every reader takes: without halves of surrogate pairs, and without numbers that are not finite.

Python's strings may hold such halves, of undecodable bytes in an error message say; in a JSON file DuckDB and others
refuse them, together with the whole file. They are written as the text of their escapes instead. NaN and infinities,
which JSON does not have, become null.
"""

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, indent: int | None = None, allow_nan: bool = False) -> str:
    """`value` as JSON, in ASCII.

    Args:
        value: Plain values.
        indent: For people; None puts all in one line.
        allow_nan: Write NaN and infinities as Python does, which not every reader takes; otherwise they are null.

    Raises:
        TypeError: it holds something that JSON has no form for.
    """
    try:
        text = json.dumps(value, indent=indent, allow_nan=allow_nan)
    except ValueError:  # a number that is not finite
        value = _finite(value)
        text = json.dumps(value, indent=indent, allow_nan=False)
    if "\\ud" not in text:  # which few texts have: a pair, or half of one
        return text
    return json.dumps(_whole(value), indent=indent, allow_nan=allow_nan)


def _whole(value: Any) -> Any:
    """Without halves of surrogate pairs."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_whole(key): _whole(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(member) for member in value]
    return value


def _finite(value: Any) -> Any:
    """With None for numbers that are not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return value
