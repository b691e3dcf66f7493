"""Decoders from and to Hugging Face directories, adapters with their bases, and the policy that a recipe names.

A directory holds ``config.json``, the weights as safetensors, and usually a tokenizer. Matrices are transposed on
the way ([out, in] there, [in, out] here) and layers are stacked. Every tensor must be accounted for: what is
missing, unknown or of another shape is an error by name. A family may keep several matrices of a layer in one tensor,
one below the other (Phi-3): they are parameters of their own here. Not covered: downloads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from penstock.model.arrays import named_leaves
from penstock.model.json_files import read_json, write_json
from penstock.model.language.adapter import LoraPair, base_digest, drawn_adapter, merged, read_adapter, write_adapter
from penstock.model.language.config import ADAPTER, Dtype, ModelConfig, PolicyConfig, read_shape
from penstock.model.language.decoder import Decoder, Layer, named_arrays
from penstock.model.language.lora import LoraConfig, is_adapter
from penstock.model.tensor_files import SHARD_BYTES, TensorFiles, open_tensors, save_tensors
from penstock.types import CheckpointError, ConfigError, fold

_LAYERS = "layers."
_OUTER_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "gemma3_text": {
        "attention_out_norm": "post_attention_layernorm.weight",
        "post_norm": "pre_feedforward_layernorm.weight",
        "mlp_out_norm": "post_feedforward_layernorm.weight",
    }
}
"""By family: where it differs from `_LAYER_NAMES`."""
_JOINED: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {
        "self_attn.qkv_proj.weight": ("query", "key", "value"),
        "mlp.gate_up_proj.weight": ("gate", "up"),
    }
}
"""By family: tensors of a layer that hold several matrices, and which, in their order."""


@runtime_checkable
class PolicyTokenizer(Protocol):
    """What a model directory needs of a tokenizer; `penstock.text.Tokenizer` has it."""

    @property
    def vocab_size(self) -> int:
        """One past the largest token id."""
        ...

    @property
    def eos_token_id(self) -> int:
        """The token that ends a text."""
        ...

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's own files."""
        ...


def load_decoder(
    directory: str | Path,
    dtype: Dtype = "float32",
    base: str | None = None,
    lora: LoraConfig | None = None,
    seed: int = 0,
    adapter_dtype: Dtype | None = None,
) -> Decoder:
    """Reads a model directory, or an adapter's with its base.

    Args:
        directory: With ``config.json`` and ``model.safetensors``, or shards and their index; or as PEFT writes it.
        dtype: What the parameters become, whatever they were saved as.
        base: Directory of an adapter's base, in place of that which its ``adapter_config.json`` names.
        lora: An adapter to be drawn beside a model; one that is read must have this shape. None: as the directory is.
        seed: What A is drawn by, an integer.
        adapter_dtype: What an adapter's parameters become, where neither `lora` says so nor `dtype` does.

    Raises:
        CheckpointError: a file is missing or broken, its tensors do not fit the configuration, or an adapter's base is
            not there or another.
        ConfigError: the configuration asks for something that the decoder does not do.
    """
    directory = Path(directory)
    config = read_shape(directory, dtype, base, lora)
    if config.lora is None:
        return Decoder.from_arrays(config, _read_model(directory, config))
    if adapter_dtype is not None:
        config = config.model_copy(update={"lora": config.lora.model_copy(update={"dtype": adapter_dtype})})
    arrays = _read_model(Path(config.base), config)
    if is_adapter(directory):
        adapter = read_adapter(directory, config, base_digest(arrays))
    else:
        adapter = drawn_adapter(config, seed)
    return Decoder.from_arrays(config, arrays | adapter)


def _read_model(directory: Path, config: ModelConfig) -> dict[str, Array]:
    """The arrays that `Decoder.from_arrays` takes, but for an adapter's."""
    shapes = {name: shape for name, shape in config.parameter_shapes().items() if not name.startswith(ADAPTER)}
    with open_tensors(directory) as files:
        _check_tensors(directory, config, shapes, files)
        if config.lora is None:
            return {name: _read(name, shape, config, files) for name, shape in shapes.items()}
        return {
            own: array
            for name, shape in shapes.items()
            for own, array in _read_apart(name, shape, config, files).items()
        }


