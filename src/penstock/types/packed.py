"""A rollout in one block of memory, for buffers that hold very many.

A `Rollout` of 256 tokens owns about 4.5 KB of numbers in six NumPy arrays, whose Python objects and separate
allocations add a fifth to that. `PackedRollout` keeps the numbers end to end in one `bytes` and makes the arrays,
as read-only views of it, when they are asked for. It has the attributes of a `Rollout` and is never validated
again; members of one group share what is the same for all of them.
"""

from array import array
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields
from operator import attrgetter
from typing import Any, NamedTuple, final

import numpy as np

from penstock.types.generation import Decoding, FinishReason
from penstock.types.rollouts import (
    Rollout,
    RolloutMetadata,
    Turn,
    describe_rollout,
    find_defect,
    newest_weight_step,
    sample_spans,
)

_origin = attrgetter(
    *(field.name for field in fields(RolloutMetadata) if field.name not in ("timestamp", "weight_step"))
)
"""Of metadata: its fields in order, but for those that each rollout of a group has of its own."""


_KEPT = ("episode_reward", "oldest_weight_step", "finish_reason", "turns", "sample_starts", "rewards_by_function")
"""Attributes that are kept as they are."""


class _Shared(NamedTuple):
    """What rollouts of one group have in common."""

    group_id: str
    env_name: str
    env_example_id: str
    lesson_id: str
    decoding: Decoding
    has_weight_steps: bool
    stages: tuple[str, ...]
    """Names of the timings."""
    origin: tuple[Any, ...] | None
    """`_origin` of the metadata; None without metadata."""


@final
class PackedRollout:
    """Reads like a `penstock.types.Rollout`; arrays are read-only views, made anew at each access.

    Args:
        rollout: Its arrays are copied once.
        neighbour: Another member of its group, to share with.
    """

    __slots__ = (
        "_block", "_name", "_prompt_length", "_seconds", "_shared", "_timestamp", "_weight_step", "episode_reward",
        "finish_reason", "oldest_weight_step", "rewards_by_function", "sample_starts", "turns",
    )  # fmt: skip

    _block: bytes
    _name: int | str
    _prompt_length: int
    _seconds: bytes
    _shared: _Shared
    _timestamp: float | None
    _weight_step: int | None
    episode_reward: float
    oldest_weight_step: int | None
    finish_reason: FinishReason
    turns: tuple[Turn, ...]
    sample_starts: tuple[int, ...]
    rewards_by_function: tuple[tuple[str, float | None], ...]

    def __init__(self, rollout: Rollout, neighbour: "PackedRollout | None" = None) -> None:
        shared, stamp = _shared(rollout), rollout.metadata
        own: dict[str, Any] = {
            "_shared": neighbour._shared if neighbour is not None and neighbour._shared == shared else shared,
            "_name": _short_name(rollout.rollout_id),
            "_prompt_length": len(rollout.prompt_tokens),
            "_block": _block(rollout),
            "_seconds": array("d", rollout.timings.values()).tobytes(),
            "_timestamp": None if stamp is None else stamp.timestamp,
            "_weight_step": None if stamp is None else stamp.weight_step,
        }
        for name in _KEPT:
            own[name] = getattr(rollout, name)
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @property
    def rollout_id(self) -> str:
        """Ticket id and index; empty before the metadata is attached."""
        return self._name if isinstance(self._name, str) else f"{self._shared.group_id}/{self._name}"

    @property
    def metadata(self) -> RolloutMetadata | None:
        """Worker, time and weight step; None until the generator attaches it."""
        origin = self._shared.origin
        if origin is None or self._timestamp is None or self._weight_step is None:
            return None
        worker_id, *rest = origin
        return RolloutMetadata(worker_id, self._timestamp, self._weight_step, *rest)

    @property
    def env_name(self) -> str:
        """Name of the environment."""
        return self._shared.env_name

    @property
    def env_example_id(self) -> str:
        """Id of the problem, unique within the environment."""
        return self._shared.env_example_id

    @property
    def lesson_id(self) -> str:
        """Id of the lesson that the group belongs to."""
        return self._shared.lesson_id

    @property
    def decoding(self) -> Decoding:
        """Sampling parameters of the policy's turns."""
        return self._shared.decoding

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds by stage."""
        return dict(zip(self._shared.stages, np.frombuffer(self._seconds).tolist(), strict=True))

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
        """Ticket id, the part of `rollout_id` before the slash."""
        return self._shared.group_id

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens that the policy sampled."""
        return self._block.count(1, len(self._block) - self.response_length)

    @property
    def longest_sample(self) -> int:
        """Tokens of its longest sample."""
        if len(self.sample_starts) == 1:
            return self._prompt_length + self.response_length
        return max(stop - start for start, stop in sample_spans(self))

    @property
    def newest_weight_step(self) -> int:
        """The newest version that sampled any token."""
        return newest_weight_step(self)

    @property
    def defect(self) -> str | None:
        """Why the rollout cannot be trained on; None: nothing is wrong."""
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
            sample_starts=self.sample_starts,
            rewards_by_function=self.rewards_by_function,
            timings=self.timings,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):  # like a `Rollout` it is read only: a user's batch maker or loss is given it
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return describe_rollout(self)

    def _view(self, column: int, dtype: type[np.generic]) -> np.ndarray:
        length = self.response_length
        return np.frombuffer(self._block, dtype, length, 4 * (self._prompt_length + column * length))


def _shared(rollout: Rollout) -> _Shared:
    stamp = rollout.metadata
    return _Shared(
        rollout.group_id,
        rollout.env_name,
        rollout.env_example_id,
        rollout.lesson_id,
        rollout.decoding,
        rollout.response_weight_steps is not None,
        tuple(rollout.timings),
        None if stamp is None else _origin(stamp),
    )


def _short_name(rollout_id: str) -> int | str:
    """The index in the group, which costs nothing to keep; the whole id where that does not end in a plain number."""
    _, slash, index = rollout_id.rpartition("/")
    is_plain = bool(slash) and index.isascii() and index.isdecimal() and str(int(index)) == index
    return int(index) if is_plain else rollout_id


def _block(rollout: Rollout) -> bytes:
    steps = rollout.response_weight_steps
    return b"".join(
        (
            rollout.prompt_tokens.tobytes(),
            rollout.response_tokens.tobytes(),
            rollout.response_logprobs.tobytes(),
            rollout.token_rewards.tobytes(),
            b"" if steps is None else steps.tobytes(),
            rollout.response_mask.tobytes(),
        )
    )


AnyRollout = Rollout | PackedRollout
"""Read only: both have the same attributes."""
