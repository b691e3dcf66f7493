"""A calculator as a tool, in two turns: the policy writes a call, reads the result, and answers.

::

    user       12+30=
    assistant  <calc>12+30</calc>          sampled, in the loss
    tool       <result>42</result>         told, outside the loss
    assistant  42                          sampled, in the loss

The conversation grows by tokens, never through text: what was sampled is the next turn's prompt as it is. The
response's token budget (`Decoding.max_output_tokens`) covers all of it: half for the call, a quarter for the result,
the rest for the answer, so that no rollout's answer depends on how long its neighbours' calls were.

What the policy wrote is never evaluated as code, but read by `penstock.environments.expressions`.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import override

from penstock.environments.base import Reference, Template
from penstock.environments.episode import EpisodeBuilder, generate_each
from penstock.environments.example_environment import (
    FAILURES,
    Example,
    ExampleEnvironment,
    Failure,
    Outcome,
    Task,
    split_by_rank,
)
from penstock.environments.expressions import CalculationError, calculate, show_number
from penstock.types import Completion, Decoding, EnvironmentFailure, InferenceContext, RolloutGroup, fold

EVAL_FRACTION = 0.2
CALL_END = "</calc>"
VALID_CALL, RIGHT_CALL, RIGHT_ANSWER = 0.2, 0.2, 0.6
"""Rewards: for a call that computes, for one whose result is the answer, for the answer itself."""
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_LEAST_BUDGET_TOKENS = 4


@dataclass(slots=True)
class _Attempt:
    """One rollout under way: the task, its episode, and the seed of its second turn."""

    task: Task
    episode: EpisodeBuilder
    seed: int
    answer: str = ""
    failure: Failure | None = None
    waits: bool = False


class CalculatorEnvironment(ExampleEnvironment):
    """Sums, differences and products of two numbers, with a calculator at hand.

    The answer counts with or without a call; calls that compute, and that compute the right thing, count beside it.

    Args:
        largest: No number is larger.
        name: Stands on every rollout.
        template: How prompts are put to the policy.
        system_prompt: Put before every prompt: tell a real language model how to call.
    """

    def __init__(
        self,
        largest: int = 30,
        name: str = "calculator",
        template: Template = "auto",
        system_prompt: str | None = None,
    ) -> None:
        super().__init__(name, template, system_prompt)
        if largest < 2:
            raise ValueError(f"largest is {largest}: it must be at least 2")
        self._split = split_by_rank(_examples(largest), EVAL_FRACTION, lambda e: e.example_id)

    def references(self, example: Example) -> list[Reference]:
        """The call, and the answer after its result."""
        prompt = self.shaped(example)
        call = f"<calc>{example.example_id}</calc>"
        told = tool_reply(call)
        return [
            Reference(prompt, call, ends=False),
            Reference(prompt, example.answer, earlier=(call, told)),
        ]

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """``tool_calls``: calls per rollout."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        calls = sum(turn.role == "tool" for rollout in rollouts for turn in rollout.turns)
        return {"tool_calls": calls / len(rollouts)} if rollouts else {}

    @override
    def play(
        self, inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
    ) -> list[Outcome]:
        budget = _TurnBudget.of(decoding)
        calling = replace(
            decoding, max_output_tokens=budget.call_tokens, stop_strings=(*decoding.stop_strings, CALL_END)
        )
        called = generate_each(inference_ctx, tasks, n_generations, calling)
        attempts: list[list[_Attempt] | Failure] = [
            completions
            if isinstance(completions, Failure)
            else [
                self._first_turn(inference_ctx, task, completion, j, decoding, budget)
                for j, completion in enumerate(completions)
            ]
            for task, completions in zip(tasks, called, strict=True)
        ]
        waiting = [a for group in attempts if not isinstance(group, Failure) for a in group if a.waits]
        self._second_turn(inference_ctx, waiting, replace(decoding, max_output_tokens=budget.answer_tokens))
        return [group if isinstance(group, Failure) else self._finish(group) for group in attempts]

    def _first_turn(
        self,
        inference_ctx: InferenceContext,
        task: Task,
        completion: Completion,
        position: int,
        decoding: Decoding,
        budget: "_TurnBudget",
    ) -> _Attempt:
        episode = EpisodeBuilder(task.prompt, task.prompt_tokens, decoding)
        attempt = _Attempt(task, episode, fold(task.seed, "answer", position), completion.text)
        try:
            episode.say(completion)
        except EnvironmentFailure as failure:
            attempt.failure = failure
            return attempt
        tokenizer = inference_ctx.tokenizer
        said = tokenizer.decode(completion.response_tokens)
        if completion.finish_reason == "stop" and _CALL.search(said):
            began = time.monotonic()
            episode.credit(_call_credit(said, task.example.answer))
            told = tool_reply(said)
            tokens = tokenizer.encode(told)
            episode.spend("tool_s", time.monotonic() - began)
            attempt.waits = len(tokens) <= budget.tool_tokens
            if attempt.waits:
                episode.hear(told, tokens)
            else:
                episode.cut()
        return attempt

    def _second_turn(self, inference_ctx: InferenceContext, waiting: list[_Attempt], decoding: Decoding) -> None:
        tasks = [Task(a.task.example, a.task.prompt, a.episode.tokens, a.seed) for a in waiting]
        answers = generate_each(inference_ctx, tasks, 1, decoding) if tasks else []
        for attempt, completions in zip(waiting, answers, strict=True):
            try:
                if isinstance(completions, Failure):
                    raise completions
                attempt.episode.say(completions[0])
                attempt.answer = completions[0].text
            except FAILURES as failure:
                attempt.failure = failure

    def _finish(self, attempts: list[_Attempt]) -> Outcome:
        for attempt in attempts:
            if attempt.failure is not None:
                return attempt.failure
            right = attempt.answer.strip() == attempt.task.example.answer
            attempt.episode.credit(RIGHT_ANSWER * (right and attempt.episode.ended))
        return [attempt.episode.rollout(self.name, attempt.task.example.example_id) for attempt in attempts]


@dataclass(frozen=True, slots=True)
class _TurnBudget:
    """How the response's tokens are shared out."""

    call_tokens: int
    tool_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, decoding: Decoding) -> "_TurnBudget":
        total = decoding.max_output_tokens
        if total < _LEAST_BUDGET_TOKENS:
            raise EnvironmentFailure(
                f"max_output_tokens is {total}: a call, its result and an answer need {_LEAST_BUDGET_TOKENS} or more"
            )
        call, tool = (total + 1) // 2, total // 4
        return cls(call, tool, total - call - tool)


def tool_reply(said: str) -> str:
    """What the calculator says to the first call in a text: its result, or that there is none."""
    match = _CALL.search(said)
    try:
        result = show_number(calculate(match.group(1) if match else ""))
    except CalculationError:
        result = "error"
    return f"<result>{result}</result>"


def _call_credit(said: str, answer: str) -> float:
    reply = tool_reply(said)
    if reply == "<result>error</result>":
        return 0.0
    return VALID_CALL + RIGHT_CALL * (reply == f"<result>{answer}</result>")


def _examples(largest: int) -> list[Example]:
    numbers = np.arange(2, largest + 1)
    expressions = [f"{a}{sign}{b}" for a in numbers for b in numbers for sign in "+-*" if sign != "-" or a >= b]
    return [Example(e, f"{e}=", show_number(calculate(e))) for e in expressions]
