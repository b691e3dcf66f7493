"""What a decoder is made of, how a recipe names the policy it starts from, and both as Hugging Face's `config.json`.

`ModelConfig` covers the Llama, Qwen2 (bias on queries, keys and values), Qwen3 (normalised queries and keys) and
Mistral families. What a `config.json` may say beyond that, and every field that would change the mathematics, is
refused by name, never ignored. Both its older form (`rope_theta`, `rope_scaling`) and that of transformers 5
(`rope_parameters`) are read.

Not covered: mixtures of experts, attention windows shorter than the context, quantised weights.
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.model.json_files import read_json
from penstock.model.language.lora import CONFIG_FILE, LoraConfig, base_directory, is_adapter, read_adapter_config
from penstock.types.errors import ConfigError

ModelType = Literal["llama", "qwen2", "qwen3", "mistral"]
Dtype = Literal["float32", "bfloat16"]

ARCHITECTURES: dict[ModelType, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RopeScaling(_Frozen):
    """Llama 3's stretching of rotary wavelengths; see `penstock.model.language.decoder`.

    Attributes:
        factor: Long wavelengths are stretched by this.
        low_freq_factor: Wavelengths beyond original context / this are stretched fully.
        high_freq_factor: Wavelengths under original context / this are kept.
        original_max_position_embeddings: Context of the model before it was stretched.
    """

    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> "RopeScaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")
        return self


ADAPTER = "adapter."
"""What the names of an adapter's arrays begin with."""


class ModelConfig(_Frozen):
    """The shape of a decoder, under the field's own names (those of `config.json`).

    Attributes:
        model_type: Family; decides `attention_bias` and `qk_norm`.
        vocab_size: Rows of the embedding; may exceed the tokenizer's.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_hidden_layers: Depth.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads.
        head_dim: Width of a head, even; independent of `hidden_size`.
        rope_theta: Base of the rotary wavelengths.
        rope_scaling: Llama 3's stretching, or None.
        rms_norm_eps: Added to the mean square.
        tie_word_embeddings: Whether the output matrix is the embedding.
        max_position_embeddings: The longest sequence that the model is meant for.
        dtype: Of parameters and activations; norms, softmax and logits are computed in float32.
        lora: The adapter beside a frozen model; None: there is none.
        base: Path of that model's directory; empty where there is no adapter.
        other_keys: What else the `config.json` that it was read from holds, as JSON; written back when it is saved.
    """

    model_type: ModelType = "llama"
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = Field(default=2048, gt=0)
    dtype: Dtype = "float32"
    lora: LoraConfig | None = None
    base: str = Field(default="", repr=False)
    other_keys: str = Field(default="{}", repr=False)

    @model_validator(mode="after")
    def _consistent(self) -> "ModelConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary embedding turns pairs")
        return self

    @property
    def attention_bias(self) -> bool:
        """Whether queries, keys and values have a bias (Qwen2)."""
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.model_type == "qwen3"

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by the name under which weights travel; ``layers.`` are stacked.

        This table is the one place that says what a decoder consists of; matrices are [in, out]. Beside an adapter
        the layers lie one by one (``layers.0.query``), and do not travel; here and in digests they are a stack.
        """
        depth, hidden, wide = self.num_hidden_layers, self.hidden_size, self.intermediate_size
        queries, keys = self.query_size, self.key_value_size
        biases = {"query_bias": (queries,), "key_bias": (keys,), "value_bias": (keys,)}
        head_norms = {"query_norm": (self.head_dim,), "key_norm": (self.head_dim,)}
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "query": (hidden, queries),
            "key": (hidden, keys),
            "value": (hidden, keys),
            **(biases if self.attention_bias else {}),
            **(head_norms if self.qk_norm else {}),
            "output": (queries, hidden),
            "post_norm": (hidden,),
            "gate": (hidden, wide),
            "up": (hidden, wide),
            "down": (wide, hidden),
        }
        return {
            "embedding": (self.vocab_size, hidden),
            **{f"layers.{name}": (depth, *shape) for name, shape in layer.items()},
            "final_norm": (hidden,),
            **({} if self.tie_word_embeddings else {"head": (self.vocab_size, hidden)}),
            **self.adapter_shapes({name: shape for name, shape in layer.items() if len(shape) == 2}),
        }

    def adapter_shapes(self, matrices: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shape of every array of the adapter, stacked; none where there is no adapter.

        Args:
            matrices: (in, out) of a layer's matrices, by their names in a `Layer`.
        """
        if self.lora is None:
            return {}
        depth, rank = self.num_hidden_layers, self.lora.rank
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self.lora.matrices:
            inputs, outputs = matrices[name]
            shapes |= {f"{ADAPTER}{name}.a": (depth, inputs, rank), f"{ADAPTER}{name}.b": (depth, rank, outputs)}
        return shapes

    @property
    def still(self) -> tuple[str, ...]:
        """Patterns of the names of arrays that never train: all but the adapter's, where there is one."""
        if self.lora is None:
            return ()
        outer = (name for name in self.parameter_shapes() if not name.startswith(("layers.", ADAPTER)))
        return (*outer, "layers.*")

    def with_lora(self, lora: LoraConfig, source: str, base: str = "") -> "ModelConfig":
        """The same model with an adapter.

        Args:
            lora: The shape of the adapter.
            source: Where it is asked for, for errors.
            base: Path of this model's directory.

        Raises:
            ConfigError: a matrix is smaller than the rank.
        """
        shapes = self.model_copy(update={"lora": None}).parameter_shapes()
        lora.check_fits({name: shapes[f"layers.{name}"] for name in lora.matrices}, source)
        return self.model_copy(update={"lora": lora.in_dtype(self.dtype), "base": base})

    @property
    def parameter_count(self) -> int:
        """Number of parameters; a tied output matrix counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any], dtype: Dtype = "float32") -> "ModelConfig":
        """Reads the content of a `config.json`.

        Args:
            config: The parsed file, in the form of transformers 4 or 5.
            dtype: What to compute in, whatever the file was saved as.

        Raises:
            ConfigError: naming the field that is missing, out of range, or asks for something unsupported.
        """
        read = cls.validated(read_config(config) | {"dtype": dtype}, "config.json")
        replaced = {*write_config(read), *_REPLACED_KEYS}
        others = {name: value for name, value in config.items() if name not in replaced}
        return read.model_copy(update={"other_keys": json.dumps(others, sort_keys=True)})

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads as this model."""
        return write_config(self)

    @classmethod
    def validated(cls, fields: Mapping[str, Any], source: str) -> "ModelConfig":
        """Like the constructor, but with one `ConfigError` naming `source` and the first wrong field."""
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "fields"
            raise ConfigError(f"{source}: {where}: {first['msg']}") from error


