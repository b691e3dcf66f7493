"""The learner of a language policy in a process of its own; see `trainer` for what every learner does.

Warm start and parity probe are further tasks that the overseer asks for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.curriculum import Curriculum
from penstock.inference import RemoteContext
from penstock.learner import Checkpoint, Learner
from penstock.model.language import load_policy, named_arrays
from penstock.overseer.config import RunConfig
from penstock.overseer.distributed.component import Surroundings
from penstock.overseer.distributed.records import View
from penstock.overseer.distributed.roles.servers import make_pool, servers_of
from penstock.overseer.distributed.roles.settings import Settings
from penstock.overseer.distributed.roles.trainer import TrainerRole
from penstock.overseer.parity import probe_parity
from penstock.overseer.warm_start import warm_start
from penstock.rollout import RolloutManager
from penstock.types import EnvironmentFailure, PenstockError, Stopped
from penstock.weights import trained_arrays


class LearnerRole(TrainerRole[RunConfig]):
    """Runs one `Learner` and its `TrainingLoop`."""

    def __init__(self, around: Surroundings, settings: Settings) -> None:
        super().__init__(around, settings)
        self._pool = make_pool(settings)
        self._tokenizer = settings.tokenizer()
        self._learner: Learner | None = None

    def look(self, view: View) -> None:
        """Follows the inference servers, for the probe."""
        self._pool.set_servers(servers_of(view))
        super().look(view)

    def _make(self, checkpoint: Checkpoint | None) -> None:
        config = self.config
        if checkpoint is None:
            policy = load_policy(config.model, config.seed, self._tokenizer)
            self._learner = Learner(policy, config.learner, config.steps)
            return
        learner = Learner(checkpoint.decoder, config.learner, config.steps)
        learner.restore_arrays(checkpoint.learner_arrays)
        self._learner = learner

    def _compile(self) -> None:
        self._loaded().compile()

    def _current(self) -> Learner | None:
        return self._learner

    def _arrays(self) -> Mapping[str, Any]:
        return named_arrays(self._loaded().decoder)

    def _travelling(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        return trained_arrays(arrays, self.config.learner.optimizer.frozen)

    def _write_checkpoint(self, save: Any, step: int, states: Mapping[str, Any]) -> Path:
        folder, keep = self.settings.directory.checkpoints, self.config.overseer.keep_checkpoints
        return save(folder, step, self._loaded(), self._tokenizer, states, keep)

    # --- tasks ---------------------------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """Supervised steps on the environments' reference solutions; then version 0 is published anew."""
        config, learner = self.config, self._loaded()
        assert config.learner.warm_start is not None  # or nobody asks for it

        def on_step(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if self.stopping.is_set():
                raise Stopped("warm start")
            self._steps_done += 1
            self.doing = f"warm start {done}/{total}"
            self.around.metrics(0, {"warm_start/step": float(done), **metrics})

        warm_start(learner, self._manager(), config.learner.warm_start, config.seed, on_step)
        self._published = None  # the same version, with other weights
        self.restart_broadcaster()

    def probe(self) -> float | None:
        """Largest difference between the servers' log-probabilities and the learner's; None where none was measured.

        Raises:
            MismatchError: it is too large.
        """
        self.doing = "checking that engines and learner agree"
        config = self.config
        lesson_id, limit = next(iter(config.curriculum.lessons)), config.learner.mismatch_limit
        try:
            worst = probe_parity(self._manager(), self._loaded(), lesson_id, config.learner.row_length, limit)
        except EnvironmentFailure as failure:  # counted where it trains; parity is checked at every step, too
            self.around.event("parity_not_probed", lesson=lesson_id, reason=str(failure))
            return None
        self.around.event("parity", largest_difference=worst, limit=limit)
        return worst

    def stop(self, timeout_s: float) -> None:
        """See `Component.stop`."""
        super().stop(timeout_s)
        self._pool.close()

    def _loaded(self) -> Learner:
        if self._learner is None:
            raise PenstockError("the learner is not loaded yet: wait until it runs")
        return self._learner

    def _manager(self) -> RolloutManager:
        curriculum = Curriculum(self.config.curriculum)  # names the lessons; nothing is recorded in it
        context = RemoteContext(self._pool, self._tokenizer)
        return RolloutManager(curriculum, context, self.config.seed, self.settings.lineage)


def make_learner(around: Surroundings, settings: Mapping[str, Any]) -> LearnerRole:
    """Factory of the learner."""
    return LearnerRole(around, Settings.of(settings))
