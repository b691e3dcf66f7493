"""Calls in the forms that models write."""

import pytest

from penstock.text.tool_calls import ToolCall, said_beside, tool_calls

ONE = ToolCall("multiply", {"a": 6})
TWO = ToolCall("fails", {"reason": "x"})
BAD = ToolCall("", {}, 'a call is JSON: {"name": …, "arguments": {…}}')


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>', [ONE]),
        ('I will.\n<tool_call>{"name": "multiply", "arguments": {"a": 6}}</tool_call>\n'
         '<tool_call>{"name": "fails", "arguments": {"reason": "x"}}</tool_call>', [ONE, TWO]),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 6}}', [ONE]),
        ('{"name": "multiply", "parameters": {"a": 6}}', [ONE]),
        ('<|python_tag|>{"name": "multiply", "parameters": {"a": 6}}', [ONE]),
        ('[TOOL_CALLS] [{"name": "multiply", "arguments": {"a": 6}}]', [ONE]),
        ('[{"name": "multiply", "arguments": {"a": 6}}, {"name": "fails", "arguments": {"reason": "x"}}]', [ONE, TWO]),
        ('<tool_call>{"name": "table"}</tool_call>', [ToolCall("table", {})]),
        ("<tool_call>multiply(6)</tool_call>", [BAD]),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', [BAD]),
        ('<tool_call>{"name": "multiply", "arguments": [6]}</tool_call>', [BAD]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", [BAD]),
        ('{"name": "multiply", "parameters": {"a": 6}}; {"name": "fails", "parameters": {"reason": "x"}}', [ONE, TWO]),
        ('{"name": "multiply", "parameters": {"a": 6}} is what I would call', []),
        ('{"name": "Ada", "age": 36}', []),
        ('{"name": "Ada"}; {"name": "multiply", "parameters": {"a": 6}}', []),
        ("42", []),
        ('{"answer": 42}', []),
        ("[1, 2]", []),
        ("", []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_forms_that_models_write(text, calls):
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('I will.\n<tool_call>{"name": "multiply", "arguments": {}}</tool_call> Then more.', "I will."),
        ('<tool_call>{"name": "multiply", "arguments": {}}</tool_call>', ""),
        ('{"name": "multiply", "parameters": {"a": 6}}', ""),
    ],
)
def test_what_is_said_before_a_call(text, said):
    assert said_beside(text) == said
