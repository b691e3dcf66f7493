"""The text of single tokens, where a character may take several of them.

The tokenizer comes from the run itself: that of its newest checkpoint, or the one that its config names. Only the Rust
tokenizer is loaded, not transformers. What comes out may hold anything: `penstock.text.safe_text` before it is printed.
"""

import importlib.resources
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.rundir import RunDirectory
from penstock.types import AnyRollout, ConfigError, Turn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 8
_PACKAGED = "penstock"


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens that make up some text together: mostly one token.

    Attributes:
        start: The first token.
        stop: One past the last.
        text: As decoded; U+FFFD for bytes that are no characters.
    """

    start: int
    stop: int
    text: str


class TokenText:
    """Decodes tokens piece by piece.

    Args:
        tokenizer: The Rust tokenizer.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of_run(cls, directory: RunDirectory) -> "TokenText":
        """The tokenizer of a run.

        Raises:
            ConfigError: none of the places where it could be has one that can be read.
        """
        from tokenizers import Tokenizer

        tried: list[str] = []
        for path in _places(directory):
            if not path.is_file():
                tried.append(f"{path} is missing")
                continue
            # The Rust tokenizer reports a broken file as a bare Exception; there is nothing narrower to catch.
            try:
                return cls(Tokenizer.from_file(str(path)))
            except Exception as error:
                tried.append(f"{path} cannot be read ({error})")
        raise ConfigError("the run has no tokenizer: " + "; ".join(tried))

    def pieces(self, tokens: Sequence[int], breaks: Collection[int] = ()) -> list[TokenSpan]:
        """Splits tokens into the smallest pieces that are whole characters.

        Args:
            tokens: Ids, special ones included; those that the vocabulary lacks appear as ``⟨id⟩``.
            breaks: Positions that no piece crosses, such as the beginnings of turns.
        """
        pieces: list[TokenSpan] = []
        context = start = 0  # the text of a token may depend on the one before it: a leading space, for example
        for stop in range(1, len(tokens) + 1):
            at_break = stop == len(tokens) or stop in breaks
            text = self._text(tokens[context:stop])[len(self._text(tokens[context:start])) :]
            whole = bool(text) and not text.endswith(_REPLACEMENT)
            if not whole and not at_break and stop - start < _LONGEST_CHARACTER_TOKENS:
                continue
            pieces += self._split(tokens, TokenSpan(start, stop, text))
            context, start = (start, stop) if whole and not at_break else (stop, stop)
        return pieces

    def _split(self, tokens: Sequence[int], piece: TokenSpan) -> list[TokenSpan]:
        """A last token that is whole by itself stands apart from broken bytes before it."""
        last = self._text(tokens[piece.stop - 1 : piece.stop])
        before = piece.text[: len(piece.text) - len(last)]
        if piece.stop - piece.start == 1 or not before or not piece.text.endswith(last) or last.endswith(_REPLACEMENT):
            return [piece]
        return [TokenSpan(piece.start, piece.stop - 1, before), TokenSpan(piece.stop - 1, piece.stop, last)]

    def _text(self, tokens: Sequence[int]) -> str:
        """Decoded, with a name for every id that the vocabulary lacks."""
        known: list[int] = []
        text = ""
        for token in map(int, tokens):
            if self._tokenizer.id_to_token(token) is not None:
                known.append(token)
                continue
            text += self._tokenizer.decode(known, skip_special_tokens=False) + f"⟨{token}⟩"
            known = []
        return text + (self._tokenizer.decode(known, skip_special_tokens=False) if known else "")


def turns_of(rollout: AnyRollout) -> list[Turn]:
    """A rollout's turns; where none are stored, its prompt and its response without their texts."""
    prompt, length = len(rollout.prompt_tokens), len(rollout.prompt_tokens) + len(rollout.response_tokens)
    return list(rollout.turns) or [Turn("user", "", 0, prompt), Turn("assistant", "", prompt, length)]


def breaks_within(rollout: AnyRollout, start: int, stop: int) -> set[int]:
    """Where in a span of a rollout's tokens its prompt ends, or sampled tokens begin or end; counted from `start`."""
    prompt = len(rollout.prompt_tokens)
    sampled = np.concatenate([np.zeros(prompt, np.bool_), rollout.response_mask])[start:stop]
    changes = np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1
    return {*map(int, changes), prompt - start}


def _places(directory: RunDirectory) -> list[Path]:
    """Where a run's ``tokenizer.json`` may be, likeliest first."""
    saved = sorted(directory.checkpoints.glob("step-*/model/tokenizer.json"), key=_step_of, reverse=True)
    model: Any = directory.read_config().get("model") if directory.config_path.is_file() else None
    model = model if isinstance(model, dict) else {}
    named = next(
        (name for name in (model.get("tokenizer"), model.get("path")) if name and isinstance(name, str)), _PACKAGED
    )
    packaged = Path(str(importlib.resources.files("penstock"))) / "recipes" / "tokenizer"
    return [*saved, (packaged if named == _PACKAGED else Path(named)) / "tokenizer.json"]


def _step_of(path: Path) -> int:
    step = path.parents[1].name.removeprefix("step-")
    return int(step) if step.isdecimal() else -1
