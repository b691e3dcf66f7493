"""Configuration of tracking."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TensorBoardConfig(BaseModel):
    """TensorBoard event files; needs the extra ``penstock[tensorboard]``.

    Attributes:
        directory: Where the event files go; None: ``tensorboard/`` in the run directory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: str | None = None


class WandbConfig(BaseModel):
    """Weights & Biases; needs the extra ``penstock[wandb]``.

    Attributes:
        project: The project's name.
        entity: User or team; None: the account's default.
        name: The run's name; None: the run directory's.
        mode: ``offline`` writes files that ``wandb sync`` uploads later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str = Field(default="penstock", min_length=1)
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


class TrackingConfig(BaseModel):
    """Where metrics and sample conversations go besides the run directory's own ``metrics.jsonl``.

    Attributes:
        samples: Write sample conversations to ``samples.jsonl`` in the run directory.
        samples_per_log: Most conversations of one group that are logged.
        tensorboard: None: not used.
        wandb: None: not used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: bool = True
    samples_per_log: int = Field(default=4, ge=1)
    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None
