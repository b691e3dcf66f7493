"""How much memory a run will take, from its configuration alone.

Pure functions over the configs; nothing is allocated. With P parameters of b bytes, L layers, hidden size h,
intermediate size i, query width q, key-value width v, H heads, vocabulary V, slots s, sequence length S, rows R of
length T in a micro-batch (N = R T tokens):

- *parameters* 2 P b: the learner's and the published ones that the engine decodes with (never donated); 3 P b where
  the engine is split over several devices, because its parts are then copies;
- *gradients* P b, accumulated over micro-batches, and as much again for the micro-batch being added;
- *optimiser* 2 P b: AdamW's two moments;
- *KV cache* 2 · 2 L s S v b: the cache, and its copy while it grows or a prompt's samples fork from it;
- *activations* of one micro-batch: L N h b between layers, plus for each layer whose inside is kept (one where
  `remat` recomputes them, otherwise L) N (4 h + 3 q + 4 v + 4 i) b + 2 · 4 N H T for attention scores;
- *vocabulary* 2 · 4 V max(head tile, slots): scores of the learner's head tile with their gradient, or of one
  decode step with their running sums.

Of all devices together: what an engine is split over holds an equal part of its parameters and cache each.
An upper estimate to decide by, within a factor of about two; the process itself (Python, JAX, compiled programs) adds
`PROCESS_BYTES`.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from penstock.inference.config import EngineConfig
from penstock.learner.config import LearnerConfig
from penstock.model.language.config import ModelConfig, PolicyConfig
from penstock.types import ConfigError

PROCESS_BYTES = 700 * 2**20
"""Measured after start-up of a CPU run with a tiny model."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by purpose; see the module's docstring.

    Attributes:
        parameters_bytes: Two sets; three with an engine over several devices.
        gradients_bytes: Accumulated, and of one micro-batch.
        optimizer_bytes: Both moments.
        kv_cache_bytes: Twice the engine's cache.
        activations_bytes: Of one micro-batch.
        vocabulary_bytes: Scores over the vocabulary.
        process_bytes: Everything else.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kv_cache_bytes: int
    activations_bytes: int
    vocabulary_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def model_shape(policy: PolicyConfig) -> ModelConfig:
    """The shape of the policy, from its config.json or its `init` section; no weights are read.

    Raises:
        ConfigError: the model or tokenizer directory is not there, or cannot be read.
    """
    if policy.init is not None:
        from penstock.text import Tokenizer

        return policy.init.model(Tokenizer.load(policy.tokenizer_path).vocab_size, policy.dtype)
    path = Path(str(policy.path)) / "config.json"
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path is {policy.path}: {path} cannot be read ({error}): give a Hugging Face model directory"
        ) from error
    return ModelConfig.from_hugging_face(content, policy.dtype)


def estimate_memory(model: ModelConfig, engine: EngineConfig, learner: LearnerConfig) -> MemoryEstimate:
    """The memory of a training run in one process."""
    parameters = model.parameter_count * _DTYPE_BYTES[model.dtype]
    return MemoryEstimate(
        parameters_bytes=(2 if engine.model_parallel == 1 else 3) * parameters,
        gradients_bytes=2 * parameters,
        optimizer_bytes=2 * parameters,
        kv_cache_bytes=2 * kv_cache_bytes(model, engine.max_slots, engine.max_seq_len),
        activations_bytes=activation_bytes(model, learner.micro_batch_rows, learner.row_length, learner.remat),
        vocabulary_bytes=2 * 4 * model.vocab_size * max(learner.head_tile_tokens, engine.max_slots),
    )


def kv_cache_bytes(model: ModelConfig, slots: int, length: int) -> int:
    """Keys and values of every layer, slot and position."""
    return 2 * model.num_hidden_layers * slots * length * model.key_value_size * _DTYPE_BYTES[model.dtype]


def activation_bytes(model: ModelConfig, rows: int, row_length: int, remat: bool) -> int:
    """What the backward pass of one micro-batch keeps, without the head."""
    tokens, width = rows * row_length, _DTYPE_BYTES[model.dtype]
    between = model.num_hidden_layers * tokens * model.hidden_size * width
    inside = (
        4 * model.hidden_size + 3 * model.query_size + 4 * model.key_value_size + 4 * model.intermediate_size
    ) * width + 2 * 4 * model.num_attention_heads * row_length
    return between + (1 if remat else model.num_hidden_layers) * tokens * inside


def bytes_text(count: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
