"""From a recipe's name and ``key=value`` words to a validated config, with errors a person can act on.

`load_config` is the way of a run's config: `load_recipe` (a packaged name or a YAML path) → `apply_overrides` →
`build_config`. Recipes do not inherit from each other: what a file says is what runs. Every failure is a `ConfigError`
of one line per mistake: the dotted key as the user wrote it, its value, what is expected there, and the remedy, with
the nearest spelling of a wrong key. Where a value may be one of several types, pydantic reports every failed
alternative; those are joined into one line.

`named_code` says which code a recorded config names, before it runs: a run directory may have been written by others.
`CODE_KEYS` is the one list of keys whose value is imported, or decides what other processes run. What is Penstock's own
is not mentioned. Nothing is imported for that.
"""

import copy
import difflib
import importlib.resources
import reprlib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.batch.config import BUILT_IN_MAKERS
from penstock.rundir import RunDirectory
from penstock.rundir.yaml_documents import parse_mapping, parse_yaml, read_mapping
from penstock.types import ConfigError
from penstock.types.importing import locate

if TYPE_CHECKING:
    from penstock.overseer.config import RunConfig
    from penstock.overseer.control_config import FleetRunConfig

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


Config = TypeVar("Config", bound=BaseModel)


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> "RunConfig | FleetRunConfig":
    """A run's configuration from a recipe: a `FleetRunConfig` where there is a ``fleet`` section.

    Args:
        recipe: A packaged name or a YAML path; see `load_recipe`.
        overrides: ``key=value`` words; see `apply_overrides`.

    Raises:
        ConfigError: one line that names the key, its value and the remedy.
    """
    values = apply_overrides(load_recipe(recipe), overrides)
    if "fleet" in values:
        from penstock.overseer.control_config import FleetRunConfig

        if "curriculum" in values:
            raise ConfigError(
                f"{recipe}: fleet and curriculum are both there: a run trains a control policy in simulators (fleet) "
                "or a language policy on lessons (curriculum); remove one"
            )
        return build_config(FleetRunConfig, values, source=str(recipe))
    from penstock.overseer.config import RunConfig

    return build_config(RunConfig, values, source=str(recipe))


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
    if path.suffix in (".yaml", ".yml") or "/" in name or path.is_file():
        return _read(path)
    known = ", ".join(sorted(recipes)) or "none"
    raise ConfigError(
        f"no recipe named {name!r}{_nearest(name, recipes)}: packaged recipes are {known}; "
        f"or give the path of a YAML file"
    )


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tells names and paths from ``key=value`` words; a word that is an existing file is a path."""
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    return [word for word in words if word not in overrides], overrides


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Sets dotted keys on a copy of a recipe.

    Args:
        values: The recipe.
        overrides: ``learner.optimizer.learning_rate=1e-3`` and the like, later ones last. Values are YAML
            (``[1, 2]``, ``true``, ``null``); an empty value is null. Missing sections are made; a number in the
            path indexes a list.

    Raises:
        ConfigError: a word without ``=``, a value that is no YAML, or a path through something that has no keys.
    """
    result = copy.deepcopy(dict(values))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"override {override!r} is not of the form key=value: "
                f"write for example learner.optimizer.learning_rate=1e-3"
            )
        _set(result, keys, parse_yaml(text, f"override {override!r}"), override)
    return result


def build_config(model: type[Config], values: Mapping[str, Any], source: str = "") -> Config:
    """Validates plain data against a config model.

    Args:
        model: Any pydantic model.
        values: The data.
        source: Where the data came from; put before the message where given.

    Raises:
        ConfigError: one line with the key's dotted path, its value, what is expected, and the nearest spelling of
            an unknown key.
    """
    prefix = f"{source}: " if source else ""
    try:
        return model.model_validate(dict(values))
    except UnicodeEncodeError as error:  # pydantic cannot even report such a key
        broken = error.object[error.start : error.end]
        raise ConfigError(
            f"{prefix}a key holds {broken!r}, half a character: write the whole one, or leave it"
        ) from error
    except ValidationError as error:
        first, *others = describe_validation_error(model, values, error)
        more = f" (and {len(others)} more: {', '.join(where for where, _ in others)})" if others else ""
        raise ConfigError(f"{prefix}{first[1]}{more}") from error


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
        hint = _nearest(path.name, siblings)
        raise ConfigError(f"no file {path}{hint}: give an existing YAML file or a packaged recipe") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _nearest(word: str, known: Any) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    node: Any = values
    for depth, key in enumerate(keys[:-1]):
        child = _child(node, key, ".".join(keys[: depth + 1]), override)
        if child is None:
            child = node[_index(node, key)] = {}
        node = child
    _child(node, keys[-1], ".".join(keys), override)
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


