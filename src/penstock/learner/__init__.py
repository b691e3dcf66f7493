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
    "BestCheckpoint": "checkpoints",
    "Checkpoint": "checkpoints",
    "ControlLearner": "control_learner",
    "ControlOptimizerConfig": "control_config",
    "CorrectionConfig": "config",
    "CriticConfig": "loss_terms",
    "KlConfig": "loss_terms",
    "Learner": "learner",
    "LearnerConfig": "config",
    "LearnerSnapshot": "snapshot",
    "LossConfig": "config",
    "LossInputs": "losses",
    "OptimizerConfig": "config",
    "PolicyLoss": "losses",
    "PpoConfig": "control_config",
    "ReferenceKlConfig": "control_config",
    "TokenLoss": "losses",
    "VTraceConfig": "control_config",
    "WarmStartConfig": "config",
    "gae": "control_losses",
    "latest_checkpoint": "checkpoints",
    "load_checkpoint": "checkpoints",
    "newest_good_checkpoint": "checkpoints",
    "read_states": "checkpoints",
    "restore_control_learner": "checkpoints",
    "restore_learner": "checkpoints",
    "save_checkpoint": "checkpoints",
    "sequence_weights": "losses",
    "tiled_logprobs": "head",
    "tiled_loss": "head",
    "vtrace": "control_losses",
}

__all__ = [
    "BestCheckpoint", "Checkpoint", "ControlLearner", "ControlOptimizerConfig", "CorrectionConfig", "CriticConfig",
    "KlConfig", "Learner", "LearnerConfig", "LearnerSnapshot", "LossConfig", "LossInputs", "OptimizerConfig",
    "PolicyLoss", "PpoConfig", "ReferenceKlConfig", "TokenLoss", "VTraceConfig", "WarmStartConfig", "gae",
    "latest_checkpoint", "load_checkpoint", "newest_good_checkpoint", "read_states", "restore_control_learner",
    "restore_learner", "save_checkpoint", "sequence_weights", "tiled_logprobs", "tiled_loss", "vtrace",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
