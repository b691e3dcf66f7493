"""Configuration of admission, freshness and storage of experience."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class ReplayConfig(BaseModel):
    """What the ticket issuer and the replay buffer go by; docs/replay.md explains the rules behind it.

    Attributes:
        groups_per_batch: B, the groups that one update trains on.
        staleness_budget: S, how many updates old the weights behind a group may be when it is trained; 0 is
            synchronous training.
        capacity: Most waiting rollouts per environment; the oldest groups above it are evicted.
        max_samples: Uses of a rollout before it is done; −1 lets it be used for as long as it is fresh. Groups
            are used again only where a batch would otherwise have to wait.
        max_rollout_step_delay: Oldest weight step that is still fresh, counted back from the current one; None
            means the staleness budget. It cannot be lower than that.
        max_rollout_timestamp_delay: Seconds after which a rollout is stale; negative means never. Off at
            staleness zero.
        filter_zero_variance: Leave out groups whose valid rewards are all equal.
        max_filtered_groups_per_batch: So many filtered groups while waiting for one batch end the run; None
            means 32 batches' worth.
        max_failed_groups_per_batch: The same for groups that failed, were malformed or were evicted.
        straggler_timeout_s: Longest wait of a due update for a group that still runs; then it is aborted.
        seal_rollouts: A file is written when so many rollouts wait for one.
        seal_s: Or when the oldest of them has waited so long. A waiting learner has it written at once.
        compression: Of the Parquet files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups_per_batch: int = Field(default=8, ge=1)
    staleness_budget: int = Field(default=1, ge=0)
    capacity: int = Field(default=4096, ge=1)
    max_samples: int = 1
    max_rollout_step_delay: int | None = Field(default=None, ge=0)
    max_rollout_timestamp_delay: float = 3600.0
    filter_zero_variance: bool = False
    max_filtered_groups_per_batch: int | None = Field(default=None, ge=1)
    max_failed_groups_per_batch: int | None = Field(default=None, ge=1)
    straggler_timeout_s: float = Field(default=120.0, gt=0)
    seal_rollouts: int = Field(default=8, ge=1)
    seal_s: float = Field(default=5.0, gt=0)
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd"

    @field_validator("max_samples")
    @classmethod
    def _some_use(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError(f"max_samples is {value}: it must be at least 1, or -1 for no limit")
        return value

    @model_validator(mode="after")
    def _delay_covers_budget(self) -> Self:
        delay = self.max_rollout_step_delay
        if delay is not None and delay < self.staleness_budget:
            raise ValueError(
                f"max_rollout_step_delay is {delay}, below staleness_budget = {self.staleness_budget}: groups "
                "would be admitted only to be dropped; raise the one or lower the other"
            )
        return self

    @property
    def synchronous(self) -> bool:
        """Whether everything goes by ticket order, one whole cohort per update."""
        return self.staleness_budget == 0

    @property
    def step_delay(self) -> int:
        """Versions that a fresh rollout may lie behind the current one."""
        return self.staleness_budget if self.max_rollout_step_delay is None else self.max_rollout_step_delay

    @property
    def timestamp_delay_s(self) -> float | None:
        """Seconds that a rollout stays fresh; None without limit."""
        if self.synchronous or self.max_rollout_timestamp_delay < 0:
            return None
        return self.max_rollout_timestamp_delay

    @property
    def uses(self) -> float:
        """How often a rollout may be used; infinity without limit."""
        return float("inf") if self.max_samples < 0 else self.max_samples

    @property
    def filtered_limit(self) -> int:
        """Filtered groups while waiting for one batch that end the run."""
        return self.max_filtered_groups_per_batch or 32 * self.groups_per_batch

    @property
    def failed_limit(self) -> int:
        """Failed, malformed or evicted groups while waiting for one batch that end the run."""
        return self.max_failed_groups_per_batch or 32 * self.groups_per_batch
