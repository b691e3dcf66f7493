"""TensorBoard event files, written by tensorboardX (which needs no TensorFlow and no torch)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.tracking.tracker import ServiceConfig
from penstock.types import ConfigError


class TensorBoardConfig(ServiceConfig):
    """TensorBoard event files; needs the extra ``penstock[tensorboard]``.

    Attributes:
        directory: Where the event files go; None: ``tensorboard/`` in the run directory.
    """

    label = "TensorBoard"

    directory: str | None = None

    def open(self, run_dir: Path, run_config: Mapping[str, Any]) -> "TensorBoardTracker":
        """A tracker that writes there."""
        return TensorBoardTracker(Path(self.directory) if self.directory else run_dir / "tensorboard")


class TensorBoardTracker:
    """Writes scalars and the text of sample conversations as TensorBoard event files.

    Args:
        directory: Where the event files go; made if missing.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"tracking.tensorboard needs tensorboardX, which cannot be imported ({error}): "
                "pip install 'penstock[tensorboard]', or set tracking.tensorboard to null"
            ) from error
        self._writer = SummaryWriter(logdir=str(directory))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes each conversation as preformatted text under ``samples/<lesson>/<position>``."""
        for position, sample in enumerate(samples):
            lines = [f"reward {sample['reward']:g}"]
            lines += [f"{turn['role']}: {turn['content']}" for turn in sample["turns"]]
            indented = "\n".join("    " + line for line in "\n".join(lines).splitlines())
            self._writer.add_text(f"samples/{sample['lesson_id']}/{position}", indented, step)

    def close(self) -> None:
        """Writes out what is pending."""
        self._writer.close()
