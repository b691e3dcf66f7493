"""Conversations in which the policy calls tools: Python functions with annotated arguments.

::

    def multiply(a: int, b: int) -> int:
        "The product of two whole numbers."
        return a * b

    class ProductEnvironment(ToolEnvironment):
        tools = [multiply]

and problems and a `score`, as in every environment. The chat template shows the tools, as JSON schemas made from the
signatures; a conversation is over with the first turn that calls none. Calls are read in the forms that the templates
of open models teach: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` (Hermes, Qwen, SmolLM), any number in a
turn, or JSON alone (Llama 3's ``{"name": …, "parameters": {…}}``, Mistral's list). A call that cannot be read or fails
is answered with ``error: …``, so that the policy can try again. Arguments are checked against the annotations
(pydantic); what the policy wrote is never evaluated as code. Tools run in threads of this process: not covered are
tools that must be fenced in.
"""

import asyncio
import inspect
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from typing_extensions import override

from penstock.environments.base import Prompt
from penstock.environments.example_environment import Example
from penstock.environments.multi_turn import Conversation, GaveNoAnswer, MultiTurnEnvironment, Reply, within
from penstock.text.tool_calls import CALL_END, ToolCall, tool_calls
from penstock.types import Message, Mode

logger = logging.getLogger(__name__)

MOST_RESULT_CHARACTERS = 8192
"""A longer result is cut."""


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """What chat templates take as one of `tools`: name, description (the docstring) and arguments as JSON schema.

    Raises:
        ValueError: it is no function with a name; an argument has no annotation, or one that JSON cannot say.
    """
    name = getattr(tool, "__name__", repr(tool))
    for argument, parameter in inspect.signature(tool).parameters.items():
        if parameter.annotation is inspect.Parameter.empty or parameter.kind in (
            parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD,
        ):  # fmt: skip
            raise ValueError(f"tool {name}: argument {argument!r} must be an annotated one with a name")
    if not name.isidentifier():
        raise ValueError(f"tool {name:.60} has no name by which it could be called: write a function, def …")
    try:
        form: Any = tool
        arguments = TypeAdapter(form).json_schema()
    except Exception as error:  # pydantic has several, none of them narrower
        raise ValueError(f"tool {name}: its arguments cannot be said in JSON: {error}") from error
    arguments = {"type": "object", "properties": {}, **arguments}
    return {
        "type": "function",
        "function": {"name": name, "description": inspect.getdoc(tool) or "", "parameters": arguments},
    }


class ToolEnvironment(MultiTurnEnvironment):
    """Problems that may be solved with tools.

    Args:
        tools: Functions with annotated arguments, async or not; their docstrings tell the policy what they do. None:
            those of the class.
        tool_seconds: Longest time of one call; a longer one is an error that the policy is told.
        shown: Whether the chat template shows the tools; where not, or where prompts are plain, `system_prompt` must
            say how to call.
        name: Stands on every rollout; None: the name of the class.
        conversation: What `MultiTurnEnvironment` takes.

    Attributes:
        tools: As given, or of the class.
    """

    tools: Sequence[Callable[..., Any]] = ()

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        tool_seconds: float = 30.0,
        shown: bool = True,
        name: str | None = None,
        **conversation: Any,
    ) -> None:
        super().__init__(name, **conversation)
        self.tools = self.tools if tools is None else tools
        schemas = [tool_schema(tool) for tool in self.tools]
        names = [schema["function"]["name"] for schema in schemas]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"tools are {names}: give one or more, by different names")
        self._tools = {name: validate_call(tool) for name, tool in zip(names, self.tools, strict=True)}
        self._given = {"tools": schemas} if shown else {}
        self._tool_seconds = tool_seconds

    @abstractmethod
    def score(self, conversation: Conversation) -> float:
        """What the finished conversation is worth; ``conversation.state["calls"]`` has its calls."""

    @override
    def chat_template_kwargs(self, example: Example) -> Mapping[str, Any]:
        return {} if isinstance(self.shaped(example), str) else self._given

    @override
    def stop_strings(self, plain: bool) -> tuple[str, ...]:
        return (CALL_END,) if plain else ()

    @override
    def begin(self, example: Example, prompt: Prompt) -> Conversation:
        conversation = super().begin(example, prompt)
        conversation.state["calls"] = []
        return conversation

    @override
    def is_done(self, conversation: Conversation) -> bool:
        return not tool_calls(conversation.text)

    @override
    def respond(self, conversation: Conversation) -> Reply:
        plain = isinstance(self.shaped(conversation.example), str)
        replies: list[Message] = []
        for call in tool_calls(conversation.text):
            told = self._call(call)
            conversation.state["calls"].append((call, told))
            content = f"<tool_response>{told}</tool_response>" if plain else told
            replies.append({"role": "tool", "name": call.name, "content": content})
        return replies

    @override
    def numbers(self, conversation: Conversation) -> dict[str, float]:
        """Also ``tool_calls``, and the share of them that were errors."""
        told = [answer for _, answer in conversation.state["calls"]]
        numbers = {**super().numbers(conversation), "tool_calls": float(len(told))}
        if told:
            numbers["tool_errors"] = sum(answer.startswith("error: ") for answer in told) / len(told)
        return numbers

    @cached_property
    def _pools(self) -> dict[Mode, Sequence[Example]]:
        """Of these the prompts are first known, and whether anybody is shown the tools."""
        pools = super()._pools
        plain = sum(isinstance(self.shaped(example), str) for example in pools["train"])
        if plain and self._given and self._system_prompt is None:
            logger.warning(
                "environment %s: no policy is shown its tools (%s) in %d of %d prompts, which are plain text, and no "
                "chat template: set template: chat, or say in system_prompt how to call them; shown: false where the "
                "prompts say it",
                self.name, ", ".join(self._tools), plain, len(pools["train"]),
            )  # fmt: skip
        return pools

    def _call(self, call: ToolCall) -> str:
        if call.error:
            return f"error: {call.error}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r:.100}; there are {', '.join(self._tools)}"
        try:
            result = within(self._tool_seconds, _answer, tool, call.arguments)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return f"error: {call.name}: {problems:.500}"
        except GaveNoAnswer as error:
            return f"error: {call.name}: {error}"
        except (Exception, SystemExit) as error:  # whatever a tool raises is the policy's to know
            return f"error: {call.name}: {type(error).__name__}: {error}"[:500]
        return (result if isinstance(result, str) else json.dumps(result, default=str))[:MOST_RESULT_CHARACTERS]


def _answer(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a tool returns; an async one has an event loop of its own."""
    answer = tool(**arguments)
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer
