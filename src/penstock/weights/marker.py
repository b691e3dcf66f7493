"""The marker: one small file that says which publications lie beside it, replaced in one move after they are whole.

It is signed with the job's token (HMAC-SHA-256), so that a client takes nothing of another job or token. Names in it
are plain file names; numbers are checked before anything is opened or allocated.
"""

import functools
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.types import SupersededVersionError, WeightsError, WeightVersion
from penstock.weights.fetching import Announcement
from penstock.weights.manifest import Manifest, compact_json, read_json, version_from_values

_FORMAT = 1
_SIGNATURE_CHARACTERS = 64
_MOST_OFFERS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

Chains = dict[tuple[WeightVersion, str], tuple[str, ...]]
"""Names of delta files that lead from a content to the publication, in order."""


@dataclass(frozen=True, slots=True)
class Offer:
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
class Marker:
    """What a place offers.

    Attributes:
        job: Whose weights.
        offers: The newest first; at least one.
    """

    job: str
    offers: tuple[Offer, ...]

    @property
    def announcement(self) -> Announcement:
        """Who published last, and which version."""
        newest = self.offers[0].manifest
        return Announcement(newest.incarnation, newest.version)

    @property
    def files(self) -> set[str]:
        """Every file that is still needed."""
        return set().union(*(offer.files for offer in self.offers))

    def offer(self, version: WeightVersion) -> Offer:
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
    def from_bytes(cls, content: bytes, job: str, token: str | None, max_bytes: int) -> "Marker":
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


def _offer_values(offer: Offer) -> dict[str, Any]:
    return {
        "manifest": offer.manifest.to_values(),
        "file": offer.file,
        "chains": [
            [[version.lineage, version.step], digest, list(names)] for (version, digest), names in offer.chains.items()
        ],
    }


def _offer(values: Any, max_bytes: int) -> Offer:
    chains = {
        (version_from_values(version), str(digest)): tuple(_name(name) for name in _list(names))
        for version, digest, names in _list(values["chains"])
    }
    return Offer(Manifest.from_values(values["manifest"], max_bytes), _name(values["file"]), chains)


def _list(values: Any) -> Sequence[Any]:
    if not isinstance(values, list) or len(values) > _MOST_OFFERS:
        raise ValueError(f"not a list of at most {_MOST_OFFERS} entries")
    return values


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r:.150} is not a plain file name")
    return value
