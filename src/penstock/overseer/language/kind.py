"""A run of a language policy: its components, and the phases around its training.

load → parity probe → evaluate untrained → warm start, probed again → evaluate before → train → evaluate after.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, final

from penstock.environments import Environment, load_environment
from penstock.inference import InferenceEngine
from penstock.inference.external import key_of
from penstock.inference.server_pool import trusting
from penstock.learner import Learner, load_checkpoint
from penstock.learner.checkpoints import read_state
from penstock.learner.losses import check_own_loss
from penstock.learner.reference import check_reference
from penstock.model.language import Decoder, load_policy
from penstock.model.language.config import ModelConfig, read_shape
from penstock.model.language.decoder import decoder_digests
from penstock.model.language.lora import is_adapter
from penstock.model.programs import LazyPrograms, Programs
from penstock.overseer.assembly import make_batch_makers
from penstock.overseer.component import Settings
from penstock.overseer.config import RunConfig, lesson_of_worker, rollout_workers
from penstock.overseer.estimate import model_shape
from penstock.overseer.kind import VALUES, Factories, LearnerTasks, RunStart, check_kept, make_spec
from penstock.overseer.language.evaluator import make_evaluator, metrics_of
from penstock.overseer.language.given import GivenObjects
from penstock.overseer.language.inference import ExternalInference, InferenceRole, ServingRole
from penstock.overseer.language.local import local_components
from penstock.overseer.language.preparation import Preparation
from penstock.overseer.language.replay import make_curriculum, make_replay, problem_rules
from penstock.overseer.language.rollout import make_rollout
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.metrics import (
    Bottleneck,
    ClusterSnapshot,
    IdleShares,
    Pace,
    SignalWatch,
    find_bottleneck,
    idle_shares,
    success_thresholds,
)
from penstock.overseer.progress import TRUNCATED, Progress
from penstock.overseer.results import Results
from penstock.overseer.run import PhaseSteps, Run, until
from penstock.overseer.run_log import RunLog
from penstock.overseer.supervisor.member import ComponentSpec
from penstock.overseer.supervisor.scaling import SpecMaker
from penstock.overseer.tasks import LocalComponent
from penstock.overseer.trainer import LearnerComponent
from penstock.text import Tokenizer, same_tokenizer, vocabulary_size
from penstock.types import CheckpointError, ConfigError, PenstockError


def _expected_shape(config: RunConfig) -> ModelConfig | None:
    """Of the policy, without what takes time to read; None where something is to be told of it when it is read."""
    policy = config.model
    if config.learner.kl.directory is not None:
        return None
    try:
        if policy.directory is not None:
            return read_shape(str(policy.directory), policy.dtype, policy.base, policy.lora)
        size = vocabulary_size(policy.tokenizer_path)
        return policy.init.model(size, policy.dtype) if policy.init is not None and size else None
    except PenstockError:  # whoever loads it says it better
        return None


def _compiling(model: ModelConfig, config: RunConfig) -> LazyPrograms:
    """A learner's programs, being compiled from the shapes of what it will train; before them its process's engine's.

    These come first because all that precedes the first batch waits for them.
    """
    inference = config.inference
    has_engine = config.runtime == "local" and inference.external is None and config.replay.from_rollouts is None
    of_engine = InferenceEngine.first_programs(model, inference) if has_engine else {}
    learner = Learner(Decoder.of_shapes(model), config.learner, total_steps=1)
    programs = LazyPrograms({**learner.first_programs(), **of_engine, **learner.programs()}, lambda told: None)
    programs.compile()
    return programs


def _base_now(config: RunConfig, checkpoint: Path) -> str | None:
    """Where the base of a checkpoint's adapter lies by the configuration; None: where the adapter names it."""
    return config.model.base_now if is_adapter(checkpoint / "model") else None


_ELSEWHERE = {"other_keys", "base"}
"""Of a shape what may be another when a run is resumed."""


