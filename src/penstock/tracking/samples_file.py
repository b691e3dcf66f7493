"""Sample conversations as lines of JSON, readable with any text tool while the run goes on.

Metrics are not written here: the run directory's own ``metrics.jsonl`` has them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.rundir import JsonLinesLog


class JsonlTracker:
    """Appends one line per conversation: ``{"step": …, …}``, see `conversation_of`.

    Args:
        path: The file; made if missing. An unfinished last line, left by a crash, is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._log = JsonLinesLog(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Ignores metrics."""

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends the conversations in one write."""
        self._log.append(*({"step": step, **sample} for sample in samples))

    def close(self) -> None:
        """Closes the file."""
        self._log.close()
