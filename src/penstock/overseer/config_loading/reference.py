"""The reference of all configuration keys: docs/config.md as a whole, and single keys for ``penstock config KEY``.

Nothing is said here: types, defaults and meanings come from `penstock.overseer.config_loading.keys`.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.inference.config import ServeConfig
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading.keys import REQUIRED, ConfigKey, all_keys, is_key, keys_at, matches
from penstock.overseer.config_loading.suggestions import NOT_HERE, suggest
from penstock.overseer.control_config import FleetRunConfig
from penstock.types import ConfigError

_SERVE = "penstock serve"

KINDS: dict[str, type[BaseModel]] = {
    "language runs": RunConfig,
    "control runs": FleetRunConfig,
    _SERVE: ServeConfig,
}
"""Whose keys there are."""


@dataclass(frozen=True, slots=True)
class KeyMeaning:
    """What is known of one key.

    Attributes:
        key: The key; of a name in a mapping, the mapping's.
        kinds: Where it means just that, by the names of `KINDS`.
        keys: Those below it, where it is a section.
    """

    key: ConfigKey
    kinds: tuple[str, ...]
    keys: tuple[ConfigKey, ...]


def look_up(key: str, kinds: Sequence[str] = tuple(KINDS)) -> list[KeyMeaning]:
    """What a key means; one entry for all kinds of which the same is true.

    Args:
        key: Dotted; ``*``, or any name, where names are free. Of one that no kind has, all keys that end so.
        kinds: Look there only; names of `KINDS`.

    Raises:
        ConfigError: no kind has it; with what was probably meant.
    """
    parts = key.strip().split(".")
    found: dict[tuple[ConfigKey, tuple[ConfigKey, ...]], list[str]] = {}
    for kind in kinds:
        keys = all_keys(KINDS[kind])
        entry = _nearest_entry(keys, parts) if is_key(KINDS[kind], parts) else None
        if entry is not None:
            found.setdefault((entry, _keys_of(entry, keys)), []).append(kind)
    if not found:
        for kind in kinds:
            keys = all_keys(KINDS[kind])
            for entry in (each for each in keys if each.path.endswith(f".{key.strip()}")):
                found.setdefault((entry, _keys_of(entry, keys)), []).append(kind)
    if not found:
        raise ConfigError(_refusal(key, kinds, parts))
    return [KeyMeaning(entry, tuple(names), below) for (entry, below), names in found.items()]


def print_key(key: str, config: "RunConfig | FleetRunConfig | None", console: Console) -> None:
    """Prints what a key means, and the keys of a section.

    Args:
        key: As `look_up` takes it.
        config: Look into its kind of run only, and say what it holds; None: into all kinds.
        console: Where all is printed.

    Raises:
        ConfigError: there is no such key.
    """
    kinds = tuple(KINDS) if config is None else (_kind_of(config),)
    values = None if config is None else config.dump()
    for entry in look_up(key, kinds):
        path = entry.key.path if entry.key.path.endswith(f".{key.strip()}") else key
        title = Text(entry.key.path, style="bold")
        console.print(title.append(f"  {', '.join(entry.kinds)}", style="not bold dim"), soft_wrap=True)
        facts = Table(box=None, show_header=False, padding=(0, 1))
        facts.add_row("type", Text(_plain(entry.key.takes)))
        if entry.key.default:
            facts.add_row("default", Text(entry.key.default))
        for name, value in () if values is None or entry.keys else _values_at(values, path):
            facts.add_row("here", Text(f"{name}: {json.dumps(value)}" if "*" in path else json.dumps(value)))
        facts.add_row("meaning", Text(_plain(entry.key.meaning)))
        console.print(facts)
        if entry.keys:
            held = None if values is None else next((value for _, value in _values_at(values, path)), None)
            console.print(_table(entry.keys, held))


def print_sections(console: Console) -> None:
    """Prints the keys that a config of each kind begins with."""
    for kind, model in KINDS.items():
        console.print(Text(kind, style="bold"))
        console.print(_table([key for key in all_keys(model) if "." not in key.path]))


def _table(keys: Sequence[ConfigKey], held: Any = None) -> Table:
    """One row for each key; with what a config holds, where that is a section."""
    values = held if isinstance(held, Mapping) else None
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("key", "type", "default", *(() if values is None else ("here",)), "meaning"):
        table.add_column(title, overflow="fold", no_wrap=title == "key", ratio=1 if title == "meaning" else None)
    for key in keys:
        name = key.path.rpartition(".")[2]
        value = values.get(name) if values is not None else None
        here = () if values is None else ("" if isinstance(value, Mapping) else json.dumps(value),)
        table.add_row(*map(Text, (name, _plain(key.takes), key.default, *here, _plain(key.meaning))))
    return table


def _plain(text: str) -> str:
    return text.replace("`", "")


def _kind_of(config: BaseModel) -> str:
    return next(kind for kind, model in KINDS.items() if isinstance(config, model))


def _values_at(values: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """What a config holds at a key, with its path: several for ``*``, nothing where it has nothing there."""
    return list(matches(values, key.strip().split(".")))


def _nearest_entry(keys: Sequence[ConfigKey], parts: Sequence[str]) -> ConfigKey | None:
    """The key at that path, or the mapping that has it as a name of the user's own."""
    by_length = sorted(keys, key=lambda each: -each.path.count("."))
    for each in by_length:
        pattern = each.path.split(".")
        if len(pattern) <= len(parts) and all(a in ("*", b) or b == "*" for a, b in zip(pattern, parts, strict=False)):
            return each
    return None


