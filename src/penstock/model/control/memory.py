"""Memory of a control policy: GRU, LSTM, or a transformer over a fixed window of past steps.

State is a flat mapping of [batch, …] arrays, zero at an episode's start. `first` says where an observation begins an
episode: there the state is reset before it is used. `unroll` over T steps equals T calls of `step`.

Each layer of the transformer remembers its own (normalised) inputs of the last `window` steps, so that a step costs one
query, and what a layer saw reaches back further with every layer above it. State: ``features`` [batch, layers, window,
width], oldest first, and ``length`` int32 [batch], how many of them count (the newest). Positions are ages: each head
adds a learned number per age to its scores. Attention is written once, on inputs and not on keys and values,
q · (K x) = (Kᵀ q) · x, so that nothing but inputs is stored and one equation serves `step` and `unroll`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from penstock.model.control.layers import HIDDEN_GAIN, Dense, orthogonal

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


_FORBIDDEN = -1e30
_EPS = 1e-5


def layer_norm(x: Float[Array, "*batch width"], weight: Float[Array, " width"]) -> Float[Array, "*batch width"]:
    """Centres and normalises the last axis: (x − mean) / sqrt(var + 1e-5) · weight."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + _EPS) * weight


class WindowLayer(eqx.Module):
    """Attention over the window and an MLP, each with a norm before and a residual connection around it."""

    attention_norm: Float[Array, " width"]
    query: Float[Array, "width heads part"]
    key: Float[Array, "width heads part"]
    value: Float[Array, "width heads part"]
    output: Dense
    age_bias: Float[Array, "heads window"]
    mlp_norm: Float[Array, " width"]
    up: Dense
    down: Dense

    @classmethod
    def draw(cls, rng: np.random.Generator, width: int, heads: int, window: int) -> "WindowLayer":
        """Orthogonal matrices; what writes to the residual stream begins at a tenth of the others' gain."""

        def projection() -> Array:
            return jnp.asarray(orthogonal(rng, width, width, 1.0).reshape(width, heads, width // heads))

        return cls(
            attention_norm=jnp.ones(width, jnp.float32),
            query=projection(),
            key=projection(),
            value=projection(),
            output=Dense.draw(rng, width, width, 0.1),
            age_bias=jnp.zeros((heads, window), jnp.float32),
            mlp_norm=jnp.ones(width, jnp.float32),
            up=Dense.draw(rng, width, 4 * width, HIDDEN_GAIN),
            down=Dense.draw(rng, 4 * width, width, 0.1),
        )

    def attend(
        self,
        queries: Float[Array, "batch queries width"],
        remembered: Float[Array, "batch keys width"],
        ages: Int[Array, "queries keys"],
        allowed: Bool[Array, "batch queries keys"],
    ) -> Float[Array, "batch queries width"]:
        """What each query finds among the remembered inputs; every query is allowed at least one (itself)."""
        asked = jnp.einsum("bqd,dhp,ehp->bqhe", queries, self.query, self.key, optimize="optimal")
        scores = jnp.einsum("bqhe,bke->bhqk", asked, remembered) / math.sqrt(self.query.shape[-1])
        scores += self.age_bias[:, jnp.clip(ages, 0, self.age_bias.shape[1] - 1)]
        weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, _FORBIDDEN), axis=-1)
        found = jnp.einsum("bhqk,bke->bqhe", weights, remembered)
        mixed = jnp.einsum("bqhe,ehp->bqhp", found, self.value)
        return self.output(mixed.reshape(*queries.shape))

    def mlp(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """The residual stream after the second half of the layer."""
        return x + self.down(jax.nn.silu(self.up(layer_norm(x, self.mlp_norm))))


class WindowMemory(Memory):
    """Layers over the window; see the module."""

    entry: Dense
    layers: tuple[WindowLayer, ...]
    final_norm: Float[Array, " width"]
    window: int = eqx.field(static=True)

    @classmethod
    def draw(
        cls, rng: np.random.Generator, inputs: int, width: int, depth: int, heads: int, window: int
    ) -> "WindowMemory":
        """A memory of that depth and width for inputs of that width."""
        layers = tuple(WindowLayer.draw(rng, width, heads, window) for _ in range(depth))
        return cls(Dense.draw(rng, inputs, width, 1.0), layers, jnp.ones(width, jnp.float32), window)

    def initial_state(self, batch: int) -> dict[str, Array]:
        """Nothing remembered."""
        shape = (batch, len(self.layers), self.window, len(self.final_norm))
        return {"features": jnp.zeros(shape, jnp.float32), "length": jnp.zeros(batch, jnp.int32)}

    def step(
        self, inputs: Float[Array, "batch inputs"], state: State, first: Bool[Array, " batch"]
    ) -> tuple[Float[Array, "batch features"], dict[str, Array]]:
        """One step: the window moves on by one."""
        before = reset(state, first)
        length = jnp.minimum(before["length"] + 1, self.window)
        ages = jnp.arange(self.window - 1, -1, -1)[None]
        allowed = (ages < length[:, None])[:, None]
        x, windows = self.entry(inputs), []
        for index, layer in enumerate(self.layers):
            new = layer_norm(x, layer.attention_norm)[:, None]
            remembered = jnp.concatenate([before["features"][:, index, 1:], new], axis=1)
            windows.append(remembered)
            x = layer.mlp(x + layer.attend(new, remembered, ages, allowed)[:, 0])
        return layer_norm(x, self.final_norm), {"features": jnp.stack(windows, axis=1), "length": length}

    def unroll(
        self, inputs: Float[Array, "time batch inputs"], state: State, first: Bool[Array, "time batch"]
    ) -> tuple[Float[Array, "time batch features"], dict[str, Array]]:
        """T steps at once: keys are the window before them and the steps themselves."""
        steps, window = inputs.shape[0], self.window
        episodes, lengths = _episodes(first, state["length"], window)
        ages = window + jnp.arange(steps)[:, None] - jnp.arange(window + steps)[None]
        allowed = (ages >= 0) & (ages < lengths.T[:, :, None])
        x, pasts = jnp.swapaxes(self.entry(inputs), 0, 1), []
        for index, layer in enumerate(self.layers):
            new = layer_norm(x, layer.attention_norm)
            remembered = jnp.concatenate([state["features"][:, index], new], axis=1)
            pasts.append(remembered)
            x = layer.mlp(x + layer.attend(new, remembered, ages, allowed))
        places = jnp.arange(steps)[:, None] + 1 + jnp.arange(window)[None]
        windows = jnp.stack(pasts, axis=1)[:, :, places]  # [batch, layers, T, window, width]
        begun = _begun(episodes, window)[:, places]  # [batch, T, window]
        kept = begun == episodes.T[:, :, None]
        windows = jnp.where(kept[:, None, :, :, None], windows, 0.0)
        after = {"features": jnp.moveaxis(windows, 2, 0), "length": lengths}
        return jnp.swapaxes(layer_norm(x, self.final_norm), 0, 1), after


def _episodes(
    first: Bool[Array, "time batch"], length: Int[Array, " batch"], window: int
) -> tuple[Int[Array, "time batch"], Int[Array, "time batch"]]:
    """For each step, how many episodes began in the unroll so far, and how many remembered steps count after it."""
    steps = jnp.arange(len(first), dtype=jnp.int32)[:, None]
    began = jax.lax.cummax(jnp.where(first, steps, -1), axis=0)
    since = jnp.where(began >= 0, steps - began + 1, length[None] + steps + 1)
    return jnp.cumsum(first, axis=0, dtype=jnp.int32), jnp.minimum(since, window).astype(jnp.int32)


def _begun(episodes: Int[Array, "time batch"], window: int) -> Int[Array, "batch keys"]:
    """The episode of each key: 0 for the window before the unroll."""
    return jnp.concatenate([jnp.zeros((episodes.shape[1], window), jnp.int32), episodes.T], axis=1)
