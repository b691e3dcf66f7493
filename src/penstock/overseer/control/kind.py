"""A run of a control policy: its components, and the phases around its training.

load → evaluate untrained → train → evaluate trained. Rollout workers start their simulators with the run, roll out
while the learner trains, and are drained when it has reached its last step; where the run goes back after that, there
are as many again. A resumed run keeps the policy of its checkpoint, so a network or simulators that it was not trained
with are refused before anything is started.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from penstock.fleet.space_check import same_form
from penstock.learner import Checkpoint, ControlLearner, load_checkpoint
from penstock.model.control import read_control_form
from penstock.overseer.component import Settings
from penstock.overseer.control.evaluator import make_fleet_evaluator, metrics_of
from penstock.overseer.control.policies import make_policy
from penstock.overseer.control.replay import make_fleet_replay
from penstock.overseer.control.rollout import make_fleet_rollout
from penstock.overseer.control.simulators import probe_spaces, require_films
from penstock.overseer.control.updates import FleetUpdates
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.fleet_conductor import FleetConductor
from penstock.overseer.kind import Factories, LearnerTasks, RunStart, make_spec
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.metrics import ClusterSnapshot, IdleShares
from penstock.overseer.results import Results
from penstock.overseer.resume import check_kept
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervision import ThreadGroup
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.messages import ComponentMessage
from penstock.overseer.supervisor.scaling import SpecMaker
from penstock.overseer.terminal import CONTROL_LABELS, Progress
from penstock.overseer.trainer import LearnerComponent
from penstock.rundir import RunDirectory
from penstock.types import ConfigError, Spaces

if TYPE_CHECKING:
    from penstock.overseer.run import PhaseSteps, Run


def check_resume(config: FleetRunConfig, spaces: Spaces, checkpoint: Path) -> None:
    """Compares what a run is to go on with and what its checkpoint was trained with.

    Args:
        config: The run's, with the changes that were asked for.
        spaces: Of its simulators.
        checkpoint: Its folder.

    Raises:
        ConfigError: they do not fit; the message names every field with both values, and the remedy.
        CheckpointError: the checkpoint holds no control policy.
    """
    trained, trained_spaces = read_control_form(checkpoint / "model")
    ours, theirs = config.model.model_dump(mode="json"), trained.model_dump(mode="json")
    check_kept(ours, theirs, checkpoint, lambda name: f"model.{name}")
    if not same_form(spaces, trained_spaces):
        raise ConfigError(
            f"fleet.tasks: {checkpoint} holds a policy for other observations or actions than these simulators have: "
            "resume with the tasks that it was trained on"
        )


ACCELERATED = ("learner",)


@final
class ControlKind:
    """Implements `penstock.overseer.kind.PolicyKind`.

    Args:
        spaces: What the policy sees and does.
        factories: By role, of components other than the usual ones.

    Attributes:
        spaces: As given.
    """

    def __init__(self, spaces: Spaces, factories: Factories | None = None) -> None:
        self.spaces = spaces
        self._factories = {**FACTORIES, **(factories or {})}
        self._workers: int | None = None  # when they were drained
        self._updates: ReportedUpdates | None = None

    @classmethod
    def of(cls, config: FleetRunConfig) -> Self:
        """With the spaces of the run's simulators, one of each is started to look at.

        Raises:
            ConfigError: one cannot be made, or packages for films are missing.
        """
        require_films(config)
        return cls(probe_spaces(config))

    # --- before anything is started ------------------------------------------------------------------------------

    def progress(self, config: FleetRunConfig, recipe: str) -> Progress:
        """Of steps and tasks."""
        title, budget = f"penstock · {recipe}", config.replay.max_staleness
        return Progress(title, config.steps, budget, wording=CONTROL_LABELS)

    def check(self, config: FleetRunConfig) -> None:
        """The network fits the spaces."""
        make_policy(config, self.spaces)

    def begin(self, config: FleetRunConfig) -> RunStart:
        """A network for the spaces."""
        return RunStart(make_policy(config, self.spaces), self.spaces)

    def resume(self, config: FleetRunConfig, lineage: int, checkpoint: Path) -> RunStart:
        """The checkpoint's network."""
        self.check_resume(config, checkpoint)
        loaded = load_checkpoint(checkpoint)
        return RunStart(loaded.policy, self.spaces, lineage, loaded)

    def check_resume(self, config: FleetRunConfig, checkpoint: Path) -> None:
        """Network and spaces."""
        check_resume(config, self.spaces, checkpoint)

    def hosts(self, config: FleetRunConfig) -> Mapping[str, str]:
        """The learner's weights."""
        return {"weights.host": config.weights.host} if config.weights.transport == "arrow_flight" else {}

    def make_local_run(
        self, config: FleetRunConfig, directory: RunDirectory, crew: ThreadGroup, log: RunLog, start: RunStart
    ) -> FleetConductor:
        """Learner and rollout workers are threads; simulators are processes."""
        return FleetConductor(config, directory, crew, log, start)

    # --- components ----------------------------------------------------------------------------------------------

    def components(self, settings: Settings[FleetRunConfig], states: Mapping[str, Any] | None) -> list[ComponentSpec]:
        """Replay, learner, rollout workers, evaluator."""
        state = None if states is None else states["evaluator"]
        return [
            *(self._spec(settings, role, 0) for role in ("replay", "learner")),
            *(self._spec(settings, "rollout", index) for index in range(settings.config.fleet.workers)),
            self._spec(settings, "evaluator", 0, state=state),
        ]

    def scalable(self, settings: Settings[FleetRunConfig]) -> list[tuple[str, SpecMaker, int]]:
        """Workers, each with simulators of its own."""
        return [("rollout", lambda index: self._spec(settings, "rollout", index), 1)]

    def _spec(self, settings: Settings[FleetRunConfig], role: str, index: int, **more: Any) -> ComponentSpec:
        more = {"spaces": self.spaces.to_values(), **more}
        return make_spec(settings, self._factories, role, index, accelerated=ACCELERATED, **more)

    # --- the learner ---------------------------------------------------------------------------------------------

    def make_learner(self, settings: Settings[FleetRunConfig], checkpoint: Checkpoint | None) -> ControlLearner:
        """A `ControlLearner` of a network."""
        config = settings.config
        policy = make_policy(config, self.spaces) if checkpoint is None else checkpoint.policy
        learner = ControlLearner(policy, config.learner, config.steps, config.seed)
        if checkpoint is not None:
            learner.restore_arrays(checkpoint.learner_arrays)
        return learner

    def compile_learner(self, learner: ControlLearner, config: FleetRunConfig) -> None:
        """The update of a batch of fragments."""
        learner.compile(config.replay.fragments_per_batch, config.fleet.fragment_length)

    def arrays(self, learner: ControlLearner) -> Mapping[str, Any]:
        """The network's."""
        return learner.named_arrays()

    def codec(self, settings: Settings[FleetRunConfig]) -> None:
        """None: the policy knows its spaces."""

    def learner_tasks(self, ctx: ComponentContext, component: LearnerComponent) -> LearnerTasks:
        """None."""
        return LearnerTasks({})

    # --- phases --------------------------------------------------------------------------------------------------

    def prepared(self, run: "Run") -> "PhaseSteps":
        """As many workers as before, where the run went back after they were drained."""
        if not run.supervisor.names("rollout"):
            run.supervisor.scale("rollout", self._workers or run.config.fleet.workers)
        yield

    def before_training(self, run: "Run") -> "PhaseSteps":
        """The evaluation of the untrained policy, where it is wanted."""
        if run.config.evaluation.before:
            run.phase("evaluating the untrained policy")
            run.results["untrained"] = run.results["before"] = yield from run.evaluate("untrained")

    def checked(self, run: "Run") -> "PhaseSteps":
        """Nothing."""
        yield from ()

    def after_training(self, run: "Run") -> "PhaseSteps":
        """Nobody acts any more, so that the account of steps closes."""
        yield from run.tasks.call("learner-0", "publish_last")
        names = run.supervisor.names("rollout")
        self._workers = len(names) or self._workers
        for name in names:
            run.supervisor.drain(name, "the training is over")
        yield from run.until_stopped(run.tasks.until(lambda: self._all_are_drained(run)))

    def _all_are_drained(self, run: "Run") -> bool | None:
        return None if any(name.startswith("rollout-") for name in run.supervisor.describe()) else True

    def goal_reached(self, run: "Run") -> bool:
        """Never: tasks do not graduate."""
        return False

    # --- what a run reports --------------------------------------------------------------------------------------

    def make_update_log(self, config: FleetRunConfig, log: RunLog) -> "ReportedUpdates":
        """Names the bottleneck by the fleet's pace."""
        self._updates = ReportedUpdates(log, config.fleet.tasks)
        return self._updates

    def metrics_of(self, results: Results) -> dict[str, float]:
        """As ``eval/<task>/…``."""
        return metrics_of(results)

    def units_per_s(self, run: "Run") -> float | None:
        """Simulator steps."""
        return None if self._updates is None else self._updates.steps_per_s

    def on_event(self, run: "Run", message: ComponentMessage) -> None:
        """Counts failures of simulators."""
        run.log.simulators_event(message.name, message.fields)

    def failures(self, run: "Run") -> tuple[int, str]:
        """Of simulators; they are restarted or given up, and no group fails."""
        return run.log.failures, run.log.last_failure

    def status(self, run: "Run") -> dict[str, Any]:
        """Steps by what became of them, and failed simulators."""
        failed, last_failure = self.failures(run)
        return {
            "account": run.seen.facts("replay-0").get("account", {}),
            "simulators": {"failed": failed, "last_failure": last_failure},
        }


class ReportedUpdates(FleetUpdates):
    """Updates whose other numbers come from the components' last reports."""

    def __init__(self, log: RunLog, tasks: Collection[str]) -> None:
        super().__init__(log, tasks)
        self._idle = IdleShares()

    def add(
        self, step: int, metrics: Mapping[str, float], look: ClusterSnapshot, overseer: Mapping[str, float]
    ) -> None:
        """One update, with the numbers of the components' last reports."""
        self._idle.look(look.reports.values())
        idle = {**self._idle.of_roles, **self._idle.of_components}
        shares = {f"time/idle/{name}": share for name, share in idle.items()}
        self.note(step, {**look.numbers(), **shares, **overseer, **metrics})


def make_learner(ctx: ComponentContext, settings: Mapping[str, Any]) -> LearnerComponent:
    """Factory of the learner; `settings` has the ``spaces``, too."""
    kind = ControlKind(Spaces.from_values(settings["spaces"]))
    return LearnerComponent(ctx, Settings.of(settings, FleetRunConfig), kind)


FACTORIES: Factories = {
    "learner": make_learner,
    "replay": make_fleet_replay,
    "rollout": make_fleet_rollout,
    "evaluator": make_fleet_evaluator,
}