def check_with_model(config: RunConfig, policy: ModelConfig) -> None:
    """Compares what a run names of its model, tokens that end an answer and the reference of a KL, with the policy.

    Raises:
        ConfigError: the model has no such token; or the reference's directory is not there, or its shape or tokenizer
            is another.
    """
    for lesson_id, lesson in config.curriculum.lessons.items():
        stops = lesson.sampling_params.stop_tokens or ()
        beyond = [stop for stop in stops if isinstance(stop, int) and stop >= policy.vocab_size]
        if beyond:
            raise ConfigError(
                f"curriculum.lessons.{lesson_id}.sampling_params.stop_tokens has {beyond[0]}, but the model's tokens "
                f"are 0 to {policy.vocab_size - 1}: give one of these, or the text that is to end an answer"
            )
    directory = config.learner.kl.directory
    if directory is None:
        return
    try:
        found = read_shape(directory, policy.dtype)
    except CheckpointError as error:
        raise ConfigError(
            f"learner.kl.reference is {directory}: {error}; give initial, ema, or the path of a Hugging Face directory"
        ) from error
    check_reference(directory, found, policy)
    if same_tokenizer(config.model.tokenizer_path, directory) is False:
        raise ConfigError(
            f"learner.kl.reference is {directory}: its tokenizer is another than that of "
            f"{config.model.tokenizer_path}; name a model of the policy's own vocabulary"
        )


TOKENS = "inference/tokens_total"
"""What the pace is of."""


class Updates:
    """Writes one line per update, and an event where another part than before sets the pace.

    Args:
        log: The run's single writer.
        synchronous: Whether generation and learner take turns.
        local: Whether all runs in one process.
        success_threshold: The reward from which a rollout counts as a success.
        offline: Whether the rollouts are stored ones, whose age nobody knows.
    """

    def __init__(
        self,
        log: RunLog,
        synchronous: bool = False,
        local: bool = False,
        success_threshold: float = 0.5,
        offline: bool = False,
    ) -> None:
        self._offline = offline
        self._log = log
        self._idle = IdleShares()
        self._synchronous, self._local, self._engine_busy_s = synchronous, local, 0.0
        self._pace = Pace()
        self._signal = SignalWatch(success_threshold)

    def begin_phase(self) -> None:
        """What was generated before is none of its pace."""
        self._pace.begin()

    def pace(self, look: ClusterSnapshot) -> float | None:
        """Tokens of all servers; while the first update waits for its programs there is none."""
        pace, progress = self._pace.note(look.numbers().get(TOKENS, 0.0)), self._log.progress
        if progress.compiling and not len(progress.times):
            self._pace.begin()
            return None
        return pace

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
        rollouts = self._log.take_rollout_metrics()
        found, shares = self._bottleneck_of(metrics, look)
        self._log.step = step
        self._log.bottleneck(found.part, found.words)
        values = {**look.numbers(), **shares, **overseer, **rollouts, **metrics}
        self._log.metrics(step, values)
        progress = self._log.progress
        self._pace.note_update()
        staleness = None if self._offline else values.get("replay/staleness_mean", 0.0)
        progress.note_update(step, values.get("train/reward_mean"), staleness, values)
        truncated = progress.history.get(TRUNCATED)
        self._log.signal(self._signal.note(step, values, None if truncated is None else truncated.last))
        return values

    def _bottleneck_of(
        self, metrics: Mapping[str, float], look: ClusterSnapshot
    ) -> tuple[Bottleneck, dict[str, float]]:
        """Of this update in one process; of the last seconds where components are asked now and then."""
        if self._local:
            before, self._engine_busy_s = self._engine_busy_s, look.reports["inference-0"].condition.busy_s
            return find_bottleneck(idle_shares(metrics, self._engine_busy_s - before), self._synchronous, local=True)
        self._idle.look(look.reports.values())
        found, shares = find_bottleneck(self._idle.of_roles, self._synchronous)
        return found, shares | {f"time/idle/{name}": s for name, s in sorted(self._idle.of_components.items())}


