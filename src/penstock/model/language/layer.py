"""One decoder layer as two pure pieces, so that training and cached decoding share one set of equations.

`project` is everything before attention, `finish` everything after it; what keys a query sees (a packed row in
training, a cache in inference) is the caller's. Matrices are stored [in, out], the transpose of Hugging Face's.
In a `Decoder` every array has a leading layer axis; the methods are for one layer, as `jax.lax.scan` or
`Decoder.layer` hands it out.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from penstock.model.language.config import ModelConfig
from penstock.model.language.rotary import rotate


def rms_norm(
    x: Float[Array, "*batch width"], weight: Float[Array, " width"], eps: float
) -> Float[Array, "*batch width"]:
    """Normalises the last axis: x / sqrt(mean(x²) + eps) · weight; the division in float32, then in x's dtype.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def linear(x: Float[Array, "*batch inputs"], matrix: Float[Array, "inputs outputs"]) -> Float[Array, "*batch outputs"]:
    """Multiplies the last axis by a matrix.

    As a product of two matrices, because XLA's CPU compiler otherwise makes a transposed copy of the larger
    operand for every weight gradient: that alone took 17% off the backward pass of a 6M model.
    """
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])


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
            x: The residual stream.
            cos: From `rotary_tables` at x's positions.
            sin: Likewise.
        """
        config = self.config
        normed = rms_norm(x, self.input_norm, config.rms_norm_eps)
        query = _heads(linear(normed, self.query), self.query_bias, config.num_attention_heads)
        key = _heads(linear(normed, self.key), self.key_bias, config.num_key_value_heads)
        value = _heads(linear(normed, self.value), self.value_bias, config.num_key_value_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query = rms_norm(query, self.query_norm, config.rms_norm_eps)
            key = rms_norm(key, self.key_norm, config.rms_norm_eps)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return checkpoint_name(query, "query"), checkpoint_name(key, "key"), checkpoint_name(value, "value")

    def finish(
        self, x: Float[Array, "*batch hidden"], attended: Float[Array, "*batch heads head_dim"]
    ) -> Float[Array, "*batch hidden"]:
        """The residual stream after this layer, given what its queries attended to."""
        attended = checkpoint_name(attended.reshape(*x.shape[:-1], -1), "attended")
        x = checkpoint_name(x + linear(attended, self.output), "residual")
        normed = rms_norm(x, self.post_norm, self.config.rms_norm_eps)
        gate = checkpoint_name(linear(normed, self.gate), "gate")
        up = checkpoint_name(linear(normed, self.up), "up")
        return x + linear(jax.nn.silu(gate) * up, self.down)


def _heads(projected: Array, bias: Array | None, heads: int) -> Array:
    """[..., heads * head_dim] -> [..., heads, head_dim], with the bias added where there is one."""
    projected = projected if bias is None else projected + bias
    return projected.reshape(*projected.shape[:-1], heads, -1)
