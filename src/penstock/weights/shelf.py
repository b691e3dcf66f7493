"""Reads publications from a place that a marker describes: memory of this machine, or files.

Such a place cannot tell anybody that something is new, so the marker is looked at time and again.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from penstock.types import Stopped, SupersededVersionError, WeightsError, WeightVersion
from penstock.weights.fetching import Announcement, Received
from penstock.weights.manifest import Manifest
from penstock.weights.marker import Marker, Offer


class Shelf(Protocol):
    """A place with a marker and files, for reading."""

    @property
    def look_every_s(self) -> float:
        """Pause between two looks at the marker."""
        ...

    def marker(self) -> bytes | None:
        """The marker file as it is now; None where there is none yet.

        Raises:
            UnreachableError: the place is gone, or does not answer.
        """
        ...

    def arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        """The arrays in a file, read-only, in the manifest's layout; not verified.

        Raises:
            WeightsError: the file is gone, or of another size.
            UnreachableError: as above.
        """
        ...

    def message(self, name: str, most_bytes: int) -> Any:
        """A file with a delta, as a buffer of bytes. Raises as `arrays`; also where it is larger than allowed."""
        ...


class ShelfReader:
    """Reads from a shelf (`fetching.Reader`).

    Args:
        shelf: The place.
        job: Whose weights are wanted.
        token: That the marker must be signed with.
        max_bytes: Largest publication that is accepted.
    """

    def __init__(self, shelf: Shelf, job: str, token: str | None, max_bytes: int) -> None:
        self._shelf, self._job, self._token, self._max_bytes = shelf, job, token, max_bytes
        self._closed = threading.Event()
        self._seen: tuple[bytes, Marker] | None = None

    def newest(self) -> Announcement | None:
        """See `Reader.newest`."""
        marker = self._marker()
        return None if marker is None else marker.announcement

    def wait(self, known: Announcement | None, timeout_s: float) -> Announcement | None:
        """See `Reader.wait`."""
        deadline = time.monotonic() + timeout_s
        while True:
            newest = self.newest()
            remaining_s = deadline - time.monotonic()
            if newest != known or remaining_s <= 0 or self._closed.is_set():
                return newest
            self._closed.wait(min(self._shelf.look_every_s, remaining_s))

    def read(self, version: WeightVersion, base: tuple[WeightVersion, str] | None, timeout_s: float) -> Received:
        """See `Reader.read`; the timeout does not apply to files, which either come or fail."""
        if self._closed.is_set():
            raise Stopped("the reader of weights was closed")
        offer = self._offer(version)
        names = None if base is None else offer.chains.get(base)
        try:
            if names is None:
                arrays = self._shelf.arrays(offer.file, offer.manifest)
                received = Received(offer.manifest, arrays, moved_bytes=offer.manifest.nbytes)
            else:
                messages = [self._shelf.message(name, offer.manifest.nbytes) for name in names]
                received = Received(offer.manifest, None, messages, sum(len(message) for message in messages))
        except WeightsError:
            self._offer(version)  # where the files went because the version was superseded, that is the reason
            raise
        now = self._offer(version)
        if (now.manifest, now.file) != (offer.manifest, offer.file):
            raise WeightsError(f"{version} was published anew while it was read")
        return received

    def metrics(self) -> dict[str, float]:
        """See `Reader.metrics`."""
        return {}

    def close(self) -> None:
        """See `Reader.close`."""
        self._closed.set()

    def _offer(self, version: WeightVersion) -> Offer:
        marker = self._marker()
        if marker is None:
            raise SupersededVersionError(f"{version} is not available: nothing is published yet")
        return marker.offer(version)

    def _marker(self) -> Marker | None:
        content = self._shelf.marker()
        if content is None:
            return None
        if self._seen is None or self._seen[0] != content:
            self._seen = content, Marker.from_bytes(content, self._job, self._token, self._max_bytes)
        return self._seen[1]
