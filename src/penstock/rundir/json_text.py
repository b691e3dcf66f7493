"""JSON without halves of surrogate pairs, so that every reader takes it.

Python's strings may hold such halves, of undecodable bytes in an error message say; in a JSON file DuckDB and others
refuse them, together with the whole file. They are written as the text of their escapes instead.
"""

import json
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, indent: int | None = None, allow_nan: bool = False) -> str:
    """`value` as JSON, in ASCII.

    Args:
        value: Plain values.
        indent: For people; None puts all in one line.
        allow_nan: Write NaN and infinities too, which not every reader takes.

    Raises:
        ValueError: it holds a number that is not finite, and that is not allowed.
        TypeError: it holds something that JSON has no form for.
    """
    text = json.dumps(value, indent=indent, allow_nan=allow_nan)
    if "\\ud" not in text:  # which few texts have: a pair, or half of one
        return text
    return json.dumps(_cleaned(value), indent=indent, allow_nan=allow_nan)


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(member) for member in value]
    return value
