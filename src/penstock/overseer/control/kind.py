"""A run of a control policy: its components, and the phases around its training.

load → evaluate untrained → train → evaluate trained. Rollout workers start their simulators with the run, roll out
while the learner trains, and are drained when it has reached its last step; where the run goes back after that, there
are as many again. A resumed run keeps the policy of its checkpoint, so a network or simulators that it was not trained
with are refused before anything is started.

How fast the fleet goes, and what sets its pace: rollout workers in processes of their own report their counters now and
then, and updates may come far more often. Rates are therefore over the last seconds and not over an update, and from
one report to another. The learner is the goal of all others: while it is busy it sets the pace itself. While it waits,
inference does where it is busy; otherwise the simulators do.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, final

from penstock.learner import ControlLearner, load_checkpoint
from penstock.model.control import read_control_form
from penstock.model.control.config import ControlModelConfig
from penstock.model.programs import Programs
from penstock.overseer.component import Settings
from penstock.overseer.control.evaluator import make_fleet_evaluator, metrics_of
from penstock.overseer.control.local import local_components
from penstock.overseer.control.policies import make_policy
from penstock.overseer.control.replay import make_fleet_replay
from penstock.overseer.control.rollout import make_fleet_rollout
from penstock.overseer.control.simulators import probe_spaces, require_films
from penstock.overseer.control_config import FleetRunConfig
from penstock.overseer.kind import Factories, LearnerTasks, RunStart, check_kept, make_spec
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.metrics import BUSY, BUSY_SUPPLIER, Bottleneck, ClusterSnapshot, IdleShares, seconds_of
from penstock.overseer.progress import CONTROL_LABELS, Progress
from penstock.overseer.results import Results
from penstock.overseer.run import PhaseSteps, Run
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.scaling import SpecMaker
from penstock.overseer.tasks import LocalComponent
from penstock.overseer.trainer import LearnerComponent
from penstock.types import ConfigError, Spaces, Stopped

COUNTERS = ("fleet/steps_total", "fleet/blocked_s")
"""What only grows, but where the replay buffer of many processes is begun anew, and counts from there."""


FAR = 10.0
"""Bounds of so many standard deviations, or a fraction of one, are told to the user."""
LARGE_RETURN = 1e4
"""Scaled returns beyond this are, too."""
LARGE_SHARED_RETURN = 30.0
"""The same where values may share layers with the actions, whose part of the loss they then drown."""

WINDOW_S = 5.0
"""Rates are over so long, or over the time between the last two tellings where that is longer."""


class ThroughputTrend:
    """Compares updates with those before.

    Args:
        clock: Monotonic seconds.

    Attributes:
        bottleneck: Of the last update.
        steps_per_s: Of all simulators, lately; None where it is not known yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = {name: _Rate() for name in COUNTERS}
        self.bottleneck = Bottleneck()
        self.steps_per_s: float | None = None

    def note(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Takes an update in.

        Args:
            metrics: Its own, with its times, and the fleet's.

        Returns:
            ``fleet/steps_per_s``, where it is known; ``time/idle/<role>``: shares between 0 and 1, the learner's of
            the update, inference's lately. Empty where the update took no time.
        """
        waited_s, whole_s = seconds_of(metrics)
        now_s = self._clock()
        rates = {name: rate.note(metrics.get(name, 0.0), now_s, whole_s) for name, rate in self._rates.items()}
        if whole_s <= 0:
            return {}
        self.steps_per_s = rates["fleet/steps_total"]
        batches_per_s = (self.steps_per_s or 0.0) / max(metrics.get("fleet/batch_slots_mean", 1.0), 1.0)
        workers = max(metrics.get("fleet/workers", 1.0), 1.0)
        inference = min(1.0, batches_per_s * metrics.get("fleet/inference_p50_s", 0.0) / workers)
        idle = waited_s / whole_s
        self.bottleneck = find_bottleneck(idle, inference, metrics.get("fleet/step_p50_s", 0.0))
        known = {} if self.steps_per_s is None else {"fleet/steps_per_s": self.steps_per_s}
        return known | {
            "time/idle/learner": idle,
            "time/idle/inference": 1.0 - inference,
            "fleet/blocked_fraction": min(1.0, (rates["fleet/blocked_s"] or 0.0) / workers),
        }


class _Rate:
    """Of a counter that is told of now and then."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, float]] = deque()  # when, and how much: each time that it had grown
        self._rate: float | None = None

    def note(self, total: float, now_s: float, since_s: float) -> float | None:
        """Takes a value of the counter in, that may have been told before.

        Args:
            total: The counter, as it was told last.
            now_s: On a monotonic clock.
            since_s: So long ago it was zero, where this is the first value.

        Returns:
            Its growth per second: between the oldest telling of the window and the newest. Where nothing was told for
            a whole window, until now. None: it has not grown yet.
        """
        told = self._told
        if not told:
            told.append((now_s - since_s, 0.0))
        if total < told[-1][1]:  # it begins anew; what it was is the best guess for a moment
            told.clear()
            told.append((now_s, total))
        elif total > told[-1][1]:
            told.append((now_s, total))
        while len(told) > 2 and told[1][0] <= now_s - WINDOW_S:
            told.popleft()
        (first_s, first), (last_s, last) = told[0], told[-1]
        until_s = last_s if now_s - last_s <= WINDOW_S else now_s
        if until_s > first_s and (len(told) > 1 or self._rate is not None):
            self._rate = (last - first) / (until_s - first_s)
        return self._rate


def find_bottleneck(learner_idle: float, inference_busy: float, step_s: float) -> Bottleneck:
    """Which part sets the pace, and what helps.

    Args:
        learner_idle: Share of an update in which the learner waited.
        inference_busy: Share of it in which a worker's policy decided.
        step_s: Median seconds that a process takes for its simulators' step.
    """
    if learner_idle < BUSY:
        words = (
            f"learner busy {1 - learner_idle:.0%}: it sets the pace: train fewer epochs (learner.epochs), a smaller "
            "network, or on a faster device"
        )
        return Bottleneck("learner", words)
    if inference_busy > 1 - BUSY_SUPPLIER:
        words = (
            f"learner idle {learner_idle:.0%}: inference is busy {inference_busy:.0%}: raise fleet.batch_size, or "
            "shrink the network (model)"
        )
        return Bottleneck("inference", words)
    words = (
        f"learner idle {learner_idle:.0%}: simulators set the pace, {1000 * step_s:.3g} ms for a process's step: more "
        "of them (fleet.envs_per_worker) or more cores"
    )
    return Bottleneck("simulators", words)


class FleetUpdates:
    """Writes one line per update.

    Args:
        log: The run's single writer.
        tasks: Of the fleet.
        local: Whether all runs in one process, whose components have no idle times of their own.
    """

    def __init__(self, log: RunLog, tasks: Collection[str], local: bool = False) -> None:
        self._idle = None if local else IdleShares()
        self._log = log
        self._tasks = tasks
        self._pace = ThroughputTrend()

    def begin_phase(self) -> None:
        """Simulators go on."""

    def pace(self, look: ClusterSnapshot) -> float | None:
        """Simulator steps, as of the last update."""
        return self._pace.steps_per_s

    def add(
        self, step: int, metrics: Mapping[str, float], look: ClusterSnapshot, overseer: Mapping[str, float]
    ) -> Mapping[str, float]:
        """One update.

        Args:
            step: The version reached.
            metrics: The learner's.
            look: The others, as they were last seen.
            overseer: The overseer's own numbers.

        Returns:
            The line of metrics.
        """
        values = {**look.numbers(), **self._idle_shares(look), **overseer, **metrics}
        values |= self._pace.note(values)
        self._log.step = step
        self._log.bottleneck(self._pace.bottleneck.part, self._pace.bottleneck.words)
        self._log.metrics(step, values)
        rewards = {task: values[name] for task in self._tasks if (name := f"fleet/{task}/reward_mean") in values}
        progress = self._log.progress
        progress.reward = rewards
        progress.units_per_s = self._pace.steps_per_s
        score = sum(rewards.values()) / len(rewards) if rewards else None
        progress.note_update(step, score, values.get("train/step_staleness_mean", 0.0), values)
        return values

    def _idle_shares(self, look: ClusterSnapshot) -> dict[str, float]:
        if self._idle is None:
            return {}
        self._idle.look(look.reports.values())
        return {f"time/idle/{name}": s for name, s in {**self._idle.of_roles, **self._idle.of_components}.items()}


ACCELERATED = ("learner",)


def actions_out_of_reach(spaces: Spaces, std: float) -> list[str]:
    """Of each `Box` of actions, why a policy that begins with N(0, std²), clipped to it, learns little; mostly none."""
    found = []
    for leaf in spaces.actions:
        if leaf.kind != "box" or leaf.low is None or leaf.high is None:
            continue
        half = (leaf.high - leaf.low) / 2
        if half > FAR * std or half < std / FAR or not leaf.low - std < 0 < leaf.high + std:
            name = f" {leaf.name}" if leaf.name else ""
            found.append(
                f"action{name} lies in [{leaf.low:g}, {leaf.high:g}], and a policy begins with N(0, {std:.3g}²), "
                "clipped to that: make the simulator with gymnasium.wrappers.RescaleAction(env, -1, 1)"
            )
    return found


def large_returns(results: Results, reward_scale: float | Literal["auto"], model: ControlModelConfig) -> list[str]:
    """Of each task whose returns drown the policy's loss in that of the values, what to set."""
    if reward_scale == "auto":
        return []
    shared = model.value_network == "shared"
    apart = ", or model.value_network=separate" if shared and model.module is None and model.memory == "none" else ""
    found = []
    for task, stats in results.items():
        scaled = abs(stats.reward_mean) * reward_scale
        told = f"task {task}: the untrained policy's return is {stats.reward_mean:.3g}; "
        if scaled > LARGE_RETURN:
            fits = reward_scale * 10.0 ** -math.floor(math.log10(scaled) - 1)
            found.append(
                f"{told}returns of some ones or tens are learned from best: set learner.reward_scale=auto, or {fits:g}"
            )
        elif shared and scaled > LARGE_SHARED_RETURN:
            found.append(
                f"{told}where values share layers with the actions, such returns leave these little to learn from: set "
                f"learner.reward_scale=auto{apart}"
            )
    return found


@final
class ControlKind:
    """Implements `penstock.overseer.kind.PolicyKind`.

    Args:
        spaces: What the policy sees and does.

    Attributes:
        spaces: As given.
    """

    evaluates = True

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self._workers: int | None = None  # when they were drained

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
        """As `begin`."""
        self.begin(config)

    def begin(self, config: FleetRunConfig) -> RunStart:
        """A network for the spaces, which has what the learner's keys name."""
        start = RunStart(make_policy(config, self.spaces))
        self.make_learner(config, start)
        return start

    def resume(self, config: FleetRunConfig, checkpoint: Path) -> RunStart:
        """The checkpoint's network."""
        self.check_resume(config, checkpoint)
        loaded = load_checkpoint(checkpoint, module=config.model.module, kwargs=config.model.kwargs)
        return RunStart(loaded.policy, None, loaded)

    def check_resume(self, config: FleetRunConfig, checkpoint: Path) -> None:
        """Compares what a run is to go on with and what its checkpoint was trained with: network and spaces.

        Raises:
            ConfigError: they do not fit; the message names every field with both values, and the remedy.
            CheckpointError: the checkpoint holds no control policy.
        """
        trained, trained_spaces = read_control_form(checkpoint / "model")
        if config.model.module and trained.module:
            trained = trained.moved(config.model.module, config.model.kwargs)
        ours, theirs = config.model.model_dump(mode="json"), trained.model_dump(mode="json")
        check_kept(ours, theirs, checkpoint, lambda name: f"model.{name}")
        if not self.spaces.same_form(trained_spaces):
            raise ConfigError(
                f"fleet.tasks: {checkpoint} holds a policy for other observations or actions than these simulators "
                f"have ({self.spaces.differences(trained_spaces)}): resume with the tasks that it was trained on"
            )

    # --- components ----------------------------------------------------------------------------------------------

    def components(self, settings: Settings[FleetRunConfig], states: Mapping[str, Any] | None) -> list[ComponentSpec]:
        """Replay, learner, rollout workers, evaluator."""
        state = None if states is None else states["evaluator"]
        return [
            *(self._spec(settings, role, 0) for role in ("replay", "learner")),
            *(self._spec(settings, "rollout", index) for index in range(settings.config.fleet.workers)),
            self._spec(settings, "evaluator", 0, state=state),
        ]

    def local_components(
        self,
        settings: Settings[FleetRunConfig],
        start: RunStart,
        context: Callable[[str], ComponentContext],
        log: RunLog,
    ) -> dict[str, LocalComponent]:
        """One learner, and a fleet whose workers are threads; simulators are processes."""
        return local_components(self, settings, start, context)

    def scalable(self, settings: Settings[FleetRunConfig]) -> list[tuple[str, SpecMaker, int]]:
        """Workers, each with simulators of its own."""
        return [("rollout", lambda index: self._spec(settings, "rollout", index), 1)]

    def _spec(self, settings: Settings[FleetRunConfig], role: str, index: int, **more: Any) -> ComponentSpec:
        more = {"spaces": self.spaces.to_values(), **more}
        return make_spec(settings, FACTORIES, role, index, accelerated=ACCELERATED, **more)

    # --- the learner ---------------------------------------------------------------------------------------------

    def make_learner(self, config: FleetRunConfig, start: RunStart) -> ControlLearner:
        """A `ControlLearner` of a network."""
        learner = ControlLearner(start.policy, config.learner, config.steps, config.seed)
        if start.checkpoint is not None:
            learner.restore_arrays(start.checkpoint.learner_arrays)
        return learner

    def scoring_programs(self, learner: ControlLearner) -> Programs:
        """None."""
        return {}

    def update_programs(self, learner: ControlLearner, config: FleetRunConfig) -> Programs:
        """The update of a batch of fragments."""
        return learner.programs(config.replay.fragments_per_batch, config.fleet.fragment_length)

    def learner_tasks(self, ctx: ComponentContext, component: LearnerComponent) -> LearnerTasks:
        """None."""
        return LearnerTasks({})

    # --- phases --------------------------------------------------------------------------------------------------

    def prepared(self, run: Run) -> PhaseSteps:
        """As many workers as before, where the run went back after they were drained."""
        if not run.tasks.names("rollout"):
            run.tasks.scale("rollout", self._workers or run.config.fleet.workers)
        yield

    def before_training(self, run: Run) -> PhaseSteps:
        """The evaluation of the untrained policy, where it is wanted; says what a network can hardly learn from."""
        for words in actions_out_of_reach(self.spaces, math.exp(run.config.model.initial_log_std)):
            run.log.event("badly_scaled", words=words)
        if run.config.evaluation.before:
            run.phase("evaluating the untrained policy")
            run.results["untrained"] = run.results["before"] = yield from run.evaluate("untrained")
            for words in large_returns(run.results["untrained"], run.config.learner.reward_scale, run.config.model):
                run.log.event("badly_scaled", words=words)

    def checked(self, run: Run) -> PhaseSteps:
        """Nothing."""
        yield from ()

    def after_training(self, run: Run) -> PhaseSteps:
        """Nobody acts any more, so that the account of steps closes."""
        yield from run.tasks.call("learner-0", "publish")
        names = run.tasks.names("rollout")
        self._workers = len(names) or self._workers
        for name in names:
            run.tasks.drain(name, "the training is over")
        while run.tasks.any_left("rollout"):
            if run.stopping:
                raise Stopped("waiting for rollout workers")
            yield

    def goal_reached(self, run: Run) -> bool:
        """Never: tasks do not graduate."""
        return False

    # --- what a run reports --------------------------------------------------------------------------------------

    def make_update_log(self, config: FleetRunConfig, log: RunLog) -> FleetUpdates:
        """Names the bottleneck by the fleet's pace."""
        return FleetUpdates(log, config.fleet.tasks, config.runtime == "local")

    def metrics_of(self, results: Results) -> dict[str, float]:
        """As ``eval/<task>/…``."""
        return metrics_of(results)

    def failures(self, run: Run) -> tuple[int, str]:
        """Of simulators; they are restarted or given up, and no group fails."""
        return run.log.failures, run.log.last_failure

    def status(self, run: Run) -> dict[str, Any]:
        """Steps by what became of them, how fast they come, and failed simulators."""
        failed, last_failure = self.failures(run)
        pace = run.log.progress.units_per_s
        return {
            "account": run.seen.facts("replay-0").get("account", {}),
            "simulators": {"failed": failed, "last_failure": last_failure},
            "numbers": {**run.seen.numbers(), **({} if pace is None else {"fleet/steps_per_s": pace})},
        }


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
