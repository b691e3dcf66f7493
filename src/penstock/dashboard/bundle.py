"""A dashboard that opens without a server: a folder with the pages' own files and one of data.

Browsers load neither modules nor JSON from a folder on the disk, so the modules are joined into one classic script,
each in a function of its own, and the data stands in a script, too. What needs a query (SQL, other curves than those in
`MOST_POINTS` blocks) is not there, and says so; of the newest groups the tokens are there up to `MOST_BYTES`.
"""

import re
import time
from pathlib import Path
from typing import Any

from penstock.dashboard.compare import compare_page
from penstock.dashboard.findings import findings_page
from penstock.dashboard.observation import ObservedRun, ObservedRuns
from penstock.dashboard.pages import (
    curves_page,
    fleet_page,
    ledger_page,
    lessons_page,
    reward_page,
    run_page,
    runs_page,
    safe,
    update_page,
)
from penstock.dashboard.rollout_pages import MOST_ROWS, choices, group_list, group_page, timeline
from penstock.dashboard.web import static_files
from penstock.rundir.logs import to_json
from penstock.rundir.storage import check_place, write_atomically
from penstock.types import ConfigError, PenstockError

MOST_BYTES = 16 << 20
"""Of the texts of groups, over all runs."""
MOST_GROUPS = 20_000
"""Of one run that are listed: the newest."""
MOST_UPDATES = 200
"""Of one run whose pages are there: the last."""
MOST_POINTS = 400
"""Of one curve."""
MOST_COMPARED = 8
"""Runs; with more, none are compared."""
POLICY = "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' data: file:"
MODULES = ("uplot.js", "core.js", "charts.js", "runs.js", "run.js", "rollouts.js", "fleet.js", "app.js")
"""In the order in which they need each other."""


def write_bundle(path: Path, out: Path, trust: bool = False) -> str:
    """Writes the bundle of a run, or of a folder of runs.

    Args:
        path: A run directory, or a folder of such; nothing is written there.
        out: The folder to make.
        trust: Connect to stores in the network that runs name, whoever may have written that.

    Returns:
        What was written, in words.

    Raises:
        RunDirectoryError: there is no run.
        ConfigError: `out` exists already, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--bundle {out} exists already: name a folder that does not")
    runs = ObservedRuns(path, None, trust)
    if not out.exists():
        check_place(out, "--bundle")
    for run in runs.all():
        run.catch_up()
    data, groups, left_out, broken = _data(runs)
    files = static_files()
    out.mkdir(parents=True, exist_ok=True)
    script = "globalThis.PENSTOCK_BUNDLE = " + to_json(data) + ";\n"
    written: dict[str, str | bytes] = {
        "index.html": _page(files["index.html"].decode()),
        "app.js": joined({name: files[name].decode() for name in MODULES}),
        "data.js": script,
        **{name: files[name] for name in ("style.css", "uplot.css", "icon.svg", "uplot.LICENSE.txt")},
    }
    for name, content in written.items():
        write_atomically(out / name, content, durable=False)
    count = len(data["runs"])
    words = f"{count} run{'s' * (count != 1)}, {groups} groups in full"
    words += f" ({left_out} more in lists alone: {MOST_BYTES >> 20} MiB is the limit)" if left_out else ""
    words += f" ({broken} more cannot be read)" if broken else ""
    problems = "".join(f"\n{run.name}: {run.problem}" for run in runs.all() if run.problem)
    return f"wrote {out / 'index.html'}: {words}, {len(script) / 1e6:.1f} MB{problems}"


def joined(modules: dict[str, str]) -> str:
    """Modules as one classic script: what one exports the others take from an object; in the order given.

    Raises:
        ConfigError: a module imports one that does not stand before it.
    """
    parts = ['"use strict";\nconst modules = {};\n']
    for name, text in modules.items():
        body, exported = _unwrapped(name, text, parts)
        parts.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {", ".join(exported)} }};\n}})();\n')
    return "".join(parts)


_IMPORT = re.compile(r'^import (?P<what>\w+|\{[^}]*\}) from "\./(?P<file>[\w.]+)";$', re.MULTILINE)
_DEFAULT = re.compile(r"^export \{ (\w+) as default \};$", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_PRELOAD = re.compile(r'^<link rel="modulepreload".*\n', re.MULTILINE)


def _unwrapped(name: str, text: str, before: list[str]) -> tuple[str, list[str]]:
    def taken(match: re.Match[str]) -> str:
        if not any(part.startswith(f'modules["{match["file"]}"]') for part in before):
            raise ConfigError(f"{name} imports {match['file']}, which does not stand before it in MODULES")
        what = match["what"] if match["what"].startswith("{") else f"{{ default: {match['what']} }}"
        return f'const {what} = modules["{match["file"]}"];'

    exported = [f"default: {each}" for each in _DEFAULT.findall(text)] or _EXPORT.findall(text)
    return _EXPORT.sub("", _DEFAULT.sub("", _IMPORT.sub(taken, text))), exported


def _page(text: str) -> str:
    policy = f'<meta http-equiv="content-security-policy" content="{POLICY}">\n<title>'
    scripts = '<script defer src="data.js"></script>\n<script defer src="app.js"></script>'
    text = _PRELOAD.sub("", text).replace('<script type="module" src="static/app.js"></script>', scripts)
    return text.replace("static/", "").replace("<title>", policy, 1)


def _data(runs: ObservedRuns) -> tuple[dict[str, Any], int, int, int]:
    """All pages, of how many groups the tokens are there, of how many there was no room, and how many are broken."""
    found: dict[str, Any] = {}
    room, written, left_out, broken = MOST_BYTES, 0, 0, 0
    for run in runs.all():
        pages = safe(_pages(run))
        pages["groups"] = {}
        for group in pages["list"]:
            if room <= 0:
                left_out += 1
                continue
            try:
                page = safe(group_page(run, group["group_id"]))
            except PenstockError:  # its files are gone or broken
                broken += 1
                continue
            room -= len(to_json(page))
            written += 1
            pages["groups"][group["group_id"]] = page
        found[run.name] = pages
    names = list(found)
    pairs = [(a, b) for a in names for b in names if a != b] if len(names) <= MOST_COMPARED else []
    return {
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "list": safe(runs_page(runs)),
        "runs": found,
        "compare": {f"{a}\n{b}": safe(compare_page(runs, {"a": a, "b": b})) for a, b in pairs},
    }, written, left_out, broken  # fmt: skip


def _pages(run: ObservedRun) -> dict[str, Any]:
    names = run.curves.names
    curves = curves_page(run, {"names": ",".join(names), "points": str(MOST_POINTS)})["curves"]
    steps, _, _ = run.curves.series("train/loss")
    return {
        "page": run_page(run),
        "curves": curves,
        "reward": reward_page(run),
        "findings": findings_page(run),
        "ledger": ledger_page(run),
        "choices": choices(run),
        "list": _all_groups(run),
        "timeline": timeline(run, {}),
        "lessons": lessons_page(run),
        "fleet": fleet_page(run),
        "updates": {str(step): update_page(run, int(step)) for step in steps[-MOST_UPDATES:].tolist()},
    }


def _all_groups(run: ObservedRun) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < MOST_GROUPS:
        page = group_list(run, {"of": "all", "offset": str(len(found)), "limit": str(MOST_ROWS)})["groups"]
        if not page:
            break
        found += page
    return found
