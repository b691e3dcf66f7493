"""The policy's tokenizer: a Hugging Face fast tokenizer with its chat template, read from a directory.

Nothing is added behind the caller's back: `encode` adds no special tokens, `decode` does not tidy spaces, and a chat
template that fails is an error, never a reason to fall back to another format. A plain prompt begins with the tokens
that the tokenizer itself puts first (BOS, where it says so); a chat template writes its own. Encoding and decoding
are safe from several threads (they go to the Rust tokenizer directly; transformers' own methods set its truncation at
every call, which fails when two threads meet). Not covered: slow (pure Python) tokenizers, and downloads.
"""

import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.types import ConfigError, Message, PromptTooLong

if TYPE_CHECKING:
    import tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

PACKAGED = "penstock"
"""The name of the small tokenizer that ships with the recipes."""

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
LONG_TEXT = 4096
"""In characters: shorter texts are encoded within a millisecond or two."""

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""By the character that a byte-level vocabulary writes it as: itself where it is printable, else one from 256 on."""

_PLAIN_KEYS = frozenset(
    ("bos_token", "chat_template", "clean_up_tokenization_spaces", "eos_token", "model_max_length", "pad_token",
     "tokenizer_class", "unk_token")
)  # fmt: skip
"""What a ``tokenizer_config.json`` may say without a change to what its ``tokenizer.json`` does."""
_PLAIN_VOCABULARY = 100_000
"""Entries up to which transformers leaves a ``tokenizer.json`` as it is."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def same_tokenizer(path: str | Path, other: str | Path) -> bool | None:
    """Whether two tokenizer directories hold the same ``tokenizer.json``; None where one of them holds none."""
    contents = [_directory(each) / "tokenizer.json" for each in (path, other)]
    if not all(content.is_file() for content in contents):
        return None
    return contents[0].read_bytes() == contents[1].read_bytes()


def vocabulary_size(path: str | Path) -> int:
    """`Tokenizer.vocab_size` of a directory that adds no tokens to its ``tokenizer.json``; for 0 a tokenizer is none.

    Without all that transformers imports for `Tokenizer.load`, which says what is wrong with a directory.
    """
    import tokenizers

    file = _directory(path) / "tokenizer.json"
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception:  # as of `_load_fast`: whatever it is, `Tokenizer.load` will tell
        return 0
    return max(vocabulary.values(), default=-1) + 1


class TemplateArgumentError(ConfigError):
    """A chat template is given what it does not read.

    Attributes:
        key: Under which it is given: ``tools``, or ``chat_template_kwargs``.
    """

    def __init__(self, source: str, name: str) -> None:
        self.key = "tools" if name == "tools" else "chat_template_kwargs"
        what = f"{self.key}: the chat template takes no {name!r:.100}"
        remedy = "leave it out, or give it under the name that stands in the template"
        if name == "tools":
            remedy = "the policy would not see them; leave them out, or take a checkpoint whose template shows tools"
        super().__init__(f"tokenizer {source!r}: {what}: {remedy}")


