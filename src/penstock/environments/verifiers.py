"""Environments of verifiers 0.3 (extra ``verifiers``), by ``load_environment``: one turn, several, tools, rubrics.

::

    environment: {env_class: penstock.environments.VerifiersEnvironment, env_args: {env_id: wordle, args: {…}}}

Rows become problems; ``setup_state``, stop conditions, ``env_response``, tools, cleanup and the rubric's weighted
reward functions, async ones too, are the environment's own, called in verifiers' order; every number of the rubric is a
metric ``rewards/<function>/mean``. The policy is not asked through verifiers' clients: its turns are sampled here, and
stay token by token what was sampled (`penstock.environments.multi_turn`). Tool calls are read by `tool_calls`.

All of an environment's coroutines run in one event loop, a thread of this process, as under verifiers: what blocks the
loop, a slow function that is not async, say, keeps its other conversations waiting.

Other than under verifiers a reward function that raises fails its group, where verifiers would log that and give 0.
Refused with a line that says so: group-level reward functions, environments that are no ``MultiTurnEnv``
(``EnvGroup``: name its members as lessons), that change a prompt in ``setup_state``, write their conversation anew,
show pictures, or ask the policy beside their conversation. verifiers' ``v1`` tasksets are not covered.

The module loads without the package.
"""

import asyncio
import atexit
import contextvars
import functools
import inspect
import json
import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from typing_extensions import override

from penstock.environments.base import Prompt
from penstock.environments.example_environment import Example, hashed_id, split_by_hash
from penstock.environments.multi_turn import Conversation, MultiTurnEnvironment, Reply
from penstock.environments.problem_rows import prompt_key
from penstock.text.tool_calls import CALL_END, said_beside, tool_calls
from penstock.types import ConfigError, EnvironmentFailure, Message
from penstock.types.importing import load_attribute, load_module

logger = logging.getLogger(__name__)

T = TypeVar("T")
_KEY = "verifiers"
_UNLIMITED_TURNS = 1_000
_CLOSE_S = 30.0
_LOADING = threading.Lock()
_FAILED: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failed reward functions")


