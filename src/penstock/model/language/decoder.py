"""The decoder: embedding, layers stacked and scanned, final norm, tied or untied output matrix.

One network serves the learner (packed rows through `hidden_states`) and the inference engine (which scans
`layers` itself and puts its cache between `Layer.project` and `Layer.finish`). Parameters are the only state; what a
decoder does not have (an untied head, biases) has no name among its arrays.

A layer is two pure pieces, so that training and cached decoding share one set of equations: `project` is everything
before attention, `finish` everything after it; what keys a query sees (a packed row, a cache) is the caller's.
Matrices are stored [in, out], the transpose of Hugging Face's. In a `Decoder` every array has a leading layer axis; a
`Layer`'s methods are for one, as `jax.lax.scan` or `Decoder.layer` hands it out.

Attention is grouped-query (`penstock.model.language.attention`). There is no window: `ModelConfig` refuses one shorter
than the context.

*Precision* is the same for packed rows and cached decoding on every platform. Every matrix product goes through
`penstock.model.language.precision.product`. The residual stream, norms, softmax, the gate's silu and logits are float32
whatever the dtype; what goes into a product is rounded to it once, by `rounded`.

Positions are rotary (Su et al. 2021, https://arxiv.org/abs/2104.09864) in Hugging Face's arrangement, where dimension i
is paired with i + head_dim / 2. Angles are float32 whatever the model's dtype. Covered scaling: none, and Llama 3's.

Not covered: the loss's output head, which must never hold [tokens, vocabulary] in float32 (`penstock.learner`).
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from penstock.model.arrays import named_leaves, with_named_leaves
from penstock.model.language.attention import Segments, attention
from penstock.model.language.attention_choice import AttentionKernel
from penstock.model.language.config import ModelConfig, RopeScaling
from penstock.model.language.precision import product, rounded


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair: theta^(-2i / head_dim), float32 [head_dim / 2], scaled if asked."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def rotary_tables(
    config: ModelConfig, position_ids: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosines and sines of the angles at these positions, float32, half = head_dim / 2."""
    angles = position_ids[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
) -> Float[Array, "*batch heads head_dim"]:
    """Turns every head at every position by the tables' angles; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "*batch width"]:
    """Normalises the last axis: x / sqrt(mean(x²) + eps) · weight; in float32, which it stays.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32 * scale * weight.astype(jnp.float32)


def linear(x: Float[Array, "*batch inputs"], matrix: Float[Array, "inputs outputs"]) -> Float[Array, "*batch outputs"]:
    """Multiplies the last axis by a matrix; the result is float32.

    As a product of two matrices, because XLA's CPU compiler otherwise makes a transposed copy of the larger
    operand for every weight gradient: that alone took 17% off the backward pass of a 6M model.
    """
    return product("ni,io->no", x.reshape(-1, x.shape[-1]), matrix).reshape(*x.shape[:-1], matrix.shape[-1])


PRODUCTS = ("query", "key", "value", "attended", "residual", "gate", "up")
"""Names of what a layer computes by matrix products, for `jax.checkpoint`: all else is cheap to recompute."""


