"""How much memory a run will take, from its configuration alone.

Pure functions over the configs; nothing is allocated. With P parameters of b bytes, L layers, hidden size h,
intermediate size i, query width q, key-value width v, H heads, vocabulary V, slots s, sequence length S, rows R of
length T in a micro-batch (N = R T tokens), and c bytes of what is computed with (b, but 4 on CPUs, where XLA computes
bfloat16 in float32):

- *learner's parameters* 2 P b: the present and the next version (never donated: engines read them); 3 P b where an
  update takes several optimiser steps, with what lies between the two; beside an adapter of A parameters P b + 2 A b;
- *reference* P b, of a KL; P (b + 4) where a bfloat16 one follows by an average, which is float32; A for P beside an
  adapter, unless it is a directory's;
- *engine's parameters* 2 P b: its own, unstacked, and the next version's during a swap; what an engine over several
  devices holds are copies throughout, 3 P b with those that are put there; beside an adapter 2 A b, since it reads the
  learner's base (over several devices P b more);
- *gradients* 4 P, accumulated in float32, and P b for the micro-batch being added;
- *optimiser*, unless it is offloaded: AdamW's moments in float32, 8 P; Muon's momentum 4 P_m, with AdamW's
  8 (P − P_m) of all but the P_m parameters in matrices of layers; Adafactor's rows and columns of each matrix. And 4 P
  more for the float32 master of a bfloat16 model. Of an adapter A for P, and its own dtype, as of its gradients;
- *KV cache* 2 · 2 L s S v b: the cache, and its copy while it grows or a prompt's samples fork from it;
- *attention*, dense, R H T² (8 + c): scores and their gradient in float32, weights in the dtype of the products; by any
  other kernel 8 N (q + v) c, half as much again where products are kept; dense 4 R H T² more in every layer where all
  is; and of the largest prefill, r prompts of length t, 8 r t i and dense H r t² (4 + c), else 6 r t (q + v) b; of a
  long one, on one CPU, those of a chunk of t tokens, 8 t i + H t S (4 + c) + 2 S v c;
- *adapter's products*, of outputs w in all: 8 N w, 6 N w where bfloat16 is computed in float32; or attention, where it
  takes more and is not dense;
- *activations* of one micro-batch: L N h b between layers (none, offloaded), with q beside h where what attention gave
  is kept (`attends_again`), and N (4 h + 3 q + 4 v + 4 i) c inside one where `remat` keeps a layer's input; where it
  keeps products, L N (2 h + 2 q + 2 v + 2 i) b, and N (h + 2 i) c, or twice the former inside where c is not b; where
  it keeps all, 4 L N (11 h + 3 q + 2 v + 6 i), and N (h + 2 i) c;
- *vocabulary*: the output head takes 8 V h + 12 V · tile, before the layers' backward pass; what that
  exceeds gradient, attention and activations by, and 6 · 4 V s of a decode step;
- *float32 copies*, on CPUs of a bfloat16 model: 4 P + 8 V h in the learner, none beside an adapter; of head and cache
  in the engine;
- *snapshot*: P b (A b) of an older version, and copies on the host of the optimiser's state and the reference, where a
  checkpoint is written while training goes on;
- *optimiser step*: what its temporaries exceed those of the gradient by: 4 P (7.6 P with a master), of Muon
  6 P_m (13 P_m) of its matrices and 10 (7.6) of each other parameter, of Adafactor 4 P (10.6 P).

Each program's part is within 15% of what XLA's compiler allots (`memory_analysis`; a bfloat16 prefill, and the gradient
of an adapter, within 20%),
tested on CPUs, and for the gradient against programs compiled for a GPU. Of all devices together: what an engine is
split over holds an equal part of its parameters and cache each. The process itself (Python, JAX, compiled programs)
adds `PROCESS_BYTES`.
"""

import math
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from penstock.batch.packing import RowShape
from penstock.inference.config import EngineConfig
from penstock.learner.config import STACKED, LearnerConfig, OptimizerConfig
from penstock.model.language.attention_choice import AttentionKernel, Remat, attends_again, attention_kernel
from penstock.model.language.config import ADAPTER, ModelConfig, PolicyConfig, read_shape
from penstock.types import CheckpointError, ConfigError

