"""What a language policy's learner does before training: the warm start, and the parity probe.

A random model cannot reach sparse rewards by trying, so supervised steps on the environments' reference solutions may
come first. Their optimiser state is discarded; version 0 of the run is what comes out.

The probe: for equal weights, engine and learner must agree about log-probabilities. A few held-out prompts are answered
by the engine through its cached, batched decode, and the same tokens are scored by the learner's packed forward pass.
Whatever makes the two differ (a kernel, a dtype, a temperature, stale weights) would make every later update wrong in
silence, so the run refuses to start.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast, final

import numpy as np

from penstock.batch import example_from_pair, example_from_rollout
from penstock.curriculum import Curriculum
from penstock.inference import RemoteContext
from penstock.learner import Learner
from penstock.learner.config import WarmStartConfig
from penstock.overseer.language.rollout import make_pool, reproducible, servers_of
from penstock.overseer.launch.launcher import ComponentContext
from penstock.overseer.supervisor.messages import Membership
from penstock.rollout import RolloutManager
from penstock.types import AnyRollout, EnvironmentFailure, MismatchError, RolloutBatch, Stopped, fold, generator

if TYPE_CHECKING:
    from penstock.overseer.trainer import LearnerComponent


def probe_parity(manager: RolloutManager, learner: Learner, lesson_id: str, max_tokens: int, limit: float) -> float:
    """Largest difference between behaviour and recomputed log-probabilities of one probe batch.

    Args:
        manager: Its engine must hold the learner's weights.
        learner: Scores the sampled tokens.
        lesson_id: Whose prompts to use.
        max_tokens: Longest sequence.
        limit: Largest difference that passes.

    Raises:
        MismatchError: the difference exceeds `limit`.
    """
    batch, _ = manager.sample_batch(lesson_id, 4, 2, "eval", rng=0, weight_step=learner.step, worker_id="probe")
    worst = largest_difference(batch, learner, max_tokens)
    if not worst <= limit:  # nor where either side is not a number
        raise MismatchError(
            f"engine and learner disagree about log-probabilities by up to {worst:.3g} at start-up "
            f"(learner.mismatch_limit is {limit:g}): their weights, dtypes or kernels differ"
        )
    return worst


def largest_difference(batch: RolloutBatch, learner: Learner, max_tokens: int) -> float:
    """Largest |engine − learner| over the sampled tokens of a batch; 0 for a batch without any."""
    rollouts = [rollout for rollout in batch.rollouts() if rollout.sampled_tokens]
    # Log-probabilities are those before truncation, so that truncation changes nothing here.
    examples = [example_from_rollout(rollout, 0.0, max_tokens, True) for rollout in rollouts]
    scores = learner.score(examples)
    differences = [_difference(r, s) for r, s in zip(rollouts, scores, strict=True)]
    return float(np.max(differences, initial=0.0))  # unlike the built-in, NaN if any of them is


def _difference(rollout: AnyRollout, scored: np.ndarray) -> float:
    response = scored[len(rollout.prompt_tokens) : len(rollout.prompt_tokens) + len(rollout.response_tokens)]
    mask = rollout.response_mask[: len(response)]
    return float(np.abs(response - rollout.response_logprobs[: len(response)])[mask].max(initial=0.0))


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
    lessons = config.lessons or [
        lesson_id for lesson_id, lesson in manager.curriculum.config.lessons.items() if not lesson.dependencies
    ]
    rng = generator(fold(seed, "warm_start"))
    for step in range(config.steps):
        lesson_id = lessons[int(rng.integers(len(lessons)))]
        references = manager.environment(lesson_id).reference_examples(
            config.batch_size, fold(seed, "warm_start", step)
        )
        examples = [example_from_pair(*reference.token_pair(manager.context.tokenizer)) for reference in references]
        on_step(step + 1, config.steps, learner.supervised_update(examples))


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

    def on_view(self, view: Membership) -> None:
        """Follows the inference servers."""
        if self._pool is not None:
            self._pool.set_servers(servers_of(view))

    def close(self) -> None:
        """Ends its connections."""
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

        warm_start(self._learner, self._manager(), config.learner.warm_start, config.seed, on_step)
        component.publish_anew()

    def probe(self) -> float | None:
        """Largest difference between the servers' log-probabilities and the learner's; None where none was measured.

        Raises:
            MismatchError: it is too large.
        """
        self._component.doing = "checking that engines and learner agree"
        config = self._component.config
        lesson_id, limit = next(iter(config.curriculum.lessons)), config.learner.mismatch_limit
        try:
            worst = probe_parity(self._manager(), self._learner, lesson_id, config.learner.row_length, limit)
        except EnvironmentFailure as failure:  # counted where it trains; parity is checked at every step, too
            self._ctx.event("parity_not_probed", lesson=lesson_id, reason=str(failure))
            return None
        self._ctx.event("parity", largest_difference=worst, limit=limit)
        return worst

    @property
    def _learner(self) -> Learner:
        return cast(Learner, self._component.learner)

    def _manager(self) -> RolloutManager:
        if self._pool is None:
            assert self._component.shared is not None
            return self._component.shared.manager
        settings = self._component.settings
        curriculum = Curriculum(settings.config.curriculum)  # names the lessons; nothing is recorded in it
        context = RemoteContext(self._pool, settings.tokenizer(), ordered=reproducible(settings.config))
        return RolloutManager(curriculum, context, settings.config.seed, settings.lineage)
