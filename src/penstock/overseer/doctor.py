"""`penstock doctor`: what this machine offers and whether Penstock works on it, check by check with its remedy.

Of a checkpoint, what a run that trains it would meet here (`penstock.overseer.doctor_probes.examine_checkpoint`).

A check that raises is a failed check and disturbs no other. What computes, or starts simulators, lives
in `penstock.overseer.doctor_probes`. Nothing is written or removed but by `clean`, and nothing outside this machine is
asked.
"""

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.inference.config import EngineConfig
from penstock.learner.config import LearnerConfig
from penstock.model.language.config import LoadingConfig
from penstock.overseer.estimate import bytes_text

Status = Literal["ok", "warn", "fail"]

PACKAGES = (
    "penstock",
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "numpy",
    "pyarrow",
    "tokenizers",
    "transformers",
    "gymnasium",
)
LEAST_PYTHON = (3, 11)
LITTLE_MEMORY_BYTES, LEAST_MEMORY_BYTES = 2 * 2**30, 2**29
LITTLE_DISK_BYTES, LEAST_DISK_BYTES = 5 * 2**30, 2**29

_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        status: `warn` where a run would work but badly, `fail` where it would not.
        detail: What was found, with numbers.
        remedy: What to do about it; empty where nothing need be done.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


class DoctorConfig(BaseModel, frozen=True, extra="forbid"):
    """Under which settings a checkpoint is tried.

    Attributes:
        model: In what dtype it is loaded.
        inference: The engine's; its `max_seq_len` comes down to what the model is meant for.
        learner: The learner's; answers are as long as a row allows.
    """

    model: LoadingConfig = LoadingConfig()
    inference: EngineConfig = EngineConfig()
    learner: LearnerConfig = LearnerConfig()


SMALL_SHAPES = {
    "inference": {"max_slots": 8, "max_seq_len": 256},
    "learner": {"row_length": 256, "micro_batch_rows": 1},
}
"""What `penstock doctor CHECKPOINT` lays a user's keys over: enough for an answer in seconds."""


def examine() -> list[Check]:
    """Makes every check, the cheap ones first."""
    probes: dict[str, Callable[[], Check]] = {
        "python": check_python,
        "packages": check_packages,
        "processors": check_processors,
        "memory": lambda: judge_memory(free_memory_bytes()),
        "disk": lambda: judge_disk(shutil.disk_usage(Path.cwd()).free, Path.cwd()),
        "memory of killed runs": check_abandoned_memory,
        "devices": _probe("check_devices"),
        "matrix product": _probe("check_matrix_product"),
        "memory copy": _probe("check_memory_copy"),
        "parity": _probe("check_parity"),
        "simulators": _probe("check_simulators"),
    }
    return [_guarded(name, probe) for name, probe in probes.items()]


def check_python() -> Check:
    """The interpreter."""
    version = platform.python_version()
    detail = f"{version} at {sys.executable}, {platform.platform(terse=True)}"
    if sys.version_info < LEAST_PYTHON:
        return Check("python", "fail", detail, "use Python 3.11 or later")
    return Check("python", "ok", detail)


def check_packages() -> Check:
    """The packages that every run needs, with their versions."""
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    detail = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if missing:
        return Check("packages", "fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("packages", "ok", detail)


def check_processors() -> Check:
    """The processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    if cores < 2:
        remedy = "allow at least two cores: generation and learning share them"
        return Check("processors", "warn", f"{cores} core{load}", remedy)
    return Check("processors", "ok", f"{cores} cores{load}")


def judge_memory(free_bytes: int) -> Check:
    """Whether that much free memory is enough for the smallest recipes."""
    detail = f"{bytes_text(free_bytes)} free"
    remedy = "close other programs; penstock train RECIPE --dry-run estimates what a run takes"
    if free_bytes < LEAST_MEMORY_BYTES:
        return Check("memory", "fail", detail, remedy)
    return (
        Check("memory", "warn", detail, remedy) if free_bytes < LITTLE_MEMORY_BYTES else Check("memory", "ok", detail)
    )


def judge_disk(free_bytes: int, folder: Path) -> Check:
    """Whether that much free disk is enough for checkpoints and rollouts."""
    detail = f"{bytes_text(free_bytes)} free in {folder}"
    remedy = "free some space, or put runs elsewhere with --run-dir"
    if free_bytes < LEAST_DISK_BYTES:
        return Check("disk", "fail", detail, remedy)
    return Check("disk", "warn", detail, remedy) if free_bytes < LITTLE_DISK_BYTES else Check("disk", "ok", detail)


def check_abandoned_memory() -> Check:
    """What drivers that were killed left in this machine's memory (``weights.transport: shared_memory``)."""
    from penstock.weights.shared_memory import find_abandoned

    found = find_abandoned()
    if not found:
        return Check("memory of killed runs", "ok", "none")
    detail = ", ".join(f"{bytes_text(folder.nbytes)} in {folder.path}" for folder in found)
    return Check("memory of killed runs", "warn", detail, "penstock doctor --clean removes it, as does the next run")


def clean() -> list[str]:
    """Removes what killed runs left behind, and says what it was, a line each."""
    from penstock.weights.shared_memory import free_abandoned

    freed = [f"removed {folder.path}: {bytes_text(folder.nbytes)} of memory" for folder in free_abandoned()]
    return freed or ["nothing to remove: no killed run left memory behind"]


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: what the machine has left, within its control group's limit."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # no Linux: all there is, for want of a portable "available"
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def print_checks(checks: list[Check], console: Console) -> None:
    """Prints a table and a closing line."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for check in checks:
        detail = Text(check.detail)
        if check.remedy:
            detail.append(f"\n→ {check.remedy}", style="bold")
        table.add_row(Text(check.status, style=_STYLES[check.status]), check.name, detail)
    console.print(table)
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    console.print(f"{len(checks)} checks, {failed} failed, {warned} with a warning")


def _probe(name: str) -> Callable[[], Check]:
    """A check that computes; an installation too broken to import is its finding, not an error of the others."""
    return lambda: getattr(importlib.import_module("penstock.overseer.doctor_probes"), name)()


def _guarded(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except Exception as error:  # whatever a broken installation raises is the finding
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Check(name, "fail", reason, "reinstall from constraints.txt; if it persists, report this line")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
