"""Reads publications from a place that a marker describes: memory of this machine, or files.

Such a place cannot tell anybody that something is new, so the marker is looked at time and again. Files of a network
may hang: then each read has a limit, and is left behind in its thread.

Calls that may hang, such as reads of a network's file system: each is made in a thread that is left behind in time.

Nothing ends a read that hangs. A few of them may; then no other begins before one of them is over.

The marker: one small file that says which publications lie beside it, replaced in one move after they are whole.

It is signed with the job's token (HMAC-SHA-256), so that a client takes nothing of another job or token. Names in it
are plain file names; numbers are checked before anything is opened or allocated.

Offers publications in a place that a marker describes: files are written first, then the marker is replaced.
"""

import functools
import hashlib
import hmac
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.weights.broadcaster import Publication
from penstock.weights.client import FetchedArrays, LatestVersion
from penstock.weights.delta import Delta
from penstock.weights.manifest import Manifest, compact_json, read_json, version_from_values

MOST_LEFT_BEHIND = 4
"""So many calls may hang at once."""

_Result = TypeVar("_Result")


class TimeLimitedCalls:
    """Makes calls for one thread at a time; `close` comes from another."""

    def __init__(self) -> None:
        self._closed: Future[None] = Future()
        self._hanging: list[tuple[str, Future[Any]]] = []

    def __call__(self, what: str, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """Calls a function and returns its result, or raises what it raised.

        Args:
            what: In words, for the error.
            function: May go on after the limit, in its thread; then its result is thrown away.
            timeout_s: The limit.

        Raises:
            UnreachableError: it is not over in time, or too many before it still hang, or this was closed.
        """
        self._hanging = [(name, call) for name, call in self._hanging if not call.done()]
        if len(self._hanging) >= MOST_LEFT_BEHIND:
            first, _ = self._hanging[0]
            raise UnreachableError(f"{what} did not begin: {len(self._hanging)} before it hang, {first} first")
        call: Future[_Result] = Future()
        threading.Thread(target=_run, args=(call, function), name="weights-read", daemon=True).start()
        either: list[Future[Any]] = [call, self._closed]
        wait(either, timeout_s, FIRST_COMPLETED)
        if call.done():
            return call.result()
        self._hanging.append((what, call))
        if self._closed.done():
            raise UnreachableError(f"{what} was given up: the reader was closed")
        raise UnreachableError(f"{what} was not over within {timeout_s:.3g} s")

    def close(self) -> None:
        """Ends the wait for a call that runs. May be called twice."""
        if not self._closed.done():
            self._closed.set_result(None)


def _run(call: Future[_Result], function: Callable[[], _Result]) -> None:
    try:
        call.set_result(function())
    except BaseException as error:  # whatever it is, the caller has it
        call.set_exception(error)


_FORMAT = 1
_SIGNATURE_CHARACTERS = 64
_MOST_OFFERS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

Chains = dict[tuple[WeightVersion, str], tuple[str, ...]]
"""Names of delta files that lead from a content to the publication, in order."""


@dataclass(frozen=True, slots=True)
class OfferedVersion:
    """One publication that can be fetched.

    Attributes:
        manifest: What it holds.
        file: Name of the file with its arrays.
        chains: Ways to it from earlier contents.
    """

    manifest: Manifest
    file: str
    chains: Chains

    @property
    def files(self) -> set[str]:
        """Every file that it needs."""
        return {self.file, *(name for names in self.chains.values() for name in names)}


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """What a place offers.

    Attributes:
        job: Whose weights.
        offers: The newest first; at least one.
    """

    job: str
    offers: tuple[OfferedVersion, ...]

    @property
    def announcement(self) -> LatestVersion:
        """Who published last, and which version."""
        newest = self.offers[0].manifest
        return LatestVersion(newest.incarnation, newest.version)

    @property
    def files(self) -> set[str]:
        """Every file that is still needed."""
        return set().union(*(offer.files for offer in self.offers))

    def offer(self, version: WeightVersion) -> OfferedVersion:
        """The newest publication of that version.

        Raises:
            SupersededVersionError: there is none.
        """
        for offer in self.offers:
            if offer.manifest.version == version:
                return offer
        newest = self.announcement.version
        raise SupersededVersionError(
            f"{version} is not available: {newest} is the newest of {len(self.offers)} kept",
            (newest.lineage, newest.step),
        )

    def to_bytes(self, token: str | None) -> bytes:
        """The signed file."""
        values = {"format": _FORMAT, "job": self.job, "offers": [_offer_values(offer) for offer in self.offers]}
        text = compact_json(values)
        return _signature(text, token) + text

    @classmethod
    def from_bytes(cls, content: bytes, job: str, token: str | None, max_bytes: int) -> "CurrentVersion":
        """Reads a marker file.

        Args:
            content: The file, of bounded size.
            job: Whose weights are wanted.
            token: That it must be signed with.
            max_bytes: Most that the arrays of one publication may have.

        Raises:
            WeightsError: it is damaged, malformed, or of another job or token.
        """
        text = content[_SIGNATURE_CHARACTERS:]
        if not hmac.compare_digest(content[:_SIGNATURE_CHARACTERS], _signature(text, token)):
            raise WeightsError("the marker of weights is damaged, or was signed with another token")
        values = read_json(text)
        try:
            if values["format"] != _FORMAT:
                raise WeightsError(f"the marker of weights has format {values['format']!r:.20}, not {_FORMAT}")
            if values["job"] != job:
                raise WeightsError(f"the weights here are of job {values['job']!r:.100}, not {job!r}")
            offers = tuple(_offer(offer, max_bytes) for offer in _list(values["offers"]))
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"the marker of weights is malformed: {type(error).__name__}: {error}") from error
        if not offers or any(offer.manifest.job != job for offer in offers):
            raise WeightsError(f"the marker of weights is malformed: it offers nothing, or not of job {job!r}")
        return cls(job, offers)


