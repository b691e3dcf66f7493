#!/usr/bin/env python3
"""Measures the shape of Penstock's source without running it; standard library only.

    python3 scripts/shape.py [--src src/penstock] [--json] [--list] [--check]

Definitions, so that numbers of different days compare:
  module       a `.py` file that is no `__init__.py`; `file` counts those too
  code line    a line with a token that is neither comment nor docstring
  import       `from penstock.x import Name` counts as an import of the module that defines `Name`, also where the
               package exports it; imports under `if TYPE_CHECKING` do not count; imports inside functions count for
               importers, and circles are given without and with them; `__init__` files are no importers
  one importer a module that exactly one other module of `src/` imports, and that one lies in the same folder
  twin names   public classes of the same name in two top packages, or in two modules of one
  noise        docstring lines that say nothing: a whole docstring `See X.`, an entry of `Args` under three words that
               names neither unit nor type nor symbol, and `Likewise`
  assembly     a call `Name(...)` in src/ (not in tests) of a class whose objects should be made in one place
  parameter spread  modules that name `top_k`: a stand-in for the files that a new sampling parameter touches

Limits: what is imported by a string (`importlib`, factories named in settings) is not seen; nor whether a name is good.
"""

import argparse
import ast
import collections
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMITS = {
    "files over 600 lines": 0,
    "twin names": 2,
    "circles": 0,
    "circles with imports in functions": 0,
    "modules with one importer, in their folder": 23,
    "constructors with over 6 parameters": 15,
    "noise lines": 85,
    "assemblies of ReplayBuffer": 1,
    "assemblies of TrainingLoop": 1,
    "parameter spread": 3,
}
"""What was reached: every number is `at most`, and goes down only."""

ONCE = ("ReplayBuffer", "PacedReplayBuffer", "TrainingLoop")
"""Classes whose objects are made in one place."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
SECTIONS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
TELLING = re.compile(r"second|byte|token|step|`|\[|\d|[α-ωΑ-Ω]|NumPy|path|URL", re.IGNORECASE)
ENTRY = re.compile(r"^[*\w, ]{1,60}: ?(.*)$")


class Module:
    """One parsed file.

    Attributes:
        name: Dotted, from the package on.
        path: Relative to the package.
        tree: Its syntax tree.
        nodes: All nodes of it, breadth first.
        lines: How many it has.
        code: How many of them are code.
    """

    def __init__(self, root: Path, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.path = path.relative_to(root).as_posix()
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.lines = text.count("\n")
        self.docstrings = [doc for node in self.nodes if (doc := docstring_of(node)) is not None]
        self.code = count_code(text, self.docstrings)

    @property
    def folder(self) -> str:
        """Its package, dotted."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def top(self) -> str:
        """Its top package."""
        return self.path.split("/")[0] if "/" in self.path else "."


def docstring_of(node: ast.AST) -> ast.Constant | None:
    """The docstring's node, where a node has one."""
    if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body and isinstance(node.body[0], ast.Expr):
        value = node.body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value
    return None


def count_code(text: str, docstrings: list[ast.Constant]) -> int:
    """Lines with tokens, comments and docstrings apart."""
    blank = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
        tokenize.ENCODING,
    }  # fmt: skip
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            used.update(range(token.start[0], token.end[0] + 1))
    for doc in docstrings:
        used.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(used)