class InitConfig(_Frozen):
    """A model to be drawn at random: the fields of `ModelConfig` with defaults for small models.

    Attributes:
        model_type: Family; ``qwen2`` has biases on queries, keys and values, ``qwen3`` normalised queries and keys.
        vocab_size: Rows of the embedding; None takes the tokenizer's.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP; None: 8/3 of the hidden size, rounded up to a multiple of 16.
        num_hidden_layers: Number of layers.
        num_attention_heads: Query heads of a layer.
        num_key_value_heads: Key and value heads, a divisor of the query heads; None: as many.
        head_dim: Width of a head, even; None: hidden size divided by query heads.
        rope_theta: Base of the rotary wavelengths.
        rms_norm_eps: Added to the mean square in norms.
        tie_word_embeddings: Whether the output matrix is the embedding.
        max_position_embeddings: The longest sequence that the model is meant for.
    """

    model_type: ModelType = "llama"
    vocab_size: int | None = Field(default=None, gt=0)
    hidden_size: int = Field(default=128, gt=0)
    intermediate_size: int | None = Field(default=None, gt=0)
    num_hidden_layers: int = Field(default=2, gt=0)
    num_attention_heads: int = Field(default=4, gt=0)
    num_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = True
    max_position_embeddings: int = Field(default=2048, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> "InitConfig":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is no multiple of num_attention_heads "
                f"({self.num_attention_heads}): give head_dim"
            )
        self.model(vocab_size=self.vocab_size or 1, dtype="float32")
        return self

    def model(self, vocab_size: int, dtype: Dtype) -> ModelConfig:
        """The complete configuration, for a tokenizer of that size where none is given here."""
        derived = {
            "vocab_size": self.vocab_size or vocab_size,
            "intermediate_size": self.intermediate_size or -(-self.hidden_size * 8 // 3 // 16) * 16,
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.hidden_size // self.num_attention_heads,
            "dtype": dtype,
        }
        return ModelConfig.model_validate(self.model_dump() | derived)

    def check_describes(self, model: ModelConfig, vocab_size: int) -> None:
        """Refuses a model that is loaded in place of the one described here, and is another.

        Args:
            model: As it is loaded.
            vocab_size: How many tokens the tokenizer has.

        Raises:
            ConfigError: the first field that differs, with both values.
        """
        asked, loaded = self.model(vocab_size, model.dtype), model
        for name in type(self).model_fields:
            if getattr(asked, name) != getattr(loaded, name):
                raise ConfigError(
                    f"model.init.{name} is {getattr(asked, name)!r}, and {getattr(loaded, name)!r} in "
                    "model.initial_checkpoint: name a checkpoint of that shape, or set model.init=null"
                )


class LoadingConfig(_Frozen):
    """How a policy is loaded, wherever it comes from: what every command takes under ``model:``.

    Attributes:
        dtype: Of parameters and activations, whatever a checkpoint was saved as.
        base: Directory of the model that an adapter was trained beside, where it does not lie where the adapter's
            ``adapter_config.json`` says; only of an adapter.
        chat_template_kwargs: What the chat template is given for every conversation, such as
            ``{enable_thinking: false}``; an environment's own, and those of a request, go before them.
    """

    dtype: Dtype = "float32"
    base: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def policy(self, directory: str | Path) -> "PolicyConfig":
        """The policy that lies in a directory, loaded so.

        Args:
            directory: Of a model, or of an adapter.
        """
        shared = {name: getattr(self, name) for name in LoadingConfig.model_fields}
        return PolicyConfig(path=str(directory), **shared)


class PolicyConfig(LoadingConfig):
    """The policy that a run starts from, as a recipe writes it under ``model:``.

    Attributes:
        path: A Hugging Face checkpoint directory. Either this or `init` is given, or `initial_checkpoint`.
        init: A small model drawn at random from the run's seed. Either this or `path` is given.
        initial_checkpoint: A run's ``checkpoints/step-<n>``, whose policy and tokenizer the run begins with. A recipe
            with `init` takes it, too, and draws nothing then: the shapes must be the same.
        tokenizer: A tokenizer directory, or "penstock" for the packaged one; None means the checkpoint's own,
            and the packaged one for `init`.
        lora: Train a low-rank adapter beside the checkpoint, which stays as it is; None: train the model. A checkpoint
            that is an adapter goes on being trained without this key.
    """

    path: str | None = None
    init: InitConfig | None = None
    initial_checkpoint: str | None = None
    tokenizer: str | None = None
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "PolicyConfig":
        if self.path is not None and self.initial_checkpoint is not None:
            raise ValueError("path and initial_checkpoint both say where the policy is loaded from: remove one")
        if self.initial_checkpoint is None and (self.path is None) == (self.init is None):
            given = "neither given" if self.path is None else "both given: init: null leaves out the recipe's"
            raise ValueError(f"give exactly one of path and init ({given})")
        return self

    @model_validator(mode="after")
    def _base_lasts(self) -> "PolicyConfig":
        if self.lora is not None and self.directory is None:
            raise ValueError(
                "lora needs a checkpoint beside which it trains, and init draws one that no file holds: give path or "
                "initial_checkpoint, or leave lora out"
            )
        return self

    @property
    def directory(self) -> str | None:
        """The model directory that weights are loaded from; None where they are drawn."""
        return self.path if self.initial_checkpoint is None else os.path.join(self.initial_checkpoint, "model")

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.tokenizer or (
            "penstock" if self.directory is None else tokenizer_directory(self.directory, self.base)
        )

    @property
    def source_key(self) -> str:
        """The key that names `directory`, for errors."""
        return "model.path" if self.initial_checkpoint is None else "model.initial_checkpoint"


def read_shape(
    directory: str | Path, dtype: Dtype, base: str | None = None, lora: LoraConfig | None = None
) -> ModelConfig:
    """The shape of what lies in a directory, with its adapter or one that is to be drawn; no weights are read.

    Args:
        directory: Of a model, or of an adapter.
        dtype: What to compute in.
        base: Directory of an adapter's base, in place of that which it names.
        lora: An adapter to be drawn beside a model; one that is there must have this shape.

    Raises:
        CheckpointError: a file is missing or broken, or the base of an adapter is not there.
        ConfigError: it is of something that is not supported, or not what is asked for.
    """
    below, source = Path(directory), "model.lora"
    if is_adapter(directory):
        found, named = read_adapter_config(directory)
        below, source = base_directory(directory, named, base), str(below / CONFIG_FILE)
        lora = found.checked(lora, str(directory))
    elif base is not None:
        raise ConfigError(f"model.base is {base!r}, but {directory} is no adapter: leave it out")
    config = ModelConfig.from_hugging_face(read_json(below / "config.json"), dtype)
    return config if lora is None else config.with_lora(lora, source, os.path.abspath(below))


def tokenizer_directory(directory: str, base: str | None = None) -> str:
    """Where a checkpoint's tokenizer lies: beside it, or beside the base of an adapter that was saved without one.

    Args:
        directory: Of a model, or of an adapter.
        base: As of `LoadingConfig`.
    """
    if os.path.isfile(os.path.join(directory, "tokenizer.json")) or not is_adapter(directory):
        return directory
    return str(base_directory(directory, read_adapter_config(directory)[1], base))


_OWN = {"dtype", "lora", "base", "rope_scaling", "other_keys"}
"""What a `config.json` has not, or under another name."""
_REPLACED_KEYS = ("dtype", "rope_parameters", "eos_token_id", "pad_token_id")
"""Of a `config.json`: its saved form says this under other names, or the tokenizer does."""
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NUMBERS = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "rope_theta",
    "rms_norm_eps",
)
_DEFAULT_EPS = 1e-6
_MAX_POSITIONS = 2048


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` (but for the dtype) from a parsed `config.json`.

    Raises:
        ConfigError: naming a field that is missing or asks for something the decoder does not do.
    """
    _check_kinds(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: model_type is {_shown(model_type)}: supported are {known}")
    for name in _REQUIRED:
        if config.get(name) is None:
            raise ConfigError(f"config.json: {name} is missing")
    _refuse_unsupported(config)
    theta, scaling = _read_rope(config)
    return {
        "model_type": model_type,
        **{name: config[name] for name in _REQUIRED},
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "head_dim": config.get("head_dim") or _default_head_dim(config),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.get("rms_norm_eps", _DEFAULT_EPS),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": config.get("max_position_embeddings", _MAX_POSITIONS),
    }


def _check_kinds(config: Mapping[str, Any]) -> None:
    """Raises where a number or a section of keys is something else; ranges are `ModelConfig`'s to check."""
    for name in (*_REQUIRED, *_NUMBERS):
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"config.json: {name}: {_shown(value)} is no number")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), Mapping | None):
            raise ConfigError(f"config.json: {name} is {_shown(config[name])}: it must be a section of keys")
    if config.get("num_attention_heads") == 0:
        raise ConfigError("config.json: num_attention_heads is 0: it must be at least 1")


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _default_head_dim(config: Mapping[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ConfigError(
            f"config.json: head_dim is missing and hidden_size ({hidden}) is no multiple of "
            f"num_attention_heads ({heads})"
        )
    return hidden // heads


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises on whatever would make the decoder compute something else than transformers does."""
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act is {_shown(config['hidden_act'])}: only silu is supported")
    # In these two families the flag adds a bias to the output projection too, which the decoder has not.
    if config["model_type"] != "qwen2" and config.get("attention_bias"):
        raise ConfigError("config.json: attention_bias is true: only qwen2's own biases are supported")
    if config.get("mlp_bias"):
        raise ConfigError("config.json: mlp_bias is true: biases in the MLP are not supported")
    if config.get("quantization_config"):
        raise ConfigError("config.json: quantization_config is set: load the weights unquantised")
    _refuse_window(config)


def _refuse_window(config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    positions = config.get("max_position_embeddings", _MAX_POSITIONS)
    if window is not None and window < positions:
        raise ConfigError(
            f"config.json: sliding_window is {window}, less than max_position_embeddings ({positions}): "
            f"windowed attention is not supported; where no sequence is longer than the window, "
            f"set max_position_embeddings to {window}, which gives the same results"
        )


def _read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and Llama 3 scaling, from either form of the file."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta", parameters.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not 1: partial rotation is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"config.json: rope type is {_shown(kind)}: supported are default and llama3")
    missing = [name for name in _LLAMA3_KEYS if name not in parameters]
    if missing:
        raise ConfigError(f"config.json: llama3 rope scaling lacks {', '.join(missing)}")
    return theta, {name: parameters[name] for name in _LLAMA3_KEYS}


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The content of a `config.json`; rotary fields in the form that every transformers version reads."""
    scaling = config.rope_scaling
    fields = json.loads(config.other_keys) | config.model_dump(exclude=_OWN)
    fields |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling.model_dump()},
        "hidden_act": "silu",
        "torch_dtype": config.dtype,
        "use_cache": True,
    }
    if config.model_type in ("llama", "qwen3"):
        fields["attention_bias"] = False
    if config.model_type == "mistral":
        fields["sliding_window"] = None
    if config.model_type in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = False
    return fields