def free_name(prefix: str, suffix: str, taken: set[str]) -> str:
    """The first of ``<prefix>-0<suffix>``, ``<prefix>-1<suffix>``, … that is not taken.

    So files that a killed broadcaster left behind are written over, and nothing piles up.
    """
    number = 0
    while f"{prefix}-{number}{suffix}" in taken:
        number += 1
    return f"{prefix}-{number}{suffix}"


def _signature(text: bytes, token: str | None) -> bytes:
    signature = _keyed((token or "").encode()).copy()
    signature.update(text)
    return signature.hexdigest().encode()


@functools.lru_cache(maxsize=8)
def _keyed(key: bytes) -> hmac.HMAC:
    """With the key taken in: that costs more than to sign a marker, and is the same for every publication."""
    return hmac.new(key, digestmod=hashlib.sha256)


def _offer_values(offer: OfferedVersion) -> dict[str, Any]:
    return {
        "manifest": offer.manifest.to_values(),
        "file": offer.file,
        "chains": [
            [[version.lineage, version.step], digest, list(names)] for (version, digest), names in offer.chains.items()
        ],
    }


def _offer(values: Any, max_bytes: int) -> OfferedVersion:
    chains = {
        (version_from_values(version), str(digest)): tuple(_name(name) for name in _list(names))
        for version, digest, names in _list(values["chains"])
    }
    return OfferedVersion(Manifest.from_values(values["manifest"], max_bytes), _name(values["file"]), chains)


