"""The replay buffer of a language run as a component, and the curriculum as another, which applies the buffer's log.

The buffer is made from the run's files: those of a new run, or those of the checkpoint that this lineage begins with.
Tickets are handed out once the learner trains (`admit`); what the view says of the dead is passed on to the service, so
that their tickets go to others.

It owes progress while something waits for it alone. A full disk, a learner that is paused, groups that wait for their
turn: these are others' to end.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from typing_extensions import override

from penstock.batch import AdvantageName, GroupAdvantage, example_from_rollout, with_kl_in_reward
from penstock.curriculum import CurriculumEvent, CurriculumService, RemoteCurriculum
from penstock.curriculum.config import PROBLEM_RETRIES
from penstock.environments import Environment, load_environment
from penstock.learner import read_states
from penstock.learner.parity import LEAST_TOKENS
from penstock.overseer.assembly import make_batch_makers, open_replay, restore_parts
from penstock.overseer.component import CallCounter, Settings, SteadyClock, ThreadedComponent
from penstock.overseer.config import RunConfig
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.metrics import RolloutMetrics
from penstock.overseer.supervisor.messages import ComponentStatus, Identity, Membership
from penstock.replay import (
    LANGUAGE,
    MemoryRolloutStorage,
    PacedReplayBuffer,
    ProblemRules,
    ReplayBuffer,
    ReplayService,
    RolloutReceiver,
    TicketRules,
    TicketService,
)
from penstock.replay.training_pool import TrainingPool
from penstock.types import (
    AnyRollout,
    Caller,
    ConfigError,
    NoProgressError,
    ProblemSet,
    RetryingCaller,
    RLExample,
    RolloutGroup,
    RolloutSink,
    RunFailed,
)
from penstock.types.errors import errors_of_user_code


class CurriculumRole(ThreadedComponent):
    """Runs one `CurriculumService`."""

    def __init__(self, ctx: ComponentContext, settings: Settings) -> None:
        super().__init__(ctx, settings)
        self._service = CurriculumService(settings.config.curriculum)
        self._handling = CallCounter(self.activity)
        self.apply = self._handling.of(self._service.apply)

    @override
    def start(self) -> None:
        self.activity.begin()
        self.state, self.doing = "running", "serving"

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        progress = float(self._handling.done) if self._handling.under_way else None
        return ComponentStatus(
            self.state, self.doing, progress, busy_s, idle_s, facts=self._facts(**self._service.status())
        )


def make_curriculum(ctx: ComponentContext, settings: Mapping[str, Any]) -> CurriculumRole:
    """Factory of the curriculum."""
    return CurriculumRole(ctx, Settings.of(settings, RunConfig))


SERVED = ("checkpoint_saved", "checkpoint_states", "deliver", "formed_batch", "has_room", "set_current_step")
"""Methods of the replay service that others call as they are."""
TICKETS_SERVED = ("cleared", "fail", "server_holds", "update_evaluation")
"""Methods of the ticket service that others call as they are."""


def owes_progress(metrics: Mapping[str, float], in_hand: int) -> bool:
    """Whether something waits for the buffer alone.

    Args:
        metrics: The service's.
        in_hand: Deliveries that the receiver hands to the buffer at this moment.
    """
    waiting = ("rollout_storage/depth", "replay/overdue_groups")
    return in_hand > 0 or any(metrics[name] > 0 for name in waiting)


DIGESTS_SERVED = ("expect_digests", "mark_engine", "tell_digests")
"""Methods of the buffer's digests that others call as they are."""


SCORE_S = 600.0
"""Longest wait for the log-probabilities of a batch under the reference, compiling included."""