def save_decoder(
    decoder: Decoder, directory: str | Path, tokenizer: PolicyTokenizer, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a model directory that transformers loads: configurations, weights, tokenizer.

    The directory is made where it is missing. It is not written atomically: write it aside and rename it. What the
    original's ``config.json`` said beyond the shape is kept, and so is its ``generation_config.json``, which comes
    with the tokenizer.

    Args:
        decoder: The policy, written in its own dtype.
        directory: Path of what is written.
        tokenizer: Goes with it, and says which tokens end an answer.
        shard_bytes: Beyond so many bytes the weights are written in several files with an index.
    """
    if decoder.adapter is not None:
        raise ConfigError("the policy is an adapter beside its base: save it by save_adapter, or with_merged(policy)")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_tensors(as_tensors(named_arrays(decoder), decoder.config), directory, shard_bytes)
    _save_tokenizer(directory, tokenizer)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write_json(decoder.config.to_hugging_face() | special, directory / "config.json")


def save_adapter(decoder: Decoder, directory: str | Path, tokenizer: PolicyTokenizer, digest: str) -> None:
    """Writes an adapter as PEFT does, with the tokenizer beside it; the base it names.

    There is no ``config.json``: with one, transformers looks for a whole model there.

    Args:
        decoder: Of which the adapter is written, in its own dtype.
        directory: Path of what is written; made where it is missing, not atomically.
        tokenizer: Goes with it.
        digest: `base_digest` of its base, by which a later reader knows it again.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_adapter(decoder, directory, digest)
    _save_tokenizer(directory, tokenizer)


def with_merged(decoder: Decoder) -> Decoder:
    """The model that computes what base and adapter do, stacked: each matrix merged in float32, and rounded once."""
    layers, adapter = decoder.layers, decoder.adapter
    if adapter is None or isinstance(layers, Layer):
        raise ConfigError("the policy has no adapter to be merged: it is a model already")
    arrays = {name: array for name, array in named_arrays(decoder).items() if "." not in name}
    for name, first in named_leaves(layers[0]).items():
        pair: LoraPair | None = getattr(adapter, name, None)
        stacked = np.empty((len(layers), *first.shape), first.dtype)
        for index, layer in enumerate(layers):
            matrix = np.asarray(getattr(layer, name))
            stacked[index] = matrix if pair is None else merged(matrix, pair, index)
        arrays[f"layers.{name}"] = jnp.asarray(stacked)
    return Decoder.from_arrays(decoder.config.model_copy(update={"lora": None, "base": ""}), arrays)


def _save_tokenizer(directory: Path, tokenizer: PolicyTokenizer) -> None:
    """Tokenizer and ``generation_config.json``."""
    tokenizer.save(directory)
    path = directory / "generation_config.json"
    generation = {"pad_token_id": tokenizer.pad_token_id} | (read_json(path) if path.is_file() else {})
    write_json(generation | {"eos_token_id": list(tokenizer.stop_token_ids)}, path)


def load_policy(config: PolicyConfig, seed: int, tokenizer: PolicyTokenizer) -> Decoder:
    """The policy that a recipe starts from: loaded, or drawn at random from the run's seed.

    Args:
        config: What a recipe says under ``model:``.
        seed: The run's seed, for weights that are drawn.
        tokenizer: Loaded from `config.tokenizer_path`; gives a drawn model its vocabulary size.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's, or the model is not supported.
        CheckpointError: the checkpoint cannot be read.
    """
    directory = config.directory
    if config.init is not None and directory is None:
        model = config.init.model(tokenizer.vocab_size, config.dtype)
        check_vocabulary(model, tokenizer)
        drawn_from = jax.device_put(np.array([0, fold(seed, "model") % 2**32], np.uint32))
        # `jax.random.key` of that number, which would compile a program.
        return Decoder.initialise(model, jax.random.wrap_key_data(drawn_from, impl="threefry2x32"))
    if directory is None or not Path(directory).is_dir():
        place = "there is no such directory" if config.initial_checkpoint is None else f"there is no {directory}"
        raise ConfigError(
            f"{config.source_key} is {config.initial_checkpoint or config.path!r}: {place}; download the checkpoint "
            "first, or name another"
        )
    decoder = load_decoder(directory, config.dtype, config.base, config.lora, fold(seed, "lora") % 2**32)
    check_vocabulary(decoder.config, tokenizer)
    if config.init is not None:
        config.init.check_describes(decoder.config, tokenizer.vocab_size)
    return decoder


def check_vocabulary(config: ModelConfig, tokenizer: PolicyTokenizer) -> None:
    """Refuses a tokenizer with ids that the model has no embedding for (spare embedding rows are common and fine)."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocab_size is {config.vocab_size}: "
            "set model.tokenizer to the tokenizer that the model was made for"
        )


class _Place(NamedTuple):
    """Where a layer's parameter stands in the files: rows of a tensor of each layer, or all of it.

    Attributes:
        suffix: Of the tensor's name.
        first: Row that it begins with.
        rows: How many the tensor has in all; None: it is the tensor.
    """

    suffix: str
    first: int = 0
    rows: int | None = None


def _place(name: str, config: ModelConfig) -> _Place:
    """Of a parameter ``layers.…``."""
    shapes, name = config.parameter_shapes(), name.removeprefix(_LAYERS)
    for suffix, joined in _JOINED.get(config.model_type, {}).items():
        if name in joined:
            rows = [shapes[_LAYERS + part][-1] for part in joined]
            return _Place(suffix, sum(rows[: joined.index(name)]), sum(rows))
    return _Place((_LAYER_NAMES | _OTHER_NAMES.get(config.model_type, {}))[name])


def _tensor_names(name: str, config: ModelConfig) -> list[str]:
    """Where a parameter stands in the files: one tensor, or one per layer."""
    if name.startswith(_LAYERS):
        suffix = _place(name, config).suffix
        return [f"model.layers.{index}.{suffix}" for index in range(config.num_hidden_layers)]
    return [_OUTER_NAMES[name]]


def _tensor_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter's tensor in the files, from its shape here."""
    if not name.startswith(_LAYERS):
        return shape
    rows = _place(name, config).rows
    return shape[:0:-1] if rows is None else (rows, *shape[-2:0:-1])


def _check_tensors(
    directory: Path, config: ModelConfig, shapes: dict[str, tuple[int, ...]], files: TensorFiles
) -> None:
    if config.num_hidden_layers > len(files.shapes):
        raise CheckpointError(
            f"{directory} does not fit its config.json: num_hidden_layers is {config.num_hidden_layers}, but there are "
            f"{len(files.shapes)} tensors"
        )
    expected = {
        tensor: _tensor_shape(name, shape, config)
        for name, shape in shapes.items()
        for tensor in _tensor_names(name, config)
    }
    problems = files.misfits(expected, spare=lambda name: _spare(name, config))
    embedding, head = _OUTER_NAMES["embedding"], _OUTER_NAMES["head"]
    if config.tie_word_embeddings and {embedding, head} <= files.shapes.keys():
        if not np.array_equal(files.read(head), files.read(embedding)):  # which the model's author computed with
            problems.append(f"{head} is not {embedding}, although tie_word_embeddings is true: set it to false")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(problems[:5])}{more}")


