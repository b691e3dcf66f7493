"""The decoder: embedding, layers stacked and scanned, final norm, tied or untied output matrix.

One network serves the learner (packed rows through `hidden_states`) and the inference engine (which scans
`layers` itself and puts its cache between `Layer.project` and `Layer.finish`). Parameters are the only state.
The loss's output head is not here: it must never hold [tokens, vocabulary] in float32 (`penstock.learner`).
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from penstock.model.language.attention import grouped_attention, packed_mask
from penstock.model.language.config import ModelConfig
from penstock.model.language.layer import PRODUCTS, Layer, rms_norm
from penstock.model.language.rotary import rotary_tables

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
            config, {name: jnp.asarray(_draw(rng, name, shape), dtype) for name, shape in shapes.items()}
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
        """The residual stream before the first layer."""
        return self.embedding[tokens]

    def layer(self, index: int) -> Layer:
        """One layer, without the layer axis."""
        return jax.tree.map(lambda array: array[index], self.layers)

    def normalise(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """The final norm: from the last layer's residual stream to hidden states."""
        return rms_norm(x, self.final_norm, self.config.rms_norm_eps)

    def hidden_states(
        self,
        tokens: Int[Array, "batch length"],
        position_ids: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        remat: bool = False,
    ) -> Float[Array, "batch length hidden"]:
        """Runs packed rows through all layers; attention is causal and stays inside a segment.

        Args:
            tokens: Token ids; anything valid at padding.
            position_ids: Position within its own sequence.
            segment_ids: 1, 2, … per sequence, 0 for padding.
            remat: Keep nothing but each layer's input for the backward pass. Otherwise the results of matrix
                products are kept.

        Returns:
            States after the final norm; those at padding mean nothing, but are finite.
        """
        cos, sin = rotary_tables(self.config, position_ids)
        mask = packed_mask(segment_ids)

        def run(x: Array, layer: Layer) -> tuple[Array, None]:
            query, key, value = layer.project(x, cos, sin)
            key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
            return layer.finish(x, grouped_attention(query, key, value, mask)), None

        # Fresh memory is what a CPU is slowest at: keeping the products only (445 MB, not 1,142, for 64 x 80 tokens
        # of a 6M model) makes the backward pass faster, although norms, silu and attention weights are recomputed.
        policies = jax.checkpoint_policies
        keep = policies.nothing_saveable if remat else policies.save_only_these_names(*PRODUCTS)
        x, _ = jax.lax.scan(jax.checkpoint(run, prevent_cse=False, policy=keep), self.embed(tokens), self.layers)
        return self.normalise(x)

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Float32 scores of every token. For a few positions; the loss has its own tiled head."""
        return jnp.einsum("...h,vh->...v", hidden, self.output_matrix, preferred_element_type=jnp.float32)


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