class VerifiersEnvironment(MultiTurnEnvironment):
    """One environment of verifiers.

    Args:
        env_id: As for ``verifiers.load_environment``: the name of an installed module; or ``path/to/file.py:function``.
        args: What its ``load_environment`` takes.
        eval_fraction: Which part of the rows is held out, where the environment has one data set only.
        name: Stands on every rollout; null takes `env_id`.
        conversation: What `MultiTurnEnvironment` takes. Limits hold beside the environment's own.

    Attributes:
        environment: The ``verifiers.Environment``.

    Raises:
        ConfigError: the package or the environment's module is missing, or it is of a kind that is not supported.
    """

    def __init__(
        self,
        env_id: str,
        args: dict[str, Any] | None = None,
        eval_fraction: float = 0.1,
        name: str | None = None,
        **conversation: Any,
    ) -> None:
        if not 0 < eval_fraction < 1:
            raise ConfigError(f"env_args.eval_fraction is {eval_fraction}: it takes a number between 0 and 1")
        self.environment = _loaded(env_id, args or {})
        for key, own, unlimited in (
            ("max_turns", self.environment.max_turns, _UNLIMITED_TURNS),
            ("max_seconds", self.environment.timeout_seconds or 0, math.inf),
        ):
            limits = [limit for limit in (conversation.get(key), own) if limit is not None and limit > 0]
            if limits or key == "max_turns":
                conversation[key] = min(limits, default=unlimited)
        super().__init__(name or env_id.rpartition("/")[2].partition(".py:")[0], **conversation)
        self.eval_fraction = eval_fraction
        self._client = _no_client()
        for rubric in _rubrics(self.environment.rubric):
            rubric.funcs = [_watched(function) for function in rubric.funcs]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = threading.Thread()
        self._starting = threading.Lock()
        atexit.register(self.close)

    @override
    def chat_template_kwargs(self, example: Example) -> Mapping[str, Any]:
        tools = [] if isinstance(self.shaped(example), str) else self._tools(example)
        return {"tools": [{"type": "function", "function": tool} for tool in tools]} if tools else {}

    @override
    def stop_strings(self, plain: bool) -> tuple[str, ...]:
        return (CALL_END,) if plain and self.environment.tool_defs else ()

    @override
    def is_done(self, conversation: Conversation) -> bool:
        return self._run(self._is_done(conversation))

    @override
    def respond(self, conversation: Conversation) -> Reply:
        plain = isinstance(self.shaped(conversation.example), str)
        reply: list[Any] = conversation.state[_KEY].reply
        names = {call.id: call.name for call in _calls_of(conversation.state[_KEY].state)}
        return [_message(each, plain, names.get(getattr(each, "tool_call_id", None), "")) for each in reply]

    @override
    def score(self, conversation: Conversation) -> float:
        return self._run(self._score(conversation))

    @override
    def release(self, conversation: Conversation) -> None:
        """Calls the environment's cleanup where an unfinished conversation has not come so far."""
        side: _Side | None = conversation.state.get(_KEY)
        if side is not None and not side.is_clean:
            self._run(self._clean(side))

    @override
    def numbers(self, conversation: Conversation) -> dict[str, float]:
        """Also ``rewards/<function>/mean`` of each function of the rubric."""
        given = self.rewards_by_function(conversation)
        return {**super().numbers(conversation), **{f"rewards/{name}/mean": value for name, value in given.items()}}

    @override
    def rewards_by_function(self, conversation: Conversation) -> dict[str, float]:
        found: Mapping[str, Any] = conversation.state[_KEY].state.get("metrics") or {}
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}

    @override
    def close(self) -> None:
        """Calls the environment's teardown, once, and ends its event loop."""
        atexit.unregister(self.close)
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self.environment._teardown(), loop).result(_CLOSE_S)
        except Exception as error:  # what a teardown raises keeps no run from ending
            logger.warning("environment %s: its teardown raised %s: %s", self.name, type(error).__name__, error)
        loop.call_soon_threadsafe(loop.stop)
        self._loop_thread.join(_CLOSE_S)

    # --- data -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _split(self) -> tuple[list[Example], list[Example]]:
        rows, held_out_rows = self.environment.build_dataset(), self.environment.build_eval_dataset()
        if rows is None or held_out_rows is None:
            examples = _examples(held_out_rows if rows is None else rows)
            train, held_out = split_by_hash(examples, self.eval_fraction, _problem_key(examples))
        else:
            asked, held_out = _examples(rows), _examples(held_out_rows)
            key = _problem_key([*asked, *held_out])
            known = {key(example) for example in held_out}
            train = [example for example in asked if key(example) not in known]
            if len(train) < len(asked):
                left_out = len(asked) - len(train)
                logger.warning("environment %s: %d training rows are held-out problems: left out", self.name, left_out)
        if not train or not held_out:
            raise ConfigError(
                f"env_args.env_id: {self.name} has {len(train)} problems to train on and {len(held_out)} others to "
                "evaluate with: give it more rows by env_args.args"
            )
        return train, held_out

    def _tools(self, example: Example) -> list[dict[str, Any]]:
        info = example.columns.get("info")
        info = json.loads(info) if isinstance(info, str) and info.strip() else info
        of_row = info.get("tool_defs") if isinstance(info, Mapping) else None
        tools = self.environment._normalize_tool_defs(of_row) if of_row is not None else self.environment.tool_defs
        return [tool.model_dump(include={"name", "description", "parameters"}) for tool in tools or []]

    # --- in the event loop ------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(
                    target=lambda: (loop.run_forever(), loop.close()), name=f"verifiers-{self.name}", daemon=True
                )
                self._loop_thread.start()
        limited = asyncio.wait_for(work, self.max_seconds)
        return asyncio.run_coroutine_threadsafe(limited, self._loop).result()

    async def _is_done(self, conversation: Conversation) -> bool:
        side = await self._told(conversation)
        environment, state = self.environment, side.state
        if await environment.is_completed(state):
            return True
        if conversation.turns >= self.max_turns:
            return False
        before = [*side.messages, *state["trajectory"][-1]["completion"]]
        messages = await environment.get_prompt_messages(state)
        if state.get("final_env_response") is not None:  # a last word, which the policy does not answer
            return await environment.is_completed(state)
        if messages[: len(before)] != before:
            raise EnvironmentFailure("it writes its conversation anew (get_prompt_messages): this is not supported")
        side.messages, side.reply = messages, messages[len(before) :]
        return False

    async def _told(self, conversation: Conversation) -> "_Side":
        """Verifiers' side of a conversation, with the policy's latest turn."""
        side: _Side | None = conversation.state.get(_KEY)
        if side is None:
            side = conversation.state[_KEY] = await self._begun(conversation.example)
        if side.turns < conversation.turns:
            side.turns = conversation.turns
            response = _response(conversation, bool(side.state["tool_defs"]), self.name)
            self.environment.increment_state_usage_from_response(side.state, response)
            await self.environment.add_model_response(side.state, side.messages, response)
        if (error := side.state.get("error")) is not None:
            raise EnvironmentFailure(f"its state has the error {type(error).__name__}: {error}")
        return side

    async def _begun(self, example: Example) -> "_Side":
        state = await self.environment.init_state(dict(example.columns), self._client, self.name, {})
        asked = list(state["prompt"])
        state["timing"].generation.start = state["timing"].setup.start = time.time()
        state = await self.environment.setup_state(state) or state
        state["timing"].setup.end = time.time()
        if list(state["prompt"]) != asked:
            raise EnvironmentFailure("its setup_state changes the prompt: this is not supported")
        return _Side(state, asked)

    async def _score(self, conversation: Conversation) -> float:
        side = await self._told(conversation)
        state, rubric = side.state, self.environment.rubric
        if not state["is_completed"]:  # a limit of ours ended it
            state["is_completed"] = state["is_truncated"] = True
            state["stop_condition"] = f"{conversation.ending}_limit"
        await self._clean(side)
        _FAILED.set(failed := [])
        await rubric.score_group([state])
        await rubric.cleanup(state)
        if failed:
            raise EnvironmentFailure(failed[0])
        return state["reward"]

    async def _clean(self, side: "_Side") -> None:
        side.is_clean = True
        await self.environment.cleanup(side.state)


