"""What differs between a run of a language policy and one of a control policy, behind one protocol.

`penstock.overseer.language.kind.LanguageKind` and `penstock.overseer.control.kind.ControlKind` implement it; nothing
else in a run asks which of them it has.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.overseer.component import Settings
from penstock.overseer.config import RoleConfig
from penstock.overseer.launch.launcher import ComponentContext, Factory
from penstock.overseer.metrics import ClusterSnapshot
from penstock.overseer.progress import Progress
from penstock.overseer.results import Results
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.messages import Membership
from penstock.overseer.supervisor.scaling import SpecMaker
from penstock.overseer.training_loop import UpdatingLearner
from penstock.types import ConfigError, TrainingBatch

if TYPE_CHECKING:
    from penstock.learner import Checkpoint
    from penstock.model.programs import LazyPrograms, Programs
    from penstock.overseer.assembly import LocalBatches
    from penstock.overseer.run import PhaseSteps, Run
    from penstock.overseer.tasks import LocalComponent
    from penstock.overseer.trainer import LearnerComponent
    from penstock.replay import StoredBatches
    from penstock.weights import InProcessBroadcaster

Factories = Mapping[str, Factory]
ESSENTIAL = ("learner", "replay")
"""Their loss takes the run back to its newest checkpoint."""
ESSENTIAL_NAMES = tuple(f"{role}-0" for role in ESSENTIAL)
REWOUND = (*ESSENTIAL_NAMES, "evaluator-0")
"""Components that start anew, from the checkpoint, where the run goes back to one."""


class UpdateLog(Protocol):
    """Writes one line of metrics per update."""

    def begin_phase(self) -> None:
        """The run came to another phase: what was generated before is none of its pace."""
        ...

    def pace(self, look: ClusterSnapshot) -> float | None:
        """Tokens, or steps of simulators, per second, lately, given the last reports; None: not known yet."""
        ...

    def add(
        self, step: int, metrics: Mapping[str, float], look: ClusterSnapshot, overseer: Mapping[str, float]
    ) -> Mapping[str, float]:
        """One update: the version reached, the learner's numbers, the components' last reports, the overseer's own.

        Returns:
            The line of metrics.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a learner, and every component that shares its process, begins with.

    Attributes:
        policy: As initialised, as loaded, or the checkpoint's.
        codec: The tokenizer of a language policy; a control policy knows its spaces itself.
        checkpoint: Where it resumes from; None for a new run.
        begun: Programs of its learner, and of an engine in its process, that are being compiled already.
    """

    policy: Any
    codec: Any = None
    checkpoint: "Checkpoint | None" = None
    begun: "LazyPrograms | None" = None


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the components of a run in one process have by reference, from its start to its end.

    Not the policy that it begins with: that lives until the first update replaces it.

    Attributes:
        weights: Where the learner publishes, and everybody else fetches.
        batches: The learner's side of replay.
        manager: The `penstock.rollout.RolloutManager` of a language policy, which generates in this process.
    """

    weights: "InProcessBroadcaster"
    batches: "LocalBatches | StoredBatches"
    manager: Any = None


@dataclass(frozen=True, slots=True)
class LearnerTasks:
    """What a learner's process does beside training.

    Attributes:
        methods: By name, what the run may ask for.
        on_view: Given each new view.
        on_stop: Called when the component ends.
        before_update: Given the batch of each update.
        after_update: Called after it, before the new version is offered; gives metrics.
        digests: Given the arrays of a version that is about to be offered; gives what replay is told of them, by which
            it knows what engines serve. Nothing where nobody asks.
    """

    methods: Mapping[str, Callable[..., Any]]
    on_view: Callable[[Membership], object] = lambda view: None
    on_stop: Callable[[], object] = lambda: None
    before_update: Callable[[TrainingBatch[Any]], object] = lambda batch: None
    after_update: Callable[[], Mapping[str, float]] = dict[str, float]
    digests: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda arrays: {}


