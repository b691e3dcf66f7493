"""Publications as files that a signed pointer names: what shared memory and checkpoint files have in common.

The files of a version are written first; then the pointer is replaced in one move. It carries the manifests, and is
signed with the job's token (HMAC-SHA-256), so that a client takes nothing of another job or token. Names in it are
plain file names, and numbers are checked before anything is opened or allocated.

Files notify nobody, so clients poll the pointer. A network's file system may hang: then each read has a time limit, and
is left behind in its thread. Not covered: where the files lie, which is what `VersionFiles` are for.
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
from typing_extensions import override

from penstock.types import Stopped, SupersededVersionError, UnreachableError, WeightsError, WeightVersion
from penstock.types.calls import in_background
from penstock.weights.broadcaster import Publication, TransportServer
from penstock.weights.client import FetchedArrays, LatestVersion, TransportReader
from penstock.weights.manifest import Content, Manifest, compact_json, read_json, version_from_values

POINTER = "marker.json"
"""Name of the file that says which versions lie beside it."""

POINTER_S = 10.0
"""Longest read of a pointer."""

MAX_HUNG_CALLS = 4
"""Maximum number of concurrent hung calls."""

_FORMAT = 1
_SIGNATURE_CHARACTERS = 64
_MAX_ENTRIES = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_T = TypeVar("_T")

Chains = dict[Content, tuple[str, ...]]
"""Names of delta files that lead from a content to the publication, in order."""


class VersionFiles(Protocol):
    """A job's files in one place, for both sides; the pointer is one of them.

    Attributes:
        may_hang: Whether a read can take without end.
        poll_s: Pause between two reads of the pointer.
    """

    may_hang: bool
    poll_s: float

    def prepare(self) -> None:
        """Makes the place ready for writing.

        Raises:
            ConfigError: it cannot be written.
            WeightsError: another broadcaster of the job lives.
        """
        ...

    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        """Names a file for these arrays that is not among the taken ones; whatever can, is written from here on.

        Raises:
            WeightsError: there is no space.
        """
        ...

    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes the arrays that were begun last.

        They may still be written when this returns, and are whole when the pointer is. They do not change meanwhile.

        Raises:
            WeightsError: there is no space.
        """
        ...

    def write_delta(self, name: str, buffers: Iterable[bytes]) -> None:
        """Makes or replaces a file. Raises as `write_arrays`."""
        ...

    def write_pointer(self, content: bytes) -> None:
        """Replaces the pointer in one move, after all else is whole. Raises as `write_arrays`."""
        ...

    def discard(self, names: set[str]) -> None:
        """Frees files that the pointer names no more."""
        ...

    def endpoint(self) -> dict[str, Any]:
        """What a client needs to find the place."""
        ...

    def read_pointer(self) -> bytes | None:
        """The pointer as it is now; None where there is none yet.

        Raises:
            UnreachableError: the place is gone, or does not answer.
        """
        ...

    def read_arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        """The arrays in a file, read-only, in the manifest's layout; not verified.

        Raises:
            WeightsError: the file is gone, or of another size.
            UnreachableError: the place is gone, or does not answer.
        """
        ...

    def read_delta(self, name: str, max_bytes: int) -> Any:
        """A file as a buffer of bytes. Raises as `read_arrays`; also where it is larger than allowed."""
        ...

    def close(self) -> None:
        """Frees what a writer holds; nothing for a reader."""
        ...


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
        """Names of all files that it needs."""
        return {self.file, *(name for names in self.chains.values() for name in names)}


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    """The pointer: which publications can be fetched.

    Attributes:
        job: Whose weights.
        offers: The newest first; at least one.
    """

    job: str
    offers: tuple[OfferedVersion, ...]

    @property
    def latest(self) -> LatestVersion:
        """Who published last, and which version."""
        newest = self.offers[0].manifest
        return LatestVersion(newest.incarnation, newest.version)

    @property
    def files(self) -> set[str]:
        """Names of all files that are still needed."""
        return set().union(*(offer.files for offer in self.offers))

    def offer(self, version: WeightVersion) -> OfferedVersion:
        """The newest publication of that version.

        Raises:
            SupersededVersionError: there is none.
        """
        for offer in self.offers:
            if offer.manifest.version == version:
                return offer
        newest = self.latest.version
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
        """Reads the signed file.

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


class FileTransport(TransportServer, TransportReader):
    """Offers publications as files, or reads them; one object does one of the two.

    Args:
        files: The place; closed with this.
        job: The run.
        token: Signs the pointer.
        max_bytes: Largest publication that is read.
        keep: Publications that are offered; deltas lead to the newest only.
    """

    def __init__(self, files: VersionFiles, job: str, token: str | None, max_bytes: int, keep: int = 1) -> None:
        self._files, self._job, self._token, self._max_bytes, self._keep = files, job, token, max_bytes, keep
        self._closed = threading.Event()
        self._limited = TimeLimitedCalls() if files.may_hang else None
        self._seen: tuple[bytes, CurrentVersion] | None = None
        self._offered: CurrentVersion | None = None
        self._begun = ""
        self._deltas: dict[tuple[Content, Content], str] = {}
        self._numbers: dict[str, float] = {}

    def prepare(self) -> "FileTransport":
        """Makes the place ready for `put`, and keeps what a broadcaster before offers there; returns this.

        What that signed with another token, or left damaged, is written over.

        Raises:
            ConfigError: the place cannot be written.
            WeightsError: another broadcaster of the job lives.
        """
        self._files.prepare()
        content = self._files.read_pointer()
        try:
            self._offered = None if content is None else self._parsed(content)
        except WeightsError:
            self._offered = None
        return self

    @override
    def begin(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._begun = self._files.begin_arrays(arrays, self._taken)

    @override
    def put(self, publication: Publication) -> None:
        manifest, taken = publication.manifest, self._taken
        file, self._begun = self._begun, ""
        assert file  # it was begun
        before = self._older_offers(manifest)
        self._files.write_arrays(file, manifest, publication.arrays)
        deltas, written = self._write_deltas(publication, taken)
        chains = {
            base: tuple(deltas[delta.base, delta.manifest.content] for delta in chain)
            for base, chain in publication.chains.items()
        }
        offered = CurrentVersion(self._job, (OfferedVersion(manifest, file, chains), *before))
        self._files.write_pointer(offered.to_bytes(self._token))
        self._offered, self._deltas = offered, deltas
        self._numbers["weights/bytes_written"] = float(manifest.nbytes + written)
        self._files.discard(taken - offered.files)

    @override
    def endpoint(self) -> dict[str, Any]:
        return self._files.endpoint()

    @override
    def wait(self, known: LatestVersion | None, timeout_s: float) -> LatestVersion | None:
        deadline = time.monotonic() + timeout_s
        while True:
            current = self._within("reading the marker of weights", self._read_pointer, POINTER_S)
            newest = None if current is None else current.latest
            remaining_s = deadline - time.monotonic()
            if newest != known or remaining_s <= 0 or self._closed.is_set():
                return newest
            self._closed.wait(min(self._files.poll_s, remaining_s))

    @override
    def read(self, version: WeightVersion, base: Content | None, timeout_s: float) -> FetchedArrays:
        """The timeout does not apply to memory, which either comes or fails."""
        if self._closed.is_set():
            raise Stopped("the reader of weights was closed")
        return self._within(f"reading {version}", lambda: self._read(version, base), timeout_s)

    @override
    def metrics(self) -> dict[str, float]:
        return dict(self._numbers)

    @override
    def close(self) -> None:
        self._closed.set()
        if self._limited is not None:
            self._limited.close()
        self._files.close()

    @property
    def _taken(self) -> set[str]:
        return set() if self._offered is None else self._offered.files

    def _older_offers(self, manifest: Manifest) -> list[OfferedVersion]:
        """What is offered beside the next publication."""
        offers = () if self._offered is None else self._offered.offers
        if offers and manifest.version < offers[0].manifest.version:
            newest = offers[0].manifest.version
            raise WeightsError(f"{manifest.version} is older than {newest}, which a broadcaster of this job published")
        older = [offer for offer in offers if offer.manifest.version != manifest.version][: self._keep - 1]
        return [OfferedVersion(offer.manifest, offer.file, Chains()) for offer in older]

    def _write_deltas(
        self, publication: Publication, taken: set[str]
    ) -> tuple[dict[tuple[Content, Content], str], int]:
        """The file of each delta, and how many bytes were written; those of before are used again."""
        files: dict[tuple[Content, Content], str] = {}
        written = 0
        for delta in (delta for chain in publication.chains.values() for delta in chain):
            way = delta.base, delta.manifest.content
            if way in files:
                continue
            if way in self._deltas:
                files[way] = self._deltas[way]
                continue
            files[way] = free_name("delta", ".bin", taken | set(files.values()) | set(self._deltas.values()))
            self._files.write_delta(files[way], delta.buffers)
            written += delta.nbytes
        return files, written

    def _within(self, what: str, function: Callable[[], _T], timeout_s: float) -> _T:
        return function() if self._limited is None else self._limited(what, function, timeout_s)

    def _read(self, version: WeightVersion, base: Content | None) -> FetchedArrays:
        offer = self._offer(version)
        names = None if base is None else offer.chains.get(base)
        try:
            if names is None:
                arrays = self._files.read_arrays(offer.file, offer.manifest)
                fetched = FetchedArrays(offer.manifest, arrays, moved_bytes=offer.manifest.nbytes)
            else:
                deltas = [self._files.read_delta(name, offer.manifest.nbytes) for name in names]
                fetched = FetchedArrays(offer.manifest, None, deltas, sum(len(delta) for delta in deltas))
        except WeightsError:
            self._offer(version)  # where the files went because the version was superseded, that is the reason
            raise
        now = self._offer(version)
        if (now.manifest, now.file) != (offer.manifest, offer.file):
            raise WeightsError(f"{version} was published anew while it was read")
        return fetched

    def _offer(self, version: WeightVersion) -> OfferedVersion:
        current = self._read_pointer()
        if current is None:
            raise SupersededVersionError(f"{version} is not available: nothing is published yet")
        return current.offer(version)

    def _read_pointer(self) -> CurrentVersion | None:
        content = self._files.read_pointer()
        if content is None:
            return None
        seen = self._seen
        if seen is None or seen[0] != content:
            # A read that was left behind may come here too, so what it finds is not taken for this one's.
            seen = self._seen = content, self._parsed(content)
        return seen[1]

    def _parsed(self, content: bytes) -> CurrentVersion:
        return CurrentVersion.from_bytes(content, self._job, self._token, self._max_bytes)


class TimeLimitedCalls:
    """Calls that may hang, such as reads of a network's file system: each in a thread that is left behind in time.

    Nothing ends a read that hangs. `MAX_HUNG_CALLS` of them may; then no other begins before one of them is over. Makes
    calls for one thread at a time; `close` comes from another.
    """

    def __init__(self) -> None:
        self._closed: Future[None] = Future()
        self._hung: list[tuple[str, Future[Any]]] = []

    def __call__(self, what: str, function: Callable[[], _T], timeout_s: float) -> _T:
        """Calls a function and returns its result, or raises what it raised.

        Args:
            what: Begins the error, such as ``reading the delta``.
            function: May go on after the limit, in its thread; then its result is thrown away.
            timeout_s: The limit.

        Raises:
            UnreachableError: it is not over in time, or too many before it still hang, or this was closed.
        """
        self._hung = [(name, call) for name, call in self._hung if not call.done()]
        if len(self._hung) >= MAX_HUNG_CALLS:
            first, _ = self._hung[0]
            raise UnreachableError(f"{what} did not begin: {len(self._hung)} before it hang, {first} first")
        call = in_background(function, "weights-read")
        either: list[Future[Any]] = [call, self._closed]
        wait(either, timeout_s, FIRST_COMPLETED)
        if call.done():
            return call.result()
        self._hung.append((what, call))
        if self._closed.done():
            raise UnreachableError(f"{what} was given up: the reader was closed")
        raise UnreachableError(f"{what} was not over within {timeout_s:.3g} s")

    def close(self) -> None:
        """Ends the wait for a call that runs. May be called twice."""
        if not self._closed.done():
            self._closed.set_result(None)


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
    """With the key taken in: that costs more than to sign a pointer, and is the same for every publication."""
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
    if not isinstance(values, list) or len(values) > _MAX_ENTRIES:
        raise ValueError(f"not a list of at most {_MAX_ENTRIES} entries")
    return values


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r:.150} is not a plain file name")
    return value
