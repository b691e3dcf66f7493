"""Offers publications in a place that a marker describes: files are written first, then the marker is replaced."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from penstock.types import WeightsError, WeightVersion
from penstock.weights.delta import Delta
from penstock.weights.manifest import Manifest
from penstock.weights.marker import Chains, Marker, Offer, free_name
from penstock.weights.publishing import Publication

_Content = tuple[WeightVersion, str]


class WritableShelf(Protocol):
    """A place with a marker and files, for writing. Nothing is seen by readers before the marker names it."""

    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        """Names a file for these arrays that is not among the taken ones; whatever can, is written from here on.

        Raises:
            WeightsError: there is no room.
        """
        ...

    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the arrays that were begun last.

        They may still be written when this returns, and are whole when the marker is. They do not change meanwhile.

        Raises:
            WeightsError: there is no room.
        """
        ...

    def write_message(self, name: str, buffers: Iterable[bytes]) -> None:
        """Makes or replaces a file. Raises as above."""
        ...

    def write_marker(self, content: bytes) -> None:
        """Replaces the marker in one move, after all else is whole. Raises as above."""
        ...

    def discard(self, names: set[str]) -> None:
        """These files are offered no more."""
        ...

    def endpoint(self) -> dict[str, Any]:
        """What a client needs to find it."""
        ...

    def close(self) -> None:
        """Stops offering."""
        ...


class ShelfStore:
    """Offers the newest publications on a shelf (`publishing.Store`).

    Args:
        shelf: The place.
        job: The run.
        token: Signs the marker.
        keep: Publications that are offered; ways by deltas lead to the newest only.
        found: What a broadcaster before this one offered there, and what is still there.
    """

    def __init__(
        self, shelf: WritableShelf, job: str, token: str | None, keep: int, found: Marker | None = None
    ) -> None:
        self._shelf, self._job, self._token, self._keep = shelf, job, token, keep
        self._marker = found
        self._files = found.files if found is not None else set[str]()
        self._begun = ""
        self._messages: dict[tuple[_Content, _Content], str] = {}
        self._numbers: dict[str, float] = {}

    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `Store.begin`."""
        self._begun = self._shelf.begin_arrays(arrays, self._files)

    def put(self, publication: Publication) -> None:
        """See `Store.put`."""
        manifest, taken = publication.manifest, self._files
        file, self._begun = self._begun, ""
        assert file  # it was begun
        before = self._older_offers(manifest)
        self._shelf.write_arrays(file, manifest, publication.arrays)
        messages, written = self._write_messages(publication, taken)
        chains = {
            base: tuple(messages[delta.base, delta.manifest.content] for delta in chain)
            for base, chain in publication.chains.items()
        }
        marker = Marker(self._job, (Offer(manifest, file, chains), *before))
        self._shelf.write_marker(marker.to_bytes(self._token))
        self._marker, self._files, self._messages = marker, marker.files, messages
        self._numbers["weights/bytes_written"] = float(manifest.nbytes + written)
        self._shelf.discard(taken - self._files)

    def endpoint(self) -> dict[str, Any]:
        """See `Store.endpoint`."""
        return self._shelf.endpoint()

    def metrics(self) -> dict[str, float]:
        """See `Store.metrics`."""
        return dict(self._numbers)

    def close(self) -> None:
        """See `Store.close`."""
        self._shelf.close()

    def _older_offers(self, manifest: Manifest) -> list[Offer]:
        """What is offered beside the next publication."""
        offers = self._marker.offers if self._marker is not None else ()
        if offers and manifest.version < offers[0].manifest.version:
            newest = offers[0].manifest.version
            raise WeightsError(f"{manifest.version} is older than {newest}, which a broadcaster of this job published")
        no_chains: Chains = {}
        older = [offer for offer in offers if offer.manifest.version != manifest.version][: self._keep - 1]
        return [Offer(offer.manifest, offer.file, no_chains) for offer in older]

    def _write_messages(
        self, publication: Publication, taken: set[str]
    ) -> tuple[dict[tuple[_Content, _Content], str], int]:
        """The file of each delta, and how many bytes were written; those of before are used again."""
        deltas: list[Delta] = [delta for chain in publication.chains.values() for delta in chain]
        files: dict[tuple[_Content, _Content], str] = {}
        written = 0
        for delta in deltas:
            way = delta.base, delta.manifest.content
            if way in files:
                continue
            if way in self._messages:
                files[way] = self._messages[way]
                continue
            files[way] = free_name("delta", ".bin", taken | set(files.values()) | set(self._messages.values()))
            self._shelf.write_message(files[way], delta.buffers)
            written += delta.nbytes
        return files, written