class PolicyKind(Protocol):
    """One kind of policy, in one run."""

    @property
    def evaluates(self) -> bool:
        """Whether there is what an evaluation needs."""
        ...

    # --- before anything is started ------------------------------------------------------------------------------

    def progress(self, config: Any, recipe: str) -> Progress:
        """What the view shows of a run by that name."""
        ...

    def check(self, config: Any) -> None:
        """Tries all that bad input can break, before a file is written.

        Raises:
            ConfigError: naming the field, its value and the remedy.
        """
        ...

    def begin(self, config: Any) -> RunStart:
        """Makes the policy that a new run begins with.

        Raises:
            ConfigError: it cannot be made.
        """
        ...

    def resume(self, config: Any, checkpoint: Path) -> RunStart:
        """What a run goes on with.

        Raises:
            ConfigError: another policy is asked for than the checkpoint's.
            CheckpointError: the checkpoint holds a policy of another kind, or cannot be read.
        """
        ...

    def check_resume(self, config: Any, checkpoint: Path) -> None:
        """Compares the policy that is asked for with the checkpoint's, which a resumed run keeps.

        Raises:
            ConfigError: they differ.
            CheckpointError: the checkpoint holds a policy of another kind.
        """
        ...

    # --- components ----------------------------------------------------------------------------------------------

    def components(self, settings: Settings[Any], states: Mapping[str, Any] | None) -> list[ComponentSpec]:
        """All of them, those first that others wait for; `states` are the checkpoint's."""
        ...

    def local_components(
        self,
        settings: Settings[Any],
        start: RunStart,
        context: Callable[[str], ComponentContext],
        log: RunLog,
    ) -> Mapping[str, "LocalComponent"]:
        """All of a run in this process, by name, in the order in which they are ended; `context` is by name, too."""
        ...

    def scalable(self, settings: Settings[Any]) -> list[tuple[str, SpecMaker, int]]:
        """Roles whose number may change: what makes one by its index, and how few there may be."""
        ...

    # --- the learner ---------------------------------------------------------------------------------------------

    def make_learner(self, config: Any, start: RunStart) -> UpdatingLearner:
        """Anew, or as the checkpoint has it."""
        ...

    def scoring_programs(self, learner: Any) -> "Programs":
        """What is asked of the learner before it trains."""
        ...

    def update_programs(self, learner: Any, config: Any) -> "Programs":
        """What training needs compiled."""
        ...

    def learner_tasks(self, ctx: ComponentContext, component: "LearnerComponent") -> LearnerTasks:
        """What the learner's process does beside training."""
        ...

    # --- phases of a run -----------------------------------------------------------------------------------------

    def prepared(self, run: "Run") -> "PhaseSteps":
        """What comes after the learner runs and before everything else, in each life of the run."""
        ...

    def checked(self, run: "Run") -> "PhaseSteps":
        """What is checked before anything is paid for, evaluations included, in each life of the run."""
        ...

    def before_training(self, run: "Run") -> "PhaseSteps":
        """Evaluations of a run that begins."""
        ...

    def after_training(self, run: "Run") -> "PhaseSteps":
        """What ends with the training, before the last evaluation."""
        ...

    def goal_reached(self, run: "Run") -> bool:
        """Whether training may end before its last step."""
        ...

    # --- what a run reports --------------------------------------------------------------------------------------

    def make_update_log(self, config: Any, log: RunLog) -> UpdateLog:
        """Writes the run's updates."""
        ...

    def metrics_of(self, results: Results) -> dict[str, float]:
        """Results of an evaluation as metrics."""
        ...

    def failures(self, run: "Run") -> tuple[int, str]:
        """How much of the experience failed in this life of the run, and what the last failure said."""
        ...

    def status(self, run: "Run") -> dict[str, Any]:
        """For status.json, beside what every run has."""
        ...


def processor_environment(resources: RoleConfig) -> dict[str, str]:
    """Environment of a process that takes no accelerator's memory, and shares its machine's processors with others.

    XLA computes with as many threads as CPUs are reserved, at least one: by default it has one for each processor, and
    to hand a small policy's decision around takes longer than the decision.
    """
    return {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": str(max(1, math.ceil(resources.num_cpus)))}


def make_spec(
    settings: Settings[Any],
    factories: Factories,
    role: str,
    index: int,
    *,
    accelerated: Collection[str],
    peer_group: str = "",
    **more: Any,
) -> ComponentSpec:
    """A component of a role.

    Args:
        settings: The run, with its config, directory and lineage.
        factories: By role.
        role: Its own.
        index: Which of the role's components.
        accelerated: Roles that may take an accelerator; others see none unless their ``env`` says so.
        peer_group: See `ComponentSpec`.
        more: Further settings, as plain values.
    """
    resources = settings.config.roles.get(role, RoleConfig())
    if role not in accelerated:
        resources = resources.model_copy(update={"env": {**processor_environment(resources), **resources.env}})
    values = {**settings.dump(), **more}
    return ComponentSpec(role, index, factories[role], values, resources, role in ESSENTIAL, peer_group)


VALUES = "give these values"


def check_kept(
    asked: Mapping[str, Any],
    trained: Mapping[str, Any],
    checkpoint: Path,
    key: Callable[[str], str],
    remedy: str = VALUES,
) -> None:
    """Refuses values that are not those of the checkpoint.

    Args:
        asked: By name, as JSON values.
        trained: The checkpoint's, by name.
        checkpoint: Named in the error.
        key: A name's place in the configuration.
        remedy: What to do, but for beginning a new run.

    Raises:
        ConfigError: naming every value that differs, both of it, and the remedy.
    """
    others = [name for name in asked if asked[name] != trained[name]]
    if not others:
        return
    differences = ", ".join(f"{key(name)} is {json.dumps(asked[name])}" for name in others)
    values = " ".join(f"{key(name)}={_as_word(trained[name])}" for name in others)
    raise ConfigError(
        f"{differences}, but {checkpoint} was trained with {values}: a resumed run keeps its model; {remedy}, or "
        "begin a new run"
    )


def _as_word(value: object) -> str:
    """As an override is written on the command line; JSON is YAML."""
    return json.dumps(value, separators=(",", ":"))
