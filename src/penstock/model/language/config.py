"""What a decoder is made of, and how a recipe names the policy it starts from.

`ModelConfig` covers the Llama, Qwen2 (bias on queries, keys and values), Qwen3 (normalised queries and keys) and
Mistral families. What a Hugging Face `config.json` may say beyond that is refused by name, never ignored. Not
covered: mixtures of experts, attention windows shorter than the context, quantised weights.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
    """Llama 3's stretching of rotary wavelengths; see `penstock.model.language.rotary`.

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

        This table is the one place that says what a decoder consists of; matrices are [in, out].
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
        }

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
        from penstock.model.language.hugging_face_config import read_config

        return cls.validated(read_config(config) | {"dtype": dtype}, "config.json")

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads as this model."""
        from penstock.model.language.hugging_face_config import write_config

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
        vocab_size: None takes the tokenizer's.
        intermediate_size: None: 8/3 of the hidden size, rounded up to a multiple of 16.
        num_key_value_heads: None: as many as query heads.
        head_dim: None: hidden size divided by query heads.
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


class PolicyConfig(_Frozen):
    """The policy that a run starts from, as a recipe writes it under ``model:``.

    Attributes:
        path: A Hugging Face checkpoint directory; or
        init: a small model drawn at random from the run's seed. Exactly one of the two.
        tokenizer: A tokenizer directory, or "penstock" for the packaged one; None means the checkpoint's own,
            and the packaged one for `init`.
        dtype: Of parameters and activations.
    """

    path: str | None = None
    init: InitConfig | None = None
    tokenizer: str | None = None
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _one_source(self) -> "PolicyConfig":
        if (self.path is None) == (self.init is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"give exactly one of path and init ({given} given)")
        return self

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.tokenizer or self.path or "penstock"