PROCESS_BYTES = 700 * 2**20
"""Measured after start-up of a CPU run with a tiny model."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def model_shape(policy: PolicyConfig) -> ModelConfig:
    """The shape of the policy, from its config.json or its `init` section; no weights are read.

    Raises:
        ConfigError: the model or tokenizer directory is not there, or cannot be read.
    """
    if policy.init is not None and policy.directory is None:
        from penstock.text import Tokenizer

        return policy.init.model(Tokenizer.load(policy.tokenizer_path).vocab_size, policy.dtype)
    try:
        return read_shape(str(policy.directory), policy.dtype, policy.base, policy.lora)
    except CheckpointError as error:
        raise ConfigError(
            f"{policy.source_key} is {policy.initial_checkpoint or policy.path}: {error}: give a Hugging Face model "
            "directory, or a run's checkpoint as model.initial_checkpoint"
        ) from error


def computes_on_cpu() -> bool:
    """Whether this machine has no NVIDIA GPU, or JAX is told to leave it alone; asked without loading JAX."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/proc/driver/nvidia").exists()


def estimate_memory(
    model: ModelConfig, engine: EngineConfig, learner: LearnerConfig, on_cpu: bool = True, snapshots: bool = False
) -> dict[str, int]:
    """The memory of a training run in one process: bytes by purpose, see the module's docstring.

    Args:
        model: Its shape and dtype.
        engine: Slots and lengths.
        learner: Rows of a micro-batch.
        on_cpu: Where XLA computes bfloat16 in float32.
        snapshots: Whether checkpoints are written while training goes on.
    """
    width = _DTYPE_BYTES[model.dtype]
    trained, own = trained_count(model, learner), _DTYPE_BYTES[_trained_dtype(model)]
    cache = kv_cache_bytes(model, engine.max_slots, engine.max_seq_len)
    upcast = on_cpu and width < 4
    gradient = gradient_temporaries(model, learner, on_cpu)
    reference = reference_bytes(model, learner)
    state = optimizer_state_bytes(model, learner) + trained * (0 if own == 4 else 4)
    upcasts = 4 * model.vocab_size * model.hidden_size + 4 // width * cache if upcast else 0
    return {
        "parameters of the learner": base_bytes(model)
        + (2 if learner.optimizer_steps == 1 else 3) * moving_bytes(model),
        **({"parameters of the reference": reference} if reference else {}),
        "parameters of the engine": _engine_bytes(model, engine),
        "gradients": trained * (4 + own),
        "optimiser state": 0 if learner.optimizer.offload else state,
        "KV cache": 2 * cache,
        "attention": gradient["attention"] + _largest_prefill(model, engine, on_cpu),
        "activations": gradient["activations"],
        "scores over the vocabulary": gradient["vocabulary"] + 6 * 4 * model.vocab_size * engine.max_slots,
        "float32 copies on a CPU": gradient["copies"] + upcasts,
        "the optimiser step": max(0, step_temporaries(model, learner) - sum(gradient.values())),
        **({"a checkpoint being written": moving_bytes(model) + state + reference} if snapshots else {}),
        "the process itself": PROCESS_BYTES,
    }


def memory_lines(parts: Mapping[str, int]) -> list[str]:
    """An estimate for people: a line for each part, and their sum."""
    shown = {**parts, "total": sum(parts.values())}
    return [f"  {name:<34}{bytes_text(count):>11}" for name, count in shown.items()]


def reference_bytes(model: ModelConfig, learner: LearnerConfig) -> int:
    """Of a KL's reference, and of the float32 average that a bfloat16 one follows by."""
    reference, moving = learner.kl.reference, moving_bytes(model)
    if reference is None:
        return 0
    if learner.kl.directory is not None:
        return base_bytes(model) + moving
    average = reference == "ema" and _trained_dtype(model) == "bfloat16"
    return 3 * moving if average else moving


def _adapter_count(model: ModelConfig) -> int:
    shapes = model.parameter_shapes().items()
    return sum(math.prod(shape) for name, shape in shapes if name.startswith(ADAPTER))


def _trained_dtype(model: ModelConfig) -> str:
    return model.dtype if model.lora is None else model.lora.dtype or model.dtype


def base_bytes(model: ModelConfig) -> int:
    """Of the parameters that every version shares: all but an adapter's; none where there is no adapter."""
    return (model.parameter_count - _adapter_count(model)) * _DTYPE_BYTES[model.dtype] if model.lora is not None else 0


def moving_bytes(model: ModelConfig) -> int:
    """Of the parameters that each version has of its own."""
    return moving_count(model) * _DTYPE_BYTES[_trained_dtype(model)]


