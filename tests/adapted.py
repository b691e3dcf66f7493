"""Decoders beside an adapter, made in memory."""

import jax.numpy as jnp
import numpy as np

from penstock.model.language import Decoder, named_arrays
from penstock.model.language.adapter import drawn_adapter
from penstock.model.language.lora import LoraConfig

LORA = LoraConfig(rank=4, alpha=8)


def adapted(decoder: Decoder, lora: LoraConfig = LORA, learned: float = 0.3, base: str = "") -> Decoder:
    """The same model with an adapter, whose B is drawn with this deviation."""
    config = decoder.config.with_lora(lora, "model.lora", base)
    arrays = {}
    for name, array in named_arrays(decoder).items():
        stacked = name.startswith("layers.")
        inner = name.removeprefix("layers.")
        arrays |= {f"layers.{i}.{inner}": layer for i, layer in enumerate(array)} if stacked else {name: array}
    rng = np.random.default_rng(7)
    for name, array in drawn_adapter(config, 5).items():
        noise = learned * rng.standard_normal(array.shape) if name.endswith(".b") else 0
        arrays[name] = array + jnp.asarray(noise, array.dtype)
    return Decoder.from_arrays(config, arrays)