def _list(values: Any) -> Sequence[Any]:
    if not isinstance(values, list) or len(values) > _MOST_OFFERS:
        raise ValueError(f"not a list of at most {_MOST_OFFERS} entries")
    return values


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r:.150} is not a plain file name")
    return value


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
    """Offers the newest publications on a shelf (`publishing.TransportServer`).

    Args:
        shelf: The place.
        job: The run.
        token: Signs the marker.
        keep: Publications that are offered; ways by deltas lead to the newest only.
        found: What a broadcaster before this one offered there, and what is still there.
    """

    def __init__(
        self, shelf: WritableShelf, job: str, token: str | None, keep: int, found: CurrentVersion | None = None
    ) -> None:
        self._shelf, self._job, self._token, self._keep = shelf, job, token, keep
        self._marker = found
        self._files = found.files if found is not None else set[str]()
        self._begun = ""
        self._messages: dict[tuple[_Content, _Content], str] = {}
        self._numbers: dict[str, float] = {}

    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `TransportServer.begin`."""
        self._begun = self._shelf.begin_arrays(arrays, self._files)

    def put(self, publication: Publication) -> None:
        """See `TransportServer.put`."""
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
        marker = CurrentVersion(self._job, (OfferedVersion(manifest, file, chains), *before))
        self._shelf.write_marker(marker.to_bytes(self._token))
        self._marker, self._files, self._messages = marker, marker.files, messages
        self._numbers["weights/bytes_written"] = float(manifest.nbytes + written)
        self._shelf.discard(taken - self._files)

    def endpoint(self) -> dict[str, Any]:
        """See `TransportServer.endpoint`."""
        return self._shelf.endpoint()

    def metrics(self) -> dict[str, float]:
        """See `TransportServer.metrics`."""
        return dict(self._numbers)

    def close(self) -> None:
        """See `TransportServer.close`."""
        self._shelf.close()

    def _older_offers(self, manifest: Manifest) -> list[OfferedVersion]:
        """What is offered beside the next publication."""
        offers = self._marker.offers if self._marker is not None else ()
        if offers and manifest.version < offers[0].manifest.version:
            newest = offers[0].manifest.version
            raise WeightsError(f"{manifest.version} is older than {newest}, which a broadcaster of this job published")
        no_chains: Chains = {}
        older = [offer for offer in offers if offer.manifest.version != manifest.version][: self._keep - 1]
        return [OfferedVersion(offer.manifest, offer.file, no_chains) for offer in older]

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


MARKER_S = 10.0
"""Longest read of a marker."""


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
    """Reads from a shelf (`fetching.TransportReader`).

    Args:
        shelf: The place.
        job: Whose weights are wanted.
        token: That the marker must be signed with.
        max_bytes: Largest publication that is accepted.
    """

    def __init__(self, shelf: Shelf, job: str, token: str | None, max_bytes: int) -> None:
        self._shelf, self._job, self._token, self._max_bytes = shelf, job, token, max_bytes
        self._closed = threading.Event()
        self._bounded = TimeLimitedCalls() if shelf.may_hang else None
        self._seen: tuple[bytes, CurrentVersion] | None = None

    def newest(self) -> LatestVersion | None:
        """See `TransportReader.newest`."""
        marker = self._within("reading the marker of weights", self._marker, MARKER_S)
        return None if marker is None else marker.announcement

    def wait(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        """See `TransportReader.wait`."""
        deadline = time.monotonic() + timeout_s
        while True:
            newest = self.newest()
            remaining_s = deadline - time.monotonic()
            if newest != known or remaining_s <= 0 or self._closed.is_set():
                return newest
            self._closed.wait(min(self._shelf.look_every_s, remaining_s))

    def read(self, version: WeightVersion, base: tuple[WeightVersion, str] | None, timeout_s: float) -> FetchedArrays:
        """See `TransportReader.read`; the timeout does not apply to memory, which either comes or fails."""
        if self._closed.is_set():
            raise Stopped("the reader of weights was closed")
        return self._within(f"reading {version}", lambda: self._read(version, base), timeout_s)

    def metrics(self) -> dict[str, float]:
        """See `TransportReader.metrics`."""
        return {}

    def close(self) -> None:
        """See `TransportReader.close`."""
        self._closed.set()
        if self._bounded is not None:
            self._bounded.close()

    def _within(self, what: str, function: Callable[[], _Result], timeout_s: float) -> _Result:
        return function() if self._bounded is None else self._bounded(what, function, timeout_s)

    def _read(self, version: WeightVersion, base: tuple[WeightVersion, str] | None) -> FetchedArrays:
        offer = self._offer(version)
        names = None if base is None else offer.chains.get(base)
        try:
            if names is None:
                arrays = self._shelf.arrays(offer.file, offer.manifest)
                received = FetchedArrays(offer.manifest, arrays, moved_bytes=offer.manifest.nbytes)
            else:
                messages = [self._shelf.message(name, offer.manifest.nbytes) for name in names]
                received = FetchedArrays(offer.manifest, None, messages, sum(len(message) for message in messages))
        except WeightsError:
            self._offer(version)  # where the files went because the version was superseded, that is the reason
            raise
        now = self._offer(version)
        if (now.manifest, now.file) != (offer.manifest, offer.file):
            raise WeightsError(f"{version} was published anew while it was read")
        return received

    def _offer(self, version: WeightVersion) -> OfferedVersion:
        marker = self._marker()
        if marker is None:
            raise SupersededVersionError(f"{version} is not available: nothing is published yet")
        return marker.offer(version)

    def _marker(self) -> CurrentVersion | None:
        content = self._shelf.marker()
        if content is None:
            return None
        seen = self._seen
        if seen is None or seen[0] != content:
            # A read that was left behind may come here too, so what it finds is not taken for this one's.
            seen = self._seen = content, CurrentVersion.from_bytes(content, self._job, self._token, self._max_bytes)
        return seen[1]