class ReferenceScores:
    """Completes drawn batches with ℓ_ref, which the learner computes, and with a KL in the reward where there is one.

    Where a rollout may be in several batches, its scores are kept until it is gone or the reference changes.

    Args:
        config: The run's; what counts is `learner.kl`, and how often a rollout may be used.
        learner: Calls the component of that name, which may be in another process.
    """

    def __init__(self, config: RunConfig, learner: Caller) -> None:
        self._kl = config.learner.kl
        loss = config.learner.loss
        self._advantage: AdvantageName | GroupAdvantage = loss.estimator() if self._kl.in_reward else loss.advantage
        self._keeps = config.replay.max_samples != 1
        self._calls = RetryingCaller(learner, "learner-0")
        self.stop = self._calls.stop
        self._version = 0
        self._kept: dict[str, np.ndarray] = {}

    def attach(self, pool: TrainingPool) -> None:
        """From now on batches of this pool are completed; nothing, where there is no reference."""
        if self._kl.reference is None:
            return

        def complete(
            examples: Sequence[RLExample], rollouts: Sequence[AnyRollout]
        ) -> tuple[tuple[RLExample, ...], dict[str, float]]:
            with pool.changed:
                gone = [name for name in self._kept if pool.waiting.find(name) is None]
            for name in gone:
                del self._kept[name]
            return self.complete(examples, rollouts)

        pool.complete = complete

    def complete(
        self, examples: Sequence[RLExample], rollouts: Sequence[AnyRollout]
    ) -> tuple[tuple[RLExample, ...], dict[str, float]]:
        """The examples of a batch with ℓ_ref, and ``time/reference``; with a KL in the reward, ``train/kl_penalty``.

        Raises:
            RunFailed: the learner is out of reach.
            Stopped: `stop` was called.
        """
        started = time.perf_counter()
        scores = self._scores(examples)
        done = [replace(each, reference_log_probs=scores[each.rollout_ids[0]]) for each in examples]
        metrics: dict[str, float] = {}
        if self._kl.in_reward:
            differences = [(each.generator_log_probs - each.reference_log_probs)[each.loss_mask].sum() for each in done]
            metrics["train/kl_penalty"] = self._kl.coefficient * float(np.mean(differences))
            done = with_kl_in_reward(self._advantage, rollouts, done, self._kl.coefficient)
        return tuple(done), metrics | {"time/reference": time.perf_counter() - started}

    def _scores(self, examples: Sequence[RLExample]) -> dict[str, np.ndarray]:
        unknown = [each for each in examples if each.rollout_ids[0] not in self._kept]
        version, found = self._ask(unknown)
        if version != self._version and len(unknown) < len(examples):  # what is kept is of another reference
            unknown = list(examples)
            version, found = self._ask(unknown)
        kept = self._kept if version == self._version else {}
        scores = kept | {each.rollout_ids[0]: one for each, one in zip(unknown, found, strict=True)}
        self._version, self._kept = version, scores if self._keeps else {}
        return scores

    def _ask(self, examples: Sequence[RLExample]) -> tuple[int, list[np.ndarray]]:
        try:
            return self._calls.call("reference_logprobs", examples, timeout_s=SCORE_S)
        except NoProgressError as error:
            raise RunFailed(
                f"a batch could not be scored under the reference (learner.kl.reference): {error}"
            ) from error


class _CountedSink:
    """The buffer, as the receiver sees it."""

    def __init__(self, buffer: RolloutSink, receiving: CallCounter) -> None:
        self.add_batches = receiving.of(buffer.add_batches)


def arrived_examples(
    buffer: ReplayBuffer | PacedReplayBuffer, step: int, most: int
) -> list[tuple[RLExample, tuple[str, ...]]]:
    """The newest rollouts of which version `step` sampled the first token, as examples to be scored.

    Args:
        buffer: Where they arrived, of the run in this process.
        step: Number of the version that the learner holds.
        most: So many of each engine, and as many more as it takes for `LEAST_TOKENS` sampled tokens.

    Returns:
        Each with the engines that answered it.
    """
    taken, tokens = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    found: list[tuple[RLExample, tuple[str, ...]]] = []
    for rollout in cast(list[AnyRollout], buffer.pool.arrived_under(step)):
        engines = () if rollout.metadata is None else rollout.metadata.engines
        if rollout.sampled_tokens and (taken[engines] < most or tokens[engines] < LEAST_TOKENS):
            taken[engines] += 1
            tokens[engines] += rollout.sampled_tokens
            found.append((example_from_rollout(rollout, 0.0, sys.maxsize, True), engines))
    return found


def _training_set(environment: Environment, env_class: str) -> ProblemSet | None:
    """`Environment.training_set`, which may be a user's, or read files that are."""
    told = f"env_class {env_class!r}: making its problems raised"
    with errors_of_user_code(ConfigError, told, " (PENSTOCK_TRACEBACK=1 shows where)"):
        problems: Any = environment.training_set()
    if not isinstance(problems, ProblemSet | None):
        raise ConfigError(
            f"env_class {env_class!r}: training_set returned {problems!r:.60}: it must be a penstock.types.ProblemSet, "
            "or None where problems are made without an end"
        )
    return problems


