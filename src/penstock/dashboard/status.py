"""How a run is, from its directory alone: it may go on, have ended, or be dead; and what `penstock status` prints.

A run that says it goes on is believed while its status.json is young and, on the same machine, its process is there.
What a process wrote that was killed in between is still shown, with its age. Printed are a few lines, and a table of
components where a run has several.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.rundir import RunDirectory, read_status
from penstock.rundir.logs import to_json
from penstock.text.safe_text import printable, shortened
from penstock.types import RunDirectoryError

STATUS_S = 2.0
"""Of `overseer.status_s`, where the run's config does not say it."""
FULL_DISK_S = 300.0
"""Of `replay.store.full_disk_s`, likewise."""
STATUS_BYTES = 64 * 1024
"""More than a status takes."""
INTERVALS, LEAST_S = 10.0, 30.0
"""A status that is older than so many intervals, and than so many seconds, is a dead run's."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One look.

    Attributes:
        path: The run directory.
        state: `starting`, `running`, `finished`, `stopped`, `failed` or `dead`.
        why: For a dead run: what tells so, and for a failed one its error; empty otherwise.
        age_s: Of status.json; None before the first.
        runtime: `local` or `ray`.
        content: What status.json says.
    """

    path: Path
    state: str
    why: str
    age_s: float | None
    runtime: str
    content: Mapping[str, Any]

    @property
    def alive(self) -> bool:
        """Whether the run goes on."""
        return self.state in ("starting", "running")

    def to_json(self) -> dict[str, Any]:
        """As one object: what status.json says, with the state as it is now."""
        told = {"run_dir": str(self.path), "why": self.why, "age_s": self.age_s, "runtime": self.runtime}
        return {**self.content, **told, "state": self.state, "components": components(self.content, self.alive)}


