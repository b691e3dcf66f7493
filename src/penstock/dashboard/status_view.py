"""What `penstock status` prints: a few lines, and a table of components where a run has several."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dashboard.run_status import RunStatus, components, finite
from penstock.dashboard.safe_text import shortened
from penstock.rundir.json_text import to_json

STYLES = {"running": "bold green", "starting": "bold green", "finished": "bold blue", "stopped": "bold yellow"}
"""Of states; all others are bad news."""
LOST = ("dead", "failed")
"""Of states: what such a run was at when it was last heard of says why."""
LONGEST = 200
THROUGHPUT = (
    ("tokens/s", "inference/tokens_per_s", "{:,.0f}"),
    ("running requests", "inference/running", "{:,.0f}"),
    ("waiting requests", "inference/waiting", "{:,.0f}"),
    ("groups running", "rollout/groups_running", "{:,.0f}"),
    ("weights MiB/s", "weights/mib_per_s", "{:,.0f}"),
    ("steps/s", "fleet/steps_per_s", "{:,.0f}"),
    ("simulator processes live", "fleet/live", "{:,.0f}"),
    ("respawning", "fleet/respawning", "{:,.0f}"),
    ("quarantined", "fleet/quarantined", "{:,.0f}"),
    ("restarts", "fleet/restarts", "{:,.0f}"),
)
"""What is shown, by which number, and how."""


def print_status(status: RunStatus, console: Console) -> None:
    """Prints a run's status; a number that is not there is left out."""
    content = status.content
    console.print(Text.assemble(f"{shortened(str(status.path), LONGEST)}  ", _state(status)))
    lines = Table.grid(padding=(0, 2))
    for name, text in _lines(content, status):
        lines.add_row(Text(name, style="dim"), Text(shortened(text, LONGEST)))
    if lines.row_count:
        console.print(lines)
    table = _components(content, status)
    if table.row_count:
        console.print(table)


def print_status_json(status: RunStatus) -> None:
    """Prints a run's status as one JSON object."""
    print(to_json(status.to_json(), indent=2, allow_nan=True))


def _state(status: RunStatus) -> Text:
    text = Text(f"«{shortened(status.state, 40)}»", style=STYLES.get(status.state, "bold red"))
    if status.why:
        text.append(f" {status.why}", style="red")
    elif status.age_s is not None:
        text.append(f" {max(0.0, status.age_s):.0f} s ago", style="dim")
    return text


def _lines(content: Mapping[str, Any], status: RunStatus) -> list[tuple[str, str]]:
    """Heading and text of what is known; what only a living run does is said of a lost one as the last known."""
    step, steps = content.get("step"), content.get("steps")
    numbers = {**_mapping(content.get("engine")), **_mapping(content.get("numbers"))}
    throughput = [
        f"{form.format(number)} {title}"
        for title, name, form in THROUGHPUT
        if (number := finite(numbers.get(name))) is not None
    ]
    ledger = [f"{state} {count}" for state, count in _mapping(content.get("ledger")).items() if count]
    lessons = [f"{lesson}: {state}" for lesson, state in _mapping(content.get("lessons")).items()]
    is_fleet, alive = "account" in content, status.alive
    phase, waiting = (str(content.get(name, "")) for name in ("phase", "waiting_for"))
    told = alive or status.state in LOST
    lines = [
        ("phase" if alive else "last phase", phase if told else ""),
        ("step", f"{step} of {steps}, lineage {content.get('lineage', 0)}" if step is not None else ""),
        ("bottleneck", str(content.get("bottleneck", ""))),
        ("throughput" if alive else "at last", ", ".join(throughput)),
        ("fragments" if is_fleet else "rollouts", ", ".join(ledger)),
        ("tasks" if is_fleet else "lessons", "; ".join(lessons)),
        ("failures", _failures(content)),
        ("learner", str(content.get("learner", ""))),
        ("waiting" if alive else "last waiting", waiting if told else ""),
    ]
    return [(name, text) for name, text in lines if text]


def _failures(content: Mapping[str, Any]) -> str:
    """Of groups and simulators: how many, and why the last."""
    for whose in ("groups", "simulators"):
        found = _mapping(content.get(whose))
        if isinstance(found.get("failed"), int) and found["failed"]:
            return f"{found['failed']:,} of {whose}; the last: {found.get('last_failure', '')}"
    return ""


def _components(content: Mapping[str, Any], status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    doing = "last doing" if status.state in LOST else "doing"
    for title in ("component", "state", "deaths", "weights", "idle", "where", doing):
        table.add_column(title, justify="right" if title in ("deaths", "idle") else "left", no_wrap=title != doing)
    for name, fields in components(content).items():
        table.add_row(*(Text(shortened(cell, LONGEST)) for cell in _row(name, fields, status)))
    return table


def _row(name: str, fields: Mapping[str, Any], status: RunStatus) -> list[str]:
    version, lag = fields.get("version"), fields.get("lag_steps")
    held = f"{version[1]}" + (f", {lag} behind" if lag else "") if isinstance(version, list) and lag is not None else ""
    busy_s, idle_s = finite(fields.get("busy_s")) or 0.0, finite(fields.get("idle_s")) or 0.0
    known = busy_s + idle_s > 0
    where = f"{fields['host']}:{fields.get('pid')}" if "host" in fields else ""
    doing = str(fields.get("doing", ""))
    if fields.get("last_death"):
        doing += f" (last death: {fields['last_death']})"
    state = str(fields.get("state", fields.get("phase", ""))) + (", leaving" if fields.get("leaving") else "")
    if not status.alive and state.startswith("running"):
        state, doing = "ended", doing if status.state in LOST else ""
    idle = f"{idle_s / (busy_s + idle_s):.0%}" if known else ""
    return [f"{name}#{fields.get('incarnation', 0)}", state, str(fields.get("deaths", 0)), held, idle, where, doing]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