@dataclass(slots=True)
class _Side:
    """verifiers' side of one conversation.

    Attributes:
        state: Its ``State``.
        messages: The prompt of the policy's next turn, as verifiers' messages.
        reply: The last of them, which the environment says.
        turns: Of the policy, that it was told.
        is_clean: Whether the environment's cleanup was called.
    """

    state: Any
    messages: list[Any]
    reply: Sequence[Any] = ()
    turns: int = 0
    is_clean: bool = False


def _response(conversation: Conversation, has_tools: bool, model: str) -> Any:
    """The policy's turn, as an answer of verifiers' clients."""
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage  # pyright: ignore[reportMissingImports]

    completion, text = conversation.completion, conversation.text
    assert completion is not None  # the policy has spoken
    written = tool_calls(text) if has_tools else []
    calls = [
        # one that cannot be read has arguments that are no JSON, so that the environment tells the policy
        ToolCall(
            id=f"call_{conversation.turns}_{number}",
            name=call.name,
            arguments=call.error or json.dumps(call.arguments),
        )
        for number, call in enumerate(written)
    ]
    is_cut = completion.finish_reason == "length"
    asked, said = len(completion.prompt_tokens), len(completion.response_tokens)
    return Response(
        id=f"turn_{conversation.turns}",
        created=int(time.time()),
        model=model,
        usage=Usage(prompt_tokens=asked, reasoning_tokens=0, completion_tokens=said, total_tokens=asked + said),
        message=ResponseMessage(
            content=said_beside(text) if calls else text,
            tool_calls=calls or None,
            finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
            is_truncated=is_cut,
        ),
    )


def _calls_of(state: Any) -> Sequence[Any]:
    """Of the policy's latest turn."""
    return getattr(state["trajectory"][-1]["completion"][-1], "tool_calls", None) or []


def _message(said: Any, plain: bool, tool_name: str) -> Message:
    role, content = said.role, said.content
    if not isinstance(content, str):
        content = "".join(_text_of(part) for part in content or [])
    if role != "tool":
        return {"role": role, "content": content}
    shown = f"<tool_response>{content}</tool_response>" if plain else content
    return {"role": "tool", "name": tool_name, "tool_call_id": said.tool_call_id, "content": shown}


def _text_of(part: Any) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise EnvironmentFailure(f"it shows a part of type {part.get('type')!r}: only text is supported")
    return text


