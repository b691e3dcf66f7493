"""The tree of keys that a config model accepts, for naming the nearest spelling of a wrong one.

Works on any pydantic model: nested models, lists and dicts of models, optional ones and unions.
"""

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_MOST_DEPTH = 8


def keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that are valid in the section at `path`; empty where any key is, or none."""
    return sorted({name for section in _at(model, path) for name in _fields(section)})


def is_secret(model: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Whether the model keeps the value at `path` out of its own printed form (``repr=False``)."""
    if not path:
        return False
    fields = [field for section in _at(model, path[:-1]) for field in _fields(section).items()]
    return any(not field.repr for name, field in fields if name == path[-1])


def nearest_key(model: type[BaseModel], path: Sequence[str | int]) -> str | None:
    """The valid dotted key that was probably meant by `path`, whose last part is unknown.

    First a close spelling in the same section; then the same name in another section, where there is just one.
    """
    *section, key = (str(part) for part in path)
    close = difflib.get_close_matches(key, keys_at(model, path[:-1]), n=1)
    if close:
        return ".".join([*section, close[0]])
    elsewhere = [dotted for dotted in _all_keys(model) if dotted.rpartition(".")[2] == key]
    return elsewhere[0] if len(elsewhere) == 1 else None


def _at(model: type[BaseModel], path: Sequence[str | int]) -> list[Any]:
    """The models and containers that the section at `path` may be."""
    candidates: list[Any] = [model]
    for key in path:
        candidates = [below for section in candidates for below in _below(section, key)]
    return candidates


def _fields(section: Any) -> dict[str, FieldInfo]:
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {field.alias or name: field for name, field in section.model_fields.items()}
    return {}


def _below(section: Any, key: str | int) -> list[Any]:
    fields = _fields(section)
    if fields:
        return _sections(fields[str(key)].annotation) if str(key) in fields else []
    return [below for argument in get_args(section)[-1:] for below in _sections(argument)]


def _sections(annotation: Any) -> list[Any]:
    """The models and containers that an annotation may stand for."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _sections(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [section for member in get_args(annotation) for section in _sections(member)]
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model or get_args(annotation) else []


def _all_keys(section: Any, prefix: str = "", depth: int = 0) -> Iterator[str]:
    for name, field in _fields(section).items():
        yield prefix + name
        if depth < _MOST_DEPTH:
            for below in _sections(field.annotation):
                yield from _all_keys(below, f"{prefix}{name}.", depth + 1)
