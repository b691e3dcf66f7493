"""Errors that quote the user's code stay in bounds."""

from penstock.types import EnvironmentFailure
from penstock.types.errors import MOST_FAILURE_CHARS, shortened


def test_a_text_that_is_too_long_loses_its_middle():
    assert shortened("short", 10) == "short"
    assert shortened("a" * 6_000 + "b" * 6_000, 50) == "aaaaa … 11,990 characters … bbbbb"


def test_the_message_of_a_failure_is_bounded_whatever_was_raised():
    message = str(EnvironmentFailure("x" * 50_000_000))
    assert MOST_FAILURE_CHARS - 50 < len(message) <= MOST_FAILURE_CHARS
    assert str(EnvironmentFailure(message)) == message
    assert str(EnvironmentFailure("as it is")) == "as it is"
