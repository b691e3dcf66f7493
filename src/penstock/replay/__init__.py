"""Replay: tickets, the buffer, the durable store, the ledger, and recovery; docs/replay.md has the rules."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.replay.buffer import OpenAdmission, ReplayBuffer
    from penstock.replay.config import ReplayBufferConfig, StoreConfig, Tolerance
    from penstock.replay.data_loader import ReplayDataLoader
    from penstock.replay.file_storage import FileRolloutStorage
    from penstock.replay.formats import FRAGMENTS, LANGUAGE, ExperienceFormat
    from penstock.replay.fragment_config import FragmentReplayConfig
    from penstock.replay.freshness import FreshnessRules, FreshnessWindow
    from penstock.replay.history import History, LoggedFate
    from penstock.replay.issuer import TicketIssuer
    from penstock.replay.ledger import FATES, STATES, Ledger
    from penstock.replay.lineages import Lineages
    from penstock.replay.memory_storage import MemoryRolloutStorage
    from penstock.replay.messages import (
        batch_from_buffer,
        batch_to_buffer,
        fragments_from_buffer,
        fragments_to_buffer,
    )
    from penstock.replay.open_source import OpenBatchSource, SampledBatches
    from penstock.replay.paced import PacedReplayBuffer
    from penstock.replay.receiver import RolloutReceiver
    from penstock.replay.recovery import plan_recovery
    from penstock.replay.remote import (
        RemoteBatches,
        RemoteFragmentBatches,
        RemoteFragments,
        RemoteSink,
        RemoteTickets,
    )
    from penstock.replay.salvage import repair_logs, salvage_logs
    from penstock.replay.service import FragmentService, ReplayService
    from penstock.replay.storage import Delivery, RolloutStorage, RolloutStorageConfig
    from penstock.replay.storage_opening import open_rollout_storage
    from penstock.replay.store import ExperienceStore, RolloutStore
    from penstock.replay.ticket_service import TicketService

_EXPORTS = {
    "Delivery": "storage",
    "ExperienceFormat": "formats",
    "ExperienceStore": "store",
    "FATES": "ledger",
    "FRAGMENTS": "formats",
    "FileRolloutStorage": "file_storage",
    "FragmentReplayConfig": "fragment_config",
    "FragmentService": "service",
    "FreshnessRules": "freshness",
    "FreshnessWindow": "freshness",
    "History": "history",
    "LANGUAGE": "formats",
    "Ledger": "ledger",
    "Lineages": "lineages",
    "LoggedFate": "history",
    "MemoryRolloutStorage": "memory_storage",
    "OpenAdmission": "buffer",
    "OpenBatchSource": "open_source",
    "PacedReplayBuffer": "paced",
    "ReplayBuffer": "buffer",
    "ReplayBufferConfig": "config",
    "RemoteBatches": "remote",
    "RemoteFragmentBatches": "remote",
    "RemoteFragments": "remote",
    "RemoteSink": "remote",
    "RemoteTickets": "remote",
    "ReplayDataLoader": "data_loader",
    "ReplayService": "service",
    "RolloutReceiver": "receiver",
    "RolloutStorage": "storage",
    "RolloutStorageConfig": "storage",
    "RolloutStore": "store",
    "STATES": "ledger",
    "SampledBatches": "open_source",
    "StoreConfig": "config",
    "TicketIssuer": "issuer",
    "TicketService": "ticket_service",
    "Tolerance": "config",
    "batch_from_buffer": "messages",
    "batch_to_buffer": "messages",
    "fragments_from_buffer": "messages",
    "fragments_to_buffer": "messages",
    "open_rollout_storage": "storage_opening",
    "plan_recovery": "recovery",
    "repair_logs": "salvage",
    "salvage_logs": "salvage",
}

__all__ = [
    "Delivery", "ExperienceFormat", "ExperienceStore", "FATES", "FRAGMENTS", "FileRolloutStorage",
    "FragmentReplayConfig", "FragmentService", "FreshnessRules", "FreshnessWindow", "History", "LANGUAGE", "Ledger",
    "Lineages", "LoggedFate", "MemoryRolloutStorage", "OpenAdmission", "OpenBatchSource", "PacedReplayBuffer",
    "RemoteBatches", "RemoteFragmentBatches", "RemoteFragments", "RemoteSink", "RemoteTickets", "ReplayBuffer",
    "ReplayBufferConfig", "ReplayDataLoader", "ReplayService", "RolloutReceiver", "RolloutStorage",
    "RolloutStorageConfig", "RolloutStore", "STATES", "SampledBatches", "StoreConfig", "TicketIssuer",
    "TicketService", "Tolerance", "batch_from_buffer", "batch_to_buffer", "fragments_from_buffer",
    "fragments_to_buffer", "open_rollout_storage", "plan_recovery", "repair_logs", "salvage_logs",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
