"""Reads publications from a place that a marker describes: memory of this machine, or files.

Such a place cannot tell anybody that something is new, so the marker is looked at time and again. Files of a network
may hang: then each read has a limit, and is left behind in its thread.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.types import Stopped, SupersededVersionError, WeightsError, WeightVersion
from penstock.weights.bounded import BoundedCalls
from penstock.weights.fetching import Announcement, Received
from penstock.weights.manifest import Manifest
from penstock.weights.marker import Marker, Offer

MARKER_S = 10.0
"""Longest read of a marker."""

_Result = TypeVar("_Result")


class Shelf(Protocol):
    """A place with a marker and files, for reading."""

    @property
    def may_hang(self) -> bool:
        """Whether a read can take without end."""
        ...

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
        self._bounded = BoundedCalls() if shelf.may_hang else None
        self._seen: tuple[bytes, Marker] | None = None

    def newest(self) -> Announcement | None:
        """See `Reader.newest`."""
        marker = self._within("reading the marker of weights", self._marker, MARKER_S)
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
        """See `Reader.read`; the timeout does not apply to memory, which either comes or fails."""
        if self._closed.is_set():
            raise Stopped("the reader of weights was closed")
        return self._within(f"reading {version}", lambda: self._read(version, base), timeout_s)

    def metrics(self) -> dict[str, float]:
        """See `Reader.metrics`."""
        return {}

    def close(self) -> None:
        """See `Reader.close`."""
        self._closed.set()
        if self._bounded is not None:
            self._bounded.close()

    def _within(self, what: str, function: Callable[[], _Result], timeout_s: float) -> _Result:
        return function() if self._bounded is None else self._bounded(what, function, timeout_s)

    def _read(self, version: WeightVersion, base: tuple[WeightVersion, str] | None) -> Received:
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

    def _offer(self, version: WeightVersion) -> Offer:
        marker = self._marker()
        if marker is None:
            raise SupersededVersionError(f"{version} is not available: nothing is published yet")
        return marker.offer(version)

    def _marker(self) -> Marker | None:
        content = self._shelf.marker()
        if content is None:
            return None
        seen = self._seen
        if seen is None or seen[0] != content:
            # A read that was left behind may come here too, so what it finds is not taken for this one's.
            seen = self._seen = content, Marker.from_bytes(content, self._job, self._token, self._max_bytes)
        return seen[1]
