"""Agents: programs that solve problems by asking an OpenAI-compatible API, trained as they are.

::

    async def solve(base_url, api_key, example):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": example.prompt}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return float(answer.choices[0].message.content == example.answer)

    env_class: penstock.environments.AgentEnvironment
    env_args: {agent: my_agents.solve, path: sums.jsonl}

or any program, as a list of words. Each rollout has a URL and a key of its own (`inference.endpoint: true`), under
which it may ask whatever it likes, however often: what it was answered is the rollout, token by token. A request whose
prompt continues what another was asked and answered, *token by token*, goes on in that sample; any other begins a new
one (`penstock.types.Rollout`). All of it has the reward of the rollout.

Agents are the user's own code, with the rights of the run; only their time and what they print are limited. Where a run
is to go the same way every time (staleness zero), they go one after the other. Not covered: agents that must be fenced
in, worked solutions for a warm start.
"""

import asyncio
import inspect
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any, ClassVar

import numpy as np
from typing_extensions import override

from penstock.environments.base import Reference, check_reward
from penstock.environments.episode import EpisodeBuilder
from penstock.environments.example_environment import (
    FAILURES,
    Example,
    ExampleEnvironment,
    Failure,
    Outcome,
    Played,
    Task,
    mean_by_name,
)
from penstock.environments.multi_turn import MOST_AT_ONCE, GaveNoAnswer, within
from penstock.environments.problem_rows import examples_of, read_rows, split_by_prompt
from penstock.types import (
    AgentContext,
    AgentSession,
    Completion,
    ConfigError,
    Decoding,
    EnvironmentFailure,
    InferenceContext,
    Rollout,
    TextCodec,
    fold,
)
from penstock.types.errors import errors_of_user_code
from penstock.types.importing import load_attribute

Agent = Callable[[str, str, Example], Any]
"""From a base URL, a key and a problem to what it earned, or to an answer; async or not."""

MOST_PRINTED_BYTES = 64 * 1024
"""Of a program's output and errors each, the last that are kept."""
_END_S = 10.0
_READ_BYTES = 8192


