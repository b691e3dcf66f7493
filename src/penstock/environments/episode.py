"""Episodes of language policies: built turn by turn, or of one prompt, one answer, one reward.

Tokens in, tokens out: sampled tokens are kept as they came, never decoded and encoded again, so the next turn's
prompt is exactly the conversation so far, or else begins a new sample of the rollout. What tools say, and a context
that is written anew, is masked out of the loss.

Most environments are made from `SingleTurnEnvironment`, which asks its subclass for two lists of problems and a `score`
of one answer, or `GroupScoredEnvironment`, for a score of all the answers to one problem at once.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import override

from penstock.environments.base import Prompt, Scores, check_reward, check_rewards, prompt_text, validate_metrics
from penstock.environments.example_environment import (
    FAILURES,
    Example,
    ExampleEnvironment,
    Failure,
    Outcome,
    Played,
    Task,
)
from penstock.types import (
    Completion,
    Decoding,
    EnvironmentFailure,
    FinishReason,
    InferenceContext,
    Role,
    Rollout,
    Turn,
)
from penstock.types.errors import errors_of_user_code


class EpisodeBuilder:
    """A conversation under way.

    Args:
        prompt: As it was rendered; becomes the first turn.
        prompt_tokens: int32 [p].
        decoding: How the policy's turns are sampled.
    """

    def __init__(self, prompt: Prompt, prompt_tokens: np.ndarray, decoding: Decoding) -> None:
        self._prompt_tokens = prompt_tokens
        self._decoding = decoding
        self._tokens: list[np.ndarray] = []
        self._length = 0
        self._logprobs: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._weight_steps: list[np.ndarray] = []
        self._rewards: dict[int, float] = {}
        self._oldest_weight_step: int | None = None
        self._finish_reason: FinishReason = "stop"
        self._starts = [0]
        self._turns = [Turn("user", prompt_text(prompt), 0, len(prompt_tokens))]
        self._spent: list[dict[str, float]] = [{}]  # of each turn, by stage
        self._until = time.monotonic()  # until then it is known what its seconds went to

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n], the sample so far, of a single one the whole conversation: the prompt of the next turn."""
        return np.concatenate([self._prompt_tokens, *self._tokens])[self._starts[-1] :]

    @property
    def response_length(self) -> int:
        """Tokens since the prompt, of all samples."""
        return self._length

    @property
    def grown_tokens(self) -> int:
        """By how much the context is longer than the prompt was; below 0 where it was written anew and is shorter."""
        return self.response_length - self._starts[-1]

    @property
    def ended(self) -> bool:
        """Whether the policy ended its latest turn by itself."""
        return self._finish_reason == "stop"

    def say(self, completion: Completion) -> None:
        """Adds what the policy sampled.

        Raises:
            EnvironmentFailure: the engine aborted the request or sampled nothing: there is no answer to score.
        """
        length = len(completion.response_tokens)
        if completion.finish_reason == "aborted" or length == 0:
            raise EnvironmentFailure(
                f"a response ended as {completion.finish_reason!r} with {length} tokens: there is no answer to score"
            )
        self._append("assistant", completion.text, completion.response_tokens)
        self._logprobs.append(completion.response_logprobs)
        self._mask.append(np.ones(length, np.bool_))
        self._weight_steps.append(completion.weight_steps)
        seen = self._oldest_weight_step
        oldest = completion.oldest_weight_step
        self._oldest_weight_step = oldest if seen is None else min(seen, oldest)
        self._finish_reason = completion.finish_reason
        ended_s = time.monotonic() if completion.finished_s is None else completion.finished_s
        rest_s = ended_s - sum(completion.timings.values()) - self._until
        self._spent[-1] = {"rest_s": rest_s} if completion.timings and rest_s > 0 else {}
        self._spent[-1] |= completion.timings
        self._until = max(ended_s, self._until)

    def hear(self, text: str, tokens: np.ndarray, role: Role = "tool") -> None:
        """Adds what the policy is told: no log-probabilities, outside the loss mask.

        The weight step of these tokens repeats that of the token before, under which they were read.
        """
        step = self._weight_steps[-1][-1] if self._weight_steps and len(self._weight_steps[-1]) else 0
        self._append(role, text, tokens)
        self._logprobs.append(np.zeros(len(tokens), np.float32))
        self._mask.append(np.zeros(len(tokens), np.bool_))
        self._weight_steps.append(np.full(len(tokens), step, np.int32))

    def renew(self, text: str, tokens: np.ndarray, role: Role = "tool") -> None:
        """Begins a new sample, with all of the context that the policy sees from here on.

        Args:
            text: What the policy is told in it for the first time.
            tokens: int32 [n], the context.
            role: Who tells it.
        """
        self._starts.append(len(self._prompt_tokens) + self.response_length)
        self.hear(text, tokens, role)

    def credit(self, reward: float) -> None:
        """Adds reward at the latest token."""
        self._rewards[self.response_length - 1] = self._rewards.get(self.response_length - 1, 0.0) + reward

    def spend(self, stage: str, seconds: float) -> None:
        """Adds to a stage of the latest turn, which ends now; what its responses took is there already."""
        self._spent[-1][stage] = self._spent[-1].get(stage, 0.0) + seconds
        self._until = time.monotonic()

    def cut(self) -> None:
        """Marks the episode as ended by a length limit instead of by the policy."""
        self._finish_reason = "length"

    def rollout(self, env_name: str, example_id: str, by_function: Iterable[tuple[str, float | None]] = ()) -> Rollout:
        """The finished rollout; its reward is the sum of the credits, and `by_function` what that was made of."""
        length = self.response_length
        token_rewards = np.zeros(length, np.float32)
        for position, reward in self._rewards.items():
            token_rewards[position] = reward
        return Rollout(
            env_name=env_name,
            env_example_id=example_id,
            prompt_tokens=self._prompt_tokens,
            response_tokens=_joined(self._tokens, np.int32),
            response_logprobs=_joined(self._logprobs, np.float32),
            token_rewards=token_rewards,
            episode_reward=float(sum(self._rewards.values())),
            response_mask=_joined(self._mask, np.bool_),
            response_weight_steps=_joined(self._weight_steps, np.int32),
            oldest_weight_step=self._oldest_weight_step,
            turns=self._timed_turns(),
            decoding=self._decoding,
            finish_reason=self._finish_reason,
            sample_starts=tuple(self._starts),
            rewards_by_function=tuple(by_function),
            timings=self._timings(),
        )

    def _timings(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for spent in self._spent:
            for stage, seconds in spent.items():
                if stage != "rest_s":
                    sums[stage] = sums.get(stage, 0.0) + seconds
        return sums

    def _timed_turns(self) -> tuple[Turn, ...]:
        if sum(turn.role == "assistant" for turn in self._turns) < 2:
            return tuple(self._turns)
        return tuple(
            replace(turn, timings=tuple(spent.items())) if spent else turn
            for turn, spent in zip(self._turns, self._spent, strict=True)
        )

    def _append(self, role: Role, text: str, tokens: np.ndarray) -> None:
        start = len(self._prompt_tokens) + self._length
        self._tokens.append(tokens)
        self._length += len(tokens)
        self._turns.append(Turn(role, text, start, start + len(tokens)))
        self._spent.append({})


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """End to end; a single one as it is: rollouts change none of their arrays."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


class GroupScoredEnvironment(ExampleEnvironment):
    """Scores all answers to one problem together."""

    @abstractmethod
    def score_group(self, example: Example, completions: Sequence[Completion]) -> Sequence[float] | Scores:
        """One finite reward per completion, alone or with metrics of the group.

        Raises:
            EnvironmentFailure: the verifier broke; this group fails, and no other.
        """

    @override
    def play(
        self, inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
    ) -> list[Outcome]:
        answered = generate_each(inference_ctx, tasks, n_generations, decoding)
        return [
            completions if isinstance(completions, Failure) else self._finish(task, completions, decoding)
            for task, completions in zip(tasks, answered, strict=True)
        ]

    def _finish(self, task: Task, completions: list[Completion], decoding: Decoding) -> Outcome:
        began = time.monotonic()
        called, about = type(self).__name__, f" while scoring {task.example.example_id!r}"
        try:
            with errors_of_user_code(EnvironmentFailure, f"{called} raised", about=about):
                scored = self.score_group(task.example, completions)
                reward_s = time.monotonic() - began
                scores = scored if isinstance(scored, Scores) else Scores(scored)
                rewards = check_rewards(scores.rewards, len(completions), called)
                names = tuple(scores.by_function)
                parts = list(zip(*scores.by_function.values(), strict=True)) or [()] * len(completions)
                rollouts = [
                    self._rollout(task, completion, reward, decoding, zip(names, given, strict=True), reward_s)
                    for completion, reward, given in zip(completions, rewards, parts, strict=True)
                ]
                return Played(rollouts, validate_metrics(scores.metrics, self.name)) if scores.metrics else rollouts
        except FAILURES as failure:
            return failure

    def _rollout(
        self,
        task: Task,
        completion: Completion,
        reward: float,
        decoding: Decoding,
        by_function: Iterable[tuple[str, float | None]],
        reward_s: float,
    ) -> Rollout:
        episode = EpisodeBuilder(task.prompt, task.prompt_tokens, decoding)
        episode.say(completion)
        episode.credit(reward)
        episode.spend("reward_s", reward_s)
        return episode.rollout(self.name, task.example.example_id, by_function)


class SingleTurnEnvironment(GroupScoredEnvironment):
    """Scores each answer by itself."""

    @abstractmethod
    def score(self, example: Example, text: str, completion: Completion) -> float:
        """The reward of one answer.

        Args:
            example: The problem that was asked.
            text: The answer, without special tokens.
            completion: All of it; ``completion.finish_reason == "length"`` says that the answer was cut.
        """

    @override
    def score_group(self, example: Example, completions: Sequence[Completion]) -> Sequence[float]:
        source = f"{type(self).__name__}.score"
        return [check_reward(self.score(example, one.text, one), source) for one in completions]


def generate_each(
    inference_ctx: InferenceContext, tasks: Sequence[Task], n_generations: int, decoding: Decoding
) -> list[list[Completion] | Failure]:
    """Generates for all tasks at once; where a prompt is refused, one by one, so that only its own group fails."""
    prompts = [task.prompt_tokens for task in tasks]
    seeds = [task.seed for task in tasks]
    try:
        return list(inference_ctx.generate(prompts, n_generations, decoding, seeds))
    except EnvironmentFailure as failure:
        if len(tasks) == 1:
            return [failure]
    return [answer for task in tasks for answer in generate_each(inference_ctx, [task], n_generations, decoding)]
