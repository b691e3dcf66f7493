"""Names of files that sort by the time at which they were made.

A part is named by a UUID of version 7 (RFC 9562), which begins with its time; so files in the order of their names
are in the order of ingest, for every reader, and a file's age needs neither its content nor the file system's clock.
"""

import re
import secrets
import threading
import uuid
from collections.abc import Callable, Iterable

from penstock.rundir.storage import SUFFIX, StoredFile
from penstock.types import Clock

_TICKS_PER_S = 1000 * 4096
"""A UUID of version 7 has 48 bits of milliseconds and, as used here, 12 bits below them."""
_UUID = re.compile(r"([0-9a-f]{32})$")
_BATCH_TIME = re.compile(r"^batch_.*_([0-9]{10,16})$")


class PartNames:
    """Gives out names, each later than the one before and than those of earlier lives. Thread-safe.

    Args:
        folder: Of the files.
        clock: Unix seconds; it may have stepped back since the last name was given.
        existing: Names that the folder has; asked once, before the first name is given.
    """

    def __init__(self, folder: str, clock: Clock, existing: Callable[[], Iterable[str]] = tuple) -> None:
        self._folder = folder
        self._clock = clock
        self._existing = existing
        self._lock = threading.Lock()
        self._last: int | None = None

    def next(self) -> str:
        """A name of now."""
        with self._lock:
            if self._last is None:
                self._last = max((ticks for name in self._existing() if (ticks := _ticks(name)) is not None), default=0)
            self._last = max(self._last + 1, int(self._clock() * _TICKS_PER_S))
            return self._name(self._last)

    def like(self, name: str) -> str:
        """Another name of the same time, for a file that takes another's place."""
        ticks = _ticks(name)
        return self.next() if ticks is None else self._name(ticks)

    def _name(self, ticks: int) -> str:
        return f"{self._folder}/part-{_time_ordered_uuid(ticks).hex}{SUFFIX}"


def made_at_s(file: StoredFile) -> float:
    """Unix seconds at which a part or a batch was made: by its name, else by its file."""
    ticks = _ticks(file.name)
    if ticks is not None:
        return ticks / _TICKS_PER_S
    batch = _BATCH_TIME.match(_stem(file.name))
    return file.modified_s if batch is None else int(batch[1]) / 1000


def _stem(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(SUFFIX)


def _ticks(name: str) -> int | None:
    """The time in a part's name; None where it holds none."""
    found = _UUID.search(_stem(name))
    if not _stem(name).startswith("part-") or found is None:
        return None
    value = uuid.UUID(found[1])
    return (value.int >> 80) << 12 | (value.int >> 64 & 0xFFF) if value.version == 7 else None


def _time_ordered_uuid(ticks: int) -> uuid.UUID:
    milliseconds, fraction = ticks >> 12, ticks & 0xFFF
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | secrets.randbits(62))
