"""The value head of a language policy: what rewards are still to come, read from the policy's own hidden states.

One linear function of the state that predicts a token, V(s_t) = w · h_t + b, float32, zero before the first update. Its
loss reaches the layers below, too (times `learner.critic.coefficient`); w and b have an optimiser and a learning rate
of their own. Time is the policy's sampled tokens alone: what an environment says between two of them belongs to the
step from the one to the other, and so does any reward that falls there. An episode's end is terminal, also where an
answer was cut at its longest: its reward is that of what was said.

Not covered: a critic with a body of its own; GAE of simulators (`control_losses`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from penstock.batch.advantages import STD_FLOOR
from penstock.learner.config import LearnerConfig
from penstock.learner.optimizer import applier, from_named, initial_state, to_named
from penstock.types import CheckpointError, RLExample

_PREFIX = "critic."


class ValueHead(eqx.Module):
    """V(s) = w · h + b.

    Attributes:
        weight: w, one for each feature of a hidden state.
        bias: b.
    """

    weight: Float32[Array, " hidden"]
    bias: Float32[Array, ""]

    @classmethod
    def zero(cls, hidden_size: int) -> "ValueHead":
        """V = 0 everywhere."""
        return cls(jnp.zeros(hidden_size, jnp.float32), jnp.zeros((), jnp.float32))

    def __call__(self, states: Float[Array, "n hidden"]) -> Float32[Array, " n"]:
        """V of each state."""
        return jnp.dot(states.astype(jnp.float32), self.weight, precision=jax.lax.Precision.HIGHEST) + self.bias


class ValueTargets(NamedTuple):
    """Of one example, aligned with its tokens; 0 outside the loss mask.

    Attributes:
        values: V of the state before each token, at the update's beginning.
        returns: What V should be there.
    """

    values: Float32[np.ndarray, " pos"]
    returns: Float32[np.ndarray, " pos"]


def token_gae(
    rewards_to_go: Float32[np.ndarray, " n"], values: Float32[np.ndarray, " n"], discount: float, gae_lambda: float
) -> Float32[np.ndarray, " n"]:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V(s_{t+1}) − V(s_t), over the n sampled tokens of an episode.

    Rewards 0, 0, 1 (to go 1, 1, 1), V = .5, .25, .75, γ = 1, λ = .5 -> [0.0625, .625, .25]; λ = 1 is r to go − V.
    Schulman et al. 2016, https://arxiv.org/abs/1506.02438.
    """
    rewards = rewards_to_go.astype(np.float64) - np.append(rewards_to_go[1:], 0)
    deltas = rewards + discount * np.append(values[1:], 0).astype(np.float64) - values
    advantages, following = np.zeros(len(deltas)), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        following = deltas[t] + discount * gae_lambda * following
        advantages[t] = following
    return advantages.astype(np.float32)


def value_token_loss(
    values: Float32[Array, " n"], before: Float32[Array, " n"], returns: Float32[Array, " n"], clip: float | None
) -> tuple[Float32[Array, " n"], Bool[Array, " n"]]:
    """½ max((V − R)², (V_before + clip(V − V_before, ±c) − R)²), and where the second decides, which has no gradient.

    V = 1, V_before = 0, R = 2, c = .2 -> ½ · 1.8²; R = .5 -> ½ · .5² (the first). Schulman et al. 2017's code,
    https://github.com/openai/baselines. Without c the first alone.
    """
    plain = jnp.square(values - returns)
    if clip is None:
        return 0.5 * plain, jnp.zeros(plain.shape, jnp.bool_)
    moved = values - before
    bounded = jnp.square(before + jnp.clip(moved, -clip, clip) - returns)
    return 0.5 * jnp.maximum(plain, bounded), (bounded > plain) & (jnp.abs(moved) > clip)


