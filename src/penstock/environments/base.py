"""What every environment is: problems and a verifier, which turn a policy's answers into rewards.

An environment sees tokens in and sampled tokens out (`InferenceContext`); it knows nothing of workers, weights or
rollout metadata. Several threads call `sample` of one instance at once, so an instance keeps no state between calls
that a call could spoil. Most environments extend `SingleTurnEnvironment` (docs/environments.md), not this class.

A problem's text becomes what the tokenizer renders: plain text, or chat messages. A failing chat template is the
tokenizer's error and is never papered over by falling back to another format.

What an environment or a reward function returned is checked; nothing malformed reaches replay. Every failure names the
field, what was found, and what was expected; it costs its own group and no other.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, SupportsInt

import numpy as np

from penstock.types import (
    ConfigError,
    Decoding,
    EnvironmentFailure,
    InferenceContext,
    Message,
    Mode,
    ProblemSet,
    Rollout,
    RolloutGroup,
    TextCodec,
)

Prompt = str | Sequence[Message]
"""What `TextCodec.render` takes: plain text, or chat messages for the chat template."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One piece of a worked solution, for a supervised warm start.

    Attributes:
        prompt: As the environment asks it.
        response: What the policy should say.
        earlier: What was said between the prompt and the response, by policy and tools; each piece is encoded
            apart, as in a rollout.
        ends: Whether the policy stops after the response (a tool call does not end an answer).
        chat_template_kwargs: What the chat template is given beside the prompt's messages.
    """

    prompt: Prompt
    response: str
    earlier: tuple[str, ...] = ()
    ends: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def token_pair(self, tokenizer: TextCodec) -> tuple[np.ndarray, np.ndarray]:
        """What to condition on, int32 [p], and what to learn, int32 [r]; the stop token closes an answer."""
        prompt = tokenizer.render(self.prompt, chat_template_kwargs=self.chat_template_kwargs)
        before = [prompt, *(tokenizer.encode(piece) for piece in self.earlier)]
        stop = np.array(tokenizer.stop_token_ids[:1] if self.ends else (), np.int32)
        return np.concatenate(before), np.concatenate([tokenizer.encode(self.response), stop])

    def response_tokens(self, tokenizer: TextCodec) -> int:
        """Tokens of all that follows the prompt, as ``max_output_tokens`` counts them."""
        pieces = [tokenizer.encode(piece) for piece in (*self.earlier, self.response)]
        return sum(map(len, pieces)) + (self.ends and len(tokenizer.stop_token_ids) > 0)


class Environment(ABC):
    """Problems with a verifier.

    Args:
        name: Stands on every rollout; replay capacity is counted by it. None: the name of the class.

    Attributes:
        reports_apart: Whether there is a set of held-out problems for reports alone, mode ``report``, from which no
            decision of a run is ever taken. Where there is none, reports are about those of ``eval``.
        has_agents: Whether it has programs ask the policy, by `penstock.types.AgentContext`.
    """

    reports_apart: ClassVar[bool] = False
    has_agents: ClassVar[bool] = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or type(self).__name__

    @abstractmethod
    def sample(
        self,
        inference_ctx: InferenceContext,
        n_examples: int,
        n_generations: int,
        decoding: Decoding,
        prng_key: SupportsInt | np.ndarray,
        mode: Mode,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Draws problems, lets the policy answer, and scores the answers.

        Args:
            inference_ctx: Generates with the policy's present weights.
            n_examples: How many problems; each gives one group, drawn twice or not.
            n_generations: Answers per problem.
            decoding: How to sample; `max_output_tokens` covers the whole response, tool tokens included.
            prng_key: Alone decides which problems, and with what sampling noise.
            mode: Which of the disjoint sets of problems; ``report`` only where the class says `reports_apart`.

        Returns:
            At most `n_examples` groups of exactly `n_generations` rollouts, without metadata and group id, and
            metrics. A problem that failed is left out and counted.

        Raises:
            EnvironmentFailure: no group came about; the message is the first failure's.
        """

    def training_set(self) -> ProblemSet | None:
        """The training problems, where there is a fixed number of them, each to be trained once per epoch.

        None, the default, where `sample` makes or draws problems itself. To be replaced together with
        `sample_problems`.
        """
        return None

    def sample_problems(
        self,
        inference_ctx: InferenceContext,
        problems: Sequence[int],
        n_generations: int,
        decoding: Decoding,
        prng_key: SupportsInt | np.ndarray,
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """`sample` of given training problems.

        Args:
            inference_ctx: Generates with the policy's present weights.
            problems: Their numbers in the `training_set`, from 0; each gives one group.
            n_generations: Answers per problem.
            decoding: How to sample, as in `sample`.
            prng_key: Alone decides the sampling noise.

        Returns:
            As `sample`.

        Raises:
            EnvironmentFailure: no group came about, or there is no problem of that number.
        """
        raise EnvironmentFailure(
            f"environment {self.name!r} ({type(self).__name__}) was asked for problem {list(problems)}: where it has a "
            "training_set, it must have sample_problems"
        )

    def reference_examples(self, n: int, prng_key: SupportsInt | np.ndarray) -> list[Reference]:
        """References drawn from the training problems. To be replaced by environments that have solutions.

        Raises:
            ConfigError: the environment has none.
        """
        raise ConfigError(
            f"environment {self.name!r} ({type(self).__name__}) has no reference solutions: "
            "remove learner.warm_start, or override reference_examples"
        )

    def check_prompts(self, tokenizer: TextCodec, most_tokens: int) -> None:  # noqa: B027  (a hook: none may be known)
        """Renders prompts before a run writes anything. To be replaced where problems are at hand.

        Args:
            tokenizer: The policy's, with its chat template.
            most_tokens: Prompts of so many, or more, leave no room for an answer: they are warned of.

        Raises:
            ConfigError: the tokenizer has no chat template, or one that refuses the messages.
        """

    def close(self) -> None:  # noqa: B027  (a hook: most environments hold nothing)
        """Frees what the environment holds, such as processes. To be replaced where there is something."""


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
    return "\n\n".join(content_of(message) for message in prompt)


def content_of(message: Message) -> str:
    """A message's text; of several parts, theirs."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: Sequence[Message] = content
    return "".join(str(part.get("text", "")) for part in parts)


REWARD_LIMIT = 1e6
"""Largest reward, and the largest of one token. Losses are float32: some orders beyond it nothing is finite."""
_BEYOND = f"rewards lie within ±{REWARD_LIMIT:g}, so scale it"

MOST_METRICS = 64
"""Of one reward function, in one call."""
MOST_METRIC_NAME_CHARS = 100


@dataclass(frozen=True, slots=True)
class Scores:
    """What the answers of one group earned.

    Attributes:
        rewards: One per completion, finite; None where a reward function does not apply to it.
        metrics: Numbers about the group, by name; `sample` gives their means over the groups that have them.
        by_function: Of several functions what each gave each completion, before weights; stored with the rollouts.
    """

    rewards: Sequence[float | None]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    by_function: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Sequence[float | None]])


def check_rewards(rewards: Any, expected: int, source: str) -> list[float]:
    """One finite number per completion.

    Args:
        rewards: What a reward function returned: a list, tuple or array.
        expected: Number of completions.
        source: Who returned it, for the message.

    Raises:
        EnvironmentFailure: wrong count, or an entry that is no finite number within `REWARD_LIMIT`.
    """
    values = _one_each(rewards, expected, source)
    return [_number(value, source, f" as reward {i}", _wanted(expected)) for i, value in enumerate(values)]


def check_reward(reward: Any, source: str) -> float:
    """Like `check_rewards`, of whoever returns the reward of one completion."""
    if inspect.iscoroutine(reward):
        reward.close()
        raise EnvironmentFailure(f"{source} is async: write it without")
    return _number(reward, source, "", "it must return a finite number")


def check_credit(reward: Any, source: str) -> float:
    """Like `check_rewards`, of what is given to a conversation's ``credit``."""
    return _number(reward, source, "", "it must be a finite number", "gave credit")


def check_function_rewards(rewards: Any, expected: int, source: str) -> list[float | None]:
    """Like `check_rewards`, for a reward function, which may say None: it does not apply to this completion."""
    values = _one_each(rewards, expected, source)
    wanted = _wanted(expected)
    return [None if each is None else _number(each, source, f" as reward {i}", wanted) for i, each in enumerate(values)]


def _one_each(rewards: Any, expected: int, source: str) -> Sequence[Any]:
    values = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise EnvironmentFailure(f"{source} returned {_shown(values)}: {_wanted(expected)}")
    if len(values) != expected:
        counts = f"{len(values)} rewards for {expected} completions"
        raise EnvironmentFailure(f"{source} returned {counts}: {_wanted(expected)}")
    return values


def _wanted(expected: int) -> str:
    return f"it must return a list of {expected} finite numbers, one per completion"


def _number(value: Any, source: str, place: str, wanted: str, did: str = "returned") -> float:
    if hasattr(value, "item"):
        with suppress(ValueError, TypeError, RuntimeError):  # it holds several
            value = value.item()
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise EnvironmentFailure(f"{source} {did} {_shown(value)}{place}: {wanted}")
    if abs(value) > REWARD_LIMIT:
        raise EnvironmentFailure(f"{source} {did} {value:g}{place}: {_BEYOND}")
    return float(value)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, float):
        return str(value)
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def pair_of(sampled: Any, env_name: str) -> tuple[Any, Any]:
    """Groups and metrics, which `validate_groups` and `validate_metrics` look at, of what `sample` returned.

    Raises:
        EnvironmentFailure: it is no pair.
    """
    if not isinstance(sampled, tuple | list) or len(sampled) != 2:
        if inspect.iscoroutine(sampled):
            sampled.close()
        raise EnvironmentFailure(
            f"environment {env_name!r}: sample returned {_shown(sampled)}: it must return two, a list of RolloutGroup "
            "and a dict of metrics"
        )
    return sampled[0], sampled[1]


