"""Which events of simulators and their workers are kept, and what the user is told of them at once."""

from collections.abc import Mapping
from typing import Any

TOLD_FAILURES = {
    "simulator_failed": "a simulator failed", "simulator_fault": "a simulator failed",
    "simulator_quarantined": "a simulator was given up",
}  # fmt: skip


def is_news(kind: str, fields: Mapping[str, Any]) -> bool:
    """Whether an event of workers and simulators belongs into events.jsonl: all do, but nurseries without troubles."""
    return kind != "nursery_ready" or bool(fields["troubles"])


def failures_in(kind: str, fields: Mapping[str, Any]) -> int:
    """How many failures of simulators an event tells of: an end of a process, or steps that went wrong without one."""
    return int(fields["steps"]) if kind == "simulator_fault" else int(kind == "simulator_failed")


def failure_in_words(kind: str, fields: Mapping[str, Any]) -> str:
    """What the user is told at once of such an event, in one line; empty for most."""
    if kind == "nursery_ready":
        left = (f"{id}: {_line(text)}" for id, text in fields["troubles"].items() if id != "threads")
        told = "; ".join(left)
        return f"not imported ahead of its processes, so each of them imports it: {told}" if told else ""
    if kind not in TOLD_FAILURES:
        return ""
    reason = "; ".join(_line(fields[name]) for name in ("reason", "limit") if fields.get(name))
    return f"{TOLD_FAILURES[kind]} (task {fields.get('task')}): {reason}"


def _line(text: object) -> str:
    return " ".join(str(text).split())