@final
class Critic:
    """The value head with its optimiser; nothing, where no advantage asks for values.

    Args:
        config: The learner's, with `critic` and `optimizer`.
        hidden_size: Features of a hidden state.
    """

    def __init__(self, config: LearnerConfig, hidden_size: int) -> None:
        self._config = config.critic
        changes = {"learning_rate": config.critic.learning_rate, "weight_decay": 0.0, "frozen": (), "rates": {}}
        self._optimizer = config.optimizer.model_copy(update=changes | {"name": "adamw"})
        self.head = ValueHead.zero(hidden_size) if config.has_critic else None
        self._state = None if self.head is None else initial_state(self._optimizer, self.head)
        self._apply = applier(self._optimizer)

    def advantages(
        self, examples: Sequence[RLExample], values: Sequence[Float32[np.ndarray, " _"]]
    ) -> tuple[list[RLExample], list[ValueTargets], dict[str, float]]:
        """GAE of each example, whose advantages are rewards to go; with its targets, and metrics.

        Args:
            examples: Of an update.
            values: Of each, V of the state before each token.
        """
        config, masks = self._config, [example.loss_mask for example in examples]
        found = [
            token_gae(example.advantage[mask], value[mask], config.discount, config.gae_lambda)
            for example, value, mask in zip(examples, values, masks, strict=True)
        ]
        targets = [
            ValueTargets(_spread(value[mask], mask), _spread(value[mask] + advantage, mask))
            for value, advantage, mask in zip(values, found, masks, strict=True)
        ]
        metrics = _explained([each.values[mask] for each, mask in zip(targets, masks, strict=True)], found)
        if config.normalize_advantages:
            found = _normalised(found)
        made = [
            replace(example, advantage=_spread(advantage, mask))
            for example, advantage, mask in zip(examples, found, masks, strict=True)
        ]
        return made, targets, metrics

    def step(self, gradients: Any, loss: Any, step: int, total_steps: int) -> None:
        """One optimiser step of the head; nothing where there is none, or where `loss` is not finite."""
        if self.head is not None:
            rate = np.float32(self._optimizer.rate_at(step, total_steps))
            self._state, self.head, _ = self._apply(self.head, self._state, gradients, rate, loss)

    def lower(self, gradients: Any) -> Any:
        """The program of `step`, to be compiled."""
        return self._apply.lower(self.head, self._state, gradients, np.float32(0), np.float32(0))

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Head and optimiser state by name, as a checkpoint keeps them."""
        if self.head is None:
            return {}
        named = to_named(self.head) | {f"optimizer.{name}": array for name, array in to_named(self._state).items()}
        return {_PREFIX + name: array for name, array in named.items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes `state_arrays` back; returns what is not its own. A checkpoint without a value head begins one.

        Raises:
            CheckpointError: names or shapes do not fit.
        """
        kept = {name.removeprefix(_PREFIX): array for name, array in arrays.items() if name.startswith(_PREFIX)}
        if kept and self.head is not None and self._state is not None:
            state = {n.removeprefix("optimizer."): a for n, a in kept.items() if n.startswith("optimizer.")}
            weight, bias = kept.get("weight"), kept.get("bias")
            if weight is None or bias is None or weight.shape != self.head.weight.shape:
                raise CheckpointError("the checkpoint's value head does not fit the model: begin a new run")
            self._state = from_named(self._state, state)
            self.head = ValueHead(jnp.asarray(weight), jnp.asarray(bias))
        return {name: array for name, array in arrays.items() if not name.startswith(_PREFIX)}


def _spread(values: np.ndarray, mask: np.ndarray) -> Float32[np.ndarray, " pos"]:
    """Values at the mask's places, 0 elsewhere."""
    whole = np.zeros(len(mask), np.float32)
    whole[mask] = values
    return whole


def _explained(values: Sequence[np.ndarray], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """Before the update, over all sampled tokens: mean V, and 1 − Var(R − V) / Var(R); none where all R are equal."""
    predicted, errors = (np.concatenate(each).astype(np.float64) for each in (values, advantages))
    returns = predicted + errors
    metrics = {"train/value_mean": float(predicted.mean())}
    if returns.var() > STD_FLOOR**2:
        metrics["train/explained_variance"] = float(1 - errors.var() / returns.var())
    return metrics


def _normalised(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """To mean 0 and sample deviation 1 over all sampled tokens of the batch; a single one has 0."""
    every = np.concatenate(advantages).astype(np.float64)
    scale = every.std(ddof=1 if len(every) > 1 else 0) + STD_FLOOR
    return [((each - every.mean()) / scale).astype(np.float32) for each in advantages]