def _spare(name: str, config: ModelConfig) -> bool:
    """Tensors that older files hold although they follow from others."""
    tied_copy = config.tie_word_embeddings and name == _OUTER_NAMES["head"]
    return tied_copy or name.endswith("rotary_emb.inv_freq")


def _read(name: str, shape: tuple[int, ...], config: ModelConfig, files: TensorFiles) -> Array:
    """One parameter, its layers stacked and its matrices transposed, on the device."""
    dtype = jnp.dtype(config.dtype)
    if not name.startswith(_LAYERS):
        return jnp.asarray(files.read(_OUTER_NAMES[name]).astype(dtype))
    stacked, first = np.empty(shape, dtype), _place(name, config).first
    for index, tensor in enumerate(_tensor_names(name, config)):
        stacked[index] = files.read(tensor)[first : first + shape[-1]].T
    return jnp.asarray(stacked)


def _read_apart(name: str, shape: tuple[int, ...], config: ModelConfig, files: TensorFiles) -> dict[str, Array]:
    """The same by layer: a stack of them is never made."""
    if not name.startswith(_LAYERS):
        return {name: _read(name, shape, config, files)}
    inner, first, dtype = name.removeprefix(_LAYERS), _place(name, config).first, jnp.dtype(config.dtype)
    return {
        f"layers.{layer}.{inner}": jnp.array(files.read(tensor)[first : first + shape[-1]].T.astype(dtype))
        for layer, tensor in enumerate(_tensor_names(name, config))
    }


def as_tensors(arrays: Mapping[str, Array | np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters as the files hold them, by their names there: views, but for what is joined.

    Args:
        arrays: Of `named_arrays`.
        config: The model's shape.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        layers = [layer.T for layer in np.asarray(array)] if name.startswith(_LAYERS) else [np.asarray(array)]
        for tensor, layer in zip(_tensor_names(name, config), layers, strict=True):
            parts.setdefault(tensor, []).append(layer)
    return {tensor: found[0] if len(found) == 1 else np.concatenate(found) for tensor, found in parts.items()}
