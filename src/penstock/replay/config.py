"""Configuration of admission, freshness and storage of experience, for language runs and for simulator fleets."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.batch.config import FILTER_KEYS, BatchMakerConfig
from penstock.rundir.store_urls import url_problem
from penstock.types.idle_keys import refuse_idle


def _some_use(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError(f"max_samples is {value}: it must be at least 1, or -1 for no limit")
    return value


_Uses = Annotated[int, AfterValidator(_some_use)]


class StoreConfig(BaseModel):
    """When files are written, and how long they stay.

    Attributes:
        url: Where ``rollouts/`` and ``batches/`` go: a path, or an object store's URL (``s3://bucket/run``) that
            names neither a server nor credentials; None means the run directory. A path is kept as an absolute
            one. The logs stay in the run directory.
        buffer_size: A file is written when so many rollouts wait for one; groups are never split. None: when as many
            groups wait as a batch has.
        seal_s: Or when the oldest of them has waited so long. A waiting learner has it written at once.
        compression: Of the Parquet files.
        compact_parts: So many small files are merged into one in the background; 0 never.
        compact_rollouts: A file is small while it holds fewer rollouts than this.
        compact_after_s: Younger files are left as they are, so that readers of the latest are not disturbed.
        max_bytes: The oldest files go when rollouts and batches together take more; None means no limit. Only files
            all of whose rollouts met their final fate before the oldest checkpoint that is kept go.
        retention_s: No file younger than this goes, whatever `max_bytes` says.
        full_disk_s: Where there is no room for a file, what should be in it is kept in memory and tried again for so
            long; then the run ends. 0 ends it at once.
        observations: Store what simulators showed, too; False saves most of the space and time that fragments take, but
            then a resume cannot bring back those that had not been trained.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: str | None = None
    buffer_size: int | None = Field(default=None, ge=1)
    seal_s: float = Field(default=5.0, gt=0)
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd"
    compact_parts: int = Field(default=64, ge=0)
    compact_rollouts: int = Field(default=4096, ge=2)
    compact_after_s: float = Field(default=600.0, ge=0)
    max_bytes: int | None = Field(default=None, ge=1)
    retention_s: float = Field(default=0.0, ge=0)
    full_disk_s: float = Field(default=300.0, ge=0)
    observations: bool = True

    @field_validator("url")
    @classmethod
    def _same_place_from_everywhere(cls, value: str | None) -> str | None:
        """The config is read again by resumes and readers that start in other directories."""
        if value is not None and (problem := url_problem(value)) is not None:
            raise ValueError(f"url {problem}")
        return value if value is None or "://" in value else str(Path(value).expanduser().absolute())

    @field_validator("compact_parts")
    @classmethod
    def _worth_merging(cls, value: int) -> int:
        if value == 1:
            raise ValueError("compact_parts is 1: a single file cannot be merged; set 2 or more, or 0 for never")
        return value

    @model_validator(mode="after")
    def _every_key_acts(self) -> Self:
        if not self.compact_parts:
            refuse_idle(self, ("compact_rollouts", "compact_after_s"), "compact_parts is 0, so nothing is merged")
        if self.max_bytes is None:
            refuse_idle(self, ("retention_s",), "without max_bytes no file goes")
        return self


