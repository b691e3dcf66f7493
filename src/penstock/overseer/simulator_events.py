"""Which events of simulators and their workers are kept, and what the user is told of them at once."""

from collections.abc import Mapping
from typing import Any

TOLD_FAILURES = {"simulator_failed": "a simulator failed", "simulator_quarantined": "a simulator was given up"}


def is_news(kind: str, fields: Mapping[str, Any]) -> bool:
    """Whether an event of workers and simulators belongs into events.jsonl: all do, but nurseries without troubles."""
    return kind != "nursery_ready" or bool(fields["troubles"])


def failure_in_words(kind: str, fields: Mapping[str, Any]) -> str:
    """What the user is told at once of such an event; empty for most."""
    if kind not in TOLD_FAILURES:
        return ""
    reason = " ".join(str(fields.get("reason", "")).split())
    return f"{TOLD_FAILURES[kind]} (task {fields.get('task')}): {reason}"
