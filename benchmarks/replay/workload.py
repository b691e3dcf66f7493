"""What the replay benchmark stores: rollouts whose arrays follow from their number, so that any of them can be checked.

Rollout i is member i mod 8 of group i div 8; its prompt begins with i, the rest repeats a pool of random arrays. One
*round* is what a training step does to a buffer: the learner's step goes up, whereupon the 64 oldest rollouts stop
being fresh; eight groups of eight arrive one by one; and a batch of 64 is drawn. So a buffer that was filled once
stays at its size for ever, and every round costs what it costs at that size.
"""

import time
from dataclasses import dataclass

import numpy as np

from penstock.replay import ReplayBufferConfig, StoreConfig
from penstock.types import RLExample, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata

GROUP_SIZE, GROUPS = 8, 8
ROUND = GROUP_SIZE * GROUPS
ENVIRONMENTS = ("words", "numbers")
_POOL = 257


@dataclass(frozen=True)
class Shape:
    """Lengths of a rollout."""

    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.response

    @property
    def array_bytes(self) -> int:
        """Of all its arrays: four numbers of 4 bytes and one of 1 per response token, one of 4 per prompt token."""
        return 4 * self.prompt + (4 * 4 + 1) * self.response


SHAPES = {256: Shape(32, 224), 4096: Shape(256, 3840)}


class Workload:
    """Makes rollouts of one shape, and knows them again."""

    def __init__(self, shape: Shape) -> None:
        rng = np.random.default_rng(0)
        self.shape = shape
        self._prompt = rng.integers(0, 50_000, shape.prompt, np.int32)
        self._tokens = rng.integers(0, 50_000, (_POOL, shape.response), np.int32)
        self._logprobs = -rng.exponential(1.0, (_POOL, shape.response)).astype(np.float32)

    def rollout(self, number: int, timestamp: float) -> Rollout:
        """Rollout `number`; its arrays belong to nobody else."""
        prompt = self._prompt.copy()
        prompt[0] = number
        rewards = np.zeros(self.shape.response, np.float32)
        rewards[-1] = reward = float(number % 2)
        group, member = divmod(number, GROUP_SIZE)
        step = number // ROUND
        return Rollout(
            env_name=ENVIRONMENTS[group % 2],
            env_example_id=str(group),
            prompt_tokens=prompt,
            response_tokens=self._tokens[number % _POOL].copy(),
            response_logprobs=self._logprobs[number % _POOL].copy(),
            token_rewards=rewards,
            episode_reward=reward,
            metadata=RolloutMetadata("worker-0", timestamp + 1e-6 * member, step),  # no two finish at once
            rollout_id=f"lesson-0-{group}/{member}",
            lesson_id="lesson",
            response_weight_steps=np.full(self.shape.response, step, np.int32),
        )

    def round(self, step: int) -> list[RolloutBatch]:
        """The groups that arrive while the learner holds version `step`, a batch each."""
        now = time.time()
        groups = [
            tuple(self.rollout(number, now) for number in range(first, first + GROUP_SIZE))
            for first in range(step * ROUND, (step + 1) * ROUND, GROUP_SIZE)
        ]
        return [
            RolloutBatch.of((RolloutGroup(f"{g[0].env_name}:{g[0].env_example_id}", g, g[0].group_id),)) for g in groups
        ]

    def is_right(self, example: RLExample) -> bool:
        """Whether an example holds, number by number, what was put in under its id."""
        group, member = (int(part) for part in example.rollout_ids[0].rpartition("-")[2].split("/"))
        put_in = self.rollout(group * GROUP_SIZE + member, 0.0)
        start = self.shape.prompt
        return (
            np.array_equal(example.tokens, np.concatenate([put_in.prompt_tokens, put_in.response_tokens]))
            and np.array_equal(example.generator_log_probs[start:], put_in.response_logprobs)
            and not example.loss_mask[:start].any()
            and np.allclose(example.advantage[start:], 4 / 7 if put_in.episode_reward else -4 / 7)
        )


def buffer_config(rounds: int, store: StoreConfig | None = None) -> ReplayBufferConfig:
    """A buffer that holds exactly so many rounds: older ones are stale, and there is room for no more."""
    return ReplayBufferConfig(
        capacity=rounds * ROUND // len(ENVIRONMENTS),
        max_samples=-1,
        staleness_budget=1,
        max_rollout_step_delay=rounds - 1,
        store=store or StoreConfig(),
    )


def whole_rounds(rollouts: int) -> int:
    """The number of rounds, two at least, that comes nearest to so many rollouts."""
    return max(2, round(rollouts / ROUND))
