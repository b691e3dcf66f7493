"""Fragments: what a control policy did in T consecutive steps of one simulator slot, with what followed.

Time runs along the first axis. Observation t is what action t was chosen on; reward, `terminated` and `truncated` of t
are what action t led to. Where an episode ends at t, observation t + 1 is the next episode's first one, and the
observation that the episode really ended with stands in `final_observations` (for bootstrapping: a truncated episode
would have gone on). One autoreset mode: the simulator is reset in the same step that ended its episode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from penstock.types.errors import InvalidRolloutError
from penstock.types.rollouts import RolloutMetadata

FRAGMENT_SCHEMA_VERSION = 1
"""Version of the stored form."""


def _array(dtype: type, more: int | None = 0) -> dict[str, Any]:
    """What is known of an array from its declaration: element type, and T + `more` entries; None: some other number.

    Checks here, and columns of stored rows, follow from it.
    """
    return {"dtype": dtype, "more": more}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampleFragment:
    """T steps of one slot; T + 1 observations. K of its steps ended an episode with a known last observation.

    Attributes:
        task: Which task of the fleet; tolerances and statistics go by it.
        env_name: Id of its environment.
        group_id: Unique in the run: worker, incarnation, slot and a count.
        slot: Which of the worker's simulators.
        observations: By leaf name, [T + 1, …]; the last is for bootstrapping only.
        actions: By leaf name, [T, …].
        rewards: float32 [T], as the simulator gave them.
        terminated: bool [T], the episode reached an end of its own: nothing follows.
        truncated: bool [T], it was cut: by a time limit, or because the simulator failed.
        faults: bool [T], the step is not to be trained on: the simulator died, hung, or said that it went wrong. A
            crash is also `truncated`, never `terminated`.
        first: bool [T + 1], the observation begins an episode: recurrent state was reset there.
        logprobs: float32 [T], of the action under the behaviour policy.
        values: float32 [T + 1], the behaviour policy's own estimates.
        weight_steps: int32 [T], the version that chose each action.
        episodes: int64 [T], counts the slot's episodes.
        final_steps: int32 [K], ascending: steps that ended an episode whose last observation is known.
        final_observations: By leaf name, [K, …].
        initial_state: Recurrent state before the first step, by leaf name, without batch axis; empty for policies
            without one.
        timings: Seconds: `generate_s` from where its first observation was decided on until its last result was,
            and in them `policy_s` of the inferences that it waited for, and `simulate_s` of its simulator's process
            (which steps all of its slots). Empty where nobody said.
        metadata: None until the worker attaches it; `weight_step` is the oldest of `weight_steps`.

    Raises:
        InvalidRolloutError: naming the field that has a wrong dtype, length or value.
    """

    task: str
    env_name: str
    group_id: str
    slot: int
    observations: Mapping[str, np.ndarray]
    actions: Mapping[str, np.ndarray]
    rewards: np.ndarray = field(metadata=_array(np.float32))
    terminated: np.ndarray = field(metadata=_array(np.bool_))
    truncated: np.ndarray = field(metadata=_array(np.bool_))
    faults: np.ndarray = field(metadata=_array(np.bool_))
    first: np.ndarray = field(metadata=_array(np.bool_, more=1))
    logprobs: np.ndarray = field(metadata=_array(np.float32))
    values: np.ndarray = field(metadata=_array(np.float32, more=1))
    weight_steps: np.ndarray = field(metadata=_array(np.int32))
    episodes: np.ndarray = field(metadata=_array(np.int64))
    final_steps: np.ndarray = field(metadata=_array(np.int32, more=None))
    final_observations: Mapping[str, np.ndarray]
    initial_state: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    metadata: RolloutMetadata | None = None

    def __post_init__(self) -> None:
        steps = len(self.rewards)
        if steps == 0:
            raise InvalidRolloutError("rewards is empty: a fragment has at least one step")
        for name, dtype, more in _PER_STEP:
            array: np.ndarray = getattr(self, name)
            if array.dtype != dtype or array.shape != (steps + more,):
                raise InvalidRolloutError(
                    f"{name} is {array.dtype}{list(array.shape)}: it must be {np.dtype(dtype)}[{steps + more}]"
                )
        for name, arrays, length in (
            ("observations", self.observations, steps + 1),
            ("actions", self.actions, steps),
            ("final_observations", self.final_observations, len(self.final_steps)),
        ):
            for leaf, array in arrays.items():
                if len(array) != length:
                    raise InvalidRolloutError(f"{name}[{leaf!r}] has {len(array)} rows: it must have {length}")

    @property
    def length(self) -> int:
        """T."""
        return len(self.rewards)

    @property
    def trainable_steps(self) -> int:
        """Steps without a fault."""
        return int(self.length - np.count_nonzero(self.faults))

    def with_metadata(self, metadata: RolloutMetadata) -> "SampleFragment":
        """The same fragment with its stamp."""
        return replace(self, metadata=metadata)

    # --- how the replay buffer reads any kind of experience -------------------------------------------------------

    @property
    def rollout_id(self) -> str:
        """A fragment is a group of one."""
        return f"{self.group_id}/0"

    @property
    def lesson_id(self) -> str:
        """The task."""
        return self.task

    @property
    def env_example_id(self) -> str:
        """Simulators have no examples: the slot stands for them."""
        return str(self.slot)

    @property
    def episode_reward(self) -> float:
        """Sum of the rewards of steps without a fault; NaN where infinite ones cancel."""
        with np.errstate(invalid="ignore"):
            return float(self.rewards[~self.faults].sum(dtype=np.float64))

    @property
    def newest_weight_step(self) -> int:
        """Of all steps."""
        return int(self.weight_steps.max())

    @property
    def oldest_weight_step(self) -> int:
        """Of all steps."""
        return int(self.weight_steps.min())

    @property
    def sampled_tokens(self) -> int:
        """What a mean over tokens weighs it with: its trainable steps."""
        return self.trainable_steps

    @property
    def defect(self) -> str | None:
        """Why it cannot be trained on; None where it can."""
        if self.trainable_steps == 0:
            return "all of its steps are faulty"
        for name in ("rewards", "logprobs", "values"):
            finite = np.isfinite(getattr(self, name)[: self.length])
            if not finite.all() and not finite[~self.faults].all():
                return f"{name} is not finite"
        return None

    def __repr__(self) -> str:
        ended = int(np.count_nonzero(self.terminated | self.truncated))
        shown = f"{self.length} steps, {ended} episodes ended, reward {self.episode_reward:.4g}"
        return f"SampleFragment({self.task}, {self.group_id}, {shown})"


_PER_STEP = [
    (each.name, each.metadata["dtype"], each.metadata["more"])
    for each in fields(SampleFragment)
    if each.metadata.get("more") is not None
]
