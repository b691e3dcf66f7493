"""A run of a language policy on stored rollouts: a learner and its batches, without engines, workers or evaluations.

What is not of generation is as in any run: its policy, its loss, checkpoints, metrics, a resume, the command line.
Not covered: runs in many processes; there is one component that computes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast, final

from typing_extensions import override

from penstock.learner import Learner
from penstock.model.language.config import ModelConfig
from penstock.model.programs import Programs
from penstock.overseer.assembly import config_error_for
from penstock.overseer.component import Settings, ThreadedComponent
from penstock.overseer.config import RunConfig
from penstock.overseer.estimate import model_shape
from penstock.overseer.full_disk import when_there_is_room
from penstock.overseer.kind import LearnerTasks, RunStart, SharedParts
from penstock.overseer.language.kind import LanguageKind, Updates
from penstock.overseer.language.replay import ReferenceScores
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.metrics import success_thresholds
from penstock.overseer.run import PhaseSteps, Run
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.messages import ComponentStatus
from penstock.overseer.supervisor.scaling import SpecMaker
from penstock.overseer.tasks import LocalComponent
from penstock.overseer.trainer import LearnerComponent
from penstock.replay import RolloutStore, StoredBatches, StoredRollouts
from penstock.text import same_tokenizer
from penstock.types import ConfigError, RLExample, Stopped, TrainingBatch
from penstock.weights import InProcessBroadcaster

KEY = "replay.from_rollouts"


def check_tokenizer(source: Path, config: RunConfig) -> None:
    """Compares the policy's tokenizer with that of the run whose rollouts they are, where it left one.

    Raises:
        ConfigError: they differ.
    """
    for folder in sorted(source.glob("checkpoints/step-*/model")):
        if same_tokenizer(config.model.tokenizer_path, folder) is False:
            raise ConfigError(
                f"{KEY} is {source}: its tokenizer ({folder}) is another than that of {config.model.tokenizer_path}: "
                "name the model that the rollouts were sampled with, or one of its tokenizer"
            )
        return


@final
class OfflineKind:
    """Implements `penstock.overseer.kind.PolicyKind`; what is not said here is as of `LanguageKind`.

    Args:
        config: The run's, with ``replay.from_rollouts``.
    """

    evaluates = False

    def __init__(self, config: RunConfig) -> None:
        language = LanguageKind()
        self.progress, self.check_resume = language.progress, language.check_resume
        self.make_learner, self.update_programs = language.make_learner, language.update_programs
        self.metrics_of = language.metrics_of
        self._language = language
        self._stored: StoredRollouts | None = None
        self._source = Path(str(config.replay.from_rollouts))

    # --- before anything is started ------------------------------------------------------------------------------

    def check(self, config: RunConfig) -> None:
        """As of a run in this process, of which alone there are some."""

    def begin(self, config: RunConfig) -> RunStart:
        """Decoder and tokenizer; the rollouts are read and checked.

        Raises:
            ConfigError: they are not this policy's.
        """
        self._read(config, model_shape(config.model))
        return self._language.begin(config)

    def resume(self, config: RunConfig, checkpoint: Path) -> RunStart:
        """The checkpoint's decoder and tokenizer; the rollouts are read and checked again."""
        start = self._language.resume(config, checkpoint)
        self._read(config, start.policy.config)
        return start

    def _read(self, config: RunConfig, policy: ModelConfig) -> None:
        check_tokenizer(self._source, config)
        self._stored = StoredRollouts.read(
            self._source,
            row_length=config.learner.row_length,
            vocab_size=policy.vocab_size,
            allow_truncated_sampling=config.learner.allow_truncated_sampling,
            batch_maker=config.replay.batch_maker,
        )
        StoredBatches.check(self._stored, config.replay.groups_per_batch)

    # --- components ----------------------------------------------------------------------------------------------

    def components(self, settings: Settings[RunConfig], states: Mapping[str, Any] | None) -> list[ComponentSpec]:
        """None: there is no such run in many processes."""
        return []

    def local_components(
        self,
        settings: Settings[RunConfig],
        start: RunStart,
        context: Callable[[str], ComponentContext],
        log: RunLog,
    ) -> dict[str, LocalComponent]:
        """The batches and the learner."""
        assert self._stored is not None  # it was read before the run was opened
        replay = OfflineReplay(context("replay-0"), settings, self._stored, log)
        if start.checkpoint is not None:
            replay.batches.restore(start.checkpoint.states["replay"])
        shared = SharedParts(InProcessBroadcaster(), replay.batches)
        learner = LearnerComponent(context("learner-0"), settings, self, shared, start)
        return {"replay-0": replay, "learner-0": learner}

    def scalable(self, settings: Settings[RunConfig]) -> list[tuple[str, SpecMaker, int]]:
        """Nothing."""
        return []

    # --- the learner ---------------------------------------------------------------------------------------------

    def scoring_programs(self, learner: Learner) -> Programs:
        """None: nobody asks for log-probabilities before an update."""
        return {}

    def learner_tasks(self, ctx: ComponentContext, component: LearnerComponent) -> LearnerTasks:
        """Scores of a reference; with no engine there is no parity to check."""

        def reference_logprobs(examples: list[RLExample]) -> Any:
            return cast(Learner, component.learner).reference_logprobs(examples)

        def before_update(batch: TrainingBatch[RLExample]) -> None:
            cast(Learner, component.learner).coming = component.coming_batch

        return LearnerTasks({"reference_logprobs": reference_logprobs}, before_update=before_update)

    # --- phases of a run -----------------------------------------------------------------------------------------

    def prepared(self, run: Run) -> PhaseSteps:
        """Nothing is waited for."""
        yield from ()

    checked = before_training = after_training = prepared

    def goal_reached(self, run: Run) -> bool:
        """At the last step alone."""
        return False

    # --- what a run reports --------------------------------------------------------------------------------------

    def make_update_log(self, config: RunConfig, log: RunLog) -> Updates:
        """Without an engine."""
        return Updates(log, True, success_threshold=min(success_thresholds(config).values()), offline=True)

    def failures(self, run: Run) -> tuple[int, str]:
        """None: nothing is generated."""
        return 0, ""

    def status(self, run: Run) -> dict[str, Any]:
        """Where the rollouts are."""
        return {"from_rollouts": str(self._source)}


