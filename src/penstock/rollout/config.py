"""Configuration of rollout generation."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from penstock.replay.queue import RolloutStorageConfig


class RolloutConfig(BaseModel):
    """How rollout workers generate.

    Attributes:
        workers: How many rollout workers (``runtime: ray``; one process has one): a number, or one for each lesson,
            whose workers then generate that lesson only.
        max_concurrent_groups: Groups one worker generates at once; None: as many as may be outstanding.
        max_consecutive_failures: So many failed groups in a row end the run with the last failure's message.
        lockstep_timeout_s: At staleness zero, the longest that one batch's groups may take.
        max_rollouts: No group is begun once so many rollouts were, and a run (in all its lives) ends at the next update
            boundary then; a worker of one's own counts those that it began. None: no limit.
        log_freq: Sample conversations go to the tracker, and to the view, every so many groups; 0 never.
        storage: Where finished groups wait for the learner.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workers: Annotated[int, Field(ge=1)] | dict[str, Annotated[int, Field(ge=1)]] = 1
    max_concurrent_groups: int | None = Field(default=None, ge=1)
    max_consecutive_failures: int = Field(default=32, ge=1)
    lockstep_timeout_s: float = Field(default=600.0, gt=0)
    max_rollouts: int | None = Field(default=None, ge=1)
    log_freq: int = Field(default=10, ge=0)
    storage: RolloutStorageConfig = RolloutStorageConfig()
