"""Numbers of one update for metrics.jsonl, and the check that both sides hold the same policy.

A metric that is undefined for a batch (the drift of older rollouts where there are none) or not finite (the loss of
an update that was skipped) is left out, never zero.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.learner.optimizer import Applied
from penstock.learner.step import Sums
from penstock.types import MismatchError, RLExample, TrainingBatch


def check_mismatch(sums: Sums, limit: float, step: int) -> None:
    """Ends the run where same-version log-probabilities disagree.

    Args:
        sums: Of the whole step, fetched from the device.
        limit: Largest |ℓ_θ − ℓ_b| over tokens of sequences sampled under exactly these weights.
        step: For the message.

    Raises:
        MismatchError: the limit is exceeded.
    """
    if sums.same_tokens and float(sums.mismatch_max) > limit:
        raise MismatchError(
            f"update {step}: learner and engine disagree about log-probabilities of the same weights by up to "
            f"{float(sums.mismatch_max):.3g} (learner.mismatch_limit is {limit:g}); the step was not applied. "
            "Different weights, temperature, dtype or kernels on the two sides are the usual causes"
        )


def loss_metrics(sums: Sums) -> dict[str, float]:
    """``train/…`` numbers that the forward passes gave; sums are fetched from the device."""
    tokens = max(float(sums.tokens), 1.0)
    metrics = {
        "train/loss": float(sums.loss),
        "train/tokens": float(sums.tokens),
        "train/clip_fraction": float(sums.clipped) / tokens,
        "train/correction_fraction": float(sums.bounded) / tokens,
        "train/ratio_mean": float(sums.ratio) / tokens,
        "train/entropy": float(sums.entropy) / tokens,
    }
    if sums.same_tokens:
        metrics["train/mismatch_kl"] = float(sums.same_kl) / float(sums.same_tokens)
        metrics["train/mismatch_max"] = float(sums.mismatch_max)
    if sums.stale_tokens:
        metrics["train/staleness_kl"] = float(sums.stale_kl) / float(sums.stale_tokens)
    return metrics


def step_metrics(applied: Applied, rate: float) -> dict[str, float]:
    """``train/…`` numbers of the optimiser step."""
    return {
        "train/grad_norm": float(applied.grad_norm),
        "train/learning_rate": rate,
        "train/non_finite": float(not applied.finite),
    }


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Advantages per sequence, and the rewards where the batch's own metrics have them."""
    advantages = np.array([example.advantage[example.loss_mask][0] for example in batch.examples], np.float64)
    metrics = {
        "train/sequences": float(len(advantages)),
        "train/advantage_mean": float(advantages.mean()),
        "train/advantage_std": float(advantages.std()),
        "train/advantage_max": float(np.abs(advantages).max()),
        "train/advantage_zero_fraction": float((advantages == 0).mean()),
    }
    return metrics | {name: value for name, value in batch.metrics.items() if name.startswith("train/")}


def throughput_metrics(
    examples: Sequence[RLExample], row_tokens: int, gradient_s: float, apply_s: float
) -> dict[str, float]:
    """Seconds and tokens.

    Args:
        examples: Of the step.
        row_tokens: Positions of all rows that went through the model, padding included.
        gradient_s: Forward and backward passes.
        apply_s: The optimiser step.
    """
    tokens = sum(len(example.tokens) for example in examples)
    return {
        "time/forward_backward": gradient_s,
        "time/apply": apply_s,
        "throughput/learner_tokens_per_s": tokens / max(gradient_s + apply_s, 1e-9),
        "throughput/row_fill": tokens / row_tokens,
    }


def finite_only(*metrics: Mapping[str, float]) -> dict[str, float]:
    """All of them, without what JSON has no number for."""
    return {name: value for part in metrics for name, value in part.items() if math.isfinite(value)}