def validate_groups(groups: Any, n_examples: int, n_generations: int, env_name: str) -> list[RolloutGroup]:
    """Checks the groups that an environment's `sample` returned.

    Args:
        groups: What it returned as groups.
        n_examples: How many were asked for; fewer are accepted.
        n_generations: Rollouts that each must have.
        env_name: For the messages.

    Raises:
        EnvironmentFailure: naming the group, the field, and what was expected.
    """
    if not isinstance(groups, list | tuple):
        raise EnvironmentFailure(f"environment {env_name!r} returned {_shown(groups)}: expected a list of RolloutGroup")
    if len(groups) > n_examples:
        raise EnvironmentFailure(f"environment {env_name!r} returned {len(groups)} groups for {n_examples} examples")
    for position, group in enumerate(groups):
        _validate_group(group, n_generations, f"environment {env_name!r}, group {position}")
    return list(groups)


def _validate_group(group: Any, n_generations: int, where: str) -> None:
    if not isinstance(group, RolloutGroup):
        raise EnvironmentFailure(f"{where} is {_shown(group)}: expected a RolloutGroup")
    if not isinstance(group.key, str) or not group.key:
        raise EnvironmentFailure(f"{where}: key is {_shown(group.key)}: expected '<environment>:<example>'")
    if len(group.rollouts) != n_generations:
        raise EnvironmentFailure(f"{where}: rollouts has {len(group.rollouts)} members, expected {n_generations}")
    for index, rollout in enumerate(group.rollouts):
        _validate_rollout(rollout, f"{where}, rollout {index}")


