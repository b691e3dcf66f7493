"""Makes the golden files against which the decoder's logits are tested. Needs torch, which Penstock does not.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers peft safetensors numpy
    /tmp/golden/bin/python scripts/make_golden_logits.py            # or the names of those to make

For each family: a tiny checkpoint as transformers saves it, and the float32 logits that transformers computes from it
for sequences of different lengths; for some an adapter beside it, as PEFT saves it, and the logits with that. Every
parameter is drawn at random, biases and norm weights included, since a parameter left at zero or one could be ignored
or misplaced without any test noticing.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

DIRECTORY = Path(__file__).parent.parent / "tests" / "model" / "language" / "golden"
LENGTHS = (1, 7, 12, 23)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, head_dim=8, sliding_window=None, tie_word_embeddings=False),
    "phi3": Phi3Config(**SHAPE, tie_word_embeddings=False),
    "gemma3_text": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 3},
        head_dim=12,
        query_pre_attn_scalar=10,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "window": MistralConfig(**SHAPE, head_dim=8, sliding_window=6, tie_word_embeddings=False),
    "yarn": Qwen2Config(**SHAPE, rope_parameters=YARN_ROPE, tie_word_embeddings=True),
}
"""By the name of the folder; those after the families are of one of them."""
ADAPTERS = {
    "llama": LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM"),
    "qwen2": LoraConfig(r=6, lora_alpha=8, target_modules=["v_proj", "q_proj"], use_rslora=True, task_type="CAUSAL_LM"),
}
SHARD_SIZE = {"mistral": "40KB"}


def draw_parameters(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter: matrices by their fan-in, norm weights around one, biases around zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.5 * noise if name.endswith("bias") else 1 + 0.3 * noise)


def make(family: str, config: PretrainedConfig, seed: int) -> None:
    """Writes one family's checkpoint and logits."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_parameters(model, generator)
    directory = DIRECTORY / family
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE.get(family, "1GB"))
    (directory / "generation_config.json").unlink(missing_ok=True)
    write_logits(model, directory, generator)


def make_adapter(family: str, config: LoraConfig, seed: int) -> None:
    """Writes an adapter beside one family's checkpoint, and its logits."""
    generator = torch.Generator().manual_seed(seed)
    base, directory = DIRECTORY / family, DIRECTORY / family / "adapter"
    shutil.rmtree(directory, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": ".."}, indent=2) + "\n")
    (directory / "README.md").unlink(missing_ok=True)
    write_logits(adapted, directory, generator)


def write_logits(model: torch.nn.Module, directory: Path, generator: torch.Generator) -> None:
    """Writes sequences of different lengths with their logits."""
    golden = {}
    for index, length in enumerate(LENGTHS):
        tokens = torch.randint(0, SHAPE["vocab_size"], (length,), generator=generator)
        with torch.no_grad():
            golden[f"logits_{index}"] = model(tokens[None]).logits[0].contiguous()
        golden[f"tokens_{index}"] = tokens.to(torch.int32)
    save_file(golden, directory / "golden.safetensors")


if __name__ == "__main__":
    for number, (name, family_config) in enumerate(FAMILIES.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, family_config, seed=number)
    for number, (name, adapter_config) in enumerate(ADAPTERS.items()):
        if not sys.argv[1:] or f"{name}_adapter" in sys.argv[1:]:
            make_adapter(name, adapter_config, seed=100 + number)