def _check_agents(config: RunConfig, environments: Mapping[str, Environment]) -> None:
    """Whether the endpoint is open where agents need it, and nowhere else."""
    asking = [lesson_id for lesson_id, environment in environments.items() if environment.has_agents]
    if asking and not config.inference.endpoint:
        raise ConfigError(
            f"inference.endpoint is false, but the environment of lesson {asking[0]!r} has agents: set it to true, "
            "which lets programs of this machine ask the policy with the key of their rollout"
        )
    if config.inference.endpoint and not asking:
        raise ConfigError(
            "inference.endpoint is true, but no lesson's environment has agents, so nobody would be given a key: leave "
            "it out, or use penstock.environments.AgentEnvironment"
        )


def _check_best(config: RunConfig, environments: Mapping[str, Environment]) -> None:
    """Whether any evaluation will say which checkpoint is the best."""
    best = config.overseer.keep_best
    if best is None or config.curriculum.eval_frequency:
        return
    if any(environment.reports_apart and f"/{name}/" in best for name, environment in environments.items()):
        raise ConfigError(
            f"overseer.keep_best is {best}, but curriculum.eval_frequency is 0, and before and after training a lesson "
            "answers problems that are kept apart for reports (eval_report/…), by which nothing is chosen: set "
            "curriculum.eval_frequency"
        )


def _check_servers(config: RunConfig) -> None:
    """Whether servers can be started, asked and given weights, as far as files, a folder and a program tell.

    Raises:
        ConfigError: they are not, or cannot be read or written.
    """
    inference, external = config.inference, config.inference.external
    key_of(external, "")
    if inference.tls_ca is not None:
        trusting(inference.tls_ca)
    if external is None or config.runtime != "local":  # other machines have folders and programs of their own
        return
    if external.launch and shutil.which(external.launch[0]) is None:
        raise ConfigError(f"inference.external.launch cannot be started: there is no program {external.launch[0]!r}")
    folder = external.weights_dir
    there = next((each for each in (folder, *folder.parents) if os.path.exists(each)), None) if folder else None
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"inference.external.weights_dir is {folder}, and {there} is no folder that can be written: give another"
        )


ACCELERATED = ("learner", "inference")


