"""From a recipe's name and ``key=value`` words to a validated config, with errors a person can act on.

`load_config` is the way of a run's config: `load_recipe` (a packaged name or a YAML path) → `apply_overrides` →
`build_config`. Recipes do not inherit from each other: what a file says is what runs. Every failure is a
`ConfigError` of one line.
"""

import copy
import difflib
import importlib.resources
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from penstock.overseer.validation_messages import describe_validation_error
from penstock.rundir.yaml_documents import parse_mapping, parse_yaml, read_mapping
from penstock.types import ConfigError

if TYPE_CHECKING:
    from penstock.overseer.config import RunConfig
    from penstock.overseer.fleet_config import FleetRunConfig

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
        from penstock.overseer.fleet_config import FleetRunConfig

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
