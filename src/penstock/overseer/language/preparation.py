"""What a language policy's learner does beside training: the warm start, and the parity of engines and learner.

A random model cannot reach sparse rewards by trying, so supervised steps on the environments' reference solutions may
come first. Their optimiser state is discarded; version 0 of the run is what comes out.

For equal weights, engine and learner must agree about log-probabilities: whatever makes the two differ (a kernel, a
dtype, a temperature, stale weights) would make every later update wrong in silence. A probe before anything else
answers a few held-out prompts through the engine's cached, batched decode, and scores the same tokens by the learner's
packed forward pass; then every update is checked (`ParityCheck`). How far apart they may be: `penstock.learner.parity`.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple, cast, final

import numpy as np

from penstock.batch import example_from_pair, example_from_rollout, longest_sample, samples_of
from penstock.curriculum import Curriculum
from penstock.environments import Reference
from penstock.inference import AgentEndpoint, RemoteContext
from penstock.learner import Learner
from penstock.learner.config import WarmStartConfig
from penstock.learner.parity import LEAST_TOKENS, ParityMonitor, differences_of, example_of
from penstock.model.language import Decoder
from penstock.overseer.component import POLL_S
from penstock.overseer.config import RunConfig
from penstock.overseer.language.rollout import make_pool, reproducible, servers_of
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import Membership
from penstock.rollout import RolloutManager
from penstock.types import (
    Completion,
    EnvironmentFailure,
    MismatchError,
    RLExample,
    Stopped,
    TrainingBatch,
    UnreachableError,
    fold,
    generator,
)

if TYPE_CHECKING:
    from penstock.overseer.trainer import LearnerComponent

PROBE_TOKENS = 32
"""Most of an answer by which engines and learner are compared at the start."""
MOST_CANARIES = 16
"""Engines that are asked at the same time."""
CALL_S = 10.0
"""What an answer may take beyond the wait for its tokens."""


class _Check(NamedTuple):
    """One that is under way.

    Attributes:
        step: The version.
        decoder: Its arrays.
        examples: The batch.
        evidence: By engine's name, sequences that it sampled; `UNATTRIBUTED` where nobody knows which one did.
        engines: The engines that serve, by name, with their incarnations as rollouts have them.
        silent: Names of those that tell no digests: what is found stands in for them.
        canaries: Answers that are waited for.
        wait_s: How long, once the update is made.
        started: On the performance counter.
    """

    step: int
    decoder: Decoder
    examples: Sequence[RLExample]
    evidence: Mapping[str, Sequence[RLExample]]
    engines: Mapping[str, str]
    silent: tuple[str, ...]
    canaries: Mapping[str, Future[list[Completion]]]
    wait_s: float
    started: float

    def lacking(self) -> list[str]:
        """Engines of which there is too little evidence."""
        return [name for name in self.engines if _sampled(self.evidence.get(name, ())) < LEAST_TOKENS]


UNATTRIBUTED = "rollouts"
"""Stands for the engine where several answered, or none is named."""

FIRST_ANSWER_S = 60.0
"""Longest wait for the first canary of an engine, which may still compile what answers it."""

SUFFICIENT_IN_A_ROW = 3
"""Where what arrived during so many updates was evidence enough, the next one asks no canary ahead."""


@final
class ParityCheck:
    """Compares engines and learner at every update, while the learner still holds the version that is judged.

    Evidence is what the version sampled itself: sequences of the batch, else of what arrived lately, which says who
    answered. An engine of which there is none answers a few prompts of the batch anew while the update is computed:
    canaries, and one context near the longest length. Where what arrives during updates has been enough, they are
    asked only once the update is made and there is still none.

    Args:
        ctx: The component's, which knows the engines.
        config: Of the run.
        lineage: Of this life of the run.
        finishing: Whether the training was asked to end: no canary is waited for then.
    """

    def __init__(self, ctx: ComponentContext, config: RunConfig, lineage: int, finishing: Callable[[], bool]) -> None:
        self._ctx = ctx
        self._finishing = finishing
        self._config = config.learner.parity
        self._row_length = config.learner.row_length
        self._lineage = lineage
        self.monitor = ParityMonitor(self._config, config.model.dtype)
        self._replay = ctx.caller("replay-0")
        self._calls = ThreadPoolExecutor(MOST_CANARIES, thread_name_prefix="canary")
        self._check: _Check | None = None
        self._metrics: Mapping[str, float] = {}
        self._began = 0.0
        self._update_s = 0.0  # of the last update
        self._sufficient = 0  # updates in a row during which enough arrived
        self._asked = set[str]()  # engines, once

    def begin(self, learner: Learner, batch: TrainingBatch[RLExample]) -> None:
        """Gathers evidence of the version that the learner holds; judges it now, where that needs nobody.

        Raises:
            MismatchError: engines and learner disagree.
        """
        self._check, self._metrics = None, {}
        self._began = time.perf_counter()
        if batch.step % self._config.every or not batch.examples:
            return
        started = time.perf_counter()
        serving = [peer for peer in self._ctx.view.of("inference") if not peer.address.get("draining")]
        engines = {peer.identity.name: str(peer.identity) for peer in serving}
        silent = tuple(peer.identity.name for peer in serving if not peer.address.get("digests"))
        own: list[RLExample] = []
        for example in batch.examples:
            if self._wants_more(own) and sampled_first_by(example, batch.step):
                own.append(example)
        evidence = {name: own for name in engines} if own and len(engines) == 1 else {}
        held = batch.step, learner.decoder, batch.examples
        check = _Check(*held, evidence, engines, silent, {}, self._config.wait_s, started)
        if check.lacking() or not engines:
            check = check._replace(evidence={**check.evidence, **self._arrived(check)})
        if not check.lacking():
            self._metrics = self._judge(learner, check)
            return
        if self._sufficient < SUFFICIENT_IN_A_ROW:
            check = self._ask(check, self._update_s)  # an update takes about as long as the last one
        self._check = check._replace(started=started - time.perf_counter())

    def end(self, learner: Learner) -> Mapping[str, float]:
        """``train/parity_…`` of the version before the update, and ``time/parity``.

        Raises:
            MismatchError: engines and learner disagree.
        """
        check, self._check = self._check, None
        self._update_s = time.perf_counter() - self._began
        if check is None:
            return self._metrics
        started = time.perf_counter() + check.started
        evidence = {**check.evidence, **self._arrived(check)} if check.lacking() else check.evidence
        check = check._replace(evidence=evidence, started=started)
        self._sufficient = 0 if check.lacking() else self._sufficient + 1
        if check.lacking() and not check.canaries:
            check = self._ask(check, 0.0)
        return self._judge(learner, check)

    def _ask(self, check: _Check, update_s: float) -> _Check:
        """Has engines without evidence answer; they may take as long as the update, and `wait_s` after it."""
        lacking = check.lacking()
        asked = {check.engines[name] for name in lacking}
        wait_s = self._config.wait_s if asked <= self._asked else max(self._config.wait_s, FIRST_ANSWER_S)
        self._asked |= asked
        what = check.step, self._prompts(check.examples), update_s + wait_s
        canaries = {name: self._calls.submit(self._canary, name, *what) for name in lacking}
        return check._replace(canaries=canaries, wait_s=wait_s)

    def wait_for_canaries(self) -> None:
        """Returns when what was asked is answered, or its `wait_s` later."""
        if self._check is not None:
            self._wait(self._check.canaries.values(), time.monotonic() + self._check.wait_s)

    def _wait(self, canaries: Collection[Future[list[Completion]]], limit: float) -> None:
        """A run that ends saves the version of this update, and may have little time for it."""
        while not self._finishing() and (left := limit - time.monotonic()) > 0:
            if not wait(canaries, min(left, POLL_S)).not_done:
                return

    def close(self) -> None:
        """Asks nobody any more."""
        self._calls.shutdown(wait=False, cancel_futures=True)

    def _judge(self, learner: Learner, check: _Check) -> dict[str, float]:
        limit = time.monotonic() + check.wait_s
        found: dict[str, np.ndarray] = {}
        for name in check.engines:
            sampled = self._compare(learner, check, check.evidence.get(name, ()))
            found[name] = np.concatenate((self._answered(learner, check, name, limit), sampled))
        if check.evidence.get(UNATTRIBUTED):
            found[UNATTRIBUTED] = self._compare(learner, check, check.evidence[UNATTRIBUTED])
        try:
            metrics = self.monitor.judge(check.step, found)
        except MismatchError as mismatch:
            self._mark(check, found, str(mismatch))
            raise
        self._mark(check, found, "")
        return metrics | {"time/parity": time.perf_counter() - check.started}

    def _mark(self, check: _Check, found: Mapping[str, np.ndarray], fault: str) -> None:
        """The verdict about engines that tell no digests."""
        for name in check.silent:
            if len(found[name]) >= LEAST_TOKENS:
                told = check.engines[name], self._lineage, check.step, fault
                with suppress(UnreachableError):  # what they sampled stays unverified
                    self._replay.call("mark_engine", *told, timeout_s=CALL_S)

    def _answered(self, learner: Learner, check: _Check, name: str, limit: float) -> np.ndarray:
        if name not in check.canaries or (name not in check.lacking() and not check.canaries[name].done()):
            return np.zeros(0, np.float32)  # nobody was asked, or what arrived meanwhile is enough
        self._wait([check.canaries[name]], limit)
        try:
            done = check.canaries[name].result(0.0)
        except (TimeoutError, UnreachableError):
            done = []  # it is counted as unchecked
        return self._compare(learner, check, [example_of(each, 1.0) for each in done])

    def _compare(self, learner: Learner, check: _Check, examples: Sequence[RLExample]) -> np.ndarray:
        return differences_of(examples, learner.score(examples, check.decoder), check.step)

    def _arrived(self, check: _Check) -> dict[str, list[RLExample]]:
        """What the version sampled lately, by engine; nothing where replay does not answer."""
        found: dict[str, list[RLExample]] = {}
        names = {identity: name for name, identity in check.engines.items()}
        (only,) = check.engines if len(check.engines) == 1 else (UNATTRIBUTED,)
        asked = check.step, self._config.sequences
        try:
            arrived = self._replay.call("arrived_under", *asked, timeout_s=self._config.wait_s)
        except UnreachableError:
            return found
        for example, engines in arrived:
            name = names.get(engines[0], only) if len(engines) == 1 else only
            mine = found.setdefault(name, [])
            if longest_sample(example) <= self._row_length and self._wants_more(mine):
                mine.append(example)
        return found

    def _wants_more(self, evidence: Sequence[RLExample]) -> bool:
        return len(evidence) < self._config.sequences or _sampled(evidence) < LEAST_TOKENS

    def _canary(self, name: str, step: int, prompts: Sequence[np.ndarray], limit_s: float) -> list[Completion]:
        asked = (self._lineage, step), prompts, self._config.canary_tokens, limit_s
        return self._ctx.caller(name).call("canary", *asked, timeout_s=limit_s + CALL_S)

    def _prompts(self, examples: Sequence[RLExample]) -> list[np.ndarray]:
        """Prompts of the batch, different ones as far as there are, and a context as long as its longest sequence.

        More than `canary_prompts` where so few answers of the batch would be no evidence; then a prompt comes again.
        """
        begun = [(example, example.first_sampled or 0) for example in examples]
        prompts = {prompt.tobytes(): prompt for prompt in (example.tokens[:begin] for example, begin in begun)}
        lengths = [np.append(example.loss_mask[begin:], False).argmin() for example, begin in begun]
        short = np.clip(np.quantile(lengths, 0.25), 1, self._config.canary_tokens)  # of first answers
        count = max(math.ceil(LEAST_TOKENS / short), min(len(prompts), self._config.canary_prompts))
        chosen = itertools.islice(itertools.cycle(prompts.values()), count)
        longest = max((sample.tokens for example in examples for sample in samples_of(example)), key=len)
        room = self._row_length - self._config.canary_tokens
        context = longest[: max(1, min(len(longest) - 1, room))]
        starts = [prompt[-room:] for prompt in chosen]
        return [np.ascontiguousarray(tokens, np.int32) for tokens in [*starts, context]]


def _sampled(examples: Sequence[RLExample]) -> int:
    """Tokens."""
    return sum(int(np.count_nonzero(example.loss_mask)) for example in examples)


def sampled_first_by(example: RLExample, step: int) -> bool:
    """Whether version `step` sampled the first of an example's tokens."""
    return int(example.weight_steps[example.first_sampled or 0]) == step