class Layer(eqx.Module):
    """Attention and a gated MLP, each with a norm before and a residual connection around it."""

    input_norm: Float[Array, "*layers hidden"]
    query: Float[Array, "*layers hidden query_size"]
    key: Float[Array, "*layers hidden key_value_size"]
    value: Float[Array, "*layers hidden key_value_size"]
    query_bias: Float[Array, "*layers query_size"] | None
    key_bias: Float[Array, "*layers key_value_size"] | None
    value_bias: Float[Array, "*layers key_value_size"] | None
    query_norm: Float[Array, "*layers head_dim"] | None
    key_norm: Float[Array, "*layers head_dim"] | None
    output: Float[Array, "*layers query_size hidden"]
    post_norm: Float[Array, "*layers hidden"]
    gate: Float[Array, "*layers hidden intermediate"]
    up: Float[Array, "*layers hidden intermediate"]
    down: Float[Array, "*layers intermediate hidden"]
    config: ModelConfig = eqx.field(static=True)

    def project(
        self,
        x: Float[Array, "*batch hidden"],
        cos: Float[Array, "*batch half"],
        sin: Float[Array, "*batch half"],
    ) -> tuple[
        Float[Array, "*batch heads head_dim"],
        Float[Array, "*batch kv_heads head_dim"],
        Float[Array, "*batch kv_heads head_dim"],
    ]:
        """Queries, keys and values of each position, normalised (Qwen3) and rotated.

        Args:
            x: The residual stream, float32.
            cos: From `rotary_tables` at x's positions.
            sin: Sines from the same tables.
        """
        config, dtype = self.config, self.query.dtype
        normed = rounded(rms_norm(x, self.input_norm, config.rms_norm_eps), dtype)
        query = _heads(linear(normed, self.query), self.query_bias, config.num_attention_heads)
        key = _heads(linear(normed, self.key), self.key_bias, config.num_key_value_heads)
        value = rounded(_heads(linear(normed, self.value), self.value_bias, config.num_key_value_heads), dtype)
        if self.query_norm is not None and self.key_norm is not None:
            query = rms_norm(query, self.query_norm, config.rms_norm_eps)
            key = rms_norm(key, self.key_norm, config.rms_norm_eps)
        query, key = rounded(rotate(query, cos, sin), dtype), rounded(rotate(key, cos, sin), dtype)
        return checkpoint_name(query, "query"), checkpoint_name(key, "key"), checkpoint_name(value, "value")

    def finish(
        self, x: Float[Array, "*batch hidden"], attended: Float[Array, "*batch heads head_dim"]
    ) -> Float[Array, "*batch hidden"]:
        """The residual stream after this layer, given what its queries attended to."""
        dtype = self.gate.dtype
        x = checkpoint_name(x + linear(attended.reshape(*x.shape[:-1], -1), self.output), "residual")
        normed = rounded(rms_norm(x, self.post_norm, self.config.rms_norm_eps), dtype)
        gate = checkpoint_name(rounded(linear(normed, self.gate), dtype), "gate").astype(jnp.float32)
        up = checkpoint_name(rounded(linear(normed, self.up), dtype), "up").astype(jnp.float32)
        return x + linear(rounded(jax.nn.silu(gate) * up, dtype), self.down)


def _heads(projected: Array, bias: Array | None, heads: int) -> Array:
    """[..., heads * head_dim] -> [..., heads, head_dim], with the bias added where there is one; float32."""
    projected = projected if bias is None else projected + bias.astype(jnp.float32)
    return projected.reshape(*projected.shape[:-1], heads, -1)


EMBEDDING_STD = 0.02