def problem_rules(config: RunConfig, environments: Mapping[str, Environment]) -> dict[str, ProblemRules]:
    """The lessons whose problems are trained once per epoch, with what tickets are drawn by.

    Args:
        config: The run's, with the order of each lesson's problems.
        environments: By lesson; one that is missing has no epochs.

    Raises:
        ConfigError: a problem set cannot be made, or an order or retries are asked for where problems are made without
            an end.
    """
    found: dict[str, ProblemRules] = {}
    for lesson_id, environment in environments.items():
        lesson = config.curriculum.lessons[lesson_id]
        if lesson.order == "iid":
            continue
        problems = _training_set(environment, lesson.environment.env_class)
        if problems is not None:
            found[lesson_id] = ProblemRules(problems.size, problems.digest, lesson.order, lesson.problem_retries)
            continue
        for key, usual in (("order", "shuffle"), ("problem_retries", PROBLEM_RETRIES)):
            if (value := getattr(lesson, key)) != usual:
                raise ConfigError(
                    f"curriculum.lessons.{lesson_id}.{key} is {value!r}, but {type(environment).__name__} has no fixed "
                    "number of training problems: leave it out, or give the environment a training_set"
                )
    return found


class ReplayRole(ThreadedComponent):
    """Runs one `ReplayService`.

    Args:
        ctx: Of the component.
        settings: The run, with its config, directory and lineage.
        problems: As `problem_rules` gives them; without, no lesson has epochs.
    """

    def __init__(
        self, ctx: ComponentContext, settings: Settings, problems: Mapping[str, ProblemRules] | None = None
    ) -> None:
        super().__init__(ctx, settings)
        config, lineage, replay = settings.config, settings.lineage, settings.config.replay
        clock = SteadyClock()
        self.now = clock.now
        self._tally = RolloutMetrics.of(config)
        self._curriculum = RemoteCurriculum(
            config.curriculum,
            ctx.caller("curriculum-0"),
            lineage,
            strict=replay.synchronous,
            on_event=self._on_curriculum_event,
        )
        self._handling, self._receiving = CallCounter(self.activity), CallCounter(self.activity)
        rules = TicketRules(config.seed, self._curriculum, self._group_size, self._curriculum.may_draw, problems or {})
        opened = self._replay = open_replay(
            ctx,
            settings,
            replay,
            LANGUAGE,
            make_batch_makers(config, self._environment_names()),
            tickets=rules,
            clock=clock.now,
            on_group=self._on_group,
            writing=self.activity.busy,
        )
        assert opened.issuer is not None  # there are rules for tickets
        issuer, buffer = opened.issuer, opened.buffer
        storage = MemoryRolloutStorage(config.rollout.storage, self._on_quarantine)
        self._scores = ReferenceScores(config, ctx.caller("learner-0"))
        self._scores.attach(buffer.pool)
        self._issuer = issuer
        self._tickets = TicketService(issuer, self._curriculum, replay.synchronous)
        self._service = ReplayService(
            buffer,
            opened.batches,
            lineage=lineage,
            receiver=RolloutReceiver(storage, _CountedSink(buffer, self._receiving)),
            check_sender=self._tickets.check,
            states=self._tickets.states,
            on_refusal=lambda worker, reason: ctx.event("rollouts_refused", worker=worker, reason=reason),
        )
        parts = {"curriculum": self._curriculum, "issuer": issuer, "replay": buffer}
        states = None if settings.checkpoint is None else read_states(settings.checkpoint)
        restore_parts(parts, buffer, states, lineage)
        for lesson_id, reason in issuer.data_changes.items():
            ctx.event("data_changed", lesson=lesson_id, reason=reason)
        self._serving = self._admitting = False
        self._alive: set[Identity] = set()
        for method in SERVED:
            setattr(self, method, self._handling.of(getattr(self._service, method)))
        for method in TICKETS_SERVED:
            setattr(self, method, self._handling.of(getattr(self._tickets, method)))
        assert isinstance(buffer, PacedReplayBuffer)
        self._digests = buffer.digests
        for method in DIGESTS_SERVED:
            setattr(self, method, self._handling.of(getattr(self._digests, method)))
        self.acquire, self.next_batch = self._tickets.acquire, self._service.next_batch  # waiting in them is no work

    @override
    def start(self) -> None:
        self._curriculum.start(self._replay.buffer.wake)
        super().start()
        self.look(self.ctx.view)

    def look(self, view: Membership) -> None:
        """Passes on who died."""
        alive = {peer.identity for role in ("rollout", "inference") for peer in view.of(role)}
        for identity in sorted(self._alive - alive):
            if identity.role == "rollout":
                self._tickets.release(identity.name, identity.incarnation)
            else:
                self._tickets.forget_server(identity.name, identity.incarnation)
                self._digests.forget_engine(identity.name, identity.incarnation)
        self._alive = alive
        super().look(view)

    def admit(self) -> None:
        """From now on tickets are handed out; a second call changes nothing."""
        if not self._admitting:
            self._admitting = True
            self._tickets.start()
            self._service.start()
            self.activity.begin()
            self.doing = "serving"

    def finish_update(self, lineage: int, step: int) -> None:
        """Update `step` was applied; the run's log gets the metrics of the groups since the last."""
        with self._handling.one():
            self._service.finish_update(lineage, step)
        values = self._tally.take()
        if values:
            self.ctx.metrics(step + 1, values)

    def add_environment(self, lesson_id: str, metrics: Mapping[str, float]) -> None:
        """What a worker's environment says of one training group; the run's log gets it with the next update."""
        self._tally.add_environment(lesson_id, metrics)

    def last_lesson(self) -> str | None:
        """The lesson of the newest group that was drawn."""
        return self._issuer.last_lesson

    def arrived_under(self, step: int, most: int) -> list[tuple[RLExample, tuple[str, ...]]]:
        """`arrived_examples`."""
        return arrived_examples(self._replay.buffer, step, most)

    def drain(self) -> None:
        """The overseer hears of the notice, has the newest version saved, and begins anew elsewhere."""

    @override
    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        self._scores.stop()
        self._tickets.stop(timeout_s)
        self._service.stop(timeout_s)
        self._replay.stop_prefetch(timeout_s)
        self._curriculum.stop(timeout_s)
        self._replay.store.close()

    # --- what the parts tell ---------------------------------------------------------------------------------------

    def _on_group(self, group: RolloutGroup) -> None:
        self._curriculum.update_group(group)
        cut = self._tally.add(group)
        if cut:
            self.ctx.event("answer_cut", lesson=group.rollouts[0].lesson_id, reason=cut)

    def _on_curriculum_event(self, event: CurriculumEvent) -> None:
        self.ctx.event(event.kind, lesson=event.lesson_id, reason=event.reason)

    def _on_quarantine(self, source: str, reason: str) -> None:
        self.ctx.event("rollouts_quarantined", source=source, reason=reason)

    def _group_size(self, lesson_id: str) -> int:
        lesson = self.config.curriculum.lessons.get(lesson_id)
        return 0 if lesson is None else lesson.sampling_params.n_generations_per_prompt

    def _environment_names(self) -> set[str]:
        """Rows go to batch makers by the environments' own names, which only the environments know."""
        if not self.config.replay.batch_makers:
            return set()
        environments = [load_environment(lesson.environment.spec) for lesson in self.config.curriculum.lessons.values()]
        names = {environment.name for environment in environments}
        for environment in environments:
            environment.close()
        return names

    @override
    def condition(self) -> ComponentStatus:
        failure = self._service.failure or self._tickets.failure or self._curriculum.failure
        if failure is not None:
            return ComponentStatus(
                "failed", self.doing, error=f"{type(failure).__name__}: {failure}", facts=self._facts()
            )
        return super().condition()

    def _describe(self, busy_s: float, idle_s: float) -> ComponentStatus:
        metrics = Counter(self._service.metrics())
        metrics.update(self._tickets.metrics())  # both count refused and repeated messages
        return ComponentStatus(
            self.state,
            self.doing,
            self._service.progress if owes_progress(metrics, self._receiving.under_way) else None,
            busy_s,
            idle_s,
            metrics=dict(metrics),
            facts=self._facts(
                complete=self._curriculum.complete,
                groups_received=self._service.progress,
                **self._tickets.status(),
                **self._service.status(),
            ),
        )


def make_replay(ctx: ComponentContext, settings: Mapping[str, Any]) -> ReplayRole:
    """Factory of the replay buffer; `settings` has the lessons' ``problems``, if any, beside those of the run."""
    problems = {lesson_id: ProblemRules(**values) for lesson_id, values in settings.get("problems", {}).items()}
    return ReplayRole(ctx, Settings.of(settings, RunConfig), problems)
