"""The content of Hugging Face's `config.json`, to the fields of `ModelConfig` and back.

What it may say beyond the fields, and every field that would change the mathematics, is refused by name, never
ignored. Both its older form (`rope_theta`, `rope_scaling`) and that of transformers 5 (`rope_parameters`) are read.

Not covered: LongRoPE, whose rotation depends on the text's length, so that what a cache holds would change with it.
"""

import json
import math
from collections.abc import Mapping
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.model.language.config import ModelConfig

ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}

REPLACED_KEYS = ("dtype", "rope_parameters", "eos_token_id", "pad_token_id")
"""Of a `config.json`: its saved form says this under other names, or the tokenizer does."""
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN_NUMBERS = (
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
_NUMBERS = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "rope_theta",
    "rms_norm_eps",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "sliding_window_pattern",
)
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias")
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "max_position_embeddings": 32768},
    "qwen3": {"use_sliding_window": False, "max_position_embeddings": 32768, "head_dim": 128},
    "mistral": {"sliding_window": 4096, "max_position_embeddings": 131072},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "gemma3_text": {
        "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 6, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}  # fmt: skip
"""What a family's file means where it says nothing."""
_ACTIVATIONS = {"gemma3_text": ("hidden_activation", "gelu_pytorch_tanh")}
"""Key and the one value that is computed; else hidden_act and silu."""
_WINDOWED = ("mistral", "phi3", "gemma3_text")
"""Families whose windows are computed."""
_GEMMA_KEYS = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")
MOST_LAYERS = 10_000
"""A file that says more is damaged, and is not believed before memory is taken for them."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MAX_POSITIONS = 2048


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig` (but for the dtype) from a parsed `config.json`.

    Raises:
        ConfigError: naming a field that is missing or asks for something the decoder does not do.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        config = _FAMILY_DEFAULTS.get(model_type, {}) | dict(config)
    _check_kinds(config)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: model_type is {shown(model_type)}: supported are {known}")
    for name in _REQUIRED:
        if config.get(name) is None:
            raise ConfigError(f"config.json: {name} is missing")
    _refuse_unsupported(config)
    theta, scaling = _read_rope(config)
    return {
        "model_type": model_type,
        **{name: config[name] for name in _REQUIRED},
        "num_key_value_heads": _or_else(config.get("num_key_value_heads"), config["num_attention_heads"]),
        "head_dim": _default_head_dim(config) if config.get("head_dim") is None else config["head_dim"],
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": config.get("max_position_embeddings", _MAX_POSITIONS),
        **_read_windows(config, scaling),
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar"),
    }


def _check_kinds(config: Mapping[str, Any]) -> None:
    """Raises where a number or a section of keys is something else; ranges are `ModelConfig`'s to check."""
    for name in (*_REQUIRED, *_NUMBERS):
        value = config.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"config.json: {name}: {shown(value)} is no number")
    for name in _FLAGS:
        if not isinstance(config.get(name), bool | None):
            raise ConfigError(f"config.json: {name} is {shown(config[name])}: it must be true or false")
    for name in ("rope_parameters", "rope_scaling"):
        whole = config.get(name)
        inner = [whole.get(kind) for kind in _LAYER_TYPES] if isinstance(whole, Mapping) else []
        for section in (whole, *inner):
            if not isinstance(section, Mapping | None):
                raise ConfigError(f"config.json: {name} has {shown(section)}: it must be a section of keys")
    if config.get("num_attention_heads") == 0:
        raise ConfigError("config.json: num_attention_heads is 0: it must be at least 1")