def is_type_checking(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_of(module: Module, type_checking: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Its import statements, and whether each stands in a function."""

    def walk(nodes: list[ast.stmt], inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node, inside
            elif isinstance(node, ast.If) and is_type_checking(node):
                if type_checking:
                    yield from walk(node.body, inside)
                yield from walk(node.orelse, inside)
            else:
                deeper = inside or isinstance(node, Function)
                for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                    children = getattr(node, field, [])
                    for child in children:
                        yield from walk(child.body if hasattr(child, "pattern") else [child], deeper)

    yield from walk(module.tree.body, False)


def defined(module: Module) -> set[str]:
    """Names that a module's own statements bind, imports apart."""
    names: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


class House:
    """All modules, and which imports which."""

    def __init__(self, src: Path) -> None:
        self.root = src.name
        files = sorted(path for path in src.rglob("*.py") if "__pycache__" not in path.parts)
        self.modules = {module.name: module for module in (Module(src, path) for path in files)}
        self.exports = {
            m.name: {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for node, _ in imports_of(m, type_checking=True)
                if isinstance(node, ast.ImportFrom) and node.module
                for alias in node.names
            }
            for m in self.modules.values()
            if m.is_package
        }
        self.names = {name: defined(module) for name, module in self.modules.items()}
        self.eager: dict[str, set[str]] = {}
        self.all: dict[str, set[str]] = {}
        for name, module in self.modules.items():
            self.eager[name], self.all[name] = set(), set()
            for target, inside in self._targets(module):
                if target != name:
                    self.all[name].add(target)
                    if not inside:
                        self.eager[name].add(target)

    def _targets(self, module: Module) -> Iterator[tuple[str, bool]]:
        for node, inside in imports_of(module):
            dotted = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [f"{node.module}.{alias.name}" for alias in node.names]
            )
            for name in dotted:
                if name.split(".")[0] == self.root and (found := self._resolve(name)) is not None:
                    yield found, inside

    def _resolve(self, dotted: str) -> str | None:
        """The module that a dotted name comes from."""
        for _ in range(5):
            if dotted in self.modules:
                return dotted
            owner, _, name = dotted.rpartition(".")
            if owner not in self.modules:
                return None
            if name in self.exports.get(owner, {}) and name not in self.names[owner]:
                dotted = self.exports[owner][name]
                continue
            return owner
        return None


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in graph:
        if start in index:
            continue
        work = [(start, iter(sorted(graph[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            node, children = work[-1]
            child = next(children, None)
            if child is not None:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    work.append((child, iter(sorted(graph.get(child, set())))))
                elif child in stack:
                    low[node] = min(low[node], index[child])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                component = []
                while True:
                    component.append(stack.pop())
                    if component[-1] == node:
                        break
                if len(component) > 1:
                    found.append(sorted(component))
    return sorted(found)


def noise(module: Module) -> dict[str, int]:
    """Docstring lines that say nothing."""
    counts = collections.Counter({"see": 0, "short entries": 0, "likewise": 0})
    for doc in module.docstrings:
        text = str(doc.value)
        if re.fullmatch(r"See\s+`[^`]+`\.?", text.strip()):
            counts["see"] += 1
        counts["likewise"] += len(re.findall(r"\bLikewise\b", text))
        section, indent = "", 0
        for line in text.expandtabs().splitlines():
            bare = line.strip()
            if SECTIONS.match(bare):
                section, indent = bare, len(line) - len(line.lstrip()) + 4
            elif section == "Args:" and bare and len(line) - len(line.lstrip()) == indent:
                entry = ENTRY.match(bare)
                short = entry is not None and len(entry[1].split()) < 3 and not TELLING.search(entry[1])
                counts["short entries"] += short
            elif bare and len(line) - len(line.lstrip()) < indent:
                section = ""
    return dict(counts)


def measure(src: Path) -> dict[str, Any]:
    """All numbers; lists under `lists`."""
    house = House(src)
    modules = list(house.modules.values())
    packages: dict[str, dict[str, int]] = {}
    folders = collections.Counter(m.folder for m in modules if not m.is_package)
    functions: list[tuple[int, str]] = []
    classes: list[tuple[str, Module]] = []
    wide: list[str] = []
    protocols: list[str] = []
    assemblies: dict[str, list[str]] = {name: [] for name in ONCE}
    spread: list[str] = []
    noises: collections.Counter[str] = collections.Counter()
    for module in modules:
        entry = packages.setdefault(module.top, {"modules": 0, "lines": 0, "code": 0, "classes": 0})
        entry["modules"] += not module.is_package
        entry["lines"] += module.lines
        entry["code"] += module.code
        noises.update(noise(module))
        for node in module.nodes:
            if isinstance(node, Function):
                functions.append(((node.end_lineno or 0) - node.lineno + 1, f"{module.path}:{node.name}"))
            elif isinstance(node, ast.ClassDef):
                classes.append((node.name, module))
                entry["classes"] += 1
                if any("Protocol" in ast.dump(base) for base in node.bases):
                    protocols.append(f"{module.path}:{node.name}")
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                        count = len(item.args.args) + len(item.args.kwonlyargs) - 1
                        if count > 6:
                            wide.append(f"{module.path}:{node.name} {count}")
            elif isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if called in assemblies:
                    assemblies[called].append(f"{module.path}:{node.lineno}")
        if any(isinstance(n, ast.Name | ast.Attribute | ast.arg | ast.keyword | ast.Constant) and "top_k" in names_in(n)
               for n in module.nodes):  # fmt: skip
            spread.append(module.path)
    places: dict[str, set[str]] = collections.defaultdict(set)
    for name, module in classes:
        if not name.startswith("_"):
            places[name].add(module.path)
    twins = {name: sorted(found) for name, found in sorted(places.items()) if len(found) > 1}
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for name, targets in house.all.items():
        if not house.modules[name].is_package:
            for target in targets:
                importers[target].add(name)
    single = sorted(
        module.path
        for module in modules
        if not module.is_package
        and len(importers[module.name]) == 1
        and house.modules[next(iter(importers[module.name]))].folder == module.folder
    )
    only = sum(not m.is_package and len(importers[m.name]) == 1 for m in modules)
    over = sorted(((m.lines, m.path) for m in modules if m.lines > 600), reverse=True)
    eager, every = circles(house.eager), circles(house.all)
    lengths = sorted(length for length, _ in functions)
    code = sum(m.code for m in modules)
    fullest, most = folders.most_common(1)[0]
    full = {folder: count for folder, count in folders.items() if count > 26}
    return {
        "files": len(modules),
        "modules": sum(not m.is_package for m in modules),
        "lines": sum(m.lines for m in modules),
        "code lines": code,
        "docstring lines": sum((d.end_lineno or d.lineno) - d.lineno + 1 for m in modules for d in m.docstrings),
        "packages": dict(sorted(packages.items())),
        "modules in the fullest folder": most,
        "modules over 26 in a folder": len(full),
        "files over 600 lines": len(over),
        "longest file": max(m.lines for m in modules),
        "modules under 40 code lines": sum(m.code < 40 for m in modules if not m.is_package),
        "function length median, p90, longest": [
            lengths[len(lengths) // 2],
            lengths[int(0.9 * len(lengths))],
            lengths[-1],
        ],
        "functions": len(functions),
        "classes": len(classes),
        "classes per 1000 code lines": round(1000 * len(classes) / code, 1),
        "protocols": len(protocols),
        "twin names": len(twins),
        "circles": len(eager),
        "circles with imports in functions": len(every),
        "modules with one importer": only,
        "modules with one importer, in their folder": len(single),
        "constructors with over 6 parameters": len(wide),
        "noise lines": sum(noises.values()),
        "noise by kind": dict(noises),
        "parameter spread": len(spread),
        **{f"assemblies of {name}": len(found) for name, found in assemblies.items()},
        "lists": {
            "fullest folders": [f"{folder} {count}" for folder, count in folders.most_common(6)],
            "files over 600 lines": [f"{path} {lines}" for lines, path in over],
            "longest functions": [f"{name} {length}" for length, name in sorted(functions, reverse=True)[:10]],
            "twin names": [f"{name}: {', '.join(found)}" for name, found in twins.items()],
            "circles": [" <-> ".join(circle) for circle in eager],
            "circles with imports in functions": [" <-> ".join(circle) for circle in every],
            "one importer, in their folder": single,
            "protocols": protocols,
            "constructors with over 6 parameters": wide,
            "parameter spread": sorted(spread),
            **{f"assemblies of {name}": found for name, found in assemblies.items()},
        },
    }


def names_in(node: ast.AST) -> str:
    """The identifier or string that a node is."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) and len(node.value) < 20 else ""
    return str(getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or "")


def show(numbers: dict[str, Any], with_lists: bool) -> None:
    """As text."""
    for name, value in numbers.items():
        if name in ("lists", "packages"):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items())
        limit = f"   (to be at most {LIMITS[name]:,})" if name in LIMITS else ""
        print(f"{name:46} {value:,}{limit}" if isinstance(value, int) else f"{name:46} {value}{limit}")
    print(f"\n{'package':16}{'modules':>9}{'lines':>9}{'code':>9}{'classes':>9}")
    for name, entry in numbers["packages"].items():
        print(f"{name:16}" + "".join(f"{entry[key]:9,}" for key in ("modules", "lines", "code", "classes")))
    for name, found in numbers["lists"].items() if with_lists else ():
        print(f"\n{name}:", *(found or ["none"]), sep="\n  ")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--src", type=Path, default=Path("src/penstock"), help="the package (default: src/penstock)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the lists")
    parser.add_argument("--list", action="store_true", help="name what is counted")
    parser.add_argument("--check", action="store_true", help="exit 1 where a number is beyond its limit")
    options = parser.parse_args()
    if not (options.src / "__init__.py").is_file():
        parser.error(f"{options.src} is no package: start this at the root of a checkout, or pass --src")
    numbers = measure(options.src.resolve())
    if options.json:
        print(json.dumps(numbers, indent=1))
    else:
        show(numbers, options.list)
    beyond = [name for name, limit in LIMITS.items() if numbers[name] > limit]
    if options.check and beyond:
        print("beyond the limit:", ", ".join(beyond), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
