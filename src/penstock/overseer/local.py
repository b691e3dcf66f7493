"""The local launcher: wires all components of one run in one process, as threads, without Ray.

`wire` is the only place that knows every component; none of them knows it. Weights go by reference, rollouts
through the replay buffer's own lock. What the threads do and how they end is `penstock.overseer.run`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.batch import DeadlineBatchMaker
from penstock.curriculum import Curriculum
from penstock.inference import EngineContext, InferenceEngine
from penstock.learner import Checkpoint, Learner
from penstock.model.language import Decoder, with_named_arrays
from penstock.overseer.config import RunConfig
from penstock.overseer.evaluator import Evaluator
from penstock.overseer.training_loop import TrainingLoop
from penstock.replay import Ledger, ReplayBuffer, RolloutStore, TicketIssuer
from penstock.rollout import RolloutManager, RolloutWorker
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer
from penstock.types import Checkpointable, RolloutBatch, WeightVersion, fold
from penstock.weights import InProcessBroadcaster

Log = Callable[[int, Mapping[str, float]], None]


@dataclass(slots=True)
class Components:
    """Everything that one local run consists of."""

    tokenizer: Tokenizer
    learner: Learner
    engine: InferenceEngine
    curriculum: Curriculum
    manager: RolloutManager
    evaluator: Evaluator
    issuer: TicketIssuer
    ledger: Ledger
    buffer: ReplayBuffer
    worker: RolloutWorker
    loop: TrainingLoop

    @property
    def checkpointables(self) -> dict[str, Checkpointable]:
        """What travels in a checkpoint beside the learner."""
        return {
            "curriculum": self.curriculum,
            "evaluator": self.evaluator,
            "issuer": self.issuer,
            "replay": self.buffer,
        }