def read_run_status(
    path: Path,
    clock: Callable[[], float] = time.time,
    process_lives: Callable[[int], bool] | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunStatus:
    """Looks at a run directory; changes nothing in it.

    Args:
        path: The run directory.
        clock: Unix seconds.
        process_lives: Whether a process of this machine is there.
        config: What config.yaml says; by default it is read.

    Raises:
        RunDirectoryError: there is no run.
    """
    directory = RunDirectory(path)
    if not directory.config_path.is_file():
        raise RunDirectoryError(
            f"{path} is not a run directory: it has no config.yaml; give one that penstock train wrote, such as "
            "runs/cats-1"
        )
    config = directory.read_config() if config is None else config
    content = read_status(directory.status_path)
    runtime = _text(config.get("runtime"), "local")
    if content is None:
        old = clock() - directory.config_path.stat().st_mtime > _limit_s(config, path)
        why = "it has written no status that can be read" if old else ""
        return RunStatus(path, "dead" if old else "starting", why, None, runtime, {})
    age_s = clock() - _number(content.get("time"), 0.0)
    state, why = str(content.get("state", "running")), ""
    if state == "running":
        why = _why_dead(content, age_s, _limit_s(config, path), process_lives or _process_lives)
        state = "dead" if why else state
    elif state == "failed":
        why = printable(_text(content.get("failure"), ""))
    return RunStatus(path, state, why, age_s, runtime, content)


def components(content: Mapping[str, Any], alive: bool = True) -> dict[str, dict[str, Any]]:
    """Name → what status.json says of a component, and how many updates its weights are behind.

    Of a run that is not `alive`, what ran when status.json was written has ended since.
    """
    told: Any = content.get("components", {})
    found: dict[str, dict[str, Any]] = {}
    for name, fields in told.items() if isinstance(told, Mapping) else ():
        row = dict(fields) if isinstance(fields, Mapping) else {}
        version, step = row.get("version"), content.get("step")
        if isinstance(version, list) and len(version) == 2 and isinstance(step, int):
            row["lag_steps"] = max(0, step - int(_number(version[1], step)))
        if not alive and row.get("state") == "running":
            row["state"] = "ended"
        found[str(name)] = row
    return found


def _why_dead(content: Mapping[str, Any], age_s: float, limit_s: float, process_lives: Callable[[int], bool]) -> str:
    pid, host = content.get("pid"), content.get("host")
    if isinstance(pid, int) and host in (None, socket.gethostname()) and not process_lives(pid):
        return f"its process {pid} is gone"
    return f"its status is {age_s:.0f} s old, and a new one is written every few seconds" if age_s > limit_s else ""


def _limit_s(config: Mapping[str, Any], path: Path) -> float:
    """How old the status of a living run may be; on a full disk as long as the run waits for room."""
    interval_s = _setting(config, "overseer", "status_s", otherwise=STATUS_S)
    waits_s = 0.0 if _has_room(path) else _setting(config, "replay", "store", "full_disk_s", otherwise=FULL_DISK_S)
    return max(LEAST_S, INTERVALS * interval_s) + waits_s


def _setting(config: Any, *keys: str, otherwise: float) -> float:
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return _number(config, otherwise)


def _has_room(path: Path) -> bool:
    """Whether the disk has room for a status."""
    try:
        room = os.statvfs(path)
    except OSError:
        return True  # not known
    return room.f_bavail * room.f_frsize >= STATUS_BYTES


def finite(value: Any) -> float | None:
    """What a file says is a number, where it is a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _number(value: Any, otherwise: float) -> float:
    found = finite(value)
    return otherwise if found is None else found


def _text(value: Any, otherwise: str) -> str:
    return value if isinstance(value, str) else otherwise


def _process_lives(pid: int) -> bool:
    """Whether there is such a process on this machine, and not only its entry that nobody collected."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # it is another user's
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True  # no such file system here


STYLES = {"running": "bold green", "starting": "bold green", "finished": "bold blue", "stopped": "bold yellow"}
"""Of states; all others are bad news."""
LOST = ("dead", "failed")
"""Of states: what such a run was at when it was last heard of says why."""
LONGEST = 400
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
    numbers = {**mapping(content.get("engine")), **mapping(content.get("numbers"))}
    training = mapping(content.get("training"))
    if "inference/tokens_per_s" in numbers and finite(training.get("units_per_s")) is not None:
        numbers["inference/tokens_per_s"] = training["units_per_s"]  # of the wall clock, as the view has it
    throughput = [
        f"{form.format(number)} {title}"
        for title, name, form in THROUGHPUT
        if (number := finite(numbers.get(name))) is not None
    ]
    ledger = [f"{state} {count}" for state, count in mapping(content.get("ledger")).items() if count]
    lessons = [f"{lesson}: {state}" for lesson, state in mapping(content.get("lessons")).items()]
    is_fleet, alive = "account" in content, status.alive
    words = _text(training.get("words"), "")
    words = words if alive else words.partition("  ETA ")[0]  # the end of a run that has ended is no forecast
    phase, waiting = (str(content.get(name, "")) for name in ("phase", "waiting_for"))
    told = alive or status.state in LOST
    lines = [
        ("phase" if alive else "last phase", phase if told else ""),
        ("step", f"{step} of {steps}, lineage {content.get('lineage', 0)}" if step is not None else ""),
        ("training", words),
        ("evaluated", _held_out(training)),
        ("no signal", _text(training.get("no_signal"), "").removeprefix("no signal: ")),
        ("bottleneck", str(content.get("bottleneck", ""))),
        ("throughput" if alive else "at last", ", ".join(throughput)),
        ("fragments" if is_fleet else "rollouts", ", ".join(ledger)),
        ("tasks" if is_fleet else "lessons", "; ".join(lessons)),
        ("failures", _failures(content)),
        ("learner", str(content.get("learner", ""))),
        ("waiting" if alive else "last waiting", waiting if told else ""),
    ]
    return [(name, text) for name, text in lines if text]


def _held_out(training: Mapping[str, Any]) -> str:
    """Of each lesson, or task, the newest score and when it was found."""
    found = {name: mapping(each) for name, each in mapping(training.get("held_out")).items()}
    known = [(name, score, each) for name, each in found.items() if (score := finite(each.get("score"))) is not None]
    return ", ".join(f"{name} {score:.3f} at step {each.get('step')}" for name, score, each in known)


def _failures(content: Mapping[str, Any]) -> str:
    """Of groups and simulators: how many, and why the last."""
    for whose in ("groups", "simulators"):
        found = mapping(content.get(whose))
        if isinstance(found.get("failed"), int) and found["failed"]:
            return f"{found['failed']:,} of {whose}; the last: {found.get('last_failure', '')}"
    return ""


def _components(content: Mapping[str, Any], status: RunStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    doing = "last doing" if status.state in LOST else "doing"
    for title in ("component", "state", "deaths", "weights", "idle", "where", doing):
        table.add_column(title, justify="right" if title in ("deaths", "idle") else "left", no_wrap=title != doing)
    for name, fields in components(content, status.alive).items():
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
    state = str(fields.get("state", fields.get("phase", "")))
    if state == "ended":
        doing = doing if status.state in LOST else ""
    elif fields.get("leaving"):
        state += ", leaving"
    idle = f"{idle_s / (busy_s + idle_s):.0%}" if known else ""
    return [f"{name}#{fields.get('incarnation', 0)}", state, str(fields.get("deaths", 0)), held, idle, where, doing]


def mapping(value: Any) -> Mapping[str, Any]:
    """What a file says is a section of keys, where it is one."""
    return value if isinstance(value, Mapping) else {}
