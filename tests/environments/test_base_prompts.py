"""Plain text and chat messages."""

import pytest

from penstock.environments.base import prompt_text, shape_prompt

MESSAGES = [{"role": "user", "content": "What is 1+2?"}]


@pytest.mark.parametrize(
    ("prompt", "template", "system", "shaped"),
    [
        ("Hi", "auto", None, "Hi"),
        ("Hi", "plain", None, "Hi"),
        ("Hi", "auto", "Be brief.", "Be brief.\n\nHi"),
        ("Hi", "chat", None, [{"role": "user", "content": "Hi"}]),
        ("Hi", "chat", "S", [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]),
        (MESSAGES, "auto", None, MESSAGES),
        (MESSAGES, "chat", "S", [{"role": "system", "content": "S"}, *MESSAGES]),
        (MESSAGES, "plain", "S", "S\n\nWhat is 1+2?"),
    ],
)
def test_shapes(prompt, template, system, shaped):
    assert shape_prompt(prompt, template, system) == shaped


def test_text_of_messages_for_people():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_text([*MESSAGES, {"role": "user", "content": parts}]) == "What is 1+2?\n\nab"