class Tolerance(BaseModel):
    """How old the rollouts of one lesson may be, where that differs from the buffer's own limits.

    Attributes:
        max_rollout_step_delay: In versions; None means the buffer's. Below the staleness budget it also brings the
            deadlines of the lesson's tickets forward.
        max_rollout_timestamp_delay: In seconds; negative means never; None means the buffer's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_rollout_step_delay: int | None = Field(default=None, ge=0)
    max_rollout_timestamp_delay: float | None = None


class ReplayBufferConfig(BaseModel):
    """What the ticket issuer and the replay buffer go by; docs/replay.md explains the rules behind it.

    Attributes:
        groups_per_batch: B, the groups that one update trains on.
        staleness_budget: S, how many updates old the weights behind a group may be when it is trained; 0 is
            synchronous training.
        capacity: Most waiting rollouts per environment; the oldest groups above it are evicted.
        max_samples: Uses of a rollout before it is done; −1 lets it be used for as long as it is fresh. In a paced
            run groups are used again only where a batch would otherwise have to wait.
        max_rollout_step_delay: Oldest weight step that is still fresh, counted back from the current one. Where it
            is not set it is the staleness budget; it cannot be lower than that. Alone at 0 it sets the budget to 0.
        max_rollout_timestamp_delay: Seconds after which a rollout is stale; negative means never. Off where tickets
            pace and the budget is zero: then a whole cohort waits for its slowest group.
        tolerances: Limits of single lessons, by lesson id.
        max_filtered_groups_per_batch: So many filtered groups while waiting for one batch end the run; None
            means 32 batches' worth.
        max_failed_groups_per_batch: The same for groups that failed, were malformed or were evicted.
        straggler_timeout_s: Longest wait of a due update for a group that still runs; then it is aborted.
        batch_maker: Who picks batches from what is fresh.
        batch_makers: Other batch makers for single environments, by environment name.
        max_waiting: Where no tickets limit what is begun: a delivery waits while so many rollouts that no batch has
            had yet are here, instead of having others evicted. None: nobody waits.
        max_waiting_s: Longest such wait; then it is an error.
        from_rollouts: Train on the rollouts that are stored there and generate none: a run directory, a folder of its
            parts, or the Parquet file of ``penstock generate``. None: the run generates.
        prefetch: Batches that are formed and stored ahead of the learner; 0 forms each when it is asked for.
        store: Files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    groups_per_batch: int = Field(default=8, ge=1)
    staleness_budget: int = Field(default=1, ge=0)
    capacity: int = Field(default=4096, ge=1)
    max_samples: _Uses = 1
    max_rollout_step_delay: int = Field(default=1, ge=0)
    max_rollout_timestamp_delay: float = 3600.0
    tolerances: dict[str, Tolerance] = {}
    max_filtered_groups_per_batch: int | None = Field(default=None, ge=1)
    max_failed_groups_per_batch: int | None = Field(default=None, ge=1)
    straggler_timeout_s: float = Field(default=120.0, gt=0)
    batch_maker: BatchMakerConfig = BatchMakerConfig()
    batch_makers: dict[str, BatchMakerConfig] = {}
    max_waiting: int | None = Field(default=None, ge=1)
    max_waiting_s: float = Field(default=300.0, gt=0)
    from_rollouts: str | None = None
    prefetch: int = Field(default=1, ge=0)
    store: StoreConfig = StoreConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _delay_and_budget_follow_one_another(cls, values: Any, handler: Callable[[Any], Any]) -> Any:
        """Where only one of the two is set, the other one fits it, and does not count as given."""
        if not isinstance(values, dict):
            return handler(values)
        given = cast(dict[str, Any], values)
        budget, delay = given.get("staleness_budget"), given.get("max_rollout_step_delay")
        filled: dict[str, Any] = {}
        if delay is None and isinstance(budget, int):
            filled = {"max_rollout_step_delay": budget}
        elif budget is None and isinstance(delay, int):
            filled = {"staleness_budget": max(0, min(1, delay))}
        made = handler({**given, **filled})
        made.model_fields_set.difference_update(filled)
        return made

    @model_validator(mode="after")
    def _delay_covers_budget(self) -> Self:
        if self.max_rollout_step_delay < self.staleness_budget:
            raise ValueError(
                f"max_rollout_step_delay is {self.max_rollout_step_delay}, below staleness_budget = "
                f"{self.staleness_budget}: groups would be admitted only to be dropped; raise one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_may_wait(self) -> Self:
        if self.max_waiting is not None and not self.groups_per_batch <= self.max_waiting <= self.capacity:
            raise ValueError(
                f"max_waiting is {self.max_waiting}: with less than groups_per_batch = {self.groups_per_batch} no "
                f"batch would ever be full, with more than capacity = {self.capacity} some would be evicted first"
            )
        return self

    @model_validator(mode="after")
    def _every_key_acts(self) -> Self:
        for name, maker in self.batch_makers.items():
            for key in FILTER_KEYS:
                why = f"groups are filtered before any maker sees them: replay.batch_maker.{key} is for all"
                refuse_idle(maker, (key,), why, at=f"batch_makers.{name}.")
        if self.max_waiting is None:
            refuse_idle(self, ("max_waiting_s",), "max_waiting is not set, so nobody waits")
        return self

    @property
    def synchronous(self) -> bool:
        """Whether everything goes by ticket order, one whole cohort per update."""
        return self.staleness_budget == 0

    def step_delay(self, lesson_id: str) -> int:
        """Versions that a fresh rollout of a lesson may lie behind the current one."""
        own = self.tolerances.get(lesson_id, Tolerance()).max_rollout_step_delay
        return self.max_rollout_step_delay if own is None else own

    @property
    def longest_step_delay(self) -> int:
        """The largest `step_delay` of all lessons."""
        return max([self.max_rollout_step_delay, *map(self.step_delay, self.tolerances)])

    def timestamp_delay_s(self, lesson_id: str) -> float | None:
        """Seconds that a rollout of a lesson stays fresh; None without limit."""
        own = self.tolerances.get(lesson_id, Tolerance()).max_rollout_timestamp_delay
        delay = self.max_rollout_timestamp_delay if own is None else own
        return None if delay < 0 else delay

    def when_paced(self) -> Self:
        """The limits as they hold where tickets pace: at staleness zero age in seconds does not count."""
        if not self.synchronous:
            return self
        ageless = {
            lesson: tolerance.model_copy(update={"max_rollout_timestamp_delay": -1.0})
            for lesson, tolerance in self.tolerances.items()
        }
        return self.model_copy(update={"max_rollout_timestamp_delay": -1.0, "tolerances": ageless})

    def budget(self, lesson_id: str) -> int:
        """Updates within which a ticket of a lesson must be trained."""
        return min(self.staleness_budget, self.step_delay(lesson_id))

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


_FRAGMENT_STORE = StoreConfig(buffer_size=512, compact_rollouts=1024)
"""Fragments come by the hundred per second, and a waiting learner has its own written at once; so files are larger."""


class FragmentReplayConfig(BaseModel):
    """How fragments wait for the learner, and how long they are good for; docs/replay.md explains it.

    Attributes:
        fragments_per_batch: What one update trains on.
        order: Of two fragments that were used equally often the ``oldest`` is taken first, or the ``newest``.
        max_samples: Batches that a fragment may be in; −1 for as long as it is fresh.
        max_staleness: How many versions the oldest step of a fresh fragment may lie behind the learner's.
        max_age_s: Seconds after which a fragment is stale; None means never.
        tolerances: Both limits for single tasks, by name.
        max_waiting: Senders wait while so many fragments are here that no batch has had yet; None means twice
            `fragments_per_batch`. −1 lets nobody wait: above `capacity` the oldest are evicted.
        max_waiting_s: Longest that a sender waits; then it is an error.
        capacity: Most waiting fragments per environment, those included that were used already and may be again; None
            means four times what is larger of `fragments_per_batch` and `max_waiting`.
        store: Files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fragments_per_batch: int = Field(default=16, ge=1)
    order: Literal["oldest", "newest"] = "oldest"
    max_samples: _Uses = 1
    max_staleness: int = Field(default=8, ge=0)
    max_age_s: float | None = Field(default=3600.0, gt=0)
    tolerances: dict[str, Tolerance] = {}
    max_waiting: int | None = None
    max_waiting_s: float = Field(default=300.0, gt=0)
    capacity: int | None = Field(default=None, ge=1)
    store: StoreConfig = _FRAGMENT_STORE

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

    @model_validator(mode="after")
    def _every_key_acts(self) -> Self:
        if self.max_waiting == -1:
            refuse_idle(self, ("max_waiting_s",), "max_waiting is -1, so nobody waits")
        return self

    @property
    def most_waiting(self) -> int | None:
        """`max_waiting` with its default; None where nobody waits."""
        if self.max_waiting == -1:
            return None
        return 2 * self.fragments_per_batch if self.max_waiting is None else self.max_waiting

    @property
    def synchronous(self) -> bool:
        """Never: simulators go on while the policy is updated."""
        return False

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
