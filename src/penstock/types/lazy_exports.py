"""Packages whose names are loaded once they are asked for, so that importing one takes a moment (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package has as `__getattr__` and `__dir__`.

    Args:
        package: Its ``__name__``.
        exports: Of each of its modules, or packages, the names that it exports.
    """
    modules = {name: module for module, names in exports.items() for name in names}

    def load(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: [*modules]
