"""The decoder: embedding, layers stacked and scanned, final norm, tied or untied output matrix.

One network serves the learner (packed rows through `hidden_states`) and the inference engine (which scans
`layers` itself and puts its cache between `Layer.project` and `Layer.finish`). Parameters are the only state; what a
decoder does not have (an untied head, biases) has no name among its arrays.

A layer is two pure pieces, so that training and cached decoding share one set of equations: `project` is everything
before attention, `finish` everything after it; what keys a query sees (a packed row, a cache) is the caller's.
Matrices are stored [in, out], the transpose of Hugging Face's. In a `Decoder` every array has a leading layer axis; a
`Layer`'s methods are for one, as `jax.lax.scan` or `Decoder.layer` hands it out. Beside an adapter
(`penstock.model.language.adapter`), which alone trains then, the layers of the base lie one by one.

Attention is grouped-query (`penstock.model.language.attention`). Layers may have a window, and others of the same model
none (`ModelConfig.windows`).

*Precision* is the same for packed rows and cached decoding on every platform. Every matrix product goes through
`penstock.model.language.precision.product`. The residual stream, norms, softmax, the gate's silu and logits are float32
whatever the dtype; what goes into a product is rounded to it once, by `rounded`.

Positions are rotary (Su et al. 2021, https://arxiv.org/abs/2104.09864) in Hugging Face's arrangement, where dimension i
is paired with i + head_dim / 2. Angles are float32 whatever the model's dtype. Covered scaling: Llama 3's, YaRN.

Not covered: the loss's output head, which must never hold [tokens, vocabulary] in float32 (`penstock.learner`).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from penstock.model.arrays import joined_digests, lower_digests, named_leaves, with_named_leaves
from penstock.model.language.adapter import Adapter
from penstock.model.language.attention import Segments, attention
from penstock.model.language.attention_choice import AttentionKernel, Remat, attends_again
from penstock.model.language.config import ADAPTER, ModelConfig, RopeScaling, YarnScaling
from penstock.model.language.precision import FLOAT32, linear, product, rounded

Tree = TypeVar("Tree")


def inverse_frequencies(config: ModelConfig, window: int | None = None) -> np.ndarray:
    """Radians per position of each pair: theta^(-2i / head_dim), float32 [head_dim / 2], scaled if asked.

    Args:
        config: Base and scaling.
        window: Of the layer: one with a window may have a base of its own, which is not scaled.
    """
    theta, scaling = _local_theta(config, window) or config.rope_theta, _scaling(config, window)
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if isinstance(scaling, YarnScaling):
        return _interpolate(frequencies, scaling, config.rope_theta)
    return frequencies if scaling is None else _stretch(frequencies, scaling)


def _stretch(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / scaling.factor + blend * frequencies).astype(np.float32)


def _interpolate(frequencies: np.ndarray, scaling: YarnScaling, theta: float) -> np.ndarray:
    """YaRN: pairs that turn often kept, pairs that turn seldom divided by the factor, a linear ramp between.

    Peng et al. 2023, https://arxiv.org/abs/2309.00071.
    """
    pairs, context = len(frequencies), scaling.original_max_position_embeddings

    def pair_with(turns: float) -> float:
        return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last += 0.001 if first == last else 0  # as the families' own code
    slow = np.clip((np.arange(pairs) - first) / (last - first), 0.0, 1.0)
    return (slow * frequencies / scaling.factor + (1 - slow) * frequencies).astype(np.float32)


def rotary_tables(
    config: ModelConfig, position_ids: Int[Array, "*batch"], window: int | None = None
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosines and sines of the angles at these positions, float32, half = head_dim / 2; YaRN's are longer than one."""
    angles = position_ids[..., None].astype(jnp.float32) * inverse_frequencies(config, window)
    scaling = _scaling(config, window)
    length = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return length * jnp.cos(angles), length * jnp.sin(angles)


def _local_theta(config: ModelConfig, window: int | None) -> float | None:
    return None if window is None else config.rope_local_theta


def _scaling(config: ModelConfig, window: int | None) -> RopeScaling | YarnScaling | None:
    return None if _local_theta(config, window) else config.rope_scaling


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


def _normed(x: Array, weight: Array, config: ModelConfig) -> Array:
    """`rms_norm` as the family has it; float32."""
    weight = 1 + weight.astype(jnp.float32) if config.is_gemma else weight
    return rms_norm(x, weight, config.rms_norm_eps)


PRODUCTS = ("query", "key", "value", "attended", "residual", "gate", "up")
"""Names of what a layer computes by matrix products, for `jax.checkpoint`: all else is cheap to recompute."""