def moving_count(model: ModelConfig) -> int:
    """Number of the parameters that each version has of its own."""
    return model.parameter_count if model.lora is None else _adapter_count(model)


def _engine_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    several = engine.model_parallel != 1
    if model.lora is None:
        return (3 if several else 2) * moving_bytes(model)
    return 2 * moving_bytes(model) + (base_bytes(model) if several else 0)


def _adapter_activations(model: ModelConfig, tokens: int, upcast: bool) -> int:
    """What an adapter adds to the products of one layer, float32, and its gradient; measured where bfloat16 is not."""
    if model.lora is None:
        return 0
    shapes = model.parameter_shapes()
    added = sum(shapes[f"{ADAPTER}{name}.b"][-1] for name in model.lora.matrices)
    return (6 if upcast else 8) * tokens * added


def trained_count(model: ModelConfig, learner: LearnerConfig) -> int:
    """Number of parameters that are not frozen."""
    return sum(map(math.prod, _trained_shapes(model, learner).values()))


def _trained_shapes(model: ModelConfig, learner: LearnerConfig) -> dict[str, tuple[int, ...]]:
    frozen, shapes = (*learner.optimizer.frozen, *model.still), model.parameter_shapes().items()
    return {name: shape for name, shape in shapes if not any(fnmatchcase(name, each) for each in frozen)}


def optimizer_state_bytes(model: ModelConfig, learner: LearnerConfig) -> int:
    """Of the optimiser's state, masters left out."""
    return sum(_state_bytes(learner.optimizer, *each) for each in _trained_shapes(model, learner).items())


def _state_bytes(optimizer: OptimizerConfig, name: str, shape: tuple[int, ...]) -> int:
    if optimizer.name != "adafactor":
        return (4 if optimizer.orthogonalises(name, len(shape)) else 8) * math.prod(shape)
    stack, own = (shape[:1], shape[1:]) if name.startswith(STACKED) else ((), shape)
    return 4 * math.prod(stack) * (math.prod(own) if len(own) < 2 else sum(own))


def gradient_temporaries(model: ModelConfig, learner: LearnerConfig, on_cpu: bool = True) -> dict[str, int]:
    """Bytes that one micro-batch's gradient takes beside parameters and the accumulated gradient, by purpose.

    Of several lengths of rows that which takes most.
    """
    found = [_temporaries_of(shape, model, learner, on_cpu) for shape in learner.row_shapes]
    return max(found, key=lambda parts: sum(parts.values()))


def _temporaries_of(shape: RowShape, model: ModelConfig, learner: LearnerConfig, on_cpu: bool) -> dict[str, int]:
    (length, rows, _), count = shape, model.parameter_count
    platform = "cpu" if on_cpu else "gpu"
    kernel = attention_kernel(learner.attention, platform, length, model.dtype, model.head_dim)
    apart, upcast = model.lora is not None, on_cpu and model.dtype == "bfloat16"
    head = (4 if apart else 8) * model.vocab_size * model.hidden_size  # a base's has no gradient
    copies = 4 * count if upcast and not apart else 0
    attention = attention_bytes(model, shape, kernel, learner.remat, on_cpu)
    added = _adapter_activations(model, rows * length, upcast)
    if kernel != "dense":  # whose gradient is over when those of the products are made
        added = max(0, added - attention)
    layers = {
        "gradient": trained_count(model, learner) * _DTYPE_BYTES[_trained_dtype(model)],
        "attention": attention,
        "activations": activation_bytes(model, shape, kernel, learner.remat, on_cpu) + added,
        "copies": copies + head if copies else 0,
    }
    tile = 12 * model.vocab_size * min(learner.head_tile(platform), rows * length)
    scoring = copies + head + tile + _kept_bytes(model, rows * length, kernel, learner.remat)
    return layers | {"vocabulary": max(0, scoring - sum(layers.values()))}


def step_temporaries(model: ModelConfig, learner: LearnerConfig) -> int:
    """Bytes that the optimiser step takes beside its arguments, the new parameters of a bfloat16 model included.

    Of an offloaded state these alone: of pieces there are few.
    """
    if learner.optimizer.offload:
        return moving_bytes(model)
    optimizer, wide = learner.optimizer, _trained_dtype(model) == "float32"
    bare, with_master = {"adamw": (4.0, 7.6), "muon": (10.0, 7.6), "adafactor": (4.0, 10.6)}[optimizer.name]
    per_parameter, of_matrix = (bare, 6.0) if wide else (with_master, 13.0)
    sizes = [
        (of_matrix if optimizer.orthogonalises(name, len(shape)) else per_parameter) * math.prod(shape)
        for name, shape in _trained_shapes(model, learner).items()
    ]
    return round(sum(sizes))


