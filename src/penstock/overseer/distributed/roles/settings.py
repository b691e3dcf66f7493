"""What every component of a distributed run is told at its start, as plain values on the way."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from penstock.overseer.config import RunConfig
from penstock.rundir import RunDirectory
from penstock.text import Tokenizer

if TYPE_CHECKING:
    from penstock.overseer.fleet_config import FleetRunConfig

AnyConfig = TypeVar("AnyConfig", RunConfig, "FleetRunConfig", default=RunConfig)
_ConfigT = TypeVar("_ConfigT", RunConfig, "FleetRunConfig")


@dataclass(frozen=True, slots=True)
class Settings(Generic[AnyConfig]):
    """One run, as a component sees it.

    Attributes:
        config: The run's.
        directory: The run's; the same path on every machine.
        token: Secret of this run: servers demand it, clients send it. Never written anywhere.
        lineage: Of this life of the run.
        checkpoint: Where that began; None for a run that begins.
    """

    config: AnyConfig
    directory: RunDirectory
    token: str = field(repr=False)
    lineage: int = 0
    checkpoint: Path | None = None

    def dump(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "config": self.config.dump(),
            "directory": str(self.directory.path.resolve()),
            "token": self.token,
            "lineage": self.lineage,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint.resolve()),
        }

    @staticmethod
    def of(values: Mapping[str, Any], config_type: type[_ConfigT]) -> "Settings[_ConfigT]":
        """From what `dump` gave, for a run with that kind of config."""
        checkpoint = values["checkpoint"]
        return Settings(
            config_type.model_validate(values["config"]),
            RunDirectory(values["directory"]),
            str(values["token"]),
            int(values["lineage"]),
            None if checkpoint is None else Path(checkpoint),
        )

    @property
    def job(self) -> str:
        """Tells this run's servers from those of others: directories of other runs may have the same name."""
        path = self.directory.path.resolve()
        return f"{path.name}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"

    def tokenizer(self: "Settings[RunConfig]") -> Tokenizer:
        """The policy's."""
        return Tokenizer.load(self.config.model.tokenizer_path)