@final
class OfflineReplay(ThreadedComponent):
    """The batches of stored rollouts, in the learner's thread.

    Args:
        ctx: Its identity, events and callers.
        settings: The run, with its config, directory and lineage.
        stored: What is trained on.
        log: Is told what there is, and of damaged files.

    Raises:
        ConfigError: the store's place cannot be used.
    """

    def __init__(self, ctx: ComponentContext, settings: Settings, stored: StoredRollouts, log: RunLog) -> None:
        super().__init__(ctx, settings)
        config, directory = settings.config, settings.directory
        self._store = RolloutStore(directory, config.replay.store, on_damage=log.damage)
        with config_error_for("replay.store.url", config.replay.store.url or directory.path):
            self._store.open_ledger(settings.lineage)
        groups, estimator = config.replay.groups_per_batch, config.learner.loss.estimator()
        self.batches = StoredBatches(stored, groups, estimator, self._store, config.seed, settings.lineage)
        self.batches.when_there_is_room = partial(
            when_there_is_room, limit_s=config.replay.store.full_disk_s, wait=self._wait_for_room
        )
        if config.learner.kl.reference is not None:
            self.batches.complete = ReferenceScores(config, ctx.caller("learner-0")).complete
            self.batches.known_ahead = False
        log.event(
            "stored_rollouts",
            source=str(stored.source),
            groups=len(stored.groups),
            rollouts=stored.rollouts,
            left_out=dict(stored.left_out),
            epochs=config.steps / self.batches.updates_per_epoch,
        )

    def admit(self) -> None:
        """The learner trains."""
        self.doing = "serving"

    def finish(self) -> None:
        """Gives no batch any more."""
        self.batches.stop()

    @override
    def stop(self, timeout_s: float) -> None:
        self.finish()
        super().stop(timeout_s)
        self._store.close()

    def _wait_for_room(self, seconds: float, why: str) -> None:
        self.ctx.event("disk_full", reason=why)
        if self.stopping.wait(seconds):
            raise Stopped(why)

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        facts = self._facts(ledger=self.batches.ledger())
        return ComponentStatus(self.state, self.doing, None, metrics=self.batches.metrics(), facts=facts)