def _keeping(remat: Remat, kernel: AttentionKernel, step: Callable[..., Any]) -> Callable[..., Any]:
    """The layer's step, of which that much is kept for the backward pass.

    Fresh memory is what a CPU is slowest at: keeping the products only (445 MB, not 1,142, for 64 x 80 tokens of a 6M
    model) makes the backward pass faster, although norms, silu and attention weights are recomputed.
    """
    if remat == "none":
        return step
    policies: Any = jax.checkpoint_policies
    kept = {
        "products": policies.save_only_these_names(*PRODUCTS),
        "layer": policies.save_only_these_names(*(() if attends_again("layer", kernel) else ("attended",))),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["stream"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    return jax.checkpoint(step, prevent_cse=False, policy=kept[remat])


class Layer(eqx.Module):
    """Attention and a gated MLP, each with a norm before, for Gemma one after, and a residual connection around it."""

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
    attention_out_norm: Float[Array, "*layers hidden"] | None
    mlp_out_norm: Float[Array, "*layers hidden"] | None
    gate: Float[Array, "*layers hidden intermediate"]
    up: Float[Array, "*layers hidden intermediate"]
    down: Float[Array, "*layers intermediate hidden"]
    config: ModelConfig = eqx.field(static=True)
    adapter: Adapter | None = None

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
        """Queries, keys and values of each position, normalised (Qwen3, Gemma 3) and rotated.

        Args:
            x: The residual stream, float32.
            cos: From `rotary_tables` at x's positions.
            sin: Sines from the same tables.
        """
        config, dtype = self.config, self.query.dtype
        normed = rounded(_normed(x, self.input_norm, config), dtype)
        query = _heads(self._times(normed, "query"), self.query_bias, config.num_attention_heads)
        key = _heads(self._times(normed, "key"), self.key_bias, config.num_key_value_heads)
        value = rounded(_heads(self._times(normed, "value"), self.value_bias, config.num_key_value_heads), dtype)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _normed(query, self.query_norm, config), _normed(key, self.key_norm, config)
        if config.query_pre_attn_scalar is not None:  # attention divides by the square root of head_dim
            query = query * (config.head_dim / config.query_pre_attn_scalar) ** 0.5
        query, key = rounded(rotate(query, cos, sin), dtype), rounded(rotate(key, cos, sin), dtype)
        return checkpoint_name(query, "query"), checkpoint_name(key, "key"), checkpoint_name(value, "value")

    def finish(
        self, x: Float[Array, "*batch hidden"], attended: Float[Array, "*batch heads head_dim"]
    ) -> Float[Array, "*batch hidden"]:
        """The residual stream after this layer, given what its queries attended to."""
        dtype, config = self.gate.dtype, self.config
        added = self._times(attended.reshape(*x.shape[:-1], -1), "output")
        if self.attention_out_norm is not None:
            added = _normed(rounded(added, dtype), self.attention_out_norm, config)
        x = checkpoint_name(x + added, "residual")
        normed = rounded(_normed(x, self.post_norm, config), dtype)
        gate = checkpoint_name(self._times(normed, "gate", dtype), "gate").astype(jnp.float32)
        up = checkpoint_name(self._times(normed, "up", dtype), "up").astype(jnp.float32)
        opened = jax.nn.gelu(gate, approximate=True) if config.is_gemma else jax.nn.silu(gate)
        added = self._times(rounded(opened * up, dtype), "down")
        if self.mlp_out_norm is not None:
            added = _normed(rounded(added, dtype), self.mlp_out_norm, config)
        return x + added

    def _times(
        self, x: Float[Array, "*batch inputs"], name: str, dtype: jnp.dtype = FLOAT32
    ) -> Float[Array, "*batch outputs"]:
        """Times one of the matrices, and what an adapter adds to it; the sum is rounded to `dtype`."""
        pair, matrix = None if self.adapter is None else getattr(self.adapter, name), getattr(self, name)
        return linear(x, matrix, dtype) if pair is None else rounded(linear(x, matrix) + pair(x), dtype)


def _heads(projected: Array, bias: Array | None, heads: int) -> Array:
    """[..., heads * head_dim] -> [..., heads, head_dim], with the bias added where there is one; float32."""
    projected = projected if bias is None else projected + bias.astype(jnp.float32)
    return projected.reshape(*projected.shape[:-1], heads, -1)


EMBEDDING_STD = 0.02
OPTIONAL = (
    "query_bias", "key_bias", "value_bias", "query_norm", "key_norm", "attention_out_norm", "mlp_out_norm",
)  # fmt: skip
"""Arrays of a layer that not every family has."""


def _unstacked(stacked: Tree, depth: int) -> tuple[Tree, ...]:
    """The layers one by one, by one small program: XLA would compile a copy of it for each in one program for all."""
    return tuple(layer_of(stacked, np.int32(index)) for index in range(depth))


@jax.jit
def layer_of(stacked: Tree, index: Int[Array, ""]) -> Tree:
    """One layer of stacked arrays."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False), stacked)


class Decoder(eqx.Module):
    """A causal language model.

    Attributes:
        embedding: One row per token id.
        layers: All layers as one stacked `Layer`, whose arrays have a leading layer axis; beside an adapter one by one,
            since they never change: so an engine reads the very arrays that the learner reads.
        final_norm: Weight of the norm after the last layer.
        head: The output matrix, or None where the embedding serves (tied).
        config: Its shape.
        adapter: What trains in the place of all others, stacked; None: they do.
    """

    embedding: Float[Array, "vocab hidden"]
    layers: Layer | tuple[Layer, ...]
    final_norm: Float[Array, " hidden"]
    head: Float[Array, "vocab hidden"] | None
    config: ModelConfig = eqx.field(static=True)
    adapter: Adapter | None = None

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
            config,
            {name: jax.device_put(_draw(rng, name, shape, config).astype(dtype)) for name, shape in shapes.items()},
        )

    @classmethod
    def from_arrays(cls, config: ModelConfig, arrays: Mapping[str, Array]) -> "Decoder":
        """Puts a decoder together from named parameters: all that `ModelConfig.parameter_shapes` lists.

        Args:
            config: Its shape, from which names follow.
            arrays: The layers' stacked; beside an adapter each layer's own, ``layers.0.query``.
        """

        def layer(prefix: str) -> Layer:
            fields: dict[str, Any] = dict.fromkeys(OPTIONAL)
            fields |= {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            return Layer(**fields, config=config)

        apart = config.lora is not None
        return cls(
            embedding=arrays["embedding"],
            layers=tuple(layer(f"layers.{i}.") for i in range(config.num_hidden_layers)) if apart else layer("layers."),
            final_norm=arrays["final_norm"],
            head=arrays.get("head"),
            config=config,
            adapter=Adapter.from_arrays(config, arrays),
        )

    @classmethod
    def of_shapes(cls, config: ModelConfig) -> "Decoder":
        """One of `jax.ShapeDtypeStruct`, of no device, in the place of every array."""
        return jax.eval_shape(lambda: cls.from_arrays(config, _zeros(config)))

    @property
    def output_matrix(self) -> Float[Array, "vocab hidden"]:
        """The matrix whose rows score the tokens: the head, or the embedding where tied."""
        return self.embedding if self.head is None else self.head

    def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """The residual stream before the first layer, float32; Gemma's is √hidden times as long."""
        embedded = self.embedding[tokens].astype(jnp.float32)
        if not self.config.is_gemma:
            return embedded
        return embedded * jnp.asarray(self.config.hidden_size**0.5, self.embedding.dtype).astype(jnp.float32)

    def layers_apart(self) -> tuple[Layer, ...]:
        """Each layer with its part of the adapter: a base that lies apart by reference, of a stack copies."""
        depth = self.config.num_hidden_layers
        layers = self.layers if isinstance(self.layers, tuple) else _unstacked(self.layers, depth)
        if self.adapter is None:
            return layers
        pairs = zip(layers, _unstacked(self.adapter, depth), strict=True)
        return tuple(replace(layer, adapter=adapter) for layer, adapter in pairs)

    def lower_apart(self) -> Any:
        """The program that `layers_apart` runs for each layer, lowered; of shapes, too."""
        return layer_of.lower(self.adapter if isinstance(self.layers, tuple) else self.layers, np.int32(0))

    def lower_digests(self) -> dict[str, Callable[[], Any]]:
        """What lowers each program of `decoder_digests`, by what that reads; of shapes, too."""
        names = ("digests of all", "digests of one layer")  # that of each which lies apart
        parts = _parts(named_leaves(self))
        return {name: partial(lower_digests, part) for name, (_, part) in zip(names, parts, strict=False)}

    def _scanned(self) -> tuple[Any, Callable[[Any], Layer]]:
        """What a scan over the layers goes through, and what makes a layer of one of its elements.

        Layers that lie apart are chosen by number: that copies one layer at a time, as a scan over a stack does, and
        the backward pass chooses it again.
        """
        layers = self.layers
        if isinstance(layers, Layer):
            return layers, lambda each: each

        def chosen(each: tuple[Array, Adapter | None]) -> Layer:
            number, adapter = each
            layer = jax.lax.switch(number, [lambda one=one: one for one in layers])
            return replace(layer, adapter=adapter)

        return (jnp.arange(len(layers)), self.adapter), chosen

    def normalise(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """The final norm: from the last layer's residual stream to hidden states, in the model's dtype."""
        return rounded(_normed(x, self.final_norm, self.config), self.final_norm.dtype)

    def hidden_states(
        self,
        tokens: Int[Array, "batch length"],
        position_ids: Int[Array, "batch length"],
        segments: Segments,
        remat: Remat = "products",
        kernel: AttentionKernel = "dense",
    ) -> Float[Array, "batch length hidden"]:
        """Runs packed rows through all layers; attention is causal and stays inside a segment.

        Args:
            tokens: Token ids; anything valid at padding.
            position_ids: Position within its own sequence.
            segments: Where the rows' sequences lie.
            remat: What is kept for the backward pass.
            kernel: What computes attention, from `attention_kernel`.

        Returns:
            States after the final norm; those at padding mean nothing, but are finite.
        """
        windows = tuple(dict.fromkeys(self.config.windows))
        tables = [rotary_tables(self.config, position_ids, window) for window in windows]
        ways = [partial(attention, segments=segments, kernel=kernel, window=window) for window in windows]

        scanned, layer_of = self._scanned()

        def run(x: Array, each: Any) -> tuple[Array, None]:
            x, layer = checkpoint_name(x, "stream"), layer_of(each)
            return layer.finish(x, ways[0](*layer.project(x, *tables[0]))), None

        def run_one_of(x: Array, each: tuple[Any, Array]) -> tuple[Array, None]:
            x, layer, kind = checkpoint_name(x, "stream"), layer_of(each[0]), each[1]
            cos, sin = (jax.lax.select_n(kind, *each) for each in zip(*tables, strict=True))
            return layer.finish(x, jax.lax.switch(kind, ways, *layer.project(x, cos, sin))), None

        kinds = jnp.array([windows.index(window) for window in self.config.windows])
        step, through = (run, scanned) if len(windows) == 1 else (run_one_of, (scanned, kinds))
        x, _ = jax.lax.scan(_keeping(remat, kernel, step), self.embed(tokens), through)
        return self.normalise(x)

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Float32 scores of every token. For a few positions; the loss has its own tiled head."""
        scores = product("nh,vh->nv", hidden.reshape(-1, hidden.shape[-1]), self.output_matrix)
        return scores.reshape(*hidden.shape[:-1], -1)


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray:
    """One parameter's first values, float32 [shape]; layers are stacked on the first axis."""
    if name.endswith("_norm"):
        return np.full(shape, 0 if config.is_gemma else 1, np.float32)
    if name.endswith("_bias"):
        return np.zeros(shape, np.float32)
    std = EMBEDDING_STD
    if name.startswith("layers."):
        depth, fan_in, _ = shape
        writes_residual = name in ("layers.output", "layers.down")
        std = (fan_in * (2 * depth if writes_residual else 1)) ** -0.5
    return rng.standard_normal(shape, np.float32) * np.float32(std)


def _zeros(model: ModelConfig) -> dict[str, Array]:
    """All parameters as `Decoder.from_arrays` takes them: beside an adapter layer by layer."""
    found: dict[str, Array] = {}
    for name, shape in model.parameter_shapes().items():
        first, _, rest = name.partition(".")
        if model.lora is not None and first == "layers":
            found |= {f"layers.{i}.{rest}": jnp.zeros(shape[1:], model.dtype) for i in range(shape[0])}
        else:
            own = model.lora.dtype if model.lora is not None and name.startswith(ADAPTER) else None
            found[name] = jnp.zeros(shape, own or model.dtype)
    return found


def named_arrays(decoder: Decoder) -> dict[str, Array]:
    """Every parameter of the decoder by name (``embedding``, ``layers.query``), in a fixed order."""
    return named_leaves(decoder)


def stack_names(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of one layer by the names that they have in a stack of all.

    Args:
        layer: By their names in a `Layer`.
    """
    return {name if name.startswith(ADAPTER) else f"layers.{name}": array for name, array in layer.items()}


def decoder_digests(arrays: Mapping[str, Array | np.ndarray]) -> dict[str, str]:
    """The digest of every one of `named_arrays`; of layers that lie apart as if they were a stack."""
    return joined_digests(_parts(arrays))


def _parts(arrays: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    outer, layers = dict(arrays), dict[int, dict[str, Any]]()
    for name in arrays:
        if found := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
            layers.setdefault(int(found[1]), {})[found[2]] = outer.pop(name)
    return [(0, outer), *((number, stack_names(layer)) for number, layer in layers.items())]


def with_named_arrays(decoder: Decoder, arrays: Mapping[str, Array | np.ndarray]) -> Decoder:
    """A decoder of the same shape that holds these arrays instead.

    Raises:
        WeightsError: naming the arrays that are missing, extra, or of another shape or dtype.
    """
    return with_named_leaves(decoder, arrays, "the decoder")
