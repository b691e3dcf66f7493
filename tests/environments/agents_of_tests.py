"""Agents that speak to the policy through the official client, as a user's would."""

import asyncio
import json

import openai

from penstock.environments import Example

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def client(base_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=280)


def tool_loop(base_url: str, api_key: str, example: Example, most_turns: int = 4) -> float:
    """Answers a question, with a tool to multiply."""
    messages = [{"role": "user", "content": example.prompt}]
    with client(base_url, api_key) as asked:
        for _ in range(most_turns):
            answer = asked.chat.completions.create(
                model="gpt-4o-mini", messages=messages, tools=[MULTIPLY], temperature=0.2, max_tokens=120
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if not message.tool_calls:
                return float((message.content or "").strip() == example.answer)
            for call in message.tool_calls:
                numbers = json.loads(call.function.arguments)
                product = str(numbers["a"] * numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": product})
    return 0.0


async def asking_twice(base_url: str, api_key: str, example: Example) -> float:
    """A conversation of two turns, the second streamed."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=280) as asked:
        messages = [{"role": "user", "content": example.prompt}]
        first = await asked.chat.completions.create(model="policy", messages=messages)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        messages += [{"role": "user", "content": "Sure?"}]
        said = ""
        async for chunk in await asked.chat.completions.create(model="policy", messages=messages, stream=True):
            said += chunk.choices[0].delta.content or ""
        return float(said == example.answer)


async def cancelled(base_url: str, api_key: str, example: Example) -> float:
    """Waits for a task that it has cancelled itself."""
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task
    return 1.0


def sampler(base_url: str, api_key: str, example: Example) -> float:
    """Two turns of the tool loop's form, whatever is said; worth the share of small letters in the last."""
    said, messages = "", [{"role": "user", "content": example.prompt}]
    with client(base_url, api_key) as asked:
        for _ in range(2):
            answer = asked.chat.completions.create(
                model="policy", messages=messages, tools=[MULTIPLY], max_tokens=24, temperature=0
            )
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    return sum(letter.islower() for letter in said) / max(len(said), 1)


def asker(base_url: str, api_key: str, example: Example) -> float:
    """One short continuation of the plain prompt; worth the share of small letters."""
    with client(base_url, api_key) as asked:
        said = asked.completions.create(model="policy", prompt=example.prompt, max_tokens=8).choices[0].text
    return sum(letter.islower() for letter in said) / max(len(said), 1)