def kv_cache_bytes(model: ModelConfig, slots: int, length: int) -> int:
    """Keys and values of every layer, slot and position."""
    return 2 * model.num_hidden_layers * slots * length * model.key_value_size * _DTYPE_BYTES[model.dtype]


def attention_bytes(
    model: ModelConfig, shape: RowShape, kernel: AttentionKernel = "dense", remat: Remat = "layer", on_cpu: bool = True
) -> int:
    """One layer's attention with its gradient: scores of every query of a row against every key, where it is dense."""
    computed, tokens = 4 if on_cpu else _DTYPE_BYTES[model.dtype], shape.rows * shape.length
    if kernel == "dense":
        scores = tokens * model.num_attention_heads * shape.length
        more = 4 * model.num_hidden_layers if remat == "none" else 0
        return scores * (8 + computed + more)
    more = 8 if remat in ("layer", "offload") else 12
    return tokens * (model.query_size + model.key_value_size) * computed * more


def prefill_temporaries(model: ModelConfig, rows: int, length: int, on_cpu: bool = True) -> int:
    """Bytes that a prefill takes beside parameters and the keys and values that it makes."""
    computed, width = 4 if on_cpu else _DTYPE_BYTES[model.dtype], _DTYPE_BYTES[model.dtype]
    scores = rows * model.num_attention_heads * length**2 * (4 + computed)
    platform = "cpu" if on_cpu else "gpu"
    if attention_kernel("auto", platform, length, model.dtype, model.head_dim) != "dense":
        scores = 6 * rows * length * (model.query_size + model.key_value_size) * width
    return scores + 8 * rows * length * model.intermediate_size


def chunk_temporaries(model: ModelConfig, tokens: int, window: int, on_cpu: bool = True) -> int:
    """Bytes that adding tokens of a prompt to a cache of that window takes beside parameters and cache."""
    computed = 4 if on_cpu else _DTYPE_BYTES[model.dtype]
    scores = model.num_attention_heads * tokens * window * (4 + computed)
    return scores + 2 * window * model.key_value_size * computed + 8 * tokens * model.intermediate_size


def _largest_prefill(model: ModelConfig, engine: EngineConfig, on_cpu: bool) -> int:
    longest = engine.longest_whole if on_cpu and engine.model_parallel == 1 else engine.max_seq_len
    shapes = [(engine.prefill_row_counts(length)[-1], length) for length in engine.prefill_buckets if length <= longest]
    chunk = chunk_temporaries(model, min(engine.prefill_chunk, engine.max_seq_len), engine.max_seq_len, on_cpu)
    return max([chunk, *(prefill_temporaries(model, rows, length, on_cpu) for rows, length in shapes)])


def activation_bytes(
    model: ModelConfig, shape: RowShape, kernel: AttentionKernel = "dense", remat: Remat = "layer", on_cpu: bool = True
) -> int:
    """What the backward pass of one micro-batch keeps and computes, without attention scores and the head."""
    tokens, width = shape.rows * shape.length, _DTYPE_BYTES[model.dtype]
    computed = 4 if on_cpu else width
    hidden, wide = model.hidden_size, model.intermediate_size
    inside = tokens * (4 * hidden + 3 * model.query_size + 4 * model.key_value_size + 4 * wide) * computed
    if remat == "none" or (remat == "products" and computed == width):  # what is kept needs no computing again
        inside = tokens * (hidden + 2 * wide) * computed
    elif remat == "products":
        inside *= 2
    return _kept_bytes(model, tokens, kernel, remat) + inside


def _kept_bytes(model: ModelConfig, tokens: int, kernel: AttentionKernel, remat: Remat) -> int:
    """From the forward to the backward pass, on the device; scores of dense attention are not counted here."""
    hidden, queries, keys = model.hidden_size, model.query_size, model.key_value_size
    width, wide = _DTYPE_BYTES[model.dtype], model.intermediate_size
    per_token = {
        "offload": 0,
        "layer": width * (hidden if attends_again("layer", kernel) else hidden + queries),
        "products": width * 2 * (hidden + queries + keys + wide),
        "none": 4 * (11 * hidden + 3 * queries + 2 * keys + 6 * wide),
    }
    return model.num_hidden_layers * tokens * per_token[remat]


def bytes_text(count: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
