"""Makes the small tokenizer that ships with the recipes; running it again writes the same bytes.

    python scripts/make_tokenizer.py [DIRECTORY]

A byte-level BPE over 382 tokens: three special ones, four tags, the 256 bytes (so that any text survives a round
trip), and the words of the tiny recipes, each whole with its leading space. It is that small so that a random policy
says " cat" now and then. The words need no merge rules: the model takes a piece that is in its vocabulary as it is
(`ignore_merges`), and anything else byte by byte. Digits and punctuation are always tokens of their own.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

DIRECTORY = Path(__file__).parent.parent / "src" / "penstock" / "recipes" / "tokenizer"

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<calc>", "</calc>", "<result>", "</result>")
ANIMALS = "cat dog cow pig fox owl"
ROLES = "system user assistant tool"
SENTENCE_STARTS = "Who What Which Name Say The My Here Look We Tell Call Draw Quick Please Now Well So Compute Add"
AFTER_A_SPACE = (
    "hen ant bee bat "
    "a an the is it of on in and me my see say says pet has here all day please name "
    "Who What Name Answer A B C D E F "
    "meow purrs hunts mice naps mat whiskers likes milk climbed tree met "
    "animal colour number fruit tool place "
    "red blue green black white pink one two three four five six apple pear plum fig lemon peach "
    "hammer saw drill axe spade rake town beach farm shop school park"
)
PIECES = r" ?\p{L}+|\p{N}|[^\p{L}\p{N}]"
"""A word with the space before it, a digit, or any other character."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{%- if message['content'] is not string -%}"
    "{{- raise_exception('the content of a message must be text') -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def vocabulary() -> dict[str, int]:
    """Every token with its id, in the order in which they are listed here."""
    words = [*ANIMALS.split(), *ROLES.split(), *SENTENCE_STARTS.split()]
    words += [" " + word for word in f"{ANIMALS} {AFTER_A_SPACE}".split()]
    letters = byte_letters()
    spelled = ["".join(letters[byte] for byte in word.encode()) for word in words]
    tokens = [PAD, TURN_START, TURN_END, *TAGS, *letters, *spelled]
    assert len(set(tokens)) == len(tokens), "a word is listed twice"
    return {token: index for index, token in enumerate(tokens)}


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: byte for byte in printable} | {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(table[byte]) for byte in range(256)]


def build() -> Tokenizer:
    """The tokenizer, without its chat template."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, TURN_START, TURN_END)]
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def main(directory: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    build().save(str(directory / "tokenizer.json"))
    config = {
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": 1_000_000,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