OnStep = Callable[[int, int, Mapping[str, float]], None]


def warm_start(learner: Learner, manager: RolloutManager, config: WarmStartConfig, seed: int, on_step: OnStep) -> None:
    """Runs the configured supervised steps.

    Args:
        learner: Whose parameters change.
        manager: Knows the lessons' environments.
        config: Steps, batch size and lessons.
        seed: The run's seed.
        on_step: Called after each step with its number, the number of all steps, and metrics.

    Raises:
        ConfigError: an environment has no reference solutions.
    """
    lessons = warm_start_lessons(manager, config)
    rng = generator(fold(seed, "warm_start"))
    for step in range(config.steps):
        lesson_id = lessons[int(rng.integers(len(lessons)))]
        references = _references(manager, lesson_id, config, seed, step)
        examples = [example_from_pair(*reference.token_pair(manager.context.tokenizer)) for reference in references]
        on_step(step + 1, config.steps, learner.supervised_update(examples))


def warm_start_lessons(manager: RolloutManager, config: WarmStartConfig) -> list[str]:
    """Those that were asked for, by default all without dependencies."""
    lessons = manager.curriculum.config.lessons
    return list(config.lessons or [lesson_id for lesson_id, lesson in lessons.items() if not lesson.dependencies])


def answers_cut_short(manager: RolloutManager, lesson_id: str, config: WarmStartConfig, seed: int) -> str:
    """Why the policy could never finish what a warm start teaches it; empty where it could.

    Looked at is the first batch of the lesson's solutions.
    """
    tokenizer = manager.context.tokenizer
    most = manager.curriculum.config.lessons[lesson_id].sampling_params.max_output_tokens
    lengths = [each.response_tokens(tokenizer) for each in _references(manager, lesson_id, config, seed, 0)]
    longer = sum(length > most for length in lengths)
    if not longer:
        return ""
    return (
        f"{longer} of {len(lengths)} worked answers are longer than sampling_params.max_output_tokens ({most}), up to "
        f"{max(lengths)} tokens: the policy will be cut before it ends one; raise the limit, or shorten solutions"
    )