CODE_KEYS = (
    "curriculum.lessons.*.environment.env_class",
    "curriculum.lessons.*.environment.env_args.reward",
    "curriculum.lessons.*.environment.env_args.reward.*",
    "replay.batch_maker.name",
    "replay.batch_makers.*.name",
    "fleet.tasks.*.id",
    "fleet.tasks.*.kwargs.callbacks.*",
    "fleet.tasks.*.kwargs.callbacks.*.path",
    "ray.address",
    "ray.runtime_env",
    "roles.*.env",
)
"""Keys whose value is imported, by `load_attribute` or Gymnasium; the last three reach code by way of Ray. A ``*``
stands for any key, or any place in a list."""

_SHOWN_CHARACTERS = 300

EVALUATED = ("curriculum", "fleet")
"""The sections whose code an evaluation imports."""


@dataclass(frozen=True, slots=True)
class NamedCode:
    """One key that names code.

    Attributes:
        key: Its dotted path.
        value: What it says.
        place: The file that is imported, or what happens instead.
    """

    key: str
    value: str
    place: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value} ({self.place})"


def named_code(values: Mapping[str, Any], sections: Sequence[str] | None = None) -> list[NamedCode]:
    """What a config has imported that is not Penstock's own.

    Args:
        values: The config as plain data.
        sections: Look into these only; by default all.
    """
    found: list[NamedCode] = []
    for pattern in CODE_KEYS:
        keys = pattern.split(".")
        if sections is not None and keys[0] not in sections:
            continue
        for key, value in _matches(values, keys, ""):
            place = _place(key, value, values.get("runtime"))
            if place is not None:
                found.append(NamedCode(key, f"{value!s:.{_SHOWN_CHARACTERS}}", place))
    return found


def load_recorded_config(
    directory: RunDirectory, overrides: Sequence[str], trust: bool, sections: Sequence[str] | None = None
) -> "tuple[RunConfig | FleetRunConfig, list[NamedCode]]":
    """The config that a run directory holds, with changes, and the code that it names.

    Args:
        directory: Of the run whose config it is; nothing in it is changed.
        overrides: ``key=value`` words of the user's own, laid over what is recorded.
        trust: Take it although others than the user may have written it.
        sections: The top-level keys whose code is going to be imported; by default all.

    Raises:
        ConfigError: others may have written it; or it is not valid.
    """
    config = load_config(directory.config_path, overrides)
    code = named_code(config.dump(), sections)
    reason = None if trust else directory.why_foreign()
    if reason is not None:
        names = "; ".join(map(str, code)) or "Penstock's own code only"
        raise ConfigError(
            f"{reason}, and what {directory.config_path} names is imported: give --trust if you know who wrote it, or "
            f"a recipe of your own; it names {names}"
        )
    return config, code


def _matches(node: Any, keys: Sequence[str], path: str) -> Iterator[tuple[str, Any]]:
    """Every place that a pattern stands for, with its value."""
    if not keys:
        yield path, node
        return
    children = cast(Mapping[str, Any], node) if isinstance(node, Mapping) else {}
    if isinstance(node, list | tuple):
        children = {str(number): child for number, child in enumerate(cast(Sequence[Any], node))}
    for name in children if keys[0] == "*" else [keys[0]] if keys[0] in children else []:
        yield from _matches(children[name], keys[1:], f"{path}.{name}" if path else name)


def _place(key: str, value: Any, runtime: Any) -> str | None:
    """Where a value leads; None where it names no code, or only Penstock's own."""
    if key.startswith(("ray.", "roles.")):
        reached = "whoever runs that cluster" if key == "ray.address" else "handed to Ray's processes"
        return reached if value and runtime == "ray" else None
    if not isinstance(value, str) or _is_built_in(key, value):
        return None
    return locate(value) or "not found"


def _is_built_in(key: str, value: str) -> bool:
    """Whether a value names Penstock's own code, or a simulator by an id that Gymnasium has."""
    if value in BUILT_IN_MAKERS or (value.startswith("penstock.") and ".py:" not in value):
        return True
    if key.startswith("fleet.") and key.endswith(".id"):
        from penstock.environments.simulators import simulator_ids

        return ":" not in value or value.partition(":")[0] in {name.partition(":")[0] for name in simulator_ids()}
    return False
