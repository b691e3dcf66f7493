"""Rollouts: what a language policy did in one episode, token by token, with its reward.

Arrays are NumPy, one-dimensional, and never changed after construction. Environments build rollouts
without metadata; whoever generates attaches it (`Rollout.with_metadata`), and storage refuses None.

`Experience` and `TrainingExample` are what replay needs of one piece, whatever it holds: a language rollout or a
simulator fragment. Containers (`RolloutGroup`, `RolloutBatch`, `RolloutRecord`, `TrainingBatch`) say by their type
argument what is in them; without one they hold what language policies make.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, cast

import numpy as np

from penstock.types.errors import ConfigError, InvalidRolloutError
from penstock.types.generation import Decoding, FinishReason


class Experience(Protocol):
    """Read only. `Rollout`, `PackedRollout` and `SampleFragment` are of this form."""

    @property
    def rollout_id(self) -> str:
        """Its group's id, a slash, and its index there."""
        ...

    @property
    def group_id(self) -> str:
        """The group that it belongs to; a fragment is a group of one."""
        ...

    @property
    def env_name(self) -> str:
        """Its environment: capacity and batch makers go by it."""
        ...

    @property
    def env_example_id(self) -> str:
        """Which of the environment's problems; for simulators, the slot."""
        ...

    @property
    def lesson_id(self) -> str:
        """Its lesson or task: tolerances go by it."""
        ...

    @property
    def metadata(self) -> "RolloutMetadata | None":
        """Who made it, when, under which weights; None until that is attached."""
        ...

    @property
    def episode_reward(self) -> float:
        """What it earned."""
        ...

    @property
    def newest_weight_step(self) -> int:
        """The newest version behind any of it; a resume goes by it."""
        ...

    @property
    def oldest_weight_step(self) -> int | None:
        """The oldest version behind any of it, where that is known."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """How many tokens or steps of it can be learned from."""
        ...

    @property
    def defect(self) -> str | None:
        """Why no update could learn from it, whatever its age; None where one could."""
        ...


class TrainingExample(Protocol):
    """Read only. `RLExample` and `FragmentExample` are of this form."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The experience that it was made of."""
        ...


if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]
    from typing_extensions import TypeVar  # defaults of type variables are of Python 3.13

    from penstock.types.packed import AnyRollout
    from penstock.types.training import RLExample

    AnyExperience = TypeVar("AnyExperience", bound=Experience, default=AnyRollout, covariant=True)
    AnyExample = TypeVar("AnyExample", bound=TrainingExample, default=RLExample, covariant=True)
else:
    from typing import TypeVar

    AnyExperience = TypeVar("AnyExperience", covariant=True)
    AnyExample = TypeVar("AnyExample", covariant=True)


SCHEMA_VERSION = 1
"""Version of the stored form of every record in this module."""

