"""A rollout in one block of memory, for buffers that hold very many.

A `Rollout` of 256 tokens owns about 4.5 KB of numbers in six NumPy arrays, whose Python objects and separate
allocations add a fifth to that. `PackedRollout` keeps the numbers end to end in one `bytes` and makes the arrays,
as read-only views of it, when they are asked for. It has the attributes of a `Rollout` and is never validated
again; members of one group share what is the same for all of them.
"""

from typing import NamedTuple, final

import numpy as np

from penstock.types.generation import Decoding, FinishReason
from penstock.types.rollouts import Rollout, RolloutMetadata, Turn, find_defect, newest_weight_step


class _Shared(NamedTuple):
    """What rollouts of one group have in common."""

    env_name: str
    env_example_id: str
    lesson_id: str
    decoding: Decoding
    has_weight_steps: bool


@final
class PackedRollout:
    """Reads like a `penstock.types.Rollout`; arrays are read-only views, made anew at each access.

    Args:
        rollout: Its arrays are copied once.
        neighbour: Another member of its group, to share with.
    """

    __slots__ = (
        "_block", "_prompt_length", "_shared", "episode_reward", "finish_reason", "metadata", "oldest_weight_step",
        "rollout_id", "turns",
    )  # fmt: skip

    rollout_id: str
    metadata: RolloutMetadata | None
    episode_reward: float
    oldest_weight_step: int | None
    finish_reason: FinishReason
    turns: tuple[Turn, ...]

    def __init__(self, rollout: Rollout, neighbour: "PackedRollout | None" = None) -> None:
        steps = rollout.response_weight_steps
        shared = _Shared(
            rollout.env_name, rollout.env_example_id, rollout.lesson_id, rollout.decoding, steps is not None
        )
        self._shared = neighbour._shared if neighbour is not None and neighbour._shared == shared else shared
        self._prompt_length = len(rollout.prompt_tokens)
        self._block = b"".join(
            (
                rollout.prompt_tokens.tobytes(),
                rollout.response_tokens.tobytes(),
                rollout.response_logprobs.tobytes(),
                rollout.token_rewards.tobytes(),
                b"" if steps is None else steps.tobytes(),
                rollout.response_mask.tobytes(),
            )
        )
        self.rollout_id = rollout.rollout_id
        self.metadata = rollout.metadata
        self.episode_reward = rollout.episode_reward
        self.oldest_weight_step = rollout.oldest_weight_step
        self.finish_reason = rollout.finish_reason
        self.turns = rollout.turns

    @property
    def env_name(self) -> str:
        """See `Rollout`."""
        return self._shared.env_name

    @property
    def env_example_id(self) -> str:
        """See `Rollout`."""
        return self._shared.env_example_id

    @property
    def lesson_id(self) -> str:
        """See `Rollout`."""
        return self._shared.lesson_id

    @property
    def decoding(self) -> Decoding:
        """See `Rollout`."""
        return self._shared.decoding

    @property
    def prompt_tokens(self) -> np.ndarray:
        """See `Rollout`: int32 [p]."""
        return np.frombuffer(self._block, np.int32, self._prompt_length)

    @property
    def response_tokens(self) -> np.ndarray:
        """See `Rollout`: int32 [r]."""
        return self._view(0, np.int32)

    @property
    def response_logprobs(self) -> np.ndarray:
        """See `Rollout`: float32 [r]."""
        return self._view(1, np.float32)

    @property
    def token_rewards(self) -> np.ndarray:
        """See `Rollout`: float32 [r]."""
        return self._view(2, np.float32)

    @property
    def response_weight_steps(self) -> np.ndarray | None:
        """See `Rollout`: int32 [r], or None."""
        return self._view(3, np.int32) if self._shared.has_weight_steps else None

    @property
    def response_mask(self) -> np.ndarray:
        """See `Rollout`: bool [r]."""
        length = self.response_length
        return np.frombuffer(self._block, np.bool_, length, len(self._block) - length)

    @property
    def response_length(self) -> int:
        """How many response tokens there are."""
        per_token = 4 * (4 if self._shared.has_weight_steps else 3) + 1
        return (len(self._block) - 4 * self._prompt_length) // per_token

    @property
    def group_id(self) -> str:
        """See `Rollout`."""
        return self.rollout_id.rpartition("/")[0]

    @property
    def sampled_tokens(self) -> int:
        """See `Rollout`."""
        return int(np.count_nonzero(self.response_mask))

    @property
    def newest_weight_step(self) -> int:
        """See `Rollout`."""
        return newest_weight_step(self)

    @property
    def defect(self) -> str | None:
        """See `Rollout`."""
        return find_defect(self)

    def unpacked(self) -> Rollout:
        """A `Rollout` over the same memory."""
        return Rollout(
            env_name=self.env_name,
            env_example_id=self.env_example_id,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            response_logprobs=self.response_logprobs,
            token_rewards=self.token_rewards,
            episode_reward=self.episode_reward,
            metadata=self.metadata,
            rollout_id=self.rollout_id,
            lesson_id=self.lesson_id,
            response_mask=self.response_mask,
            response_weight_steps=self.response_weight_steps,
            oldest_weight_step=self.oldest_weight_step,
            turns=self.turns,
            decoding=self.decoding,
            finish_reason=self.finish_reason,
        )

    def _view(self, column: int, dtype: type[np.generic]) -> np.ndarray:
        length = self.response_length
        return np.frombuffer(self._block, dtype, length, 4 * (self._prompt_length + column * length))


AnyRollout = Rollout | PackedRollout
"""Read only: both have the same attributes."""
