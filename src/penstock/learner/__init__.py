"""The learner: losses, the compiled update, the optimiser, and checkpoints."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.learner.checkpoints import (
        BestCheckpoint,
        Checkpoint,
        latest_checkpoint,
        load_checkpoint,
        newest_good_checkpoint,
        read_states,
        restore_control_learner,
        restore_learner,
        save_checkpoint,
    )
    from penstock.learner.config import (
        CorrectionConfig,
        LearnerConfig,
        LossConfig,
        OptimizerConfig,
        WarmStartConfig,
    )
    from penstock.learner.control_config import (
        ControlOptimizerConfig,
        PpoConfig,
        ReferenceKlConfig,
        VTraceConfig,
    )
    from penstock.learner.control_learner import ControlLearner
    from penstock.learner.control_losses import gae, vtrace
    from penstock.learner.head import tiled_logprobs, tiled_loss
    from penstock.learner.learner import Learner
    from penstock.learner.loss_terms import CriticConfig, KlConfig
    from penstock.learner.losses import LossInputs, PolicyLoss, TokenLoss, sequence_weights
    from penstock.learner.snapshot import LearnerSnapshot

_EXPORTS = {
    "checkpoints": [
        "BestCheckpoint", "Checkpoint", "latest_checkpoint", "load_checkpoint", "newest_good_checkpoint", "read_states",
        "restore_control_learner", "restore_learner", "save_checkpoint",
    ],
    "config": ["CorrectionConfig", "LearnerConfig", "LossConfig", "OptimizerConfig", "WarmStartConfig"],
    "control_config": ["ControlOptimizerConfig", "PpoConfig", "ReferenceKlConfig", "VTraceConfig"],
    "control_learner": ["ControlLearner"],
    "control_losses": ["gae", "vtrace"],
    "head": ["tiled_logprobs", "tiled_loss"],
    "learner": ["Learner"],
    "loss_terms": ["CriticConfig", "KlConfig"],
    "losses": ["LossInputs", "PolicyLoss", "TokenLoss", "sequence_weights"],
    "snapshot": ["LearnerSnapshot"],
}  # fmt: skip

__all__ = [
    "BestCheckpoint", "Checkpoint", "ControlLearner", "ControlOptimizerConfig", "CorrectionConfig", "CriticConfig",
    "KlConfig", "Learner", "LearnerConfig", "LearnerSnapshot", "LossConfig", "LossInputs", "OptimizerConfig",
    "PolicyLoss", "PpoConfig", "ReferenceKlConfig", "TokenLoss", "VTraceConfig", "WarmStartConfig", "gae",
    "latest_checkpoint", "load_checkpoint", "newest_good_checkpoint", "read_states", "restore_control_learner",
    "restore_learner", "save_checkpoint", "sequence_weights", "tiled_logprobs", "tiled_loss", "vtrace",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
