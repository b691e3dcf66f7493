"""Finds the token at which a growing response first contains one of its stop strings.

Several stop strings stay separate. A stop string may span tokens and end inside one; the token that completes it
belongs to the response, and nothing after it does. Only the response's tail is decoded at each look, so the cost
of a long response stays linear.
"""

from collections.abc import Sequence

from penstock.types import TextCodec


class StopStrings:
    """Watches one response.

    Args:
        tokenizer: Turns tokens into the text that is searched, without special tokens.
        strings: Any of these ends the response.
    """

    def __init__(self, tokenizer: TextCodec, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(map(len, strings)) - 1
        self._tail: list[int] = []

    def completed_by(self, tokens: Sequence[int]) -> int | None:
        """How many of the newly sampled tokens belong to the response; None if none completes a stop string."""
        old = len(self._tail)
        self._tail.extend(tokens)
        if self._found(self._tail):
            return next(n for n in range(1, len(tokens) + 1) if self._found(self._tail[: old + n]))
        self._shorten()
        return None

    def _found(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens)
        return any(string in text for string in self._strings)

    def _shorten(self) -> None:
        """Keeps the fewest last tokens whose text can still begin a stop string, found by doubling.

        Characters at a cut may be wrong (half of a multi-byte character); they are counted as not there.
        """
        keep = 1
        while keep < len(self._tail):
            whole = self._tokenizer.decode(self._tail[-keep:]).lstrip("\ufffd")
            if len(whole) > self._overlap:
                break
            keep *= 2
        self._tail = self._tail[-keep:]


def text_of(tokenizer: TextCodec, tokens: Sequence[int], stop_strings: Sequence[str]) -> str:
    """A response's text, without what follows its first stop string (the string itself is kept)."""
    text = tokenizer.decode(tokens)
    ends = [text.find(string) + len(string) for string in stop_strings if string in text]
    return text[: min(ends)] if ends else text
