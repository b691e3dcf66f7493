"""From a recipe's name and ``key=value`` words to a validated config, with errors a person can act on.

`load_config` is the way of a run's config: `load_recipe` (a packaged name or a YAML path) → `apply_overrides` →
`build_config`. Recipes do not inherit from each other: what a file says is what runs. Every failure is a `ConfigError`
of one line per mistake: the dotted key as the user wrote it, its value, what is expected there, and the remedy, with
the nearest spelling of a wrong key. Where a value may be one of several types, pydantic reports every failed
alternative; those are joined into one line.

Relative paths in a YAML file count from its folder, those in a packaged recipe or an override from the working
directory; in the config all are absolute, so that it means the same wherever it is read again. `PATH_KEYS` lists them.
"""

import copy
import importlib.resources
import logging
import os
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.overseer.config_loading.keys import is_secret, matches
from penstock.overseer.config_loading.suggestions import unknown_key
from penstock.rundir.yaml_documents import parse_mapping, parse_yaml, read_mapping
from penstock.types import ConfigError, IdleKeyError
from penstock.types.importing import as_path, nearest

if TYPE_CHECKING:
    from penstock.overseer.config import RunConfig
    from penstock.overseer.control_config import FleetRunConfig

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
    "too_short": ("min_length", "at least {} entries long"),
    "too_long": ("max_length", "at most {} entries long"),
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
    return [(dotted(path), _line(model, path, group, values)) for path, group in mistakes]


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


def _line(
    model: type[BaseModel], path: tuple[str | int, ...], group: list[ErrorDetails], values: Mapping[str, Any]
) -> str:
    first = group[0]
    name = dotted(path)
    if first["type"] == "extra_forbidden":
        return unknown_key(model, path, values)
    if first["type"] == "missing":
        return f"{name} is missing: add it"
    if first["type"] in ("value_error", "assertion_error"):
        message = str(first.get("ctx", {}).get("error", first["msg"]))
        return f"{name}: {' '.join(message.split())}" if path else " ".join(message.split())
    expected = " or ".join(dict.fromkeys(_expected(details) for details in group))
    value = "(hidden)" if is_secret(model, path) else _shown(first["input"])
    path_of_it = as_path(first["input"]) if first["type"] == "string_type" else ""
    return f"{name} is {value}: it must be {expected}{path_of_it}{_nearest_literal(first)}"


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
    return nearest(details["input"], [option.strip("'") for option in options])


def _shown(value: Any) -> str:
    try:
        text = "null" if value is None else " ".join(_BRIEF.repr(value).split())
    except ValueError:  # of a number with thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


Config = TypeVar("Config", bound=BaseModel)


Overrides = str | Sequence[str] | Mapping[str, Any]
"""Changes to a recipe: a ``key=value`` word, several, or a mapping, nested or with dotted keys."""


def load_config(
    recipe: "str | Path | RunConfig | FleetRunConfig", overrides: Overrides = (), *, recorded: bool = False
) -> "RunConfig | FleetRunConfig":
    """A run's configuration from a recipe: a `FleetRunConfig` where there is a ``fleet`` section.

    Args:
        recipe: A packaged name or a YAML path, see `load_recipe`; or a configuration, of which a changed one is made.
        overrides: ``["learner.optimizer.learning_rate=1e-3"]``, or ``{"learner": {"optimizer": {"learning_rate":
            1e-3}}}`` with whatever part of the path dotted; see `apply_overrides`.
            What a recipe says and an override keeps from acting is left out with a note to `logging`.
        recorded: It is a run's own ``config.yaml``. Its paths are absolute; those of a run from before they were count
            from the working directory. Keys that cannot act, which an earlier version wrote down, are left out with a
            note to `logging`.

    Raises:
        ConfigError: one line that names the key, its value and the remedy.
    """
    folder, source = Path.cwd(), ""
    if isinstance(recipe, str | Path):
        written, source = load_recipe(recipe), str(recipe)
        if not recorded and source not in _packaged():
            folder = Path(recipe).expanduser().absolute().parent
    elif isinstance(recipe, BaseModel):
        # defaults may follow from what changes
        written = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    else:
        raise ConfigError(
            f"config is a {type(recipe).__name__}: give a recipe's name, a YAML path, or what load_config returned"
        )
    values = apply_overrides(written, overrides)
    keys = (_UPLOADED,) if _reads_uploaded(values) else PATH_KEYS
    anchored = _anchored(written, folder, keys)
    values = _anchored(apply_overrides(anchored, overrides), Path.cwd(), keys)
    asked = {".".join(keys) for keys, *_ in assignments(overrides)}
    if "fleet" in values:
        from penstock.overseer.control_config import FleetRunConfig as model

        if "curriculum" in values:
            raise ConfigError(
                f"{source}: fleet and curriculum are both there: a run trains a control policy in simulators (fleet) "
                "or a language policy on lessons (curriculum); remove one"
            )
    else:
        from penstock.overseer.config import RunConfig as model
    may_leave_out = recorded or (asked and _idle_key(model, anchored) is None)
    values = _without_idle_keys(model, values, asked) if may_leave_out else values
    return build_config(model, values, source, asked if recorded else ())