def _keys_of(section: ConfigKey, keys: Sequence[ConfigKey]) -> tuple[ConfigKey, ...]:
    """Those right below a section, or below the names in it."""
    prefixes = (f"{section.path}.", f"{section.path}.*.")
    found = [key for key in keys for prefix in prefixes if key.path.startswith(prefix)]
    return tuple(dict.fromkeys(key for key in found if _last(key.path, prefixes)))


def _last(path: str, prefixes: Sequence[str]) -> bool:
    return any(path.startswith(prefix) and "." not in path.removeprefix(prefix) for prefix in prefixes)


def _refusal(key: str, kinds: Sequence[str], parts: Sequence[str]) -> str:
    """One line about a key that no kind has: of each kind that knows better, what was probably meant."""
    answers: dict[str, list[str]] = {}
    for kind in kinds:
        meant, note = suggest(KINDS[kind], parts)
        if meant:
            answers.setdefault(f"did you mean {' or '.join(meant)}{f' ({note})' if note else ''}?", []).append(kind)
        elif note not in ("", NOT_HERE) and kind != _SERVE:
            answers.setdefault(note, []).append(kind)
    if not answers:
        known = {name for kind in kinds for name in keys_at(KINDS[kind], parts[:-1])}
        where = (
            f"in {'.'.join(parts[:-1])} there are" if known and parts[:-1] else "penstock config lists the sections:"
        )
        known = known or {name for kind in kinds for name in keys_at(KINDS[kind], ())}
        return f"unknown key {key}: {where} {', '.join(sorted(known))}"
    if len(answers) == 1:
        return f"unknown key {key}: {next(iter(answers))}"
    return f"unknown key {key}: {'; '.join(f'{_listed(names)}: {answer}' for answer, names in answers.items())}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)


_HEAD = """\
# Configuration keys

Every key of a run's YAML and of `penstock serve`, as it may stand before `=` on a command line. This page is generated
from the models by `scripts/make_config_page.py`. `penstock config KEY` prints a part of it, and `penstock config KEY
RECIPE` the value that a recipe gives it, too; `--dry-run` prints a whole configuration with all its values.

- A `*` stands for a name of your own, such as a lesson's, or for a place in a list, counted from 0.
- What is *required* has no default. A section is a mapping of keys; what is left out of it has its default.
- An unknown key is refused, with what was probably meant. Names of TRL, verl and PPO's usual implementations (`lr`,
  `num_generations`, `kl_coef`, …) are answered with the key here, or with why there is none.
- A key that cannot act is refused where it says something else than its default, with the reason (`alpha` is of the
  recency batch maker alone, say). Two kinds are not, so that one YAML serves everywhere: what is of `runtime: ray`
  alone (`ray`, `roles`, `weights`, what `overseer` says of processes), and limits that are off at staleness zero. What
  an older `config.yaml` holds of such keys is left out with a note, and so is what a recipe says and an override keeps
  from acting (`penstock train memory model.memory=none`, of `memory_size`).
- Relative paths in a YAML file count from its folder, those on the command line and in packaged recipes from the
  working directory. A run's `config.yaml` holds them as absolute ones, so that a resume from anywhere means the same.
  Among `env_args`, `model.kwargs` and simulators' `kwargs` that goes for arguments named `path` or `…_path`, and for
  whatever has the form `file.py:Name`. Under `runtime: ray` with `ray.runtime_env.working_dir` all stay as they are
  written: each process works in an uploaded copy of that folder, and they count from there.
"""


def page() -> str:
    """The content of docs/config.md."""
    lines = [_HEAD]
    shown: dict[tuple[str, str], str] = {}
    titles = {"language runs": "Language runs", "control runs": "Control runs", "penstock serve": "penstock serve"}
    for kind, model in KINDS.items():
        lines += [f"## {titles[kind]}", "", _summary(model), ""]
        for path, section, keys in _sections(model):
            rows = [_row(key, path) for key in keys]
            title = f"`{path}`" if kind == "language runs" else f"{kind}: `{path}`"
            earlier = shown.setdefault((path, "\n".join(rows)), title)
            if path:
                lines += [f"### {title}", "", _summary(section), ""]
            if path and earlier != title:
                lines += [f"As in [language runs](#{_anchor(earlier)}).", ""]
                continue
            lines += ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel], list[ConfigKey]]]:
    """Each section's path, model and keys, in the order of the fields."""
    keys = all_keys(model)
    yield "", model, [key for key in keys if "." not in key.path]
    for key in keys:
        if key.model is not None:
            by_name = [each for each in keys if _last(each.path, [f"{key.path}.*."])]
            own = [each for each in keys if _last(each.path, [f"{key.path}."])]
            yield (key.path, key.model, own) if own else (f"{key.path}.*", key.model, by_name)


def _row(key: ConfigKey, section: str) -> str:
    name = key.path.removeprefix(f"{section}.") if section else key.path
    return f"| `{name}` | {_cell(key.takes)} | {_default(key)} | {_cell(key.meaning)} |"


def _default(key: ConfigKey) -> str:
    if not key.default:
        return ""
    return "*required*" if key.default == REQUIRED else f"`{key.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _summary(model: type[BaseModel]) -> str:
    """A model's docstring up to its ``Attributes:``."""
    text = inspect.cleandoc(model.__doc__ or "").partition("\nAttributes:")[0]
    return text.replace("``", "`").strip()


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
