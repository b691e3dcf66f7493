"""Text of others made safe to print.

What a model, an environment or a file says may hold anything: escape sequences that rewrite the screen, a carriage
return that hides a line, marks that turn the direction of reading, invisible characters. All of those are shown by
their escapes. Pass what comes out to rich as `Text`, never as a string with markup.
"""

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_JOINERS = {"\u200c", "\u200d"}  # scripts and emoji need them, and they move nothing


def printable(text: str, newlines: bool = False) -> str:
    r"""The text with every control, format and surrogate character as an escape, such as ``\x1b`` or ``\u202e``.

    Args:
        text: Any text, whether a policy, a user or a simulator wrote it.
        newlines: Keep line ends; otherwise they are escaped too.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_safe(character, newlines) else _escaped(character) for character in text)


def shortened(text: str, width: int) -> str:
    """At most `width` characters of a text in one line."""
    line = printable(text)
    return line if len(line) <= width else line[: width - 1] + "…"


def _is_safe(character: str, newlines: bool) -> bool:
    if character == "\n":
        return newlines
    return character in _JOINERS or unicodedata.category(character) not in _HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
