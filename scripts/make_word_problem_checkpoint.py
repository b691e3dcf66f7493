"""Makes a small random Qwen2-style checkpoint for word problems, with a tokenizer trained on their text.

    python scripts/make_word_problem_checkpoint.py DATA.jsonl OUT_DIR

What comes out is an ordinary Hugging Face directory (config.json, model.safetensors, tokenizer, chat template), so
`model.path: OUT_DIR` runs the very code that a real checkpoint runs, within seconds and on a laptop. It knows nothing.
The same data gives the same bytes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


def texts(path: Path) -> Iterator[str]:
    """Every text in the rows of a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield from (value for value in json.loads(line).values() if isinstance(value, str))


def train_tokenizer(data: Path, directory: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``: byte-level BPE, every digit a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": SHAPE["max_position_embeddings"],
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def make_checkpoint(data: Path, directory: Path) -> str:
    """Writes the model directory; returns a line about it."""
    import jax

    from penstock.model.language import Decoder, ModelConfig, save_decoder
    from penstock.text import Tokenizer

    with tempfile.TemporaryDirectory() as aside:
        train_tokenizer(data, Path(aside))
        tokenizer = Tokenizer.load(aside)
    config = ModelConfig(**SHAPE, vocab_size=tokenizer.vocab_size)
    save_decoder(Decoder.initialise(config, jax.random.key(0)), directory, tokenizer)
    return f"{directory}: {config.parameter_count:,} random parameters, {tokenizer.vocab_size} tokens"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA.jsonl")
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parsed = parser.parse_args(arguments)
    if not parsed.data.is_file():
        print(f"no file {parsed.data}", file=sys.stderr)
        return 2
    print(make_checkpoint(parsed.data, parsed.directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
