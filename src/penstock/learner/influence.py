"""What each rollout of an update did to it: its gradient, and the update that there would have been without it.

With g the gradient of an optimiser step, g_i the part of it that rollout i made (same denominators, so that Σ g_i = g)
and u(g) what the optimiser makes of a gradient, moments, clipping and all, the step taken is Δθ = −rate · u(g), and

- its inner product −⟨g_i, Δθ⟩ is by how much the step lowers the rollout's own loss, to first order;
- d_i = u(g) − u(g − g_i) is what the rollout did to the step: exact, not to first order, for an update of one step.

One backward pass per rollout, and one per span where it has several; three gradients live at a time. Not covered: what
a rollout did to later optimiser steps by way of the parameters and moments.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float32, PyTree

from penstock.learner.config import OptimizerConfig
from penstock.learner.learner import Learner
from penstock.learner.optimizer import OptimizerState, direction_of
from penstock.types import RLExample, TrainingBatch


class StepInfluence(NamedTuple):
    """Of one gradient on one optimiser step; u before the learning rate.

    Attributes:
        norm: ‖g_i‖.
        inner: ⟨g_i, u⟩.
        moved: ‖d_i‖.
        along: ⟨d_i, u⟩.
    """

    norm: Float32[Array, ""]
    inner: Float32[Array, ""]
    moved: Float32[Array, ""]
    along: Float32[Array, ""]


@dataclass(frozen=True, slots=True)
class SpanInfluence:
    """Of some of a rollout's tokens.

    Attributes:
        start: First position of the span in prompt and response.
        stop: One past its last.
        gradient_norm: Over the update's optimiser steps, the root of the sum of squares.
        inner_product: −⟨g_i, Δθ⟩, summed over them.
    """

    start: int
    stop: int
    gradient_norm: float
    inner_product: float


@dataclass(frozen=True, slots=True)
class RolloutInfluence:
    """Of a rollout on an update.

    Attributes:
        rollout_id: The rollout.
        gradient_norm: As of `SpanInfluence`, like `inner_product`. Where it is not finite, neither is the whole
            gradient, and the optimiser skips the step, which then counts in nothing else.
        inner_product: Of all of its tokens.
        moved: Σ‖d_i‖ / Σ‖u‖ over optimiser steps: how much of the update would be another without it.
        along: Σ⟨d_i, u⟩ / Σ‖u‖²: the share of the update, in its own direction, that would be missing.
        advantage: What the loss weighs it with, the mean over its sampled tokens.
        spans: What the policy said in a row, where it spoke more than once.
    """

    rollout_id: str
    gradient_norm: float
    inner_product: float
    moved: float
    along: float
    advantage: float
    spans: tuple[SpanInfluence, ...] = ()


def influences(
    learner: Learner, config: OptimizerConfig, batch: TrainingBatch, version_step: int
) -> list[RolloutInfluence]:
    """Makes an update, and says of each rollout what it did to it, in batch order.

    Args:
        learner: At the version that the update begins with; afterwards at the next.
        config: Of the learner's own optimiser.
        batch: What the update trains on.
        version_step: The version that the caller believes the parameters to have.
    """
    by_id = {example.rollout_ids[0]: example for example in batch.examples}
    whole: dict[str, _Sum] = defaultdict(_Sum)
    spans: dict[tuple[str, int, int], _Sum] = defaultdict(_Sum)
    advantages = dict[str, float]()
    length = square = 0.0
    for step in learner.planned_steps(batch, version_step):
        taken = _director(config)(step.decoder, step.state, step.gradients)
        norm = float(optax.tree.norm(taken))
        was_taken = math.isfinite(norm)
        if was_taken:
            length, square = length + norm, square + norm**2
        for example in step.examples:
            rollout_id = example.rollout_ids[0]
            advantages[rollout_id] = float(example.advantage[example.loss_mask].mean(dtype=float))
            measure = partial(_meter(config), step.decoder, step.state, step.gradients, taken)
            found = measure(step.gradient_of(rollout_id, 0, len(example.tokens)))
            whole[rollout_id].add(found, step.rate if was_taken else None)
            for start, stop in _several_spans(example):
                part = _products(step.gradient_of(rollout_id, start, stop), taken)
                spans[rollout_id, start, stop].add(StepInfluence(*part, *part), step.rate if was_taken else None)
    parts: dict[str, list[SpanInfluence]] = defaultdict(list)
    for (rollout_id, start, stop), total in spans.items():
        parts[rollout_id].append(SpanInfluence(start, stop, total.norm, total.inner))
    return [
        RolloutInfluence(
            rollout_id,
            total.norm,
            total.inner,
            total.moved / length if length else 0.0,
            total.along / square if square else 0.0,
            advantages[rollout_id],
            tuple(parts[rollout_id]),
        )
        for rollout_id, total in ((rollout_id, whole[rollout_id]) for rollout_id in by_id)
    ]


class _Sum:
    """Over optimiser steps."""

    def __init__(self) -> None:
        self._squares = self.inner = self.moved = self.along = 0.0

    def add(self, found: StepInfluence, rate: float | None) -> None:
        """One more; without a rate of a step that was skipped, which nothing moved."""
        norm, inner, moved, along = map(float, jax.device_get(found))
        self._squares += norm**2
        if rate is None:
            return
        self.inner += rate * inner
        self.moved += moved
        self.along += along

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares)


def _several_spans(example: RLExample) -> Iterator[tuple[int, int]]:
    """First and last + 1 of each run of tokens under the loss mask; none where there is one run."""
    edges: Bool[np.ndarray, " pos"] = np.diff(example.loss_mask, prepend=False, append=False)
    bounds = np.flatnonzero(edges).reshape(-1, 2)
    yield from ((int(start), int(stop)) for start, stop in bounds if len(bounds) > 1)


@cache
def _director(config: OptimizerConfig) -> Any:
    return jax.jit(partial(direction_of, config))


@cache
def _meter(config: OptimizerConfig) -> Any:
    """Compiled `_measure`; nothing is donated, since the step is still to be taken."""
    return jax.jit(partial(_measure, config))


def _measure(
    config: OptimizerConfig, parameters: PyTree, state: OptimizerState, gradients: PyTree, taken: PyTree, own: PyTree
) -> StepInfluence:
    rest = jax.tree.map(jnp.subtract, gradients, own)
    without = direction_of(config, parameters, state, rest)
    difference = jax.tree.map(jnp.subtract, taken, without)
    return StepInfluence(*_products(own, taken), *_products(difference, taken))


@jax.jit
def _products(tree: PyTree, taken: PyTree) -> tuple[Array, Array]:
    """Its norm, and its inner product with the step."""
    return optax.tree.norm(tree), jnp.asarray(optax.tree.vdot(tree, taken))
