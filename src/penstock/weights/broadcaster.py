"""Weights handed over inside one process: by reference, version by version, whole or not at all.

Nothing is copied: JAX arrays are immutable, and published arrays are never donated by the learner. Only the
newest version is kept. Other transports (shared memory, sockets, files) are not covered here.
"""

import threading
from collections.abc import Mapping
from typing import Any

from penstock.types import WeightsError, WeightVersion


class InProcessBroadcaster:
    """Publishes and serves named arrays by version (`types.WeightSink` and `types.WeightSource`).

    The first publication fixes the arrays' names, shapes and dtypes; a later one that differs is refused with
    the names that differ. Versions only grow.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: WeightVersion | None = None
        self._arrays: Mapping[str, Any] = {}
        self._layout: dict[str, tuple[tuple[int, ...], str]] | None = None

    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Makes a version available to every waiting client.

        Raises:
            WeightsError: the version is not newer than the last, or the arrays' layout changed.
        """
        layout = {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
        with self._changed:
            if self._version is not None and version <= self._version:
                raise WeightsError(f"{version} is not newer than the published {self._version}")
            if self._layout is not None and layout != self._layout:
                raise WeightsError(_layout_difference(self._layout, layout))
            self._version, self._arrays, self._layout = version, dict(arrays), layout
            self._changed.notify_all()

    def latest(self) -> WeightVersion | None:
        """The newest published version; None before the first."""
        with self._changed:
            return self._version

    def fetch(self, version: WeightVersion) -> Mapping[str, Any]:
        """The arrays of exactly that version, never another's.

        Raises:
            WeightsError: the version is superseded or was never published.
        """
        with self._changed:
            if version != self._version:
                raise WeightsError(f"{version} is not available: {self._version} is the newest and only one kept")
            return self._arrays

    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        """Blocks until something newer than `newer_than` is there; None at the timeout."""

        def newer() -> bool:
            return self._version is not None and (newer_than is None or self._version > newer_than)

        with self._changed:
            return self._version if self._changed.wait_for(newer, timeout_s) else None


def _layout_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    changed = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    changes = [f"{name} {expected[name]} became {found[name]}" for name in changed]
    return f"published arrays differ from the first publication: missing {missing}, extra {extra}, changed {changes}"