class Tokenizer:
    """Implements `penstock.types.TextCodec`. Made by `load`."""

    def __init__(
        self,
        facts: "_Facts",
        source: str,
        contents: Mapping[str, bytes],
        extra_stop_ids: Sequence[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if facts.eos is None:
            raise ConfigError(f"tokenizer {source}: it has no eos_token, so no answer could end: add one to its config")
        self._facts = facts
        self._backend = facts.backend
        self._source = source
        self._contents = contents
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values()) + 1
        self._longest_token_bytes = max(len(token.encode()) for token in vocabulary)
        self._added = frozenset(self._backend.get_added_tokens_decoder())
        self._is_byte_level = "ByteLevel(" in repr(self._backend.decoder)
        turn_ends = [vocabulary[token] for token in _TURN_ENDS if token in vocabulary]
        self._stop_token_ids = tuple(dict.fromkeys([facts.eos, *turn_ends, *extra_stop_ids]))
        whole = self._backend.encode("a")
        before = whole.special_tokens_mask.index(0) if 0 in whole.special_tokens_mask else 0
        self._beginning = np.array(whole.ids[:before], np.int32)
        self._chat_template_kwargs: Mapping[str, Any] = {}
        self._chat_template_kwargs = self._checked(chat_template_kwargs or {})

    @classmethod
    def load(cls, path: str | Path, chat_template_kwargs: Mapping[str, Any] | None = None) -> "Tokenizer":
        """Reads a tokenizer directory (``tokenizer.json`` and its config).

        Args:
            path: The directory; "penstock" means the one that ships with the recipes.
            chat_template_kwargs: What every conversation's chat template is given; `render` may say otherwise.

        Raises:
            ConfigError: the directory is missing, has no ``tokenizer.json``, or cannot be read as a tokenizer; or its
                chat template does not read what it is to be given.
        """
        directory = _directory(path)
        if not (directory / "tokenizer.json").is_file():
            reason = "it has no tokenizer.json" if directory.is_dir() else "there is no such directory"
            inside = directory / "model"  # of a run's checkpoint
            named = str(inside) if (inside / "tokenizer.json").is_file() else "a directory with a fast tokenizer"
            got = "; nothing is downloaded (huggingface-cli download ID --local-dir DIR makes one of a hub's id)"
            raise ConfigError(
                f"tokenizer {str(path)!r}: {reason}: give {named}, or {PACKAGED!r}{'' if directory.is_dir() else got}"
            )
        contents = {name: (directory / name).read_bytes() for name in _FILES if (directory / name).is_file()}
        stop_ids = _generation_stop_ids(directory)
        facts = _plain_facts(directory) or _Facts.of(_load_fast(directory))
        return cls(facts, str(path), contents, stop_ids, chat_template_kwargs)

    def save(self, directory: str | Path) -> None:
        """Writes the files that it was loaded from, byte for byte, so that every reader finds what it knows."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, content in self._contents.items():
            (Path(directory) / name).write_bytes(content)

    @property
    def vocab_size(self) -> int:
        """One past the largest token id, special ones included."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int:
        """The token that ends a text."""
        return self._stop_token_ids[0]

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows; the end of text where the tokenizer names none."""
        return self.eos_token_id if self._facts.pad is None else self._facts.pad

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: end of text first, then known ends of a turn and the checkpoint's own."""
        return self._stop_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` takes messages."""
        return self._facts.template is not None

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], without special tokens added; special tokens written in the text are recognised.

        Half of a surrogate pair, which is no character, is read as its escape.
        """
        if not text.isascii():
            text = text.encode("utf-8", "backslashreplace").decode()
        if len(text) <= LONG_TEXT:
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)
        # Encoding a single text would hold the interpreter, a batch of texts does not: other threads go on.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids that the tokenizer does not have are silent, broken UTF-8 becomes U+FFFD."""
        return self._backend.decode([int(token) for token in tokens], skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, which may be a part of a character; empty where there is no such token.

        Byte-level vocabularies write bytes as printable characters (Radford et al. 2019, GPT-2), those with byte
        fallback as ``<0x0A>``, and SentencePiece's a space as "▁".
        """
        written = self._backend.id_to_token(int(token))
        if written is None:
            return b""
        if token in self._added:
            return written.encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF.get(character, ord("?")) for character in written)
        byte = _BYTE_FALLBACK.fullmatch(written)
        return bytes([int(byte[1], 16)]) if byte else written.replace("▁", " ").encode()

    def render(
        self,
        prompt: str | Sequence[Message],
        max_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> np.ndarray:
        """int32 [p]: a plain string, or messages through the chat template, ready for an answer.

        A plain string begins with the tokens that the tokenizer puts before any text, unless it has them already.

        Args:
            prompt: The text, or the conversation.
            max_tokens: What is longer than so many of the longest token is refused before it is encoded, messages
                also before they go through the template.
            chat_template_kwargs: What the template is given beside the messages: `tools` (JSON schemas), and switches
                of its own such as Qwen3's `enable_thinking`. Go before those of `load`.
            continue_final: The last message is not over, and its end is left out: what comes next goes on with it.

        Raises:
            ConfigError: there is no chat template, it refuses these messages, or does not read what it is given.
            PromptTooLong: it is longer.
        """
        if not isinstance(prompt, str) and max_tokens is not None:
            parts = [part for each in (*prompt, chat_template_kwargs or {}) for part in each.values()]
            self._refuse_longer("".join(map(str, parts)), max_tokens)
        text = self.render_text(prompt, chat_template_kwargs, continue_final)
        if max_tokens is not None:
            self._refuse_longer(text, max_tokens)
        tokens, beginning = self.encode(text), self._beginning
        complete = text is not prompt or np.array_equal(tokens[: len(beginning)], beginning)
        return tokens if complete else np.concatenate([beginning, tokens])

    def render_text(
        self,
        prompt: str | Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """What `render` encodes: a plain string as it is, or messages through the chat template.

        Raises:
            ConfigError: as `render`.
        """
        if isinstance(prompt, str):
            return prompt
        return self._render_messages(prompt, self._checked(chat_template_kwargs or {}), continue_final)

    @cached_property
    def _fast(self) -> "PreTrainedTokenizerFast":
        """Of transformers, from what was read: the directory may be gone."""
        if self._facts.fast is not None:
            return self._facts.fast
        with TemporaryDirectory(prefix="penstock-tokenizer-") as folder:
            self.save(folder)
            return _load_fast(Path(folder))

    def _refuse_longer(self, text: str, max_tokens: int) -> None:
        size, most = len(text.encode("utf-8", "surrogatepass")), self._longest_token_bytes
        if size > max_tokens * most:
            raise PromptTooLong(
                f"prompt is too long: it has {size} bytes, more than max_seq_len = {max_tokens} tokens of at most "
                f"{most} bytes hold: shorten the prompt, or raise max_seq_len"
            )

    def _checked(self, chat_template_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """All that a template is given, these before those of `load`.

        Raises:
            ConfigError: a name that is not the template's to know, or that it does not read.
        """
        if not chat_template_kwargs:
            return self._chat_template_kwargs
        read = set(re.findall(r"\w+", str(self._fast.chat_template)))  # several templates by name are a dict
        ours = {*inspect.signature(self._fast.apply_chat_template).parameters, *self._fast.special_tokens_map}
        allowed = read - ours - {"messages"} | read & {"tools", "documents"}
        for name in chat_template_kwargs:
            if name not in allowed:
                raise TemplateArgumentError(self._source, name)
        return {**self._chat_template_kwargs, **chat_template_kwargs}

    def _render_messages(
        self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any], continue_final: bool
    ) -> str:
        if not self.has_chat_template:
            raise ConfigError(
                f"tokenizer {self._source!r} has no chat template but the prompt is a list of messages: "
                "set the environment's `template: plain`, or use a tokenizer with a chat template"
            )
        # A template is a program of the checkpoint's author: whatever it raises means that it refuses the messages.
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
                **chat_template_kwargs,
            )
        except Exception as error:
            raise ConfigError(
                f"tokenizer {self._source!r}: the chat template refused the messages ({error}): "
                "give it messages it knows, or set the environment's `template: plain`"
            ) from error
        return str(text)


def _directory(path: str | Path) -> Path:
    return Path(str(files("penstock") / "recipes" / "tokenizer")) if str(path) == PACKAGED else Path(path)


class _Facts(NamedTuple):
    """What a tokenizer directory says.

    Attributes:
        backend: Of the Rust library.
        eos: The token that ends a text; None: none.
        pad: The one that fills rows.
        template: The chat template, or several by name.
        fast: transformers' tokenizer; None where it has not been asked.
    """

    backend: "tokenizers.Tokenizer"
    eos: int | None
    pad: int | None
    template: object
    fast: "PreTrainedTokenizerFast | None" = None

    @classmethod
    def of(cls, fast: "PreTrainedTokenizerFast") -> "_Facts":
        eos: Any = fast.eos_token_id
        pad: Any = fast.pad_token_id
        ends = None if eos is None else int(eos)
        return cls(fast.backend_tokenizer, ends, None if pad is None else int(pad), fast.chat_template, fast)


def _plain_facts(directory: Path) -> _Facts | None:
    """Of a directory in which nothing changes its ``tokenizer.json``; None of any other, of which transformers tells.

    It does not tokenise otherwise then, and knows its special tokens.
    """
    import tokenizers

    others = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
    if any((directory / name).exists() for name in others):
        return None
    template = directory / "chat_template.jinja"
    try:
        config: Any = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        written = template.read_text(encoding="utf-8") if template.is_file() else None
    except Exception:  # as of `_load_fast`, which will tell
        return None
    if not isinstance(config, dict) or not config.keys() <= _PLAIN_KEYS:
        return None
    added = {token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    named = {name: config.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    is_plain = (
        config.get("tokenizer_class") in (None, "PreTrainedTokenizerFast")
        and all(token is None or (isinstance(token, str) and token in added) for token in named.values())
        and backend.truncation is None
        and backend.padding is None
        and backend.get_vocab_size() <= _PLAIN_VOCABULARY
    )
    if not is_plain:
        return None
    eos, pad = (None if named[name] is None else added[str(named[name])] for name in ("eos", "pad"))
    return _Facts(backend, eos, pad, config.get("chat_template") if written is None else written)


def _load_fast(directory: Path) -> "PreTrainedTokenizerFast":
    # Torch is no dependency, so transformers' advice at import that it is missing is no news to anybody.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Batches are of one text: threads of its own would win nothing, and make it complain of every later fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    # The Rust tokenizer reports a broken file as a bare Exception; there is nothing narrower to catch.
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise ConfigError(f"tokenizer {str(directory)!r} cannot be read: {error}") from error


def _generation_stop_ids(directory: Path) -> list[int]:
    """The end-of-text ids that a checkpoint's ``generation_config.json`` names, else its ``config.json``.

    As transformers reads them.
    """
    return _end_ids(directory / "generation_config.json") or _end_ids(directory / "config.json")


def _end_ids(path: Path) -> list[int]:
    """A configuration's ``eos_token_id``; none where there is no such file."""
    if not path.is_file():
        return []
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not an object: mend it, or remove it")
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ConfigError(
            f"{path}: eos_token_id is {value!r:.100}: it must be a token's id, or a list of them; leave it out to use "
            "the tokenizer's own"
        )
    return ids
