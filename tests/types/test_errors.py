"""Errors that quote the user's code stay in bounds."""

import pytest

from penstock.types import ConfigError, EnvironmentFailure, RunFailed
from penstock.types.errors import MOST_FAILURE_CHARS, errors_of_user_code, raised_at, shortened
from penstock.types.importing import load_attribute


def test_a_text_that_is_too_long_loses_its_middle():
    assert shortened("short", 10) == "short"
    assert shortened("a" * 6_000 + "b" * 6_000, 50) == "aaaaa … 11,990 characters … bbbbb"


def test_the_message_of_a_failure_is_bounded_whatever_was_raised():
    message = str(EnvironmentFailure("x" * 50_000_000))
    assert MOST_FAILURE_CHARS - 50 < len(message) <= MOST_FAILURE_CHARS
    assert str(EnvironmentFailure(message)) == message
    assert str(EnvironmentFailure("as it is")) == "as it is"


def test_where_a_users_code_raised_is_its_own_innermost_line(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("import json\n\ndef score():\n    return json.loads('nothing')\n")
    with pytest.raises(ValueError) as caught:
        load_attribute(f"{file}:score", "reward")()
    assert raised_at(caught.value) == " (rewards.py:4)"


def test_where_only_penstocks_code_is_on_the_stack_no_place_is_told():
    try:
        load_attribute("nowhere:score", "reward")
    except ConfigError as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this test's own line
        assert raised_at(error) == ""


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("odd"), StopIteration("odd")])
def test_whatever_a_users_code_raises_is_one_error(error):
    with (
        pytest.raises(
            ConfigError,
            match=f"^making it raised {type(error).__name__} about 'a': odd \\(test_errors.py:\\d+\\); remove it$",
        ) as told,
        errors_of_user_code(ConfigError, "making it raised", "; remove it", about=" about 'a'"),
    ):
        raise error
    assert told.value.__cause__ is error


@pytest.mark.parametrize("error", [RunFailed("told already"), KeyboardInterrupt()])
def test_penstocks_own_errors_and_what_ends_a_process_go_through_a_users_code(error):
    with pytest.raises(type(error)) as told, errors_of_user_code(ConfigError, "making it raised"):
        raise error
    assert told.value is error