def _references(
    manager: RolloutManager, lesson_id: str, config: WarmStartConfig, seed: int, step: int
) -> list[Reference]:
    return manager.environment(lesson_id).reference_examples(config.batch_size, fold(seed, "warm_start", step))


@final
class Preparation:
    """Tasks of a learner's component that ask inference servers, or the engine of its process, and environments.

    Args:
        ctx: The component's.
        component: Has the learner.
    """

    def __init__(self, ctx: ComponentContext, component: "LearnerComponent") -> None:
        self._ctx = ctx
        self._component = component
        self._pool = make_pool(component.settings) if component.shared is None else None
        self._parity = ParityCheck(ctx, component.config, component.settings.lineage, lambda: component.finishing)

    def on_view(self, view: Membership) -> None:
        """Follows the inference servers."""
        if self._pool is not None:
            self._pool.set_servers(servers_of(view))

    def close(self) -> None:
        """Ends its connections."""
        self._parity.close()
        if self._pool is not None:
            self._pool.close()

    def warm_start(self) -> None:
        """Supervised steps on the environments' reference solutions; then version 0 is published anew."""
        component, config = self._component, self._component.config
        assert config.learner.warm_start is not None  # or nobody asks for it

        def on_step(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if component.finishing:
                raise Stopped("warm start")
            component.note_step()
            component.doing = f"warm start {done}/{total}"
            self._ctx.metrics(0, {"warm_start/step": float(done), **metrics})

        settings = config.learner.warm_start
        with self._manager() as manager:
            for lesson_id in warm_start_lessons(manager, settings):
                reason = answers_cut_short(manager, lesson_id, settings, config.seed)
                if reason:
                    self._ctx.event("solutions_too_long", lesson=lesson_id, reason=reason)
            component.wait_until_compiled()
            warm_start(self._learner, manager, settings, config.seed, on_step)
        component.publish_anew()

    def reference_logprobs(self, examples: Sequence[RLExample]) -> tuple[int, list[np.ndarray]]:
        """`Learner.reference_logprobs`, for replay, which completes a batch that was drawn."""
        return self._learner.reference_logprobs(examples)

    def probe(self) -> float | None:
        """KL between engines and learner over a few held-out prompts; None where none was measured.

        The parity of later updates is judged by what it shows.

        Raises:
            MismatchError: it is too large.
        """
        self._component.doing = "checking that engines and learner agree"
        config, learner = self._component.config, self._learner
        lesson_id, lesson = next(iter(config.curriculum.lessons.items()))
        try:
            with self._manager() as manager:
                decoding = lesson.sampling_params.decoding(manager.context.tokenizer)
                shorter = replace(decoding, max_output_tokens=min(decoding.max_output_tokens, PROBE_TOKENS))
                asked = {"weight_step": learner.step, "worker_id": "probe", "decoding": shorter}
                batch, _ = manager.sample_batch(lesson_id, 4, 2, "eval", rng=0, **asked)
        except EnvironmentFailure as failure:  # counted where it trains; parity is checked at every step, too
            self._ctx.event("parity_not_probed", lesson=lesson_id, reason=str(failure))
            return None
        rollouts = [rollout for rollout in batch.rollouts() if rollout.sampled_tokens]
        # Log-probabilities are those before truncation, so that truncation changes nothing here.
        examples = [example_from_rollout(rollout, 0.0, config.learner.row_length, True) for rollout in rollouts]
        differences = differences_of(examples, learner.score(examples), learner.step)
        if not len(differences):
            self._ctx.event("parity_not_probed", lesson=lesson_id, reason="no token was sampled")
            return None
        monitor, rounding = self._parity.monitor, learner.rounding(examples)
        parity = monitor.calibrate(differences, rounding)
        self._ctx.event("parity", **asdict(parity), limit=monitor.limit_at_start(rounding))
        return parity.kl

    def before_update(self, batch: TrainingBatch[RLExample]) -> None:
        """`ParityCheck.begin`; the learner prepares the next batch beside it, where that is known.

        Servers that share its card fall asleep, once they have answered what parity asks.
        """
        self._learner.coming = self._component.coming_batch
        self._parity.begin(self._learner, batch)
        if self._shares_card:
            self._parity.wait_for_canaries()
            self._tell_servers("sleep")

    def after_update(self) -> Mapping[str, float]:
        """`ParityCheck.end`; what fell asleep wakes."""
        metrics = self._parity.end(self._learner)
        if self._shares_card:
            self._tell_servers("wake")
        return metrics

    @property
    def _shares_card(self) -> bool:
        external = self._component.config.inference.external
        return external is not None and external.colocate

    def _tell_servers(self, method: str) -> None:
        """All that there are; of one that does not answer it is told that it may still have the card."""
        limit_s = self._component.config.weights.fetch_timeout_s
        for peer in self._ctx.view.of("inference"):
            try:
                self._ctx.caller(peer.identity.name).call(method, timeout_s=limit_s)
            except UnreachableError as failure:
                self._ctx.event("server_not_told", server=str(peer.identity), what=method, reason=str(failure))

    @property
    def _learner(self) -> Learner:
        return cast(Learner, self._component.learner)

    @contextmanager
    def _manager(self) -> Iterator[RolloutManager]:
        """The run's where it is in this process, else one of its own, which is shut down in the end."""
        if self._pool is None:
            assert self._component.shared is not None
            yield self._component.shared.manager
            return
        settings, tokenizer = self._component.settings, self._component.settings.tokenizer()
        curriculum = Curriculum(settings.config.curriculum)  # names the lessons; nothing is recorded in it
        context = RemoteContext(self._pool, tokenizer, ordered=reproducible(settings.config))
        agents = AgentEndpoint.of(settings.config.inference, tokenizer)
        with RolloutManager(curriculum, context, settings.config.seed, settings.lineage, agents=agents) as manager:
            yield manager