def _or_else(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


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
    key, activation = _ACTIVATIONS.get(config["model_type"], ("hidden_act", "silu"))
    if config.get(key, activation) != activation:
        raise ConfigError(f"config.json: {key} is {shown(config[key])}: only {activation} is supported")
    for name in _GEMMA_KEYS:
        if config.get(name):
            raise ConfigError(f"config.json: {name} is {shown(config[name])}: it is not supported")
    # In these two families the flag adds a bias to the output projection too, which the decoder has not.
    if config["model_type"] != "qwen2" and config.get("attention_bias"):
        raise ConfigError("config.json: attention_bias is true: only qwen2's own biases are supported")
    if config.get("mlp_bias"):
        raise ConfigError("config.json: mlp_bias is true: biases in the MLP are not supported")
    if config.get("quantization_config"):
        raise ConfigError("config.json: quantization_config is set: load the weights unquantised")


def _read_windows(config: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of attention windows; a window that never cuts is none."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    positions = config.get("max_position_embeddings", _MAX_POSITIONS)
    if config["model_type"] != "gemma3_text":
        never_cuts = window is None or positions is None or window >= positions  # no positions: refused later
        if window is None or (never_cuts and "attention_factor" not in (scaling or {})):  # YaRN's sequences are longer
            return {}
        if config["model_type"] in _WINDOWED:
            return {"sliding_window": window}
        raise ConfigError(
            f"config.json: sliding_window is {window}, less than max_position_embeddings ({positions}): windows of "
            f"{config['model_type']} are not supported; where no sequence is longer than the window, set "
            f"max_position_embeddings to {window}, which gives the same results"
        )
    pattern, depth = config["sliding_window_pattern"], config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if not isinstance(pattern, int) or pattern < 1:
        raise ConfigError(f"config.json: sliding_window_pattern is {shown(pattern)}: it must be at least 1")
    if kinds is None and isinstance(depth, int) and depth <= MOST_LAYERS:
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(depth)]
    if window is None and "sliding_attention" in (kinds or ()):
        raise ConfigError("config.json: sliding_window is None, and layer_types names layers that have a window")
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = local.get("rope_theta", config["rope_local_base_freq"])
    if local.get("rope_type", "default") != "default":
        raise ConfigError(f"config.json: rope type of layers with a window is {shown(local['rope_type'])}")
    return {"sliding_window": window, "layer_types": kinds, "rope_local_theta": theta}


def _read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from either form of the file."""
    newer, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if newer and older and _rotation(newer) != _rotation(older):  # transformers would take rope_scaling alone
        raise ConfigError(
            f"config.json: rope_parameters is {shown(newer)}, and rope_scaling {shown(older)}: keep one of the two, "
            "with rope_theta in rope_parameters or beside rope_scaling"
        )
    parameters = newer or older
    if "full_attention" in parameters:  # of layers without a window
        parameters = parameters["full_attention"] or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not 1: partial rotation is not supported")
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, _read_llama3(parameters)
    if kind == "yarn" and config["model_type"] != "phi3":  # there it is a former name of LongRoPE
        return theta, _read_yarn(parameters, config)
    known = "default, llama3 and yarn"
    if config["model_type"] == "phi3":
        known = "default and llama3 (yarn is a name of LongRoPE in phi3)"
    raise ConfigError(f"config.json: rope type is {shown(kind)}: supported are {known}")


def _rotation(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a section of either form says but for the base, which stands beside the older one."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {name: value for name, value in parameters.items() if name not in ("rope_theta", "type")} | {
        "rope_type": kind
    }


def _read_llama3(parameters: Mapping[str, Any]) -> dict[str, Any]:
    missing = [name for name in _LLAMA3_KEYS if name not in parameters]
    if missing:
        raise ConfigError(f"config.json: llama3 rope scaling lacks {', '.join(missing)}")
    return {name: parameters[name] for name in _LLAMA3_KEYS}


def _read_yarn(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's fields, with the factor of attention worked out (Peng et al. 2023, section 3.4)."""
    for name in ("factor", *_YARN_NUMBERS):
        value = parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float if name == "factor" else int | float | None):
            raise ConfigError(f"config.json: yarn rope scaling: {name} is {shown(value)}: it must be a number")
    factor, original = parameters["factor"], parameters.get("original_max_position_embeddings")

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        own, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        below = scale(all_dim) if own and all_dim else 1.0
        if not below > 0:
            raise ConfigError(
                f"config.json: yarn rope scaling: mscale_all_dim is {shown(all_dim)}: it must be positive"
            )
        attention = (scale(own) if own and all_dim else scale(1.0)) / below
    return {
        "factor": factor,
        "original_max_position_embeddings": _or_else(original, config.get("max_position_embeddings", _MAX_POSITIONS)),
        "attention_factor": attention,
        "beta_fast": _or_else(parameters.get("beta_fast"), 32.0),
        "beta_slow": _or_else(parameters.get("beta_slow"), 1.0),
        "truncate": parameters.get("truncate", True),
    }


def write_config(config: "ModelConfig") -> dict[str, Any]:
    """The content of a `config.json`; rotary fields in the form that every transformers version reads."""
    scaling, key_and_activation = config.rope_scaling, _ACTIVATIONS.get(config.model_type, ("hidden_act", "silu"))
    own = {"dtype", "rope_scaling", "other_keys", "sliding_window", "layer_types", "rope_local_theta", "lora", "base"}
    fields = json.loads(config.other_keys) | config.model_dump(exclude=own | {"query_pre_attn_scalar"})
    fields |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "rope_scaling": None if scaling is None else {"rope_type": scaling.kind, **scaling.model_dump()},
        key_and_activation[0]: key_and_activation[1],
        "torch_dtype": config.dtype,
        "use_cache": True,
    }
    if config.model_type in ("llama", "qwen3", "gemma3_text"):
        fields["attention_bias"] = False
    if config.model_type in _WINDOWED:
        fields["sliding_window"] = config.sliding_window
    if config.model_type in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = False
    if config.model_type == "gemma3_text":
        fields |= {
            "layer_types": list(config.layer_types or ("sliding_attention",) * config.num_hidden_layers),
            "rope_local_base_freq": config.rope_local_theta or config.rope_theta,
            "query_pre_attn_scalar": _whole(config.query_pre_attn_scalar or config.head_dim),
        }
    return fields


def _whole(number: float) -> float:
    """256.0 as 256: where transformers declares a whole number, it opens no file with another."""
    return int(number) if number == int(number) else number