@final
class LanguageKind:
    """Implements `penstock.overseer.kind.PolicyKind`.

    Args:
        environments: By lesson; those of a run in one process, and to be closed before one in many.
        factories: By role, of components other than the usual ones.
        objects: What of them was given as Python objects, in words.
    """

    evaluates = True

    def __init__(
        self,
        environments: Mapping[str, Environment] | None = None,
        factories: Factories | None = None,
        objects: Sequence[str] = (),
    ) -> None:
        self._environments = dict(environments or {})
        self._factories = {**FACTORIES, **(factories or {})}
        self._objects = list(objects)

    @classmethod
    def of(cls, config: RunConfig, given: GivenObjects | None = None, factories: Factories | None = None) -> Self:
        """With the environments of the run's lessons, which say what problems there are; given ones are not made again.

        Raises:
            ConfigError: one cannot be made, or has no problems; nor can a batch maker or a loss of one's own be;
                nothing can be trained of what the servers give, or they cannot be started or asked; or no evaluation
                would say which checkpoint is best.
        """
        config.check_trains()
        known = {} if given is None else given.environments
        lessons = config.curriculum.lessons.items()
        made = {name: known[name] if name in known else load_environment(one.environment.spec) for name, one in lessons}
        problem_rules(config, made)  # a mistake here or below is found before anything is written
        make_batch_makers(config, {environment.name for environment in made.values()})
        check_own_loss(config.learner)
        _check_servers(config)
        _check_agents(config, made)
        _check_best(config, made)
        return cls(made, factories, objects=() if given is None else given.words)

    # --- before anything is started ------------------------------------------------------------------------------

    def progress(self, config: RunConfig, recipe: str) -> Progress:
        """Of tokens and lessons."""
        return Progress(f"penstock · {recipe}", config.steps, config.replay.staleness_budget)

    def check(self, config: RunConfig) -> None:
        """The model's shape, the tokenizer, and a prompt of each lesson; weights are loaded by the learner."""
        try:
            shape = model_shape(config.model)
            self._tokenizer(config)
        finally:
            for environment in self._environments.values():
                environment.close()  # every worker makes its own
        check_with_model(config, shape)

    def _tokenizer(self, config: RunConfig) -> Tokenizer:
        """The policy's, which prompts of each lesson were tried with."""
        tokenizer = Tokenizer.load(config.model.tokenizer_path, config.model.chat_template_kwargs)
        for environment in self._environments.values():
            environment.check_prompts(tokenizer, config.inference.max_seq_len)
        return tokenizer

    def begin(self, config: RunConfig) -> RunStart:
        """Decoder and tokenizer; programs of learner and engine are compiled while they are loaded."""
        shape = _expected_shape(config)
        begun = None if shape is None else _compiling(shape, config)
        try:
            tokenizer = self._tokenizer(config)
            policy = load_policy(config.model, config.seed, tokenizer)
            check_with_model(config, policy.config)
        except BaseException:
            if begun is not None:
                begun.drop()
            raise
        return RunStart(policy, tokenizer, begun=begun if policy.config == shape else None)

    def resume(self, config: RunConfig, checkpoint: Path) -> RunStart:
        """The checkpoint's decoder and tokenizer."""
        self.check_resume(config, checkpoint)
        loaded = load_checkpoint(checkpoint, _base_now(config, checkpoint))
        check_with_model(config, loaded.decoder.config)
        tokenizer = Tokenizer.load(checkpoint / "model", config.model.chat_template_kwargs)
        return RunStart(loaded.decoder, tokenizer, loaded)

    def check_resume(self, config: RunConfig, checkpoint: Path) -> None:
        """Compares the language model and tokenizer that are asked for with those of the checkpoint to go on from.

        What they were made of may have gone meanwhile: the checkpoint holds all that is needed, and the keys are still
        compared. Whoever needs the source all the same says so.

        Raises:
            ConfigError: the model's shape or dtype differs (the message names every field with both values), or the
                tokenizer does; with the remedy.
            CheckpointError: the checkpoint holds no language model.
        """
        asked, folder = config.model, checkpoint / "model"
        if same_tokenizer(asked.tokenizer_path, folder) is False:
            raise ConfigError(
                f"the tokenizer in {asked.tokenizer_path} is another than that of {checkpoint}: a resumed run keeps "
                "its tokenizer; leave model.tokenizer and where it was loaded from as they were, or begin a new run"
            )
        try:
            trained = read_shape(folder, asked.dtype, _base_now(config, checkpoint))
        except (CheckpointError, ConfigError) as error:
            if is_adapter(folder):  # whose base is not there
                raise
            raise CheckpointError(f"{folder} is not the config of a language model: {error}") from error
        state = read_state(checkpoint)
        if trained.lora is not None:
            lora = trained.lora.model_copy(update={"dtype": state["adapter_dtype"]})
            trained = trained.model_copy(update={"lora": lora})
        theirs = trained.model_dump(mode="json", exclude=_ELSEWHERE) | {"dtype": state["dtype"]}
        own = {"dtype", "lora"}
        try:
            ours: dict[str, Any] = model_shape(asked).model_dump(mode="json", exclude=_ELSEWHERE)
        except ConfigError:  # it is not there any more
            ours = {"dtype": asked.dtype}
            if asked.lora is not None:
                ours["lora"] = asked.lora.in_dtype(asked.dtype).model_dump(mode="json")
        place, remedy = "model.init.", VALUES
        if asked.init is None:
            place = f"{asked.directory}: "
            of_keys = all(ours[name] == theirs[name] for name in ours.keys() - own)
            remedy = VALUES if of_keys else "leave model.path as it was"
        check_kept(ours, theirs, checkpoint, lambda name: f"model.{name}" if name in own else f"{place}{name}", remedy)

    # --- components ----------------------------------------------------------------------------------------------

    def components(self, settings: Settings[RunConfig], states: Mapping[str, Any] | None) -> list[ComponentSpec]:
        """Replay, curriculum, learner, inference servers, rollout workers, evaluator."""
        config, state = settings.config, None if states is None else states["evaluator"]
        rules = problem_rules(config, self._environments)
        problems = {lesson_id: asdict(rule) for lesson_id, rule in rules.items()}
        return [
            self._spec(settings, "replay", 0, problems=problems),
            *(self._spec(settings, role, 0) for role in ("curriculum", "learner")),
            *(self._spec(settings, "inference", index) for index in range(config.inference.servers)),
            *(self._rollout(settings, index) for index in range(rollout_workers(config))),
            self._spec(settings, "evaluator", 0, state=state),
        ]

    def local_components(
        self,
        settings: Settings[RunConfig],
        start: RunStart,
        context: Callable[[str], ComponentContext],
        log: RunLog,
    ) -> dict[str, LocalComponent]:
        """One engine, one rollout worker, one learner."""
        if self._objects:
            log.event("isolation", isolation="none", objects=self._objects)
        return local_components(self, settings, start, self._environments, context, log)

    def scalable(self, settings: Settings[RunConfig]) -> list[tuple[str, SpecMaker, int]]:
        """Workers and servers."""
        config = settings.config
        per_lesson = isinstance(config.rollout.workers, dict)  # then nobody else would take a lesson's tickets
        least = rollout_workers(config) if per_lesson else 1
        return [
            ("rollout", lambda index: self._rollout(settings, index), least),
            ("inference", lambda index: self._spec(settings, "inference", index), 1),
        ]

    def _rollout(self, settings: Settings[RunConfig], index: int) -> ComponentSpec:
        """One rollout worker; those beyond the configured ones generate every lesson."""
        lesson = lesson_of_worker(settings.config, index)
        lessons = None if lesson is None else [lesson]
        return self._spec(settings, "rollout", index, peer_group=lesson or "", lessons=lessons)

    def _spec(
        self, settings: Settings[RunConfig], role: str, index: int, *, peer_group: str = "", **more: Any
    ) -> ComponentSpec:
        builtin = settings.config.inference.external is None
        accelerated = ACCELERATED if builtin else ("learner",)  # the card is the server's, not its component's
        return make_spec(settings, self._factories, role, index, accelerated=accelerated, peer_group=peer_group, **more)

    # --- the learner ---------------------------------------------------------------------------------------------

    def make_learner(self, config: RunConfig, start: RunStart) -> Learner:
        """A `Learner` of a decoder."""
        limits = {name: lesson.sampling_params.max_output_tokens for name, lesson in config.curriculum.lessons.items()}
        learner = Learner(start.policy, config.learner, config.steps, config.seed, limits)
        if start.checkpoint is not None:
            learner.restore_arrays(start.checkpoint.learner_arrays)
        return learner

    def scoring_programs(self, learner: Learner) -> Programs:
        """The probe's."""
        return learner.scoring_programs()

    def update_programs(self, learner: Learner, config: RunConfig) -> Programs:
        """The update's."""
        return learner.update_programs()

    def learner_tasks(self, ctx: ComponentContext, component: LearnerComponent) -> LearnerTasks:
        """Warm start and parity probe."""
        preparation = Preparation(ctx, component)
        return LearnerTasks(
            {
                "warm_start": preparation.warm_start,
                "probe": preparation.probe,
                "reference_logprobs": preparation.reference_logprobs,
            },
            preparation.on_view,
            preparation.close,
            preparation.before_update,
            preparation.after_update,
            decoder_digests,
        )

    # --- phases --------------------------------------------------------------------------------------------------

    def prepared(self, run: Run) -> PhaseSteps:
        """Servers have the learner's weights."""
        yield from self._until_served(run)

    def checked(self, run: Run) -> PhaseSteps:
        """Engines and learner agree."""
        run.phase("checking that engines and learner agree")
        yield from run.until_stopped(run.tasks.task("learner-0", "probe"))

    def before_training(self, run: Run) -> PhaseSteps:
        """Evaluations before and after the warm start, where they are wanted; its weights are checked, too."""
        evaluated = run.config.curriculum.eval_before
        if evaluated:
            run.phase("evaluating the untrained policy")
            run.results["untrained"] = run.results["before"] = yield from run.evaluate("untrained")
        if run.config.learner.warm_start is not None:
            run.phase("warm start")
            yield from run.until_stopped(run.tasks.task("learner-0", "warm_start"))
            yield from self._until_served(run)
            yield from self.checked(run)
            if evaluated:
                run.phase("evaluating the warm start")
                run.results["before"] = yield from run.evaluate("before")

    def after_training(self, run: Run) -> PhaseSteps:
        """Servers have the last weights, and why the training ended before its last step is told."""
        reason, step = self._goal(run), run.learner_step() or 0
        if reason and step < run.config.steps:
            run.log.event("goal_reached", step, reason=reason)
        yield from run.tasks.call("learner-0", "publish")
        yield from self._until_served(run)

    def goal_reached(self, run: Run) -> bool:
        """Every lesson has graduated, where the run stops for that; or so many rollouts were begun as may be."""
        return bool(self._goal(run))

    def _goal(self, run: Run) -> str:
        """Which one was reached, in words; empty where none was."""
        most, facts = run.config.rollout.max_rollouts, run.seen.facts("replay-0")
        begun = facts.get("ledger", {}).get("started", 0)
        if most is not None and begun >= most:
            return f"{begun:,} rollouts were begun, and rollout.max_rollouts is {most:,}"
        if run.config.curriculum.when_complete == "stop" and facts.get("complete"):
            return "every lesson has graduated (curriculum.when_complete: stop)"
        return ""

    def _until_served(self, run: Run) -> PhaseSteps:
        """Waits until every inference server holds the learner's present version."""
        return run.until_stopped(until(lambda: self.served(run)))

    def served(self, run: Run) -> bool | None:
        """Whether every inference server holds the learner's present version; None where not."""
        view = run.tasks.view
        learner = view.peer("learner-0")
        servers = [peer for peer in view.of("inference") if not peer.address.get("draining")]
        if learner is None or "weights" not in learner.address or not servers:
            return None
        wanted = (run.lineage, run.learner_step(), learner.address["weights"]["incarnation"])
        held = {(p.address.get("lineage"), p.address.get("step"), p.address.get("weights")) for p in servers}
        return True if held == {wanted} else None

    # --- what a run reports --------------------------------------------------------------------------------------

    def make_update_log(self, config: RunConfig, log: RunLog) -> Updates:
        """Names the bottleneck by idle shares."""
        threshold = min(success_thresholds(config).values())
        return Updates(log, config.replay.synchronous, config.runtime == "local", threshold)

    def metrics_of(self, results: Results) -> dict[str, float]:
        """As ``eval/<lesson>/…``, or ``eval_report/<lesson>/…`` of problems that are kept apart for reports."""
        return metrics_of(results, "eval")

    def failures(self, run: Run) -> tuple[int, str]:
        """Groups whose environment or reward function failed."""
        return run.seen.failed_groups()

    def status(self, run: Run) -> dict[str, Any]:
        """Failed groups."""
        failed, last_failure = self.failures(run)
        return {"groups": {"failed": failed, "last_failure": last_failure}}


def make_learner(ctx: ComponentContext, settings: Mapping[str, Any]) -> LearnerComponent:
    """Factory of the learner."""
    return LearnerComponent(ctx, Settings.of(settings, RunConfig), LanguageKind())


def make_inference(ctx: ComponentContext, settings: Mapping[str, Any]) -> ServingRole[Any]:
    """Factory of an inference server."""
    values = Settings.of(settings, RunConfig)
    return InferenceRole(ctx, values) if values.config.inference.external is None else ExternalInference(ctx, values)


FACTORIES: Factories = {
    "learner": make_learner,
    "replay": make_replay,
    "curriculum": make_curriculum,
    "inference": make_inference,
    "rollout": make_rollout,
    "evaluator": make_evaluator,
}
