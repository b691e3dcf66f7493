"""Replay: tickets, the buffer, the durable store, the ledger, and recovery; docs/replay.md has the rules."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.replay.buffer import OpenAdmission, ReplayBuffer
    from penstock.replay.config import FragmentReplayConfig, ReplayBufferConfig, StoreConfig, Tolerance
    from penstock.replay.draws import ProblemRules
    from penstock.replay.file_queue import FileRolloutStorage, open_rollout_storage
    from penstock.replay.freshness import FreshnessRules, FreshnessWindow
    from penstock.replay.history import FRAGMENTS, LANGUAGE, ExperienceFormat, History, LoggedFate
    from penstock.replay.ledger import FATES, STATES, Ledger, Lineages
    from penstock.replay.messages import (
        batch_from_buffer,
        batch_to_buffer,
        fragments_from_buffer,
        fragments_to_buffer,
    )
    from penstock.replay.paced import PacedReplayBuffer
    from penstock.replay.prefetch import ReplayDataLoader, SampledBatches
    from penstock.replay.queue import Delivery, MemoryRolloutStorage, RolloutStorage, RolloutStorageConfig
    from penstock.replay.receiver import RolloutReceiver
    from penstock.replay.recovery import plan_recovery
    from penstock.replay.remote import (
        RemoteBatches,
        RemoteSink,
        RemoteTickets,
    )
    from penstock.replay.repair import repair_logs
    from penstock.replay.service import ReplayService
    from penstock.replay.store import ExperienceStore, RolloutStore
    from penstock.replay.stored_rollouts import StoredBatches, StoredRollouts
    from penstock.replay.ticket_service import TicketService
    from penstock.replay.tickets import TicketIssuer, TicketRules

_EXPORTS = {
    "buffer": ["OpenAdmission", "ReplayBuffer"],
    "config": ["FragmentReplayConfig", "ReplayBufferConfig", "StoreConfig", "Tolerance"],
    "draws": ["ProblemRules"],
    "file_queue": ["FileRolloutStorage", "open_rollout_storage"],
    "freshness": ["FreshnessRules", "FreshnessWindow"],
    "history": ["ExperienceFormat", "FRAGMENTS", "History", "LANGUAGE", "LoggedFate"],
    "ledger": ["FATES", "Ledger", "Lineages", "STATES"],
    "messages": ["batch_from_buffer", "batch_to_buffer", "fragments_from_buffer", "fragments_to_buffer"],
    "paced": ["PacedReplayBuffer"],
    "prefetch": ["ReplayDataLoader", "SampledBatches"],
    "queue": ["Delivery", "MemoryRolloutStorage", "RolloutStorage", "RolloutStorageConfig"],
    "receiver": ["RolloutReceiver"],
    "recovery": ["plan_recovery"],
    "remote": ["RemoteBatches", "RemoteSink", "RemoteTickets"],
    "repair": ["repair_logs"],
    "service": ["ReplayService"],
    "store": ["ExperienceStore", "RolloutStore"],
    "stored_rollouts": ["StoredBatches", "StoredRollouts"],
    "ticket_service": ["TicketService"],
    "tickets": ["TicketIssuer", "TicketRules"],
}

__all__ = [
    "Delivery", "ExperienceFormat", "ExperienceStore", "FATES", "FRAGMENTS", "FileRolloutStorage",
    "FragmentReplayConfig", "FreshnessRules", "FreshnessWindow", "History", "LANGUAGE", "Ledger", "Lineages",
    "LoggedFate", "MemoryRolloutStorage", "OpenAdmission", "PacedReplayBuffer", "ProblemRules", "RemoteBatches",
    "RemoteSink", "RemoteTickets", "ReplayBuffer", "ReplayBufferConfig", "ReplayDataLoader", "ReplayService",
    "RolloutReceiver", "RolloutStorage", "RolloutStorageConfig", "RolloutStore", "STATES", "SampledBatches",
    "StoreConfig", "StoredBatches", "StoredRollouts", "TicketIssuer", "TicketRules", "TicketService", "Tolerance",
    "batch_from_buffer", "batch_to_buffer", "fragments_from_buffer", "fragments_to_buffer", "open_rollout_storage",
    "plan_recovery", "repair_logs",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
