"""Replay: tickets, the buffer, the durable store, the ledger, and recovery; docs/replay.md has the rules."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.replay.buffer import ReplayBuffer
    from penstock.replay.config import ReplayConfig
    from penstock.replay.freshness import FreshnessWindow
    from penstock.replay.history import History
    from penstock.replay.issuer import TicketIssuer
    from penstock.replay.ledger import FATES, STATES, Ledger
    from penstock.replay.lineages import Lineages
    from penstock.replay.recovery import plan_recovery
    from penstock.replay.store import ExperienceStore, RolloutStore

_EXPORTS = {
    "ExperienceStore": "store",
    "FATES": "ledger",
    "FreshnessWindow": "freshness",
    "History": "history",
    "Ledger": "ledger",
    "Lineages": "lineages",
    "ReplayBuffer": "buffer",
    "ReplayConfig": "config",
    "RolloutStore": "store",
    "STATES": "ledger",
    "TicketIssuer": "issuer",
    "plan_recovery": "recovery",
}

__all__ = [
    "ExperienceStore", "FATES", "FreshnessWindow", "History", "Ledger", "Lineages", "ReplayBuffer",
    "ReplayConfig", "RolloutStore", "STATES", "TicketIssuer", "plan_recovery",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
