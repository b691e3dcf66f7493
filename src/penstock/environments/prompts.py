"""How a problem's text becomes what the tokenizer renders: plain text, or chat messages.

A failing chat template is the tokenizer's error and is never papered over by falling back to another format.
"""

from collections.abc import Sequence
from typing import Literal

from penstock.environments.base import Prompt
from penstock.types import Message

Template = Literal["auto", "plain", "chat"]
"""`auto`: text stays plain, messages go through the chat template; the others force one of the two."""


def shape_prompt(prompt: Prompt, template: Template = "auto", system_prompt: str | None = None) -> Prompt:
    """The prompt in the form that the template asks for.

    Args:
        prompt: Plain text or messages.
        template: `chat` makes text a user's message; `plain` joins the contents of messages by blank lines.
        system_prompt: Put first, as a system message or as a paragraph.
    """
    messages = None if isinstance(prompt, str) else list(prompt)
    if template == "chat" and messages is None:
        messages = [{"role": "user", "content": prompt}]
    if template == "plain" or messages is None:
        paragraphs = [system_prompt] if system_prompt else []
        return "\n\n".join([*paragraphs, prompt_text(prompt)])
    system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, *messages]


def prompt_text(prompt: Prompt) -> str:
    """The prompt for human eyes: the text itself, or the messages' contents by blank lines."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_content(message) for message in prompt)


def _content(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: Sequence[Message] = content
    return "".join(str(part.get("text", "")) for part in parts)
