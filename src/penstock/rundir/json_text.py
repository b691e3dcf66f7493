"""JSON that every reader takes: no NaN, and no halves of surrogate pairs.

Python's strings may hold such halves, of undecodable bytes in an error message say; in a JSON file DuckDB and others
refuse them, together with the whole file. They are written as the text of their escapes instead.
"""

import json
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON, in ASCII.

    Raises:
        ValueError: it holds a number that is not finite.
        TypeError: it holds something that JSON has no form for.
    """
    text = _dump(value, indent)
    return _dump(_cleaned(value), indent) if "\\ud" in text else text  # which few texts have, pairs or halves


def _dump(value: Any, indent: int | None) -> str:
    return json.dumps(value, allow_nan=False, indent=indent, separators=(",", ": ") if indent else (", ", ": "))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(member) for member in value]
    return value
