import pytest

from penstock.dashboard import find_rollouts
from penstock.dashboard.conversation import token_table
from penstock.dashboard.tokens import TokenText
from tests.dashboard.sample_run import TOKENIZER


@pytest.fixture(scope="module")
def text(views) -> TokenText:
    return TokenText.of_run(views.directory)


def test_numbers_of_each_response_token(views, text, printed):
    (stored,) = find_rollouts(views, "cats-0-1/1")
    lines = printed(token_table(stored, text)).splitlines()
    cat = TOKENIZER.encode("cat").tolist()[0]
    assert lines[0].split() == ["position", "token", "text", "logprob", "advantage", "reward", "weights", "sampled"]
    assert lines[1].split() == ["3", str(cat), "'cat'", "-0.0100", "+1.0000", "0", "yes"]
    assert lines[2].split() == ["4", "2", "'<|im_end|>'", "-4.0000", "+1.0000", "+1.000", "1", "yes"]


def test_tokens_that_were_not_sampled_have_no_numbers(views, text, printed):
    (stored,) = find_rollouts(views, "tools-0-0/0")
    rows = [line.split() for line in printed(token_table(stored, text)).splitlines() if line.rstrip().endswith("no")]
    assert [row[2:] for row in rows] == [["'<result>'", "no"], ["'6'", "no"], ["'</result>'", "no"]]


def test_parts_of_a_character_and_control_characters(views, text, printed):
    (stored,) = find_rollouts(views, "cats-0-10/0")
    out = printed(token_table(stored, text))
    assert [f"'猫' {part}/3" in out for part in (1, 2, 3, 4)] == [True, True, True, False]
    (hostile,) = find_rollouts(views, "cats-0-2/0")
    out = printed(token_table(hostile, text))
    assert "'\\x1b'" in out and "'\\r'" in out and "'\\n'" in out and "\x1b" not in out


def test_without_a_tokenizer_there_is_no_text(views, printed):
    (stored,) = find_rollouts(views, "cats-0-1/1")
    assert "'" not in printed(token_table(stored, None))
