"""The numbers of an update of a language policy, by the names that metrics have.

A metric that is undefined for a batch (the drift of older rollouts where there are none) or not finite (the loss of
an update that was skipped) is left out, never zero.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from penstock.learner.config import OptimizerConfig
from penstock.learner.micro_batches import UpdatePlan
from penstock.learner.optimizer import AppliedUpdate
from penstock.learner.step import LossSums
from penstock.types import NonFiniteError, TrainingBatch


class StepOutcome(NamedTuple):
    """What one optimiser step came to, fetched from the device.

    Attributes:
        sums: Of the forward passes.
        applied: Of the optimiser.
        gradient_s: Seconds of forward and backward passes.
        apply_s: Seconds of the optimiser step.
        tokens: Of the sequences that went through the model, prompts included.
        row_tokens: Positions of rows that hold a sequence, padding included.
        all_tokens: Positions of all rows that went through the model, those that only fill up a micro-batch included.
    """

    sums: LossSums
    applied: AppliedUpdate
    gradient_s: float
    apply_s: float
    tokens: int
    row_tokens: int
    all_tokens: int


def loss_metrics(outcomes: Sequence[StepOutcome], reference: bool = False) -> dict[str, float]:
    """``train/…`` numbers that the forward passes gave; the loss is the mean of the steps', and alone without a token.

    The others are means over the tokens of all steps.

    Args:
        outcomes: Of an update's optimiser steps.
        reference: Whether the examples had log-probabilities of a reference.
    """
    sums = jax.tree.map(lambda *parts: sum(parts), *(outcome.sums for outcome in outcomes))
    tokens, metrics = float(sums.tokens), {"train/loss": float(sums.loss) / len(outcomes)}
    if not tokens:
        return metrics
    metrics |= {
        "train/clip_fraction": float(sums.clipped) / tokens,
        "train/correction_fraction": float(sums.bounded) / tokens,
        "train/ratio_mean": float(sums.ratio) / tokens,
        "train/entropy": float(sums.entropy) / tokens,
    }
    if sums.value_loss:
        metrics["train/value_loss"] = float(sums.value_loss) / len(outcomes)
        metrics["train/value_clip_fraction"] = float(sums.value_clipped) / tokens
    if reference:
        metrics["train/kl_reference"] = float(sums.reference_kl) / tokens
    if sums.stale_tokens:
        metrics["train/staleness_kl"] = float(sums.stale_kl) / float(sums.stale_tokens)
    return metrics


def rate_metrics(config: OptimizerConfig, rate: float) -> dict[str, float]:
    """The learning rate, and by pattern that of arrays which have another."""
    by_pattern = {f"train/learning_rate/{pattern}": by * rate for pattern, by in config.rates.items()}
    return {"train/learning_rate": rate, **by_pattern}


def step_metrics(outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """``train/…`` numbers of the optimiser steps: means over them, and how many there were."""
    applied = [outcome.applied for outcome in outcomes]
    return {
        "train/grad_norm": _mean(each.grad_norm for each in applied),
        "train/changed_fraction": _mean(each.changed_fraction for each in applied),
        "train/non_finite": _mean(not each.finite for each in applied),
        "train/optimizer_steps": float(len(outcomes)),
    }


def _mean(values: Iterable[Any]) -> float:
    return float(np.mean([float(value) for value in values]))


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Advantages per sequence, and the rewards where the batch's own metrics have them."""
    of_tokens = [example.advantage[example.loss_mask] for example in batch.examples]
    advantages = np.array([found.mean(dtype=np.float64) for found in of_tokens])
    largest = np.array([np.abs(found).max() for found in of_tokens], np.float64)
    metrics = {
        "train/sequences": float(len(advantages)),
        "train/tokens": float(sum(map(len, of_tokens))),
        "train/groups": float(len(set(batch.group_ids))),
        "train/advantage_mean": float(advantages.mean()),
        "train/advantage_std": float(advantages.std()),
        "train/advantage_max": float(largest.max()),
        "train/advantage_zero_fraction": float((largest == 0).mean()),
    }
    return metrics | {name: value for name, value in batch.metrics.items() if name.startswith("train/")}


def row_tokens_of(plan: UpdatePlan) -> tuple[int, int]:
    """Positions of the rows that hold a sequence, and of all rows."""
    shapes = [batch.integers.shape[1:] for batch in plan.micro_batches]
    lengths = [length for rows, length in shapes for _ in range(rows)]
    return sum(lengths[row] for row in {placement.row for placement in plan.placements}), sum(lengths)


def throughput_metrics(outcomes: Sequence[StepOutcome], scoring_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds and tokens.

    Args:
        outcomes: Of an update's optimiser steps.
        scoring_s: Seconds of forward passes before the first, by their metric's name.
    """
    tokens, row_tokens = sum(each.tokens for each in outcomes), sum(each.row_tokens for each in outcomes)
    gradient_s, apply_s = sum(each.gradient_s for each in outcomes), sum(each.apply_s for each in outcomes)
    filled: dict[str, float] = {}
    if row_tokens:
        all_tokens = sum(each.all_tokens for each in outcomes)
        filled = {"throughput/row_fill": tokens / row_tokens, "throughput/rows_used": row_tokens / all_tokens}
    return {
        **scoring_s,
        **filled,
        "time/forward_backward": gradient_s,
        "time/apply": apply_s,
        "throughput/learner_tokens_per_s": tokens / max(gradient_s + apply_s + sum(scoring_s.values()), 1e-9),
    }


def finite_only(*metrics: Mapping[str, float]) -> dict[str, float]:
    """All of them, without what JSON has no number for."""
    return {name: value for part in metrics for name, value in part.items() if math.isfinite(value)}


def skipped_in_a_row(before: int, applied: Sequence[AppliedUpdate], most: int, suspects: str) -> int:
    """How many updates were skipped one after the other, with this one, if one of its steps was.

    Raises:
        NonFiniteError: they are as many as `most`; it names the suspects.
    """
    skipped = 0 if all(each.finite for each in applied) else before + 1
    if skipped >= most:
        raise NonFiniteError(
            f"{skipped} updates in a row had a loss or gradient that was not finite "
            f"(learner.max_non_finite_updates): lower the learning rate, or look at {suspects}"
        )
    return skipped
