"""A user's own problems from JSONL or Parquet files, with reward functions of their own or built-in graders.

Rows (`penstock.environments.problem_rows`) are split into training and held-out problems by a stable hash of the prompt
(rows with equal prompts stay together), or held-out ones come from a file of their own. Functions have TRL's signature
(`penstock.environments.reward_process`).
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from penstock.environments.base import REWARD_LIMIT, Scores, Template
from penstock.environments.episode import GroupScoredEnvironment
from penstock.environments.example_environment import Example
from penstock.environments.problem_rows import examples_of, prompt_key, read_rows, split_by_prompt
from penstock.environments.reward_process import RewardFunctions
from penstock.environments.reward_worker import RewardFunction
from penstock.types import Completion, ConfigError

logger = logging.getLogger(__name__)

_RESERVED = (
    "prompts", "completions", "completion_ids", "finish_reason", "trainer_state", "log_extra", "log_metric",
)  # fmt: skip


class JsonlEnvironment(GroupScoredEnvironment):
    r"""Problems from files.

    Args:
        path: One or more JSONL or Parquet files; JSONL may be compressed (.gz, .bz2, .xz).
        prompt_column: Holds the prompt: text, or chat messages.
        answer_column: Holds the reference answer; null where there is none.
        prompt_format: Makes the prompt from a row's columns instead: ``"Question: {question}\nAnswer:"``.
        template: How prompts are put to the policy: `auto`, `plain` or `chat`.
        system_prompt: Put before every prompt.
        eval_path: Files of held-out problems; null holds out a part of `path`.
        eval_fraction: How large a part.
        max_rows: Use no more than so many rows of each file set; null uses all.
        reward: A reward function, or several: dotted path, ``path/to/file.py:function``, or from Python the function
            itself, which then runs in this process (see `penstock.train`).
        reward_weights: One number per reward function; null weighs each 1.
        reward_timeout_s: Longest time for the rewards of one group by one function in a process of its own.
        reward_start_timeout_s: Longest time for the imports of a reward function's file.
        reward_processes: How many groups one function may score at once.
        truncated_reward: The reward of answers that a length limit cut; null leaves it to the reward functions.
        chat_template_kwargs: What the chat template is given beside the messages: `tools`, and switches of its own. A
            row's own columns `tools` and `chat_template_kwargs` go before them.
        name: Stands on every rollout.

    Raises:
        ConfigError: a file, column or function is missing or malformed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | list[str],
        prompt_column: str = "prompt",
        answer_column: str | None = "answer",
        prompt_format: str | None = None,
        template: Template = "auto",
        system_prompt: str | None = None,
        eval_path: str | os.PathLike[str] | list[str] | None = None,
        eval_fraction: float = 0.1,
        max_rows: int | None = None,
        reward: str | RewardFunction | list[str | RewardFunction] = "penstock.environments.rewards.final_answer",
        reward_weights: list[float] | None = None,
        reward_timeout_s: float = 30.0,
        reward_start_timeout_s: float = 60.0,
        reward_processes: int = 2,
        truncated_reward: float | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        name: str = "jsonl",
    ) -> None:
        super().__init__(name, template, system_prompt)
        if not 0 < eval_fraction < 1:
            raise ConfigError(f"env_args.eval_fraction is {eval_fraction}: it takes a number between 0 and 1")
        if reward_processes < 1:
            raise ConfigError(f"env_args.reward_processes is {reward_processes}: it must be at least 1")
        limits = {"reward_timeout_s": reward_timeout_s, "reward_start_timeout_s": reward_start_timeout_s}
        for key, seconds in limits.items():
            if not seconds > 0:
                raise ConfigError(f"env_args.{key} is {seconds}: it must be more than 0")
        if max_rows is not None and max_rows < 1:
            raise ConfigError(f"env_args.max_rows is {max_rows}: it must be at least 1, or null for all")
        if truncated_reward is not None and not abs(truncated_reward) <= REWARD_LIMIT:
            raise ConfigError(f"env_args.truncated_reward is {truncated_reward}: rewards lie within ±{REWARD_LIMIT:g}")
        form = (prompt_column, answer_column, prompt_format)
        examples = examples_of(read_rows(path, "env_args.path")[:max_rows], str(path), *form)
        if eval_path is None:
            self._split = split_by_prompt(examples, eval_fraction, str(path))
        else:
            held_out_rows = read_rows(eval_path, "env_args.eval_path")[:max_rows]
            held_out = examples_of(held_out_rows, str(eval_path), *form)
            self._split = _without(examples, held_out, name), held_out
        self._truncated_reward = truncated_reward
        self._chat_template_kwargs = chat_template_kwargs or {}
        self._rewards = RewardFunctions(
            reward if isinstance(reward, list | tuple) else [reward],
            reward_weights,
            reward_processes,
            reward_timeout_s,
            reward_start_timeout_s,
        )

    @override
    def chat_template_kwargs(self, example: Example) -> Mapping[str, Any]:
        if isinstance(self.shaped(example), str):
            return {}
        own, tools = example.columns.get("chat_template_kwargs"), example.columns.get("tools")
        of_row = {**(own if isinstance(own, Mapping) else {}), **({"tools": tools} if isinstance(tools, list) else {})}
        return {**self._chat_template_kwargs, **of_row}

    def score_group(self, example: Example, completions: Sequence[Completion]) -> Scores:
        """Calls each reward function once for the group; see `reward_arguments`."""
        scores = self._rewards.score(reward_arguments(example, completions))
        if self._truncated_reward is None:
            return scores
        cut = self._truncated_reward
        pairs = zip(completions, scores.rewards, strict=True)
        return replace(scores, rewards=[cut if c.finish_reason == "length" else reward for c, reward in pairs])

    def close(self) -> None:
        """Ends the reward processes."""
        self._rewards.close()


def reward_arguments(example: Example, completions: Sequence[Completion]) -> dict[str, Any]:
    """What a reward function is called with: TRL's arguments, with one entry per completion in every list.

    ``prompts`` and ``completions`` are texts, or lists of messages where the data has messages; every column of the
    row follows under its own name, ``answer`` under this name too, and ``finish_reason`` (``stop`` or ``length``).
    ``trainer_state`` holds the fields of `penstock.environments.reward_worker.TrainerState`.
    """
    n = len(completions)
    chat = not isinstance(example.prompt, str)
    said: list[Any] = [c.text for c in completions]
    columns = {name: [value] * n for name, value in example.columns.items() if name not in _RESERVED}
    return {
        "answer": [example.answer] * n,
        **columns,
        "prompts": [example.prompt] * n,
        "completions": [[{"role": "assistant", "content": text}] for text in said] if chat else said,
        "completion_ids": [c.response_tokens.tolist() for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "trainer_state": {"global_step": max((int(c.weight_steps.max(initial=0)) for c in completions), default=0)},
    }


def _without(train: list[Example], held_out: list[Example], name: str) -> list[Example]:
    """Training examples whose prompt is not held out, so that both sets stay disjoint."""
    prompts = {prompt_key(example) for example in held_out}
    kept = [example for example in train if prompt_key(example) not in prompts]
    if len(kept) < len(train):
        logger.warning("environment %s: %d training rows have held-out prompts: left out", name, len(train) - len(kept))
    if not kept:
        raise ConfigError("env_args.path: every prompt is also in env_args.eval_path: nothing is left to train on")
    return kept
