import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.safe_text import printable, shortened


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold]words[/bold]", "plain [bold]words[/bold]"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb\tc\x7f", "a\\rb\\tc\\x7f"),
        ("\x9b31m", "\\x9b31m"),  # the same as ESC [ in one character
        ("ab\u202edc\u2066", "ab\\u202edc\\u2066"),
        ("x\u200by\ufeff\u2028", "x\\u200by\\ufeff\\u2028"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("猫 é 😀 👩\u200d🚀", "猫 é 😀 👩\u200d🚀"),
    ],
)
def test_what_would_act_on_the_terminal_is_escaped(text, shown):
    assert printable(text) == shown


def test_line_ends_are_kept_only_where_asked():
    assert printable("a\nb") == "a\\nb"
    assert printable("a\nb\r\n", newlines=True) == "a\nb\\r\n"


@given(st.text(st.characters()))
def test_no_control_character_is_left_and_a_terminal_can_encode_it(text):
    shown = printable(text)
    shown.encode("utf-8")
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert printable(shown) == shown


def test_long_texts_are_cut():
    assert shortened("abcdef", 4) == "abc…"
    assert shortened("ab\nd", 5) == "ab\\nd"