class Decoder(eqx.Module):
    """A causal language model. Every array of `layers` has a leading layer axis.

    Attributes:
        embedding: One row per token id.
        layers: All layers as one stacked `Layer`.
        final_norm: Weight of the norm after the last layer.
        head: The output matrix, or None where the embedding serves (tied).
        config: Its shape.
    """

    embedding: Float[Array, "vocab hidden"]
    layers: Layer
    final_norm: Float[Array, " hidden"]
    head: Float[Array, "vocab hidden"] | None
    config: ModelConfig = eqx.field(static=True)

    @classmethod
    def initialise(cls, config: ModelConfig, key: PRNGKeyArray) -> "Decoder":
        """Draws a model: normal weights, unit norms, zero biases.

        Matrices have variance 1 / fan-in, those that write to the residual stream 1 / (2 · layers) of it, the
        embedding a standard deviation of 0.02, so that the first policy is close to uniform. NumPy draws them:
        compiling a generator for each shape would cost a short run more than a second.
        """
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        dtype = jnp.dtype(config.dtype)
        shapes = config.parameter_shapes()
        return cls.from_arrays(
            config, {name: jax.device_put(_draw(rng, name, shape).astype(dtype)) for name, shape in shapes.items()}
        )

    @classmethod
    def from_arrays(cls, config: ModelConfig, arrays: Mapping[str, Array]) -> "Decoder":
        """Puts a decoder together from named parameters: all that `ModelConfig.parameter_shapes` lists."""
        layer_fields: dict[str, Any] = {
            name.removeprefix("layers."): a for name, a in arrays.items() if name.startswith("layers.")
        }
        optional: dict[str, Any] = dict.fromkeys(("query_bias", "key_bias", "value_bias", "query_norm", "key_norm"))
        return cls(
            embedding=arrays["embedding"],
            layers=Layer(**(optional | layer_fields), config=config),
            final_norm=arrays["final_norm"],
            head=arrays.get("head"),
            config=config,
        )

    @property
    def output_matrix(self) -> Float[Array, "vocab hidden"]:
        """The matrix whose rows score the tokens: the head, or the embedding where tied."""
        return self.embedding if self.head is None else self.head

    def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """The residual stream before the first layer, float32."""
        return self.embedding[tokens].astype(jnp.float32)

    def layer(self, index: int) -> Layer:
        """One layer, without the layer axis."""
        return jax.tree.map(lambda array: array[index], self.layers)

    def normalise(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """The final norm: from the last layer's residual stream to hidden states, in the model's dtype."""
        return rounded(rms_norm(x, self.final_norm, self.config.rms_norm_eps), self.final_norm.dtype)

    def hidden_states(
        self,
        tokens: Int[Array, "batch length"],
        position_ids: Int[Array, "batch length"],
        segments: Segments,
        remat: bool = False,
        kernel: AttentionKernel = "dense",
    ) -> Float[Array, "batch length hidden"]:
        """Runs packed rows through all layers; attention is causal and stays inside a segment.

        Args:
            tokens: Token ids; anything valid at padding.
            position_ids: Position within its own sequence.
            segments: Where the rows' sequences lie.
            remat: Keep nothing but each layer's input for the backward pass. Otherwise the results of matrix
                products are kept.
            kernel: What computes attention, from `attention_kernel`.

        Returns:
            States after the final norm; those at padding mean nothing, but are finite.
        """
        cos, sin = rotary_tables(self.config, position_ids)

        def run(x: Array, layer: Layer) -> tuple[Array, None]:
            query, key, value = layer.project(x, cos, sin)
            return layer.finish(x, attention(query, key, value, segments, kernel)), None

        # Fresh memory is what a CPU is slowest at: keeping the products only (445 MB, not 1,142, for 64 x 80 tokens
        # of a 6M model) makes the backward pass faster, although norms, silu and attention weights are recomputed.
        policies = jax.checkpoint_policies
        keep = policies.nothing_saveable if remat else policies.save_only_these_names(*PRODUCTS)
        x, _ = jax.lax.scan(jax.checkpoint(run, prevent_cse=False, policy=keep), self.embed(tokens), self.layers)
        return self.normalise(x)

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Float32 scores of every token. For a few positions; the loss has its own tiled head."""
        scores = product("nh,vh->nv", hidden.reshape(-1, hidden.shape[-1]), self.output_matrix)
        return scores.reshape(*hidden.shape[:-1], -1)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One parameter's first values, float32 [shape]; layers are stacked on the first axis."""
    if name.endswith("_norm"):
        return np.ones(shape, np.float32)
    if name.endswith("_bias"):
        return np.zeros(shape, np.float32)
    std = EMBEDDING_STD
    if name.startswith("layers."):
        depth, fan_in, _ = shape
        writes_residual = name in ("layers.output", "layers.down")
        std = (fan_in * (2 * depth if writes_residual else 1)) ** -0.5
    return rng.standard_normal(shape, np.float32) * np.float32(std)


def named_arrays(decoder: Decoder) -> dict[str, Array]:
    """Every parameter of the decoder by name (``embedding``, ``layers.query``), in a fixed order."""
    return named_leaves(decoder)


def with_named_arrays(decoder: Decoder, arrays: Mapping[str, Array | np.ndarray]) -> Decoder:
    """A decoder of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    return with_named_leaves(decoder, arrays, "the decoder")
