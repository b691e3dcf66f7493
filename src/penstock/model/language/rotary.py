"""Rotary position embedding: pairs of head dimensions are turned by an angle that grows with the position.

Su et al. 2021, https://arxiv.org/abs/2104.09864, in Hugging Face's arrangement, where dimension i is paired
with i + head_dim / 2. Angles are float32 whatever the model's dtype. Covered scaling: none, and Llama 3's.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from penstock.model.language.config import ModelConfig, RopeScaling


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
