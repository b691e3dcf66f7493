"""The learner of a control policy in a process of its own; see `trainer` for what every learner does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.learner import Checkpoint, ControlLearner
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.distributed.roles.trainer import TrainerRole
from penstock.overseer.fleet_config import FleetRunConfig
from penstock.overseer.fleet_policies import make_policy
from penstock.replay import RemoteFragmentBatches
from penstock.types import PenstockError, Spaces
from penstock.weights import trained_arrays


class FleetLearnerRole(TrainerRole[FleetRunConfig]):
    """Runs one `ControlLearner` and its `TrainingLoop`.

    Args:
        around: What its host gives it.
        settings: The run.
        spaces: What the policy sees and does.
    """

    def __init__(self, around: Surroundings, settings: Settings[FleetRunConfig], spaces: Spaces) -> None:
        super().__init__(around, settings, RemoteFragmentBatches)
        self._spaces = spaces
        self._learner: ControlLearner | None = None

    def _make(self, checkpoint: Checkpoint | None) -> None:
        config = self.config
        policy = make_policy(config, self._spaces) if checkpoint is None else checkpoint.policy
        learner = ControlLearner(policy, config.learner, config.steps, config.seed)
        if checkpoint is not None:
            learner.restore_arrays(checkpoint.learner_arrays)
        self._learner = learner

    def _compile(self) -> None:
        self._loaded().compile(self.config.replay.fragments_per_batch, self.config.fleet.fragment_length)

    def _current(self) -> ControlLearner | None:
        return self._learner

    def _arrays(self) -> Mapping[str, Any]:
        return self._loaded().named_arrays()

    def _travelling(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        return trained_arrays(arrays, self.config.learner.optimizer.frozen)

    def _write_checkpoint(self, save: Any, step: int, states: Mapping[str, Any]) -> Path:
        folder, keep = self.settings.directory.checkpoints, self.config.overseer.keep_checkpoints
        return save(folder, step, self._loaded(), None, states, keep)

    def _loaded(self) -> ControlLearner:
        if self._learner is None:
            raise PenstockError("the learner is not loaded yet: wait until it runs")
        return self._learner


def make_fleet_learner(around: Surroundings, settings: Mapping[str, Any]) -> FleetLearnerRole:
    """Factory of the learner; `settings` has the ``spaces``, too."""
    return FleetLearnerRole(around, Settings.of_fleet(settings), Spaces.from_values(settings["spaces"]))