def _validate_rollout(rollout: Any, where: str) -> None:
    if not isinstance(rollout, Rollout):
        raise EnvironmentFailure(f"{where} is {_shown(rollout)}: expected a Rollout")
    if not isinstance(rollout.env_example_id, str):
        raise EnvironmentFailure(f"{where}: env_example_id is {_shown(rollout.env_example_id)}: it must be text")
    sampled = rollout.sampled_tokens
    if sampled == 0:
        raise EnvironmentFailure(f"{where}: response_mask is all false: the policy sampled none of its tokens")
    if sampled < len(rollout.response_mask) and rollout.response_logprobs[~rollout.response_mask].any():
        raise EnvironmentFailure(f"{where}: response_logprobs must be 0 where response_mask is false")
    length = len(rollout.prompt_tokens) + len(rollout.response_tokens)
    if beyond := _beyond_limit(rollout):
        name, value = beyond
        raise EnvironmentFailure(f"{where}: {name} is {value:g}: {_BEYOND}")
    for name, given in rollout.rewards_by_function:
        if given is not None and not isinstance(given, int | float | np.number):
            raise EnvironmentFailure(f"{where}: rewards_by_function has {_shown(given)} of {name!r}: not a number")
    for turn in rollout.turns:
        if not 0 <= turn.start <= turn.stop <= length:
            raise EnvironmentFailure(f"{where}: turns has the span {turn.start}..{turn.stop} in {length} tokens")


def _beyond_limit(rollout: Rollout) -> tuple[str, float] | None:
    """The first reward that is too far from 0, and its field."""
    if not abs(rollout.episode_reward) <= REWARD_LIMIT:
        return "episode_reward", rollout.episode_reward
    far = np.flatnonzero(~(np.abs(rollout.token_rewards) <= REWARD_LIMIT))
    return (f"token_rewards[{far[0]}]", float(rollout.token_rewards[far[0]])) if len(far) else None


def validate_metrics(metrics: Any, env_name: str) -> dict[str, float]:
    """Checks the metrics that an environment's `sample` returned.

    Raises:
        EnvironmentFailure: not a mapping of names to finite numbers.
    """
    if not isinstance(metrics, Mapping):
        raise EnvironmentFailure(f"environment {env_name!r} returned metrics {_shown(metrics)}: expected a dict")
    for name, value in metrics.items():
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise EnvironmentFailure(
                f"environment {env_name!r}: metric {name!r} is {_shown(value)}: not a finite number"
            )
    return {str(name): float(value) for name, value in metrics.items()}