def _examples(rows: Any) -> list[Example]:
    """One example per row; equal rows are told apart by their number."""
    seen: Counter[str] = Counter()
    examples: list[Example] = []
    for row in rows:
        prompt = _prompt(row["prompt"])
        answer = row.get("answer")
        example_id = hashed_id(json.dumps([prompt, answer, row.get("info")], sort_keys=True, default=str), seen)
        examples.append(Example(example_id, prompt, "" if answer is None else str(answer), row))
    return examples


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    # Arrow gives every message the keys of all
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _problem_key(examples: Sequence[Example]) -> Callable[[Example], str]:
    """What tells problems apart: the prompt, and what is expected where one prompt stands for several problems.

    A game may begin with the same words whatever there is to be found; rows that differ in `info` alone, which may be
    a number of the row, are one problem unless none has an answer.
    """
    answered = any(example.answer for example in examples)
    expected: dict[str, set[str]] = {}

    def expectation(example: Example) -> str:
        return example.answer if answered else json.dumps(example.columns.get("info"), sort_keys=True, default=str)

    def key(example: Example) -> str:
        text = prompt_key(example)
        return text if len(expected[text]) == 1 else json.dumps([text, expectation(example)])

    for example in examples:
        expected.setdefault(prompt_key(example), set()).add(expectation(example))
    return key


# --- verifiers' objects -----------------------------------------------------------------------------------------------


def _loaded(env_id: str, args: Mapping[str, Any]) -> Any:
    """The environment.

    Raises:
        ConfigError: see `VerifiersEnvironment`.
    """
    try:
        import verifiers as vf  # pyright: ignore[reportMissingImports]
        from verifiers.envs import environment as module  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{__name__}: verifiers cannot be imported ({error}): pip install 'penstock[verifiers]'"
        ) from error
    field = "env_args.env_id"
    if ".py:" in env_id:
        make: Callable[..., Any] = load_attribute(env_id, field)
    else:
        load_module(env_id.replace("-", "_").rpartition("/")[2], env_id, field)  # its own words where there is none
        make = functools.partial(vf.load_environment, env_id)
    with _without_handlers(module):
        made = make(**args)
    if not isinstance(made, vf.MultiTurnEnv):
        raise ConfigError(
            f"{field} {env_id!r} is a {type(made).__name__}: SingleTurnEnv, MultiTurnEnv, ToolEnv and what is made of "
            "them are supported; give the members of a group as lessons of their own"
        )
    if made.requires_group_rollouts:
        names = [f.__name__ for rubric in _rubrics(made.rubric) for f in rubric.funcs if rubric._is_group_func(f)]
        raise ConfigError(
            f"{field} {env_id!r}: reward functions of whole groups ({', '.join(names)}) are not supported: leave them "
            "out of its rubric"
        )
    return made


@contextmanager
def _without_handlers(module: Any) -> Iterator[None]:
    """Environments take over SIGINT, SIGTERM and the process's end when they are made; those are the run's.

    Only a main thread could let them, moreover.
    """
    with _LOADING:
        kept = module.signal, module.atexit
        module.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
        module.atexit = SimpleNamespace(register=lambda *_: None)
        try:
            yield
        finally:
            module.signal, module.atexit = kept


def _no_client() -> Any:
    """What an environment finds in its state in place of a client."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]

    async def get_response(*_: Any, **__: Any) -> Any:
        raise EnvironmentFailure("it asks the policy beside its conversation: this is not supported")

    members = {name: get_response for name in Client.__abstractmethods__}
    return type("NoClient", (Client,), {**members, "get_response": get_response})(None)


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Those that hold reward functions: itself, or a group's."""
    for each in getattr(rubric, "rubrics", None) or ():
        yield from _rubrics(each)
    if rubric.funcs:
        yield rubric


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose failures are noted: verifiers gives 0 where one raises."""

    @functools.wraps(function)
    async def watched(*args: Any, **keywords: Any) -> float:
        name = getattr(function, "__name__", repr(function))
        try:
            found = function(*args, **keywords)
            return float(await found if inspect.isawaitable(found) else found)
        except Exception as error:
            _FAILED.get([]).append(f"reward function {name} raised {type(error).__name__}: {error}")
            raise

    return watched
