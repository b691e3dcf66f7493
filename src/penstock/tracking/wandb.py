"""Weights & Biases.

The service drops a metric whose step is smaller than one it has seen, and evaluations of an older version may well
arrive after a newer update. So every call carries the weight step as a metric of its own, and that is the x axis.
The run's id is kept in ``wandb_id`` in the run directory, so that a resumed run continues the same curves.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from penstock.tracking.tracker import ServiceConfig
from penstock.types import ConfigError

_COLUMNS = ["weight_step", "rollout_id", "lesson_id", "reward", "finish_reason", "conversation"]


class WandbConfig(ServiceConfig):
    """Weights & Biases; needs the extra ``penstock[wandb]``.

    Attributes:
        project: The project's name.
        entity: User or team; None: the account's default.
        name: The run's name; None: the run directory's.
        mode: ``offline`` writes files that ``wandb sync`` uploads later.
    """

    label = "W&B"

    project: str = Field(default="penstock", min_length=1)
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"

    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> "WandbTracker":
        """A tracker that logs to the run of this directory, a new one or the one that it began."""
        return WandbTracker(self, run_dir, run_config)


class WandbTracker:
    """Logs to one Weights & Biases run.

    Args:
        config: Project, entity, name and mode.
        run_dir: Names the run, and holds its id and offline files.
        run_config: The resolved configuration, shown beside the curves.

    Raises:
        ConfigError: wandb is not installed, or refuses to start (no account, no network).
    """

    def __init__(self, config: WandbConfig, run_dir: Path, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"tracking.wandb needs wandb, which cannot be imported ({error}): "
                "pip install 'penstock[wandb]', or set tracking.wandb to null"
            ) from error
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run_dir.name,
                mode=config.mode,
                id=_kept_id(run_dir / "wandb_id"),
                resume="allow",
                dir=str(run_dir),
                config=dict(run_config),
                settings=wandb.Settings(console="off", silent=True),  # the live view owns the terminal
            )
        except Exception as error:  # its own hierarchy of errors, which needs the import above
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"tracking.wandb could not start: {reason}; run `wandb login`, or set tracking.wandb.mode=offline"
            ) from error
        self._run.define_metric("*", step_metric="weight_step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs metrics over the weight step."""
        self._run.log({**metrics, "weight_step": step})

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs conversations as a table."""
        rows = [
            [
                sample["weight_step"],
                sample["rollout_id"],
                sample["lesson_id"],
                sample["reward"],
                sample["finish_reason"],
                "\n".join(f"{turn['role']}: {turn['content']}" for turn in sample["turns"]),
            ]
            for sample in samples
        ]
        self._run.log({"samples": self._wandb.Table(columns=_COLUMNS, data=rows), "weight_step": step})

    def close(self) -> None:
        """Uploads what is pending and ends the run there."""
        self._run.finish()


def _kept_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()
