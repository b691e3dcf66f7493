"""The keys of a config model: which are valid where, and of each its type, default and meaning.

Everything is read from the models: types and defaults from their fields, meanings from the ``Attributes:`` of their
docstrings, the one place that says them. In a path, ``*`` stands for any name or any place in a list.
"""

import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_MOST_DEPTH = 8

REQUIRED = "required"
"""Stands where a key has no default."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of a config model.

    Attributes:
        path: Dotted, ``*`` for any name.
        takes: What it may be, in words, with its bounds.
        default: As YAML has it, or `REQUIRED`; empty for a section, whose keys have defaults of their own.
        meaning: What the model's docstring says.
        model: The model that the section is made of; None where the key is no section.
    """

    path: str
    takes: str
    default: str
    meaning: str
    model: type[BaseModel] | None


def keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that are valid in the section at `path`; empty where any key is, or none."""
    return sorted({name for section in _at(model, path) for name in _fields(section)})


def is_key(model: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Whether `path` may be set: a field, an entry of a mapping or list, or anything below a mapping of any values."""
    candidates: list[Any] = [model]
    for key in path:
        found = [below for section in candidates for below in _annotations_below(section, key)]
        if not found:
            return False
        candidates = [section for annotation in found for section in _sections(annotation)] or [Any] * (Any in found)
    return True


def is_secret(model: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Whether the model keeps the value at `path` out of its own printed form (``repr=False``)."""
    if not path:
        return False
    fields = [field for section in _at(model, path[:-1]) for field in _fields(section).items()]
    return any(not field.repr for name, field in fields if name == path[-1])


def all_keys(model: type[BaseModel]) -> list[ConfigKey]:
    """Every key of a model and of its sections, in the order of the fields, a section before its keys."""
    return list(dict.fromkeys(_described(model, None, "", 0)))


def matches(node: Any, keys: Sequence[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every place in plain data that a pattern of keys stands for: its dotted path and its value."""
    if not keys:
        yield path, node
        return
    children = cast(Mapping[str, Any], node) if isinstance(node, Mapping) else {}
    if isinstance(node, list | tuple):
        children = {str(number): child for number, child in enumerate(cast(Sequence[Any], node))}
    for name in children if keys[0] == "*" else [keys[0]] if keys[0] in children else []:
        yield from matches(children[name], keys[1:], f"{path}.{name}" if path else name)


def _at(model: type[BaseModel], path: Sequence[str | int]) -> list[Any]:
    """The models and containers that the section at `path` may be."""
    candidates: list[Any] = [model]
    for key in path:
        candidates = [
            below
            for section in candidates
            for annotation in _annotations_below(section, key)
            for below in _sections(annotation)
        ]
    return candidates


def _fields(section: Any) -> dict[str, FieldInfo]:
    if isinstance(section, type) and issubclass(section, BaseModel):
        return {field.alias or name: field for name, field in section.model_fields.items()}
    return {}


def _annotations_below(section: Any, key: str | int) -> list[Any]:
    """What a key of a section may be: a field's annotation, or that of a container's entries."""
    if section is Any:
        return [Any]
    fields = _fields(section)
    if fields:
        return [fields[str(key)].annotation] if str(key) in fields else []
    return [argument for argument in get_args(section)[-1:] if argument is not Ellipsis] or list(get_args(section)[:1])


def _sections(annotation: Any) -> list[Any]:
    """The models and containers that an annotation may stand for."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _sections(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [section for member in get_args(annotation) for section in _sections(member)]
    if origin is Literal:
        return []
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_model or get_args(annotation) else []


def _described(section: type[BaseModel], values: BaseModel | None, prefix: str, depth: int) -> Iterator[ConfigKey]:
    """The keys of a section; `values` is the default of the whole section, where it has one."""
    meanings = _meanings(section)
    for name, field in section.model_fields.items():
        path = prefix + (field.alias or name)
        default = field.get_default(call_default_factory=True) if values is None else getattr(values, name)
        models = list(dict.fromkeys(_models(field.annotation)))
        model = models[0] if models else None
        shown = "" if isinstance(default, BaseModel) or (model and default == {}) else _yaml(default)
        yield ConfigKey(path, _type(field.annotation, field.metadata), shown, meanings.get(name, ""), model)
        for each in models if depth < _MOST_DEPTH else ():
            below = default if isinstance(default, each) else None
            named = "" if each in _sections(field.annotation) else "*."
            yield from _described(each, below, f"{path}.{named}", depth + 1)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation, those of a container's entries too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


_ENTRY = re.compile(r" {4}(\w+): (.*)")


@cache
def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """What a model's docstring, and those of its bases, say of each field."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        attributes = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        name = ""
        for line in attributes.split("\n\n")[0].splitlines():
            entry = _ENTRY.fullmatch(line)
            if entry is not None:
                name = entry[1]
                found[name] = entry[2]
            elif name:
                found[name] = f"{found[name]} {line.strip()}"
    return {name: _as_yaml(text) for name, text in found.items()}


def _as_yaml(text: str) -> str:
    """Docstring prose as a reader of YAML takes it."""
    for python, yaml in ((r"\bNone\b", "null"), (r"\bFalse\b", "false"), (r"\bTrue\b", "true")):
        text = re.sub(python, yaml, text)
    return text.replace("``", "`")


_TYPES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "any value",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """An annotation in words: ``whole number ≥ 1, or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        members = [member for member in arguments if member is not type(None)]
        words = " or ".join(_type(member, metadata if len(members) == 1 else ()) for member in members)
        return f"{words}, or null" if len(members) < len(arguments) else words
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is dict:
        return f"mapping of names to {_several(arguments[1])}"
    if origin in (list, tuple):
        return _listed(arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _TYPES.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def _listed(arguments: tuple[Any, ...]) -> str:
    entries = [argument for argument in arguments if argument is not Ellipsis]
    if len(entries) > 1:
        return f"list of {len(entries)}: {', '.join(map(_type, entries))}"
    return f"list of {_several(entries[0])}"


def _several(annotation: Any) -> str:
    """Of a container's entries."""
    words = _type(annotation)
    for one in ("whole number", "number", "section", "any value"):
        if words.startswith(one):
            return f"{one}s{words[len(one) :]}"
    return words


def _bounds(metadata: Sequence[Any]) -> str:
    constraints = [each for entry in metadata for each in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    signs = [
        f" {sign} {bound:g}"
        for constraint in constraints
        for name, sign in _SIGNS.items()
        if isinstance(bound := getattr(constraint, name, None), int | float)
    ]
    return ",".join(signs)


def _yaml(value: Any) -> str:
    """A default in one line, as YAML has it."""
    if value is PydanticUndefined:
        return REQUIRED
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value) or '""'