class AgentEnvironment(ExampleEnvironment):
    """Problems that agents solve.

    Args:
        agent: A function of base URL, key and problem, async or not, or its path (``package.module.function``,
            ``file.py:function``); what it returns is the reward, or, as text, an answer for `score`. Or a program with
            its arguments, as a list: it finds ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its environment, the
            problem as one line of JSON on standard input (``prompt``, ``answer``, and columns), and the last line that
            it prints is for `score`.
        path: JSONL or Parquet files of problems, where the class has no `examples`.
        prompt_column: Holds what the agent is to do: text or chat messages.
        answer_column: Holds the reference answer; null where there is none.
        max_seconds: Longest time of one agent.
        name: Stands on every rollout; None: the name of the class.

    Raises:
        ConfigError: a file or function cannot be read, or the program is empty.
    """

    has_agents: ClassVar[bool] = True

    def __init__(
        self,
        agent: str | list[str] | Agent,
        path: str | list[str] | None = None,
        prompt_column: str = "prompt",
        answer_column: str | None = "answer",
        max_seconds: float = 600.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if max_seconds <= 0:
            raise ConfigError(f"env_args.max_seconds is {max_seconds}: it must be above 0")
        found: Any = load_attribute(agent, "env_args.agent") if isinstance(agent, str) else agent
        if not callable(found) and not (isinstance(found, list) and found and all(isinstance(w, str) for w in found)):
            raise ConfigError(
                f"env_args.agent is {agent!r:.100}: it must be a function, its path, or a list of words, the program "
                "and its arguments"
            )
        self._agent: Agent | list[str] = found
        self._max_seconds = max_seconds
        self._path = path
        if path is not None:
            self.examples = examples_of(read_rows(path, "env_args.path"), str(path), prompt_column, answer_column)

    @cached_property
    @override
    def _split(self) -> tuple[Sequence[Example], Sequence[Example]]:
        if self._path is None:
            return super()._split
        return split_by_prompt(list(self.examples), self.eval_fraction, str(self._path))

    def score(self, example: Example, answer: str) -> float:
        """What an agent's answer is worth; by default it is the number that it says. To be replaced otherwise."""
        try:
            return float(answer)
        except ValueError as error:
            raise EnvironmentFailure(
                f"the agent's last line is {answer!r:.200}: it must be the reward, unless a subclass has score"
            ) from error

    @override
    def play(
        self, inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
    ) -> list[Outcome]:
        if not isinstance(inference_ctx, AgentContext):
            raise ConfigError(
                f"environment {self.name!r} needs an endpoint for its agents, which {type(inference_ctx).__name__} has "
                "not: use a RolloutManager with inference.endpoint: true"
            )
        asked = [(task, position) for task in tasks for position in range(n_generations)]

        def attempt(one: tuple[Task, int]) -> "_Attempt | Failure":
            return self._attempt(inference_ctx, *one, decoding)

        if inference_ctx.ordered:
            found = list(map(attempt, asked))
        else:
            with ThreadPoolExecutor(min(len(asked), MOST_AT_ONCE), "agent") as threads:
                found = list(threads.map(attempt, asked))
        return [_outcome(found[first : first + n_generations]) for first in range(0, len(found), n_generations)]

    @override
    def references(self, example: Example) -> list[Reference]:
        """None: what an agent asks is known only once it runs."""
        return []

    def _attempt(self, context: AgentContext, task: Task, position: int, decoding: Decoding) -> "_Attempt | Failure":
        session, began = context.session(decoding, fold(task.seed, "agent", position)), time.monotonic()
        try:
            try:
                said = self._said(session, task.example)
            finally:
                completions = session.close()  # first of all: what the policy failed with is no fault of the agent's
            reward = self._reward(task.example, said)
            if not completions:
                raise EnvironmentFailure(
                    f"the policy answered the agent nothing about {task.example.example_id!r}: its requests go to the "
                    "base URL that it is given (OPENAI_BASE_URL), with the key (OPENAI_API_KEY); what is refused, such "
                    "as a prompt that is too long, or not waited for, is no answer"
                )
            rollout, samples = rollout_of(
                completions, context.tokenizer, decoding, reward, self.name, task.example, time.monotonic() - began
            )
        except FAILURES as failure:
            return failure
        numbers = {"answers": len(completions), "samples": samples, "overridden": session.overridden}
        return _Attempt(rollout, {name: float(number) for name, number in numbers.items()})

    def _said(self, session: AgentSession, example: Example) -> Any:
        """What the agent returned, or its last line."""
        what = f"the agent about {example.example_id!r}"
        with errors_of_user_code(EnvironmentFailure, f"{what} raised"):
            try:
                if isinstance(self._agent, list):
                    return self._run(self._agent, session, example)
                return within(self._max_seconds, _call, self._agent, session, example)
            except (GaveNoAnswer, subprocess.TimeoutExpired) as error:
                raise EnvironmentFailure(f"{what} took longer than max_seconds = {self._max_seconds:g}") from error

    def _run(self, command: Sequence[str], session: AgentSession, example: Example) -> str:
        problem = {**example.columns, "prompt": example.prompt, "answer": example.answer}
        line = json.dumps(problem, default=str, ensure_ascii=False) + "\n"
        code, printed, errors = _run_command(command, line, _variables(session), self._max_seconds)
        if code:
            raise EnvironmentFailure(
                f"the agent about {example.example_id!r}, {command[0]!r}, ended with exit status {code}: "
                f"{errors.strip()[-500:] or 'it said nothing'}"
            )
        lines = [each.strip() for each in printed.splitlines() if each.strip()]
        if not lines:
            raise EnvironmentFailure(f"the agent about {example.example_id!r}, {command[0]!r}, printed nothing")
        return lines[-1]

    def _reward(self, example: Example, said: Any) -> float:
        if not isinstance(said, str):
            return check_reward(said, f"{type(self).__name__}'s agent")
        called = f"{type(self).__name__}.score"
        with errors_of_user_code(EnvironmentFailure, f"{called} raised", about=f" about {example.example_id!r}"):
            return check_reward(self.score(example, said), called)


@dataclass(frozen=True, slots=True)
class _Attempt:
    rollout: Rollout
    numbers: Mapping[str, float]


def _outcome(group: Sequence[_Attempt | Failure]) -> Outcome:
    failures = [each for each in group if isinstance(each, Failure)]
    if failures:
        return failures[0]
    done = [each for each in group if isinstance(each, _Attempt)]
    return Played([each.rollout for each in done], mean_by_name([each.numbers for each in done]))


def rollout_of(
    completions: Sequence[Completion],
    tokenizer: TextCodec,
    decoding: Decoding,
    reward: float,
    env_name: str,
    example: Example,
    whole_s: float = 0.0,
) -> tuple[Rollout, int]:
    """The rollout of an agent's requests, and how many samples it has.

    Args:
        completions: One or more, in the order of the requests.
        tokenizer: Gives the texts of the tokens.
        decoding: How they were sampled.
        reward: At the last token.
        env_name: Of the environment, which stands on it.
        example: What the agent was asked to solve.
        whole_s: Seconds from its start until now.

    Raises:
        EnvironmentFailure: a request was aborted.
    """
    samples, now = _samples(completions), time.monotonic()
    first = samples[0][0].prompt_tokens
    episode = EpisodeBuilder(tokenizer.decode(first, skip_special_tokens=False), first, decoding)
    for number, sample in enumerate(samples):
        for completion in sample:
            new = completion.prompt_tokens
            if completion is sample[0] and number:
                episode.renew(tokenizer.decode(new, skip_special_tokens=False), new, "user")
            elif completion is not sample[0]:
                new = new[len(episode.tokens) :]
                if len(new):
                    episode.hear(tokenizer.decode(new, skip_special_tokens=False), new, "user")
            episode.say(completion)
    episode.credit(reward)
    ends = [completion.finished_s for completion in completions if completion.finished_s is not None]
    after_s = min(whole_s, now - max(ends, default=now))
    asked_s = sum(seconds for completion in completions for seconds in completion.timings.values())
    episode.spend("tool_s", max(0.0, whole_s - after_s - asked_s))
    episode.spend("reward_s", after_s)
    return episode.rollout(env_name, example.example_id), len(samples)


def _samples(completions: Sequence[Completion]) -> list[list[Completion]]:
    """Those that go on with one another, in the order of their beginnings; each with the longest that it can."""
    samples: list[list[Completion]] = []
    texts: list[np.ndarray] = []
    for completion in completions:
        prompt = completion.prompt_tokens
        fitting = [i for i, text in enumerate(texts) if np.array_equal(prompt[: len(text)], text)]
        whole = np.concatenate([prompt, completion.response_tokens])
        if fitting:
            longest = max(fitting, key=lambda i: len(texts[i]))
            samples[longest].append(completion)
            texts[longest] = whole
        else:
            samples.append([completion])
            texts.append(whole)
    return samples


def _call(agent: Agent, session: AgentSession, example: Example) -> Any:
    made = agent(session.base_url, session.api_key, example)
    return asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made


async def _awaited(made: Awaitable[Any]) -> Any:
    return await made


def _variables(session: AgentSession) -> dict[str, str]:
    """Of a program; requests to this machine go past any proxy, and the run's own secrets stay with the run."""
    around = {name: os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")}
    direct = {name: ",".join(filter(None, (value, "127.0.0.1", "localhost"))) for name, value in around.items()}
    own = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**own, **direct, "OPENAI_BASE_URL": session.base_url, "OPENAI_API_KEY": session.api_key}


def _run_command(
    command: Sequence[str], told: str, variables: Mapping[str, str], limit_s: float
) -> tuple[int, str, str]:
    """Exit status, and the end of output and errors.

    Raises:
        subprocess.TimeoutExpired: it took longer; it is killed with all that it started in its group.
        EnvironmentFailure: it cannot be started.
    """
    ends_at = time.monotonic() + limit_s
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=dict(variables), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise EnvironmentFailure(f"env_args.agent {command[0]!r} cannot be started: {error}") from error
    ends = {"out": b"", "err": b""}
    work = [
        threading.Thread(target=_keep_end, args=(process.stdout, ends, "out"), name="agent-output", daemon=True),
        threading.Thread(target=_keep_end, args=(process.stderr, ends, "err"), name="agent-errors", daemon=True),
        threading.Thread(target=_tell, args=(process.stdin, told.encode()), name="agent-input", daemon=True),
    ]
    for thread in work:
        thread.start()
    try:
        code = process.wait(limit_s)
        for thread in work:  # what it left running in the background may hold the pipes: that ends with it
            thread.join(min(1.0, max(0.0, ends_at - time.monotonic())))
    finally:
        _kill_group(process)
    for thread in work:
        thread.join(_END_S)
    return code, ends["out"].decode("utf-8", "replace"), ends["err"].decode("utf-8", "replace")


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing of it is left
    process.wait(_END_S)


def _keep_end(pipe: IO[bytes], ends: dict[str, bytes], name: str) -> None:
    end = b""
    with pipe:
        while read := pipe.read1(_READ_BYTES):  # pyright: ignore[reportAttributeAccessIssue]  # it is buffered
            end = (end + read)[-MOST_PRINTED_BYTES:]
            ends[name] = end


def _tell(pipe: IO[bytes], told: bytes) -> None:
    try:
        with pipe:
            pipe.write(told)
    except BrokenPipeError:
        pass  # it does not read what it is told
