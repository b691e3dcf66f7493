"""Weights of a small language model while it is trained, as the learner would publish them: one set per update.

A residual network over token embeddings learns the next token of a synthetic language with AdamW. Master weights are
float32 and the published ones bfloat16, as in a mixed-precision run. The language is drawn anew for the part that is
recorded, so that there is something to learn, as in fine-tuning.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Size:
    """Of the model: 2 * vocabulary * width + 8 * layers * width² parameters."""

    vocabulary: int = 8192
    width: int = 512
    layers: int = 4
    batch_tokens: int = 256


TINY = Size(vocabulary=256, width=64, layers=2, batch_tokens=64)


def record(size: Size, learning_rate: float, updates: int, warm_up: int = 5) -> Iterator[dict[str, np.ndarray]]:
    """Published weights before the first update and after each: bfloat16 arrays by name.

    Args:
        size: Of the model.
        learning_rate: Of the recorded updates.
        updates: How many are recorded.
        warm_up: Updates with a learning rate of 1e-3 that come before, so that the weights are not those of a draw.
    """
    params = _initial(size)
    rng = np.random.default_rng(0)
    for rate, count, language in ((1e-3, warm_up, 1), (learning_rate, updates, 2)):
        optimizer = optax.adamw(rate)
        state = optimizer.init(params)
        successor = np.random.default_rng(language).permutation(size.vocabulary)
        if rate == learning_rate and count == updates:
            yield published(params)
        for _ in range(count):
            tokens = rng.integers(0, size.vocabulary, size.batch_tokens)
            gradients = _gradients(params, jnp.asarray(tokens), jnp.asarray(successor[tokens]))
            changes, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, changes)
            if language == 2:
                yield published(params)


def published(params: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(array.astype(jnp.bfloat16)) for name, array in params.items()}


def _initial(size: Size) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 2 + 2 * size.layers))
    shapes = {"embedding": (size.vocabulary, size.width), "head": (size.width, size.vocabulary)}
    for layer in range(size.layers):
        shapes[f"layers.{layer}.up"] = (size.width, 4 * size.width)
        shapes[f"layers.{layer}.down"] = (4 * size.width, size.width)
    return {name: 0.02 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}


@jax.jit
def _gradients(params: dict[str, jax.Array], tokens: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        hidden = params["embedding"][tokens]
        for layer in range(sum(name.endswith(".up") for name in params)):
            normed = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, -1, keepdims=True) + 1e-6)
            hidden = hidden + jax.nn.silu(normed @ params[f"layers.{layer}.up"]) @ params[f"layers.{layer}.down"]
        logits = hidden @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    return jax.grad(loss)(params)
