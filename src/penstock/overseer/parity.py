"""The probe at start-up: for equal weights, engine and learner must agree about log-probabilities.

A few held-out prompts are answered by the engine through its cached, batched decode, and the same tokens are scored by
the learner's packed forward pass. Whatever makes the two differ (a kernel, a dtype, a temperature, stale weights)
would make every later update wrong in silence, so the run refuses to start.
"""

import numpy as np

from penstock.batch import example_from_rollout
from penstock.learner import Learner
from penstock.rollout import RolloutManager
from penstock.types import AnyRollout, MismatchError, RolloutBatch


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