def recipe_summaries() -> dict[str, str]:
    """What ships: recipe name to the first comment line of its file, in alphabetical order."""
    return {name: _first_comment(file.read_text("utf-8")) for name, file in sorted(_packaged().items())}


def load_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """Reads a recipe as plain data.

    Args:
        name_or_path: A packaged recipe's name (``cats``) or the path of a YAML file. A word with a slash or a YAML
            suffix is always a path.

    Raises:
        ConfigError: no such recipe (with the nearest name and the list), no such file, or not a YAML mapping.
    """
    name = str(name_or_path)
    recipes = _packaged()
    if name in recipes:
        return parse_mapping(recipes[name].read_text("utf-8"), f"recipe {name}")
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") or "/" in name or os.path.isfile(path):
        return _read(path)
    known = ", ".join(sorted(recipes)) or "none"
    raise ConfigError(
        f"no recipe named {name!r}{nearest(name, recipes)}: packaged recipes are {known}; "
        f"or give the path of a YAML file"
    )


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tells names and paths from ``key=value`` words; a word that is an existing file is a path."""
    overrides = [word for word in words if "=" in word and not os.path.exists(word)]  # of any length
    return [word for word in words if word not in overrides], overrides


def apply_overrides(values: Mapping[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Sets dotted keys on a copy of a recipe.

    Args:
        values: The recipe.
        overrides: ``learner.optimizer.learning_rate=1e-3`` and the like, later ones last. Values are YAML
            (``[1, 2]``, ``true``, ``null``); an empty value is null. Or a mapping of names to Python values: a section
            in it is laid over the recipe's, anything else takes its place. Missing sections are made; a number in the
            path indexes a list.

    Raises:
        ConfigError: a word without ``=``, a value that is no YAML, a name that is no text, or a path through something
            that has no keys.
    """
    result = copy.deepcopy(dict(values))
    for keys, value, override in assignments(overrides):
        _set(result, keys, value, override, merging=isinstance(overrides, Mapping))
    return result


def assignments(overrides: Overrides) -> Iterator[tuple[list[str], Any, str]]:
    """What is set: the path, the value, and both as they were written."""
    for keys, value, override in _written_assignments(overrides):
        yield ["async"] if keys == ["asynchronous"] else keys, value, override  # Python has reserved the word


def _written_assignments(overrides: Overrides) -> Iterator[tuple[list[str], Any, str]]:
    if isinstance(overrides, Mapping):
        for keys, value in _leaves(overrides):
            yield keys, value, f"{'.'.join(keys)}: {_shown(value)}"
        return
    words = [overrides] if isinstance(overrides, str) else overrides
    if not isinstance(words, Collection) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"overrides is {_shown(overrides)}: give a mapping of keys to values, or key=value words")
    for override in words:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"override {override!r} is not of the form key=value: "
                f"write for example learner.optimizer.learning_rate=1e-3"
            )
        yield keys, parse_yaml(text, f"override {override!r}"), override


