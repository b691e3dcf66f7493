"""Configuration of the replay buffer of a simulator fleet: what of `ReplayBufferConfig` makes sense without tickets."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.replay.config import ReplayBufferConfig, StoreConfig, Tolerance

_FRAGMENT_STORE = StoreConfig(buffer_size=512, compact_rollouts=1024)
"""Fragments come by the hundred per second, and a waiting learner has its own written at once; so files are larger."""


class FragmentReplayConfig(BaseModel):
    """How fragments wait for the learner, and how long they are good for; docs/replay.md explains it.

    Attributes:
        fragments_per_batch: What one update trains on.
        order: Of two fragments that were used equally often the ``oldest`` is taken first, or the ``newest``.
        max_samples: Batches that a fragment may be in; −1 for as long as it is fresh.
        max_staleness: How many versions the oldest step of a fresh fragment may lie behind the learner's. 0 also turns
            `max_age_s` off.
        max_age_s: Seconds after which a fragment is stale; None means never.
        tolerances: Both limits for single tasks, by name.
        max_waiting: Senders wait while so many fragments are here that no batch has had yet; None means twice
            `fragments_per_batch`. −1 lets nobody wait: above `capacity` the oldest are evicted.
        max_waiting_s: Longest that a sender waits; then it is an error.
        capacity: Most waiting fragments per environment, those included that were used already and may be again; None
            means four times what is larger of `fragments_per_batch` and `max_waiting`.
        store: Files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fragments_per_batch: int = Field(default=16, ge=1)
    order: Literal["oldest", "newest"] = "oldest"
    max_samples: int = 1
    max_staleness: int = Field(default=8, ge=0)
    max_age_s: float | None = Field(default=3600.0, gt=0)
    tolerances: dict[str, Tolerance] = {}
    max_waiting: int | None = None
    max_waiting_s: float = Field(default=300.0, gt=0)
    capacity: int | None = Field(default=None, ge=1)
    store: StoreConfig = _FRAGMENT_STORE

    @field_validator("max_samples")
    @classmethod
    def _some_use(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError(f"max_samples is {value}: it must be at least 1, or -1 for no limit")
        return value

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        least = self.fragments_per_batch
        if self.max_waiting is not None and self.max_waiting != -1 and self.max_waiting < least:
            raise ValueError(
                f"max_waiting is {self.max_waiting}, below fragments_per_batch = {least}: no batch would ever be full; "
                "raise it, or leave it out for twice as many"
            )
        if self.capacity is not None and self.capacity < max(least, self.most_waiting or 0):
            raise ValueError(
                f"capacity is {self.capacity}: it must hold fragments_per_batch = {least} and max_waiting = "
                f"{self.most_waiting}; raise it, or leave it out"
            )
        return self

    @property
    def most_waiting(self) -> int | None:
        """`max_waiting` with its default; None where nobody waits."""
        if self.max_waiting == -1:
            return None
        return 2 * self.fragments_per_batch if self.max_waiting is None else self.max_waiting

    def buffer_config(self) -> ReplayBufferConfig:
        """The same as a replay buffer takes it. Language's filters are off, and nothing is formed ahead."""
        return ReplayBufferConfig(
            groups_per_batch=self.fragments_per_batch,
            staleness_budget=min(1, self.max_staleness),
            capacity=self.capacity or 4 * max(self.fragments_per_batch, self.most_waiting or 0),
            max_samples=self.max_samples,
            max_rollout_step_delay=self.max_staleness,
            max_rollout_timestamp_delay=-1.0 if self.max_age_s is None else self.max_age_s,
            tolerances=self.tolerances,
            max_waiting=self.most_waiting,
            max_waiting_s=self.max_waiting_s,
            prefetch=0,
            store=self.store,
        )
