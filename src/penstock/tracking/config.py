"""Configuration of tracking: a key for each service, whose settings stand beside its tracker."""

from pydantic import BaseModel, ConfigDict, Field

from penstock.tracking.tracker import MlflowConfig, ServiceConfig, TensorBoardConfig, TrackioConfig, WandbConfig


class PrometheusConfig(BaseModel):
    """``/metrics`` of the overseer, for Prometheus to scrape (docs/running.md).

    Attributes:
        host: Where it listens. Beyond this machine it needs a token, from ``PENSTOCK_TOKEN``.
        port: Where it listens; 0: a free one, which the event ``prometheus`` names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=9464, ge=0, le=65535)


class TrackingConfig(BaseModel):
    """Where metrics and sample conversations go besides the run directory's own ``metrics.jsonl``.

    Attributes:
        samples: Write sample conversations to ``samples.jsonl`` in the run directory.
        samples_per_log: Most conversations of one group that are logged.
        mlflow: None: not used.
        prometheus: None: not used.
        tensorboard: None: not used.
        trackio: None: not used.
        wandb: None: not used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: bool = True
    samples_per_log: int = Field(default=4, ge=1)
    mlflow: MlflowConfig | None = None
    prometheus: PrometheusConfig | None = None
    tensorboard: TensorBoardConfig | None = None
    trackio: TrackioConfig | None = None
    wandb: WandbConfig | None = None

    @property
    def services(self) -> list[ServiceConfig]:
        """Those that are used, in the order of the keys."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return [value for value in values if isinstance(value, ServiceConfig)]

    @property
    def labels(self) -> list[str]:
        """Names of all that is written, for people."""
        prometheus = [] if self.prometheus is None else ["Prometheus"]
        return [*(["samples.jsonl"] if self.samples else []), *(each.label for each in self.services), *prometheus]
