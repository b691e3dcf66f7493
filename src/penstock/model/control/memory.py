"""Recurrent memory: GRU and LSTM.

State is a flat mapping of [batch, …] arrays, zero at an episode's start. `first` says where an observation begins an
episode: there the state is reset before it is used. `unroll` over T steps equals T calls of `step`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from penstock.model.control.layers import Dense, orthogonal

State = Mapping[str, Array]
"""Arrays by name, [batch, …]."""


class Memory(eqx.Module):
    """What lies between the encoder and the heads."""

    @abstractmethod
    def initial_state(self, batch: int) -> dict[str, Array]:
        """The state before an episode's first step."""

    @abstractmethod
    def step(
        self, inputs: Float[Array, "batch inputs"], state: State, first: Bool[Array, " batch"]
    ) -> tuple[Float[Array, "batch features"], dict[str, Array]]:
        """One step: features for the heads, and the state after it."""

    @abstractmethod
    def unroll(
        self, inputs: Float[Array, "time batch inputs"], state: State, first: Bool[Array, "time batch"]
    ) -> tuple[Float[Array, "time batch features"], dict[str, Array]]:
        """T steps: features, and the state after each, [T, batch, …]."""


class RecurrentMemory(Memory):
    """A GRU (Cho et al. 2014, reset gate inside the product) or an LSTM (Hochreiter and Schmidhuber 1997).

    Attributes:
        gates: From inputs to all gates: reset, update, candidate; or input, forget, candidate, output.
        recurrent: From the hidden state to all gates.
        candidate_bias: Of the GRU's hidden part of the candidate; None for an LSTM.
    """

    gates: Dense
    recurrent: Float[Array, "size gates"]
    candidate_bias: Float[Array, " size"] | None
    kind: Literal["gru", "lstm"] = eqx.field(static=True)

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: Literal["gru", "lstm"], inputs: int, size: int) -> "RecurrentMemory":
        """Orthogonal gates; an LSTM's forget gate begins at a bias of 1, open."""
        count = 3 if kind == "gru" else 4
        weight = np.concatenate([orthogonal(rng, inputs, size, 1.0) for _ in range(count)], axis=1)
        recurrent = np.concatenate([orthogonal(rng, size, size, 1.0) for _ in range(count)], axis=1)
        bias = np.zeros(count * size, np.float32)
        if kind == "lstm":
            bias[size : 2 * size] = 1.0
        extra = jnp.zeros(size, jnp.float32) if kind == "gru" else None
        return cls(Dense(jnp.asarray(weight), jnp.asarray(bias)), jnp.asarray(recurrent), extra, kind)

    @property
    def size(self) -> int:
        """Width of the hidden state."""
        return self.recurrent.shape[0]

    def initial_state(self, batch: int) -> dict[str, Array]:
        """Zeros: ``hidden``, and an LSTM's ``cell``."""
        names = ("hidden",) if self.kind == "gru" else ("hidden", "cell")
        return {name: jnp.zeros((batch, self.size), jnp.float32) for name in names}

    def step(
        self, inputs: Float[Array, "batch inputs"], state: State, first: Bool[Array, " batch"]
    ) -> tuple[Float[Array, "batch features"], dict[str, Array]]:
        """One step."""
        after = self._cell(self.gates(inputs), reset(state, first))
        return after["hidden"], after

    def unroll(
        self, inputs: Float[Array, "time batch inputs"], state: State, first: Bool[Array, "time batch"]
    ) -> tuple[Float[Array, "time batch features"], dict[str, Array]]:
        """T steps; the inputs' part of the gates is one product, only the hidden state's is repeated."""

        def run(before: dict[str, Array], row: tuple[Array, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
            after = self._cell(row[0], reset(before, row[1]))
            return after, after

        _, states = jax.lax.scan(run, dict(state), (self.gates(inputs), first))
        return states["hidden"], states

    def _cell(self, gates: Float[Array, "batch gates"], state: State) -> dict[str, Array]:
        hidden = state["hidden"]
        products = hidden @ self.recurrent
        if self.kind == "gru":
            assert self.candidate_bias is not None
            reset_x, update_x, candidate_x = jnp.split(gates, 3, axis=-1)
            reset_h, update_h, candidate_h = jnp.split(products, 3, axis=-1)
            update = jax.nn.sigmoid(update_x + update_h)
            kept = jax.nn.sigmoid(reset_x + reset_h) * (candidate_h + self.candidate_bias)
            candidate = jnp.tanh(candidate_x + kept)
            return {"hidden": candidate + update * (hidden - candidate)}
        enter, forget, candidate, leave = jnp.split(gates + products, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * state["cell"] + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
        return {"hidden": jax.nn.sigmoid(leave) * jnp.tanh(cell), "cell": cell}


def reset(state: State, first: Bool[Array, " batch"]) -> dict[str, Array]:
    """The state, with zeros where an episode begins."""

    def zeroed(array: Array) -> Array:
        return jnp.where(first.reshape(-1, *(1,) * (array.ndim - 1)), jnp.zeros((), array.dtype), array)

    return {name: zeroed(array) for name, array in state.items()}