Member = TypeVar("Member", bound=Experience)

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class RolloutMetadata:
    """Who made a rollout, when, and under which weights.

    Columns of stored rows follow from the fields. A field that is added has a default: what older rows read as.

    Attributes:
        worker_id: Name of the rollout worker, unique in the run.
        timestamp: Unix seconds at which the rollout was finished: its own last response, not its group's.
        weight_step: The oldest weight step that sampled any of its tokens.
        lineage: Lineage of those weights.
        schema_version: Version of the record's stored form.
        engines: Names of the inference engines that answered in its group, each with its incarnation, in the order of
            their first answers; empty where nobody said so.
    """

    worker_id: str
    timestamp: float
    weight_step: int
    lineage: int = 0
    schema_version: int = SCHEMA_VERSION
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation, as text and as a span of the rollout's tokens.

    Attributes:
        role: Who spoke.
        content: The text that was said.
        start: First token, counted from the start of prompt + response.
        stop: One past the last token.
        timings: What it took in a conversation of several responses, stage and seconds, one after the other: of a
            response `rest_s` before it, in which nobody worked on it, and those of `Completion.timings`; `tool_s`
            stands at the turn after which the environment was at work. Empty where there is one response, whose stages
            are the rollout's, and where nobody said.
    """

    role: Role
    content: str
    start: int
    stop: int
    timings: tuple[tuple[str, float], ...] = ()


ONE_SAMPLE = (0,)
"""`Rollout.sample_starts` where the context only grew."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rollout:
    """One episode of a language policy: p prompt tokens, r response tokens.

    Its tokens are one *sample*, a context that the policy saw grow, or several, one after the other: where the context
    was written anew (a chat template that drops earlier thoughts, an agent that opens another conversation) the next
    sample begins with all of the new context, which is not sampled. What the policy wrote stands once, in the sample
    that it wrote it in; positions and attention of each sample begin anew (`sample_starts`).

    Attributes:
        env_name: Name of the environment.
        env_example_id: Which of the environment's problems, unique within the environment.
        prompt_tokens: int32 [p].
        response_tokens: int32 [r]; later turns' tool and environment tokens are part of the response.
        response_logprobs: float32 [r], of the sampled token under softmax(logits / temperature); 0 where
            `response_mask` is false.
        token_rewards: float32 [r], where the reward fell; sums to `episode_reward`.
        episode_reward: The episode's reward.
        metadata: None until the generator attaches it.
        rollout_id: Ticket id and index, assigned with the metadata; empty before.
        lesson_id: The lesson it belongs to.
        response_mask: bool [r], true where the policy sampled the token; all true by default.
        response_weight_steps: int32 [r], the version that sampled each token; None before the generator
            attaches it where the environment did not pass the engine's.
        oldest_weight_step: Oldest version behind any sampled token or its cache, from the engine.
        turns: The conversation.
        decoding: How it was sampled.
        finish_reason: Why the last response ended.
        sample_starts: Where each sample begins, counted from the start of prompt + response; the first begins at 0.
        rewards_by_function: What each of the environment's reward functions gave, by its name, before weights; None
            where it does not apply. Empty where the environment has none.
        timings: Seconds by stage, as far as anybody said: those of `penstock.types.generation.STAGES`, summed over its
            responses, `tool_s` of the environment between them, and `reward_s` of the environment after the last one;
            `generate_s` is the whole until the last response, from where its generator began.

    Raises:
        InvalidRolloutError: naming the field that has a wrong dtype, length or value.
    """

    env_name: str
    env_example_id: str
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    response_logprobs: np.ndarray
    token_rewards: np.ndarray
    episode_reward: float
    metadata: RolloutMetadata | None = None
    rollout_id: str = ""
    lesson_id: str = ""
    response_mask: np.ndarray = None  # type: ignore[assignment]  # filled in __post_init__
    response_weight_steps: np.ndarray | None = None
    oldest_weight_step: int | None = None
    turns: tuple[Turn, ...] = ()
    decoding: Decoding = field(default_factory=Decoding)
    finish_reason: FinishReason = "stop"
    sample_starts: tuple[int, ...] = ONE_SAMPLE
    rewards_by_function: tuple[tuple[str, float | None], ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.response_mask is None:  # pyright: ignore[reportUnnecessaryComparison]
            object.__setattr__(self, "response_mask", np.ones(np.shape(self.response_tokens), np.bool_))
        _check_array("prompt_tokens", self.prompt_tokens, np.int32, None)
        if len(self.prompt_tokens) == 0:
            raise InvalidRolloutError("prompt_tokens is empty: a policy needs at least one token to condition on")
        _check_array("response_tokens", self.response_tokens, np.int32, None)
        length = len(self.response_tokens)
        for name in ("response_logprobs", "token_rewards"):
            _check_array(name, getattr(self, name), np.float32, length)
        _check_array("response_mask", self.response_mask, np.bool_, length)
        if self.response_weight_steps is not None:
            _check_array("response_weight_steps", self.response_weight_steps, np.int32, length)
        if not math.isfinite(self.episode_reward):
            raise InvalidRolloutError(f"episode_reward is {self.episode_reward}: it must be a finite number")
        _check_rewards_agree(self.token_rewards, self.episode_reward)
        if self.sample_starts != ONE_SAMPLE:
            _check_samples(self.sample_starts, len(self.prompt_tokens), self.response_mask)

    @property
    def group_id(self) -> str:
        """The group (ticket) that this rollout belongs to."""
        return self.rollout_id.rpartition("/")[0]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return int(np.count_nonzero(self.response_mask))

    @property
    def longest_sample(self) -> int:
        """Tokens of its longest sample, which a training row must hold."""
        return max(stop - start for start, stop in sample_spans(self))

    @property
    def newest_weight_step(self) -> int:
        """The newest version that sampled any token; a resume goes by it."""
        return newest_weight_step(self)

    @property
    def defect(self) -> str | None:
        """Why no update could learn from it; None where one could."""
        return find_defect(self)

    def with_metadata(
        self, metadata: RolloutMetadata, rollout_id: str, lesson_id: str, timings: Mapping[str, float] | None = None
    ) -> "Rollout":
        """This rollout with what only its generator knows; `timings` are beside those that it has."""
        known = {**self.timings, **(timings or {})}
        changes = {"metadata": metadata, "rollout_id": rollout_id, "lesson_id": lesson_id, "timings": known}
        named = object.__new__(type(self))  # nothing that was checked changes
        for name in self.__dataclass_fields__:
            object.__setattr__(named, name, changes[name] if name in changes else getattr(self, name))
        return named

    def __repr__(self) -> str:
        return describe_rollout(self)


def describe_rollout(rollout: "AnyRollout") -> str:
    """A rollout in one line, with the beginning of what the policy said last."""
    named = rollout.rollout_id or f"{rollout.env_name}:{rollout.env_example_id}"
    tokens = f"{len(rollout.prompt_tokens)} + {len(rollout.response_tokens)} tokens"
    shown = [named, f"reward {rollout.episode_reward:.4g}", tokens]
    if len(rollout.sample_starts) > 1:
        shown.append(f"{len(rollout.sample_starts)} samples")
    if rollout.finish_reason != "stop":
        shown.append(rollout.finish_reason)
    said = [turn.content for turn in rollout.turns if turn.role == "assistant"]
    if said:
        shown.append(repr(said[-1] if len(said[-1]) <= _SHOWN_CHARS else f"{said[-1][: _SHOWN_CHARS - 1]}…"))
    return f"Rollout({', '.join(shown)})"


_SHOWN_CHARS = 40


def sample_spans(rollout: "AnyRollout") -> list[tuple[int, int]]:
    """First and last + 1 of each sample's tokens in prompt + response."""
    starts = rollout.sample_starts
    return list(zip(starts, (*starts[1:], len(rollout.prompt_tokens) + len(rollout.response_tokens)), strict=True))


def newest_weight_step(rollout: "AnyRollout") -> int:
    """The newest version that sampled any of its tokens; its metadata hold the oldest.

    Raises:
        InvalidRolloutError: it has no metadata.
    """
    if rollout.metadata is None:
        raise InvalidRolloutError(f"rollout {rollout.rollout_id!r} has no metadata: attach it first")
    steps = rollout.response_weight_steps
    if steps is None or not rollout.sampled_tokens:
        return rollout.metadata.weight_step
    return max(rollout.metadata.weight_step, int(steps[rollout.response_mask].max()))


def find_defect(rollout: "AnyRollout") -> str | None:
    """Why no update could learn from a rollout, whatever its age; None where one could."""
    if rollout.sampled_tokens == 0:
        return "the policy sampled none of its tokens"
    if rollout.finish_reason == "aborted":
        return "its generation was aborted"
    return None


def _check_array(name: str, array: Any, dtype: type, length: int | None) -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidRolloutError(f"{name} is a {type(array).__name__}: it must be a NumPy array")
    array = cast(np.ndarray, array)
    if array.dtype != dtype or array.ndim != 1:
        found = f"{array.dtype}{list(array.shape)}"
        raise InvalidRolloutError(f"{name} is {found}: it must be a one-dimensional {np.dtype(dtype)} array")
    if length is not None and len(array) != length:
        raise InvalidRolloutError(f"{name} has {len(array)} entries but response_tokens has {length}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRolloutError(f"{name} holds a value that is not finite")
    if name in ("prompt_tokens", "response_tokens") and array.size and array.min() < 0:
        raise InvalidRolloutError(f"{name} holds a negative token id ({array.min()})")


def _check_samples(starts: tuple[int, ...], prompt: int, mask: np.ndarray) -> None:
    inside = all(prompt < start < prompt + len(mask) for start in starts[1:])
    ascending = all(before < start for before, start in zip(starts, starts[1:], strict=False))
    if starts[:1] != ONE_SAMPLE or not inside or not ascending:
        raise InvalidRolloutError(
            f"sample_starts is {list(starts)}: it must begin with 0 and ascend, the others within the response, "
            f"{prompt + 1} to {prompt + len(mask) - 1}"
        )
    sampled = [start for start in starts[1:] if mask[start - prompt]]
    if sampled:
        raise InvalidRolloutError(
            f"sample_starts: the sample at {sampled[0]} begins with a sampled token: it needs a context, as a prompt is"
        )


def _check_rewards_agree(token_rewards: np.ndarray, episode_reward: float) -> None:
    if len(token_rewards) == 0:
        return  # an empty response has nowhere to put its reward
    total = float(token_rewards.sum(dtype=np.float64))
    if abs(total - episode_reward) > 1e-4 * max(1.0, abs(episode_reward)):
        raise InvalidRolloutError(
            f"token_rewards sum to {total:.6g} but episode_reward is {episode_reward:.6g}: they must agree"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RolloutGroup(Generic[AnyExperience]):
    """The rollouts of one prompt under one ticket; the unit of baselines, storage and fates.

    A simulator fragment is a group of one.

    Attributes:
        key: Environment and example; two groups may share it (duplicate prompts stay apart by `group_id`).
        rollouts: At least one.
        group_id: The ticket's id; empty until the generator assigns it.
    """

    key: str
    rollouts: tuple[AnyExperience, ...]
    group_id: str = ""

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise InvalidRolloutError(f"group {self.key!r} has no rollouts")

    @property
    def rewards(self) -> np.ndarray:
        """float32 [n], the episode rewards."""
        return np.array([rollout.episode_reward for rollout in self.rollouts], np.float32)

    def compute_rloo_advantages(self) -> np.ndarray:
        """Leave-one-out advantages r_i − mean of the others, float32 [n]; zero for a single rollout.

        Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
        """
        rewards = self.rewards.astype(np.float64)
        n = len(rewards)
        if n == 1:
            return np.zeros(1, np.float32)
        return ((rewards * n - rewards.sum()) / (n - 1)).astype(np.float32)

    def __repr__(self) -> str:
        rewards = self.rewards
        spread = f"{rewards.mean():.4g} ({rewards.min():.4g} to {rewards.max():.4g})"
        return f"RolloutGroup({' '.join(self.key.split())}, {len(self.rollouts)} rollouts, mean reward {spread})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RolloutBatch(Generic[AnyExperience]):
    """Groups that travel together.

    Attributes:
        groups: May be empty: an environment with nothing to give is no error.
        metadata: The oldest member's, for readers of the old form; nothing decides by it.
    """

    groups: tuple[RolloutGroup[AnyExperience], ...]
    metadata: RolloutMetadata | None = None

    @staticmethod
    def of(groups: "tuple[RolloutGroup[Member], ...]") -> "RolloutBatch[Member]":
        """A batch whose metadata is its oldest rollout's."""
        stamps = [r.metadata for group in groups for r in group.rollouts if r.metadata is not None]
        oldest = min(stamps, key=lambda m: (m.lineage, m.weight_step, m.timestamp), default=None)
        return RolloutBatch(groups, oldest)

    def rollouts(self) -> Iterator[AnyExperience]:
        """Every rollout, group by group."""
        for group in self.groups:
            yield from group.rollouts

    def to_pandas(self) -> "pandas.DataFrame":
        """A row per rollout, or fragment, with the columns of the run directory's Parquet files.

        Beside them `prompt` and `response` of a rollout as text: the first turn, and all that follow it. Columns of
        arrays hold NumPy arrays, such as `response_tokens` int32 [r].

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise ConfigError("to_pandas needs the package pandas: pip install pandas") from error
        members = [(group, rollout) for group in self.groups for rollout in group.rollouts]
        rows = [_row(rollout, group) for group, rollout in members]
        return pandas.DataFrame(rows, columns=list(rows[0]) if rows else list(_COLUMNS))

    def __repr__(self) -> str:
        rewards = [rollout.episode_reward for rollout in self.rollouts()]
        return f"RolloutBatch({len(self.groups)} groups, {len(rewards)} rollouts, mean reward {_mean(rewards):.4g})"


_COLUMNS = ("rollout_id", "group_id", "lesson_id", "env_name", "env_example_id", "episode_reward")
"""What every experience has."""
_STAMPED = ("worker_id", "timestamp", "weight_step", "lineage")
_OF_ROLLOUTS = (
    "finish_reason", "oldest_weight_step", "prompt_tokens", "response_tokens", "response_logprobs", "token_rewards",
    "response_mask", "response_weight_steps", "sample_starts", "rewards_by_function",
)  # fmt: skip
_OF_FRAGMENTS = ("rewards", "terminated", "truncated", "faults", "logprobs", "values", "weight_steps", "episodes")


def _row(experience: Any, group: RolloutGroup[Any]) -> dict[str, Any]:
    row = {name: getattr(experience, name) for name in _COLUMNS}
    row |= {"group_id": group.group_id or row["group_id"], "group_key": group.key}
    row |= {name: getattr(experience.metadata, name, None) for name in _STAMPED}
    if not hasattr(experience, "turns"):
        return row | {name: getattr(experience, name) for name in _OF_FRAGMENTS}
    asked, *said = [turn.content for turn in experience.turns] or [None]
    texts = {"prompt": asked, "response": "\n".join(said) if said else None}
    return row | texts | {name: getattr(experience, name) for name in _OF_ROLLOUTS}


@dataclass(frozen=True, slots=True, repr=False)
class RolloutBatchStats:
    """What a batch of one lesson amounts to. Means over no rollouts are 0, and `rollouts` says so.

    Attributes:
        lesson_id: The lesson.
        groups: Number of groups.
        rollouts: Number of rollouts.
        reward_mean: Mean episode reward.
        success_rate: Share of rollouts with reward ≥ the lesson's success threshold.
        pass_at_k: Share of groups with at least one success.
        response_tokens: Mean tokens per response.
        truncated_fraction: Share of rollouts cut by a length limit.
        rewards: The episode rewards, in the batch's order.
        prompts: For each of them the key of its problem: answers to one problem are no independent draws.
        metrics: The environment's own metrics.
        failure: Why there are no rollouts; empty where there are some.
        reports: Whether the problems were those that are kept apart for reports, from which nothing is decided.
    """

    lesson_id: str
    groups: int
    rollouts: int
    reward_mean: float
    success_rate: float
    pass_at_k: float
    response_tokens: float
    truncated_fraction: float
    rewards: tuple[float, ...] = ()
    prompts: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str = ""
    reports: bool = False

    @classmethod
    def failed(cls, lesson_id: str, reason: str) -> Self:
        """Of an evaluation that gave nothing."""
        return cls(lesson_id, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, failure=reason)

    @classmethod
    def of(
        cls,
        lesson_id: str,
        batch: RolloutBatch,
        success_threshold: float = 0.5,
        metrics: Mapping[str, float] | None = None,
    ) -> Self:
        """Summarises a batch; an empty one gives zeros."""
        rollouts = list(batch.rollouts())
        rewards = [r.episode_reward for r in rollouts]
        wins = [[r.episode_reward >= success_threshold for r in g.rollouts] for g in batch.groups]
        return cls(
            lesson_id=lesson_id,
            groups=len(batch.groups),
            rollouts=len(rollouts),
            reward_mean=_mean(rewards),
            success_rate=_mean([float(win) for group in wins for win in group]),
            pass_at_k=_mean([float(any(group)) for group in wins]),
            response_tokens=_mean([float(len(r.response_tokens)) for r in rollouts]),
            truncated_fraction=_mean([float(r.finish_reason == "length") for r in rollouts]),
            rewards=tuple(rewards),
            prompts=tuple(g.key for g in batch.groups for _ in g.rollouts),
            metrics=dict(metrics or {}),
        )

    def __repr__(self) -> str:
        if self.failure:
            return f"RolloutBatchStats({self.lesson_id}, failed: {self.failure})"
        counts = f"{self.rollouts} rollouts in {self.groups} groups"
        means = f"mean reward {self.reward_mean:.4g}, success {self.success_rate:.0%}"
        return f"RolloutBatchStats({self.lesson_id}, {counts}, {means})"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRecord(Generic[AnyExperience]):
    """The row that is stored: a rollout with its group. Immutable once sealed.

    Attributes:
        rollout: With metadata; storage refuses None.
        group_id: The ticket's id.
        group_key: The group's key: environment and example.
    """

    rollout: AnyExperience
    group_id: str
    group_key: str = ""
