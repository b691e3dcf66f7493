"""The one reader of config files, recipes and run directories' alike, whoever wrote them.

``1e-3`` is a number, ``no`` is a word, a repeated key is a mistake: PyYAML follows YAML 1.1, in which ``1e-3`` is
text, ``no`` is false, ``1:30`` is 90 and the last of two equal keys silently wins. Here scalars follow the core schema
of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), with ``1_000`` allowed. Only plain data can be written: no
tags, no Python objects. What would take long to read, or be huge when its references are written out, is refused
before anything is made of it.
"""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.types import ConfigError

MOST_BYTES = 4 << 20
"""Of one file."""
MOST_NODES = 100_000
"""Of one document, every reference written out."""
MOST_BRACKETS = 200
"""That may be open at the same time: PyYAML looks at every open bracket for every one that follows, so a hundred
thousand of them take it most of a minute."""

_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 scalars that refuses repeated keys, deep nesting and what is too long."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    _written_nodes = 0

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803
        """Called by the scanner at every opening bracket."""
        if self.flow_level >= MOST_BRACKETS:
            raise yaml.MarkedYAMLError(
                problem=f"it is nested too deeply: more than {MOST_BRACKETS} brackets", problem_mark=self.get_mark()
            )
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Called at every node; a long document ends here, before the rest of it is read."""
        self._written_nodes += 1
        if self._written_nodes > MOST_NODES:
            raise yaml.MarkedYAMLError(problem=f"it has more than {MOST_NODES} entries", problem_mark=self.get_mark())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.MarkedYAMLError(
                    problem="keys must be text: put it in quotes", problem_mark=key_node.start_mark
                )
            if key_node.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key_node.value!r} is written twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same values."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a config file.

    Raises:
        OSError: of the system.
        ConfigError: it is too long, not UTF-8, or not a YAML mapping; see `parse_yaml`.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES >> 20} MiB: no config is that long")
    try:
        return parse_mapping(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Reads a document that holds a mapping; see `parse_yaml`."""
    values = parse_yaml(text, source)
    if not isinstance(values, dict):
        found = "empty" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"{source} is {found}: a recipe is a YAML mapping of keys to values")
    return values


def parse_yaml(text: str, source: str) -> Any:
    """Reads one YAML document.

    Args:
        text: The document.
        source: What to call it in an error: a file's path, or the override.

    Returns:
        Plain dicts, lists, strings, numbers, booleans and None.

    Raises:
        ConfigError: naming the source, line and column of what cannot be read.
    """
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = error.problem or error.context or "cannot be read"
        raise ConfigError(f"{source}{place}: not valid YAML: {problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not valid YAML: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {reason}") from error


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Writes a mapping as YAML in its own order; `parse_yaml` reads the same values back."""
    return yaml.dump(
        dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100
    )


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_nodes(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Nodes below and with this one, as often as they are referred to; a count of None is being made."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = None
        children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_count_nodes(child, known) for child in children)
    count = known[id(node)]
    if count is None:
        raise yaml.MarkedYAMLError(problem="it refers to itself", problem_mark=node.start_mark)
    if count > MOST_NODES:
        raise yaml.MarkedYAMLError(
            problem=f"it has more than {MOST_NODES} entries when its references are written out",
            problem_mark=node.start_mark,
        )
    return count
