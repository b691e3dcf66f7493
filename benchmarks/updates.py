"""What a run's updates wrote into its metrics."""

from pathlib import Path
from typing import Any

from penstock.rundir import read_metrics


def update_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, one of each update in their order; none where there is no such file yet."""
    return [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
