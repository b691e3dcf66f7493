"""What a decoder is made of, how a recipe names the policy it starts from, and both as Hugging Face's `config.json`.

`ModelConfig` covers the Llama, Qwen2 (bias on queries, keys and values), Qwen3 (normalised queries and keys), Mistral,
Phi-3 and Gemma 3 (text) families. What a `config.json` may say beyond that is refused by name, never ignored.

Not covered: mixtures of experts, quantised weights, images.
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from typing_extensions import override

from penstock.model.json_files import read_json
from penstock.model.language.config_file import MOST_LAYERS, REPLACED_KEYS, read_config, write_config
from penstock.model.language.lora import LoraConfig, base_directory, is_adapter, read_adapter_config
from penstock.types.errors import ConfigError

ModelType = Literal["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text"]
LayerType = Literal["full_attention", "sliding_attention"]
Dtype = Literal["float32", "bfloat16"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class RopeScaling(_Frozen):
    """Llama 3's stretching of rotary wavelengths; see `penstock.model.language.decoder`.

    Attributes:
        factor: Long wavelengths are stretched by this.
        low_freq_factor: Wavelengths beyond original context / this are stretched fully.
        high_freq_factor: Wavelengths under original context / this are kept.
        original_max_position_embeddings: Context of the model before it was stretched.
    """

    kind: ClassVar[str] = "llama3"

    factor: float = Field(gt=0)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> "RopeScaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be greater than low_freq_factor")
        return self


class YarnScaling(_Frozen):
    """YaRN's stretching of rotary wavelengths; see `penstock.model.language.decoder`.

    Attributes:
        factor: Wavelengths that turn less than `beta_slow` times in the original context are stretched by this.
        original_max_position_embeddings: Context of the model before it was stretched.
        attention_factor: Cosines and sines are multiplied by this.
        beta_fast: Wavelengths that turn more often than this in the original context are kept.
        beta_slow: See `factor`; between the two there is a linear ramp over the pairs of a head.
        truncate: Whether the ramp begins and ends at whole pairs.
    """

    kind: ClassVar[str] = "yarn"

    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(gt=0)
    attention_factor: float = Field(gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    truncate: bool = True

    @model_validator(mode="after")
    def _ordered(self) -> "YarnScaling":
        if self.beta_fast <= self.beta_slow:
            raise ValueError("beta_fast must be greater than beta_slow")
        return self


def _scaling_kind(value: Any) -> str:
    if isinstance(value, RopeScaling | YarnScaling):
        return value.kind
    return YarnScaling.kind if isinstance(value, Mapping) and "attention_factor" in value else RopeScaling.kind


Scaling = Annotated[
    Annotated[RopeScaling, Tag("llama3")] | Annotated[YarnScaling, Tag("yarn")], Discriminator(_scaling_kind)
]
"""How rotary wavelengths are stretched."""

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
        rope_scaling: Llama 3's or YaRN's stretching, or None.
        rms_norm_eps: Added to the mean square.
        tie_word_embeddings: Whether the output matrix is the embedding.
        max_position_embeddings: The longest sequence that the model is meant for.
        sliding_window: How many keys a query sees at most in a layer with a window, its own among them; None: all.
        layer_types: Which layers have that window (``sliding_attention``) and which see everything
            (``full_attention``); None: all have it.
        rope_local_theta: Base of the rotary wavelengths, unscaled, in layers with a window; None: as in the others.
        query_pre_attn_scalar: Scores are divided by its square root; None: by that of the head's width.
        dtype: Of parameters and activations; norms, softmax and logits are computed in float32.
        lora: The adapter beside a frozen model; None: there is none.
        base: Path of that model's directory; empty where there is no adapter.
        other_keys: What else the `config.json` that it was read from holds, as JSON; written back when it is saved.
    """

    model_type: ModelType = "llama"
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = False
    max_position_embeddings: int = Field(default=2048, gt=0)
    sliding_window: int | None = Field(default=None, gt=0)
    layer_types: tuple[LayerType, ...] | None = None
    rope_local_theta: float | None = Field(default=None, gt=0)
    query_pre_attn_scalar: float | None = Field(default=None, gt=0)
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
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} layers, num_hidden_layers {self.num_hidden_layers}"
            )
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta ({self.rope_theta:g}) must be above 1 with YaRN, which divides by its logarithm"
            )
        return self

    @property
    def attention_bias(self) -> bool:
        """Whether queries, keys and values have a bias (Qwen2)."""
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3, Gemma 3)."""
        return self.model_type in ("qwen3", "gemma3_text")

    @property
    def is_gemma(self) -> bool:
        """Whether norms multiply by 1 + weight and also follow attention and MLP, and the gate's silu is a gelu."""
        return self.model_type == "gemma3_text"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many keys each layer's queries see at most; None: all."""
        types = self.layer_types or ("sliding_attention",) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in types)

    @property
    def longest_sequence(self) -> int:
        """Tokens that it is meant for: its positions, or what YaRN stretches its first context to, where that is more.

        Files that ask for YaRN often leave `max_position_embeddings` at what the model was trained with.
        """
        scaling = self.rope_scaling
        if not isinstance(scaling, YarnScaling):
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def shortest_window(self) -> int | None:
        """Of all layers; None where each sees everything."""
        return min((window for window in self.windows if window is not None), default=None)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by the name under which weights travel; ``layers.`` are stacked.

        This table is the one place that says what a decoder consists of; matrices are [in, out]. Beside an adapter
        the layers lie one by one (``layers.0.query``), and do not travel; here and in digests they are a stack.
        """
        depth, hidden, wide = self.num_hidden_layers, self.hidden_size, self.intermediate_size
        queries, keys = self.query_size, self.key_value_size
        biases = {"query_bias": (queries,), "key_bias": (keys,), "value_bias": (keys,)}
        head_norms = {"query_norm": (self.head_dim,), "key_norm": (self.head_dim,)}
        outer_norms = {"attention_out_norm": (hidden,), "mlp_out_norm": (hidden,)}
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "query": (hidden, queries),
            "key": (hidden, keys),
            "value": (hidden, keys),
            **(biases if self.attention_bias else {}),
            **(head_norms if self.qk_norm else {}),
            "output": (queries, hidden),
            "post_norm": (hidden,),
            **(outer_norms if self.is_gemma else {}),
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

    def with_lora(self, lora: LoraConfig, source: str | None, base: str = "") -> "ModelConfig":
        """The same model with an adapter.

        Args:
            lora: The shape of the adapter.
            source: Where it is asked for, for errors; None: it is there already, whatever its rank.
            base: Path of this model's directory.

        Raises:
            ConfigError: a matrix is smaller than the rank.
        """
        shapes = self.model_copy(update={"lora": None}).parameter_shapes()
        if source is not None:
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
        replaced = {*write_config(read), *REPLACED_KEYS}
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
            where = [".".join(map(str, first["loc"]))] if first["loc"] else []
            if where and first["type"] != "missing":
                where = [f"{where[0]} is {reprlib.repr(first['input'])}"]
            raise ConfigError(": ".join([source, *where, first["msg"].removeprefix("Value error, ")])) from error


class InitConfig(_Frozen):
    """A model to be drawn at random: the fields of `ModelConfig` with defaults for small models.

    Attributes:
        model_type: Family; ``qwen2`` has biases on queries, keys and values, ``qwen3`` normalised queries and keys. No
            layer has a window.
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
    vocab_size: int | None = Field(default=None, gt=0, le=2**24)
    hidden_size: int = Field(default=128, gt=0, le=2**20)
    intermediate_size: int | None = Field(default=None, gt=0, le=2**22)
    num_hidden_layers: int = Field(default=2, gt=0, le=MOST_LAYERS)
    num_attention_heads: int = Field(default=4, gt=0, le=65536)
    num_key_value_heads: int | None = Field(default=None, gt=0, le=65536)
    head_dim: int | None = Field(default=None, gt=0, le=65536)
    rope_theta: float = Field(default=10000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    tie_word_embeddings: bool = True
    max_position_embeddings: int = Field(default=2048, gt=0, le=2**30)

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
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        derived: dict[str, Any] = {
            "vocab_size": self.vocab_size or vocab_size,
            "intermediate_size": self.intermediate_size or -(-self.hidden_size * 8 // 3 // 16) * 16,
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": head_dim,
            "dtype": dtype,
        }
        if self.model_type == "gemma3_text":  # whose file must say these, as it will be read again
            derived |= {
                "layer_types": ("full_attention",) * self.num_hidden_layers,
                "sliding_window": self.max_position_embeddings,
                "rope_local_theta": self.rope_theta,
                "query_pre_attn_scalar": head_dim,
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

    @override
    def policy(self, directory: str | Path) -> "PolicyConfig":
        """The policy that lies in a directory, loaded so; an adapter in the dtype that `lora` gives its parameters.

        Raises:
            CheckpointError: the adapter's configuration cannot be read.
            ConfigError: it is of something that is not supported.
        """
        policy = super().policy(directory)
        if self.lora is None or self.lora.dtype is None or not is_adapter(directory):
            return policy
        return policy.model_copy(update={"lora": read_adapter_config(directory)[0].in_dtype(self.lora.dtype)})

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

    @property
    def base_now(self) -> str | None:
        """Where the base of its adapter lies, also of one that a run of it has saved; None: where that names it."""
        path = None if self.lora is None or self.directory is None else Path(self.directory)
        beside = path is not None and not is_adapter(path) and (path / "config.json").is_file()
        return str(path) if beside else self.base


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
        below, source = base_directory(directory, named, base), None
        lora = found.checked(lora, str(directory))
    elif base is not None:
        raise ConfigError(f"model.base is {base!r}, but {directory} is no adapter: leave it out")
    try:
        config = ModelConfig.from_hugging_face(read_json(below / "config.json"), dtype)
    except ConfigError as error:  # begins with the file's name
        raise ConfigError(os.path.join(below, str(error))) from error
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
