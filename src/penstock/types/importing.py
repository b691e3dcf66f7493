"""Importing what a config names by dotted path or file, with errors that a person can act on.

`locate` says beforehand which file that would be. Kept light (standard library only), because every reward process
begins with it.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from penstock.types import ConfigError

OBJECT = "object:"
"""Begins the name of what was given to a run as a Python object: no file says what it is."""

_GIVEN_AGAIN = {"env_class": "environment=…", "env_args.reward": "reward=…"}


def name_of_object(given: Any) -> str:
    """``object:__main__.score``: what stands in a run's config where a function, class or instance was given."""
    named: Any = given if hasattr(given, "__qualname__") else cast(Any, type(given))
    return f"{OBJECT}{named.__module__}.{named.__qualname__}"


def as_path(given: Any) -> str:
    """``", as 'my_package.worlds:Maze'"``, where a class or function stands for its path; else nothing."""
    name = getattr(given, "__qualname__", None)
    if not callable(given) or name is None:
        return ""
    place = "path/to/file.py" if given.__module__ == "__main__" else given.__module__
    return f", as '{place}:{name}'"


def code_digest(cls: type, rest: str) -> str:
    """SHA-256 of the file that defines a class, as it is now, and of `rest`, where no address in memory counts."""
    try:
        code = Path(inspect.getsourcefile(cls) or "").read_bytes()
    except (OSError, TypeError):  # a class that no file defines
        code = b""
    return hashlib.sha256(code + re.sub(r" at 0x[0-9a-f]+", "", rest).encode()).hexdigest()


def load_attribute(path: str, field: str) -> Any:
    """Imports what a dotted path, or ``path/to/file.py:name``, stands for.

    Modules beside the current directory are found as they are by ``python -m``. A file, too, is imported once in a
    process, as a module that is called by its whole path; what it imports may stand beside it.

    Args:
        path: For example ``my_package.rewards.exact``, ``my_package.rewards:exact`` or ``rewards.py:exact``.
        field: The config field, for the message.

    Raises:
        ConfigError: no such file, module or attribute, the module's import failed, or it was given as an object.
    """
    if path.startswith(OBJECT):
        raise ConfigError(
            f"{field} {path!r} was given as a Python object, which no file holds: give it again, from Python by "
            f"{_GIVEN_AGAIN.get(field, 'its argument')}, or name code that can be imported"
        )
    _search(os.getcwd())
    if path.endswith(".py"):
        raise ConfigError(f"{field} {path!r} is a file, and says nothing of it: write {path}:Name")
    if ".py:" in path:
        file, _, name = path.rpartition(":")
        module = _import_file(Path(file).expanduser(), path, field)
    else:
        module_name, _, name = path.rpartition(":" if ":" in path else ".")
        if not module_name or not name:
            raise ConfigError(f"{field} {path!r} is not a path: write package.module.Name or path/to/file.py:Name")
        module = load_module(module_name, path, field)
    try:
        return getattr(module, name)
    except AttributeError as error:
        names = [known for known in dir(module) if not known.startswith("_")]
        raise ConfigError(f"{field} {path!r}: {_called(module)} has no {name!r}{nearest(name, names)}") from error


def load_module(module_name: str, path: str, field: str) -> ModuleType:
    """Imports a module; those beside the current directory are found, too.

    Args:
        module_name: Of the module.
        path: What the config says, of which this is a part.
        field: The config field, for the message.

    Raises:
        ConfigError: there is none, it needs another that is missing, or its import failed.
    """
    _search(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{field} {path!r}: importing {module_name} needs {error.name!r}: install it") from error
        hint = nearest(module_name, _siblings(error.name))
        where = hint or ": it must be installed, on PYTHONPATH or in the working directory"
        raise ConfigError(f"{field} {path!r}: no module named {error.name!r}{where}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise ConfigError(f"{field} {path!r}: importing {module_name} raised {_in_words(error)}") from error


def locate(path: str) -> str | None:
    """The file that `load_attribute` would import, found without importing anything.

    Returns:
        Its path, ``built-in`` for what is compiled into Python, or None where nothing is found.
    """
    if ".py:" in path:
        file = Path(os.path.expanduser(path.rpartition(":")[0])).absolute()
        return str(file) if file.is_file() else None
    spec, places = None, None
    parts = path.rpartition(":" if ":" in path else ".")[0].split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
        if places is None and end < len(parts):
            return None
    return None if spec is None else spec.origin or ", ".join(places or [])


def _find(module: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """Asks Python's finders, as an import does; `places` are those of its package, which is not imported either."""
    known = sys.modules.get(module)
    if known is not None and known.__spec__ is not None:
        return known.__spec__
    for finder in sys.meta_path:
        spec = finder.find_spec(module, places)
        if spec is not None:
            return spec
    return PathFinder.find_spec(module, [os.getcwd()]) if places is None else None


def nearest(word: str, known: Iterable[str]) -> str:
    """``" (did you mean …?)"`` where something known is spelled alike, else nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _search(folder: str) -> None:
    """After all else, so that no installed module is hidden."""
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        sys.path.append(folder)


def _called(module: ModuleType) -> str:
    return Path(module.__name__).name


def _import_file(file: Path, path: str, field: str) -> ModuleType:
    if not file.is_file():
        siblings = [other.name for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"{field} {path!r}: no file {file.absolute()}{nearest(file.name, siblings)}")
    name = str(file.resolve())  # no module is called so, whatever the file is
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{field} {path!r}: {file} cannot be imported as Python")
    _search(str(file.resolve().parent))
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError(f"{field} {path!r}: importing {file} raised {_in_words(error)}") from error
    return module


def _in_words(error: BaseException) -> str:
    is_script = isinstance(error, SystemExit)  # it would end the run, and say nothing
    remedy = "; it ends the process where it is imported: put that under if __name__ == '__main__'" if is_script else ""
    return f"{type(error).__name__}: {error}{remedy}"


def _siblings(missing: str) -> list[str]:
    parent = missing.rpartition(".")[0]
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(importlib.import_module(parent).__path__)]