def _leaves(section: Mapping[Any, Any], above: Sequence[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """The whole path of whatever is no section, and its value; an empty section is a value."""
    for name, value in section.items():
        path = [*above, *(name.split(".") if isinstance(name, str) else [""])]
        if not all(path):
            raise ConfigError(
                f"override {name!r} is no key: write for example "
                '{"learner.optimizer.learning_rate": 1e-3} or {"learner": {"optimizer": {"learning_rate": 1e-3}}}'
            )
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, {} if isinstance(value, Mapping) else _written(value)


def _written(value: Any) -> Any:
    """A Python value as YAML would have it."""
    if isinstance(value, list | tuple):
        return [_written(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value  # numbers and arrays of NumPy and JAX


def build_config(
    model: type[Config], values: Mapping[str, Any], source: str = "", asked: Collection[str] = ()
) -> Config:
    """Validates plain data against a config model.

    Args:
        model: Any pydantic model.
        values: The data.
        source: Where the data came from; put before the message where given.
        asked: Dotted keys that did not: `source` is not named where one of them is at fault.

    Raises:
        ConfigError: one line with the key's dotted path, its value, what is expected, and the nearest spelling of
            an unknown key.
    """
    prefix = f"{source}: " if source else ""
    try:
        made = model.model_validate(dict(values))
    except UnicodeEncodeError as error:  # pydantic cannot even report such a key
        broken = error.object[error.start : error.end]
        raise ConfigError(
            f"{prefix}a key holds {broken!r}, half a character: write the whole one, or leave it"
        ) from error
    except ValidationError as error:
        first, *others = describe_validation_error(model, values, error)
        where = [key for key, _ in others if f"did you mean {key}?" not in first[1]]  # missing, for it is misspelt
        more = f" (and {len(where)} more: {', '.join(where)})" if where else ""
        prefix = "" if _is_of(first[0], asked) else prefix
        raise ConfigError(f"{prefix}{first[1]}{more}") from error
    for path, value in _booleans_for_numbers(made, values):
        raise ConfigError(f"{prefix}{'.'.join(path)} is {str(value).lower()}: it must be a number")
    return made


def _booleans_for_numbers(made: Any, given: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Where pydantic took true for 1."""
    if isinstance(given, bool):
        if isinstance(made, int | float) and not isinstance(made, bool):
            yield path, given
    elif isinstance(given, Mapping):
        parts: Mapping[Any, Any] = given
        found: dict[Any, Any] = {}
        if isinstance(made, BaseModel):
            found = {field.alias or name: getattr(made, name) for name, field in type(made).model_fields.items()}
        elif isinstance(made, Mapping):
            found = dict(made)
        for key, value in parts.items():
            yield from _booleans_for_numbers(found.get(key), value, (*path, str(key)))
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple):
        for number, (inner, value) in enumerate(zip(made, given, strict=False)):
            yield from _booleans_for_numbers(inner, value, (*path, str(number)))


def _without_idle_keys(model: type[BaseModel], values: dict[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """Leaves out what the model refuses as idle, but for the keys in `keep`, and sections with any of them."""
    while (idle := _idle_key(model, values)) is not None:
        (*section, name), why = idle
        values = copy.deepcopy(values)
        node: Any = values
        for key in section:
            node = node[key]
        path = dotted([*section, name])
        if _is_of(path, keep) or name not in node:  # or filled in by what was
            break
        logging.getLogger(__name__).warning("%s (%r) is left out: %s", path, node.pop(name), why)
    return values


def _is_of(path: str, keys: Collection[str]) -> bool:
    """Whether a key is one of several, in a section that is, or a section with one of them."""
    return any(f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}.") for key in keys)


def _idle_key(model: type[BaseModel], values: Mapping[str, Any]) -> tuple[tuple[str | int, ...], str] | None:
    """The path of a key that the model refuses as idle, and why; None where it refuses none."""
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        for details in error.errors(include_url=False):
            cause = details.get("ctx", {}).get("error")
            if isinstance(cause, IdleKeyError):
                return (*_existing(details["loc"], values), *cause.key.split(".")), cause.why
    except ConfigError:
        pass  # told when the config is built
    return None


def _packaged() -> dict[str, Traversable]:
    folder = importlib.resources.files("penstock") / "recipes"
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")] if folder.is_dir() else []
    return {file.name.removesuffix(".yaml"): file for file in files}


def _first_comment(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("#"):
            return line.lstrip("# ").strip()
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_mapping(path)
    except FileNotFoundError as error:
        siblings = [file.name for file in path.parent.glob("*.y*ml")]
        hint = nearest(path.name, siblings)
        raise ConfigError(f"no file {path}{hint}: give an existing YAML file or a packaged recipe") from error
    except (OSError, ValueError) as error:  # a path with a null character is no path
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str, merging: bool = False) -> None:
    node: Any = values
    for depth, key in enumerate(keys[:-1]):
        child = _child(node, key, ".".join(keys[: depth + 1]), override)
        if child is None:
            child = node[_index(node, key)] = {}
        node = child
    present = _child(node, keys[-1], ".".join(keys), override)
    if not (merging and value == {} and isinstance(present, dict)):  # an empty section adds nothing to one
        node[_index(node, keys[-1])] = value


def _child(node: Any, key: str, path: str, override: str) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list):
        if key.isdecimal() and int(key) < len(node):
            return node[int(key)]
        raise ConfigError(
            f"override {override!r}: {path} does not exist: the list has {len(node)} entries, counted from 0"
        )
    parent = path.rpartition(".")[0]
    raise ConfigError(f"override {override!r}: {parent} is {node!r}, which has no keys: remove .{key} from the path")


def _index(node: Any, key: str) -> Any:
    return int(key) if isinstance(node, list) else key


_UPLOADED = "ray.runtime_env.working_dir"
PATH_KEYS = (
    "model.path",
    "model.base",
    "model.module",
    "model.kwargs.*",
    "model.initial_checkpoint",
    "model.tokenizer",
    "curriculum.lessons.*.environment.env_class",
    "curriculum.lessons.*.environment.env_args.*",
    "fleet.tasks.*.id",
    "fleet.tasks.*.kwargs.*",
    "replay.batch_maker.name",
    "replay.batch_makers.*.name",
    "replay.store.url",
    "replay.from_rollouts",
    "rollout.storage.path",
    "learner.loss.module",
    "learner.kl.reference",
    "learner.reference_kl.reference",
    "inference.tls_cert",
    "inference.tls_key",
    "inference.tls_ca",
    "inference.external.api_key_file",
    "inference.external.weights_dir",
    "weights.url",
    "weights.tls_cert",
    "weights.tls_key",
    "weights.tls_ca",
    "tracking.tensorboard.directory",
    _UPLOADED,
)
"""Keys whose value is a path, or may be. Of what names code only ``file.py:Name`` is one; of an environment's or a
simulator's own arguments that, and what is called ``path`` or ``…_path``."""

_NAMES_CODE = ("env_class", "id", "name", "module")
_CODE_FILE = re.compile(r"[^:]*\.py:\w+")
_URL = re.compile(r"[A-Za-z][\w+.\-]+:")
_NO_FILE = {"model.tokenizer": ("penstock",), "learner.kl.reference": ("initial", "ema")}


def _anchored(values: Mapping[str, Any], folder: Path, keys: Sequence[str]) -> dict[str, Any]:
    """A copy in which relative paths at some of `PATH_KEYS` are absolute: they count from `folder`."""
    result = copy.deepcopy(dict(values))
    for pattern in keys:
        *section, last = pattern.split(".")
        for _, node in matches(result, section):
            for name in list(node) if isinstance(node, dict) and last == "*" else [last]:
                if isinstance(node, dict) and name in node:
                    node[name] = _absolute(node[name], pattern, str(name), folder)
    return result


def _absolute(value: Any, pattern: str, name: str, folder: Path) -> Any:
    """A value at a path key, or one of several in it."""
    own = pattern.endswith("*")  # somebody's arguments, whose names alone tell
    if isinstance(value, list):
        return [_absolute(each, pattern, name, folder) for each in value]
    if isinstance(value, dict):
        return {key: _absolute(each, pattern, "", folder) for key, each in value.items()} if own else value
    if not isinstance(value, str) or not value or value in _NO_FILE.get(pattern, ()):
        return value
    if _CODE_FILE.fullmatch(value) is None:
        is_path = name == "path" or name.endswith("_path") if own else name not in _NAMES_CODE
        if not is_path or _URL.match(value) is not None:
            return value
    return os.path.abspath(folder / os.path.expanduser(value))


def _reads_uploaded(values: Mapping[str, Any]) -> bool:
    """Whether Ray hands processes a copy of a folder to work in, from which relative paths then count."""
    ray = values.get("ray")
    environment = ray.get("runtime_env") if isinstance(ray, Mapping) else None
    return values.get("runtime") == "ray" and isinstance(environment, Mapping) and "working_dir" in environment
