"""From named observations to one row of features: each leaf by itself, side by side, then an MLP.

Leaves that are no images, and images under ``network: mlp``, are flattened and go through the MLP together;
convolutional images have their own features beside the MLP's.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from penstock.model.control.config import ControlModelConfig
from penstock.model.control.images import ImageEncoder, ImageForm, ImpalaCnn, NatureCnn, Pooling
from penstock.model.control.layers import Mlp
from penstock.types import ConfigError, LeafSpace


class LeafEncoder(eqx.Module):
    """From one leaf to a row of numbers."""

    @abstractmethod
    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""


class Numbers(LeafEncoder):
    """The leaf's numbers as they are, times a constant; no parameters."""

    features: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        return values.reshape(-1, self.features).astype(jnp.float32) * self.scale


class OneHot(LeafEncoder):
    """Each element as a row with a single 1; values beyond the last choice count as it. No parameters."""

    n: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        flat = values.reshape(len(values), len(self.n))
        if flat.dtype == jnp.uint32:
            flat = jnp.minimum(flat, np.uint32(2**31 - 1))  # larger ones would be negative below
        flat = flat.astype(jnp.int32)
        if len(set(self.n)) == 1:
            choices = jnp.clip(flat, 0, self.n[0] - 1)
            return jax.nn.one_hot(choices, self.n[0], dtype=jnp.float32).reshape(len(values), -1)
        rows = [jax.nn.one_hot(jnp.clip(flat[:, i], 0, n - 1), n, dtype=jnp.float32) for i, n in enumerate(self.n)]
        return jnp.concatenate(rows, axis=-1)


class Embedding(LeafEncoder):
    """Each element as a learned row; one table, in which the elements' choices follow each other."""

    table: Float[Array, "choices width"]
    n: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch."""
        flat = values.reshape(len(values), len(self.n)).astype(jnp.int32)
        starts = np.concatenate([[0], np.cumsum(self.n)[:-1]]).astype(np.int32)
        return self.table[starts + jnp.clip(flat, 0, np.asarray(self.n, np.int32) - 1)].reshape(len(values), -1)


class Text(LeafEncoder):
    """The mean of the code points' learned rows; an empty text is zero. Order is not seen."""

    table: Float[Array, "vocabulary width"]

    def __call__(self, values: Num[Array, "batch *leaf"]) -> Float[Array, "batch features"]:
        """Encodes a batch of code points, −1 after the end."""
        codes: Int[Array, "batch length"] = values.reshape(len(values), -1).astype(jnp.int32)
        there = (codes >= 0).astype(jnp.float32)
        rows = self.table[jnp.clip(codes, 0, len(self.table) - 1)]
        total = jnp.einsum("bl,blw->bw", there, rows)
        return total / jnp.maximum(there.sum(axis=-1, keepdims=True), 1.0)


class Encoder(eqx.Module):
    """All observations of one step, as one row of features.

    Attributes:
        flat: Encoders of the leaves that go through the MLP.
        images: Encoders of the leaves that have features of their own.
        mlp: None where there is no flat leaf.
        flat_names: The leaves' names.
        image_names: Likewise.
    """

    flat: tuple[LeafEncoder | Pooling, ...]
    images: tuple[ImageEncoder, ...]
    mlp: Mlp | None
    flat_names: tuple[str, ...] = eqx.field(static=True)
    image_names: tuple[str, ...] = eqx.field(static=True)
    features: int = eqx.field(static=True)

    @classmethod
    def draw(cls, rng: np.random.Generator, config: ControlModelConfig, leaves: tuple[LeafSpace, ...]) -> "Encoder":
        """An encoder for those observations.

        Raises:
            ConfigError: a convolutional network without an image, or with one that is too small.
        """
        images = {leaf.name: form for leaf in leaves if (form := ImageForm.of(leaf, config.image_layout))}
        if config.network == "mlp":
            networks: dict[str, ImageEncoder] = {}
        else:
            networks = {name: _convolutional(rng, config, form, name) for name, form in images.items()}
            if not networks:
                raise ConfigError(
                    f"network is {config.network!r}, but no observation is an image (of {_named(leaves)}): set "
                    "network: mlp"
                )
        flat: dict[str, LeafEncoder | Pooling] = {}
        width = 0
        for leaf in leaves:
            if leaf.name not in networks:
                form = images.get(leaf.name)
                encoder, more = _flat(rng, config, leaf) if form is None else _pooled(form, config.pooled_size)
                flat[leaf.name] = encoder
                width += more
        mlp = Mlp.draw(rng, width, config.hidden_sizes, config.activation) if flat else None
        features = (config.hidden_sizes[-1] if flat else 0) + config.image_features * len(networks)
        return cls(tuple(flat.values()), tuple(networks.values()), mlp, tuple(flat), tuple(networks), features)

    def __call__(self, observations: Mapping[str, Array]) -> Float[Array, "batch features"]:
        """Encodes [batch, …] arrays by leaf name."""
        rows = [network(observations[name]) for name, network in zip(self.image_names, self.images, strict=True)]
        if self.mlp is not None:
            flat = [encoder(observations[name]) for name, encoder in zip(self.flat_names, self.flat, strict=True)]
            rows.insert(0, self.mlp(_joined(flat)))
        return _joined(rows)


def _joined(rows: list[Array]) -> Float[Array, "batch features"]:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-1)


def _convolutional(rng: np.random.Generator, config: ControlModelConfig, form: ImageForm, name: str) -> ImageEncoder:
    if config.network == "nature_cnn":
        return NatureCnn.draw(rng, form, config.image_features, name)
    return ImpalaCnn.draw(rng, form, config.impala_channels, config.image_features)


def _pooled(form: ImageForm, size: int) -> tuple[Pooling, int]:
    pooling = Pooling(form, size)
    return pooling, pooling.features


def _flat(rng: np.random.Generator, config: ControlModelConfig, leaf: LeafSpace) -> tuple[LeafEncoder, int]:
    """The encoder of a leaf that is no image, and the width of its rows."""
    elements = math.prod(leaf.shape)
    if leaf.kind == "text":
        return Text(_table(rng, config.text_vocabulary, config.embedding_size)), config.embedding_size
    choices = leaf.n
    if leaf.kind == "box" and config.grid_values is not None and np.issubdtype(np.dtype(leaf.dtype), np.integer):
        return OneHot((config.grid_values,) * elements), config.grid_values * elements
    if leaf.kind not in ("discrete", "multi_discrete"):
        return Numbers(elements, 1 / 255 if leaf.dtype == "uint8" else 1.0), elements
    if max(choices) <= config.one_hot_limit:
        return OneHot(choices), sum(choices)
    return Embedding(_table(rng, sum(choices), config.embedding_size), choices), config.embedding_size * len(choices)


def _table(rng: np.random.Generator, rows: int, width: int) -> Array:
    """First embeddings: standard normal, so that each element is about 1, as a one-hot's is."""
    return jnp.asarray(rng.standard_normal((rows, width), np.float32))


def _named(leaves: tuple[LeafSpace, ...]) -> str:
    return ", ".join(f"{leaf.name!r} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
