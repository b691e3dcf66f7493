"""From the tracking configuration to one tracker."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.tracking.config import TrackingConfig
from penstock.tracking.samples_file import JsonlTracker
from penstock.tracking.tracker import MultiTracker, OnFailure, Tracker


def make_tracker(
    config: TrackingConfig, run_dir: Path, run_config: Mapping[str, Any], on_failure: OnFailure
) -> MultiTracker:
    """Makes every tracker that the configuration names, as one.

    Args:
        config: What to track with.
        run_dir: The run directory; it must exist.
        run_config: The resolved configuration, for services that show it.
        on_failure: See `MultiTracker`.

    Raises:
        ConfigError: a service's package is not installed, or the service cannot be reached.
    """
    trackers: list[Tracker] = []
    with contextlib.ExitStack() as on_error:
        for tracker in _each(config, run_dir, run_config):
            trackers.append(tracker)
            on_error.callback(tracker.close)
        on_error.pop_all()
    return MultiTracker(trackers, on_failure)


def _each(config: TrackingConfig, run_dir: Path, run_config: Mapping[str, Any]) -> Iterator[Tracker]:
    if config.samples:
        yield JsonlTracker(run_dir / "samples.jsonl")
    for service in config.services:
        yield service.open(run_dir, run_config)
