"""Numbers of one update of a control policy for metrics.jsonl, and the check that fleet and learner agree.

What is undefined for a batch or not finite is left out, never zero (`reporting.finite_only`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.learner.control_losses import LossTerms
from penstock.learner.control_step import Outcome, Summary
from penstock.learner.optimizer import Applied
from penstock.types import MismatchError


def check_fleet_mismatch(summary: Summary, limit: float, step: int) -> None:
    """Ends the run where log-probabilities of the learner's own version disagree.

    Args:
        summary: Of the batch, fetched from the device.
        limit: Largest |ℓ_p − ℓ_b| over steps sampled under exactly these weights.
        step: For the message.

    Raises:
        MismatchError: the limit is exceeded.
    """
    if summary.own_steps and float(summary.mismatch_max) > limit:
        raise MismatchError(
            f"update {step}: learner and fleet disagree about log-probabilities of the same weights by up to "
            f"{float(summary.mismatch_max):.3g} (learner.mismatch_limit is {limit:g}); nothing was applied. Different "
            "weights, observations that were changed on the way, or recurrent state that was not the fragment's own "
            "are the usual causes; a larger limit is right only where the two sides compute on different hardware"
        )


def batch_summary_metrics(summary: Summary) -> dict[str, float]:
    """``train/…`` numbers of the whole batch before the update."""
    metrics = {"train/trained_steps": float(summary.trained_steps)}
    if summary.trained_steps:
        metrics |= _trained_metrics(summary)
    if summary.own_steps:
        metrics["train/mismatch_max"] = float(summary.mismatch_max)
        metrics["train/mismatch_kl"] = _share(summary.own_kl, summary.own_steps)
    if summary.other_steps:
        metrics["train/staleness_kl"] = _share(summary.other_kl, summary.other_steps)
    return metrics


def _trained_metrics(summary: Summary) -> dict[str, float]:
    return {
        "train/explained_variance": float(summary.explained_variance),
        "train/value_mean": float(summary.value_mean),
        "train/advantage_mean": float(summary.advantage_mean),
        "train/advantage_std": float(summary.advantage_std),
        "train/correction_fraction": _share(summary.bounded, summary.trained_steps),
        "train/vtrace_fraction": _share(summary.old_steps, summary.trained_steps),
    }


def optimisation_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """``train/…`` numbers of the optimiser steps, means over them; fetched from the device.

    Minibatches of which no step is trained are counted, and nothing else of them is told.
    """
    full = [outcome for outcome in outcomes if not outcome.empty]
    counts = {
        "train/optimizer_steps": float(len(full)),
        "train/empty_minibatches": float(len(outcomes) - len(full)),
    }
    return counts | _step_metrics([each.terms for each in full], [each.applied for each in full]) if full else counts


def _step_metrics(terms: Sequence[LossTerms], applied: Sequence[Applied]) -> dict[str, float]:
    names = [name for name in LossTerms._fields if name != "reference_kl" or any(each.reference_kl for each in terms)]
    metrics = {f"train/{name}": _mean([getattr(each, name) for each in terms]) for name in names}
    metrics["train/grad_norm"] = _mean([each.grad_norm for each in applied])
    metrics["train/non_finite"] = 1.0 - _mean([each.finite for each in applied])
    return metrics


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(np.asarray(values, np.float64)))


def _share(part: Any, whole: Any) -> float:
    return float(part) / max(float(whole), 1.0)
