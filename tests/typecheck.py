"""The run-time type checker of the tests: beartype, with an int allowed where a float is declared (PEP 484).

jaxtyping's import hook lets `jaxtyping.jaxtyped` wrap every function, which binds the arguments of each call a second
time to relate the shapes in them: most of a simulation's time. `jaxtyped` here does that only to functions that declare
an array, and leaves the others to beartype alone.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, PyTree

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_with_shapes = jaxtyping.jaxtyped


def jaxtyped(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In place of `jaxtyping.jaxtyped`, as the import hook calls it."""

    def wrap(wrapped: Any) -> Any:
        called = wrapped.__init__ if dataclasses.is_dataclass(wrapped) else wrapped
        if not inspect.isfunction(called) or any(map(_declares_array, called.__annotations__.values())):
            return _with_shapes(wrapped, typechecker=typechecker)
        if called is wrapped:
            return checked(wrapped)
        wrapped.__init__ = checked(called)
        return wrapped

    return wrap


def _declares_array(annotation: Any) -> bool:
    """Whether an array, or what is not known yet (a name in quotes), is part of an annotation."""
    if isinstance(annotation, str) or annotation is PyTree:
        return True
    if inspect.isclass(annotation) and issubclass(annotation, AbstractArray | PyTree):
        return True
    parts = annotation if isinstance(annotation, list) else get_args(annotation)
    return any(map(_declares_array, parts))
