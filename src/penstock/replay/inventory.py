"""What the writer knows of its files: sizes, and which of them somebody has plans for. Thread-safe.

Each file is listed once, when the writer first asks; from then on the writer's own doings are counted. A file is in
one of four states: *kept*; *merging*, while its rows are copied; *replaced*, when they are in another file and it only
waits to be deleted; *offered*, when it may go at the next checkpoint. Only kept files are merged or offered, so the two
never meet, and a merged file is touched by neither as long as one that it replaces is still there.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.rundir.part_names import made_at_s
from penstock.rundir.storage import StoredFile


class State(Enum):
    """See the module."""

    KEPT = auto()
    MERGING = auto()
    REPLACED = auto()
    OFFERED = auto()


@dataclass(slots=True)
class Entry:
    """One file.

    Attributes:
        name: Folder and file name.
        size_bytes: Its size.
        made_at_s: Unix seconds.
        rows: How many; None while nobody has looked.
        mergeable: Whether it may be merged with others; False for rows of another schema.
        state: See the module.
        replaces: Files whose rows it holds too and that are still there.
        groups: Its groups, where somebody had to look and the file stayed.
    """

    name: str
    size_bytes: int
    made_at_s: float
    rows: int | None = None
    mergeable: bool = True
    state: State = State.KEPT
    replaces: set[str] = field(default_factory=set[str])
    groups: frozenset[str] | None = None


class Inventory:
    """The writer's files.

    Args:
        list_files: Lists all of them; called once.
    """

    def __init__(self, list_files: Callable[[], Iterable[StoredFile]]) -> None:
        self._list_files = list_files
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] | None = None
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What all files take."""
        with self._lock:
            self._known()
            return self._bytes

    @property
    def leaving_bytes(self) -> int:
        """What those take that are only waiting to be deleted."""
        with self._lock:
            return sum(entry.size_bytes for entry in self._known().values() if entry.state is State.REPLACED)

    def add(self, file: StoredFile, rows: int | None = None, replaces: Collection[str] = ()) -> None:
        """A file was written; those that it replaces only wait to be deleted."""
        with self._lock:
            entries = self._known()
            self._bytes -= entries[file.name].size_bytes if file.name in entries else 0
            self._bytes += file.size_bytes
            waiting = {name for name in replaces if name in entries}
            entries[file.name] = Entry(file.name, file.size_bytes, made_at_s(file), rows, replaces=waiting)
            for name in waiting:
                entries[name].state = State.REPLACED

    def remove(self, name: str) -> None:
        """A file was deleted."""
        with self._lock:
            entries = self._known()
            entry = entries.pop(name, None)
            self._bytes -= 0 if entry is None else entry.size_bytes
            for other in entries.values():
                other.replaces.discard(name)

    def mark(self, names: Iterable[str], state: State) -> None:
        """Files change their state; names that are gone are passed over."""
        with self._lock:
            for name in names:
                if name in self._known():
                    self._known()[name].state = state

    def kept(self) -> list[Entry]:
        """Files that nobody has plans for, the oldest first."""
        with self._lock:
            found = [e for e in self._known().values() if e.state is State.KEPT and not e.replaces]
        return sorted(found, key=lambda entry: (entry.made_at_s, entry.name))

    def names(self, state: State) -> list[str]:
        """Files in a state."""
        with self._lock:
            return [entry.name for entry in self._known().values() if entry.state is state]

    def __contains__(self, name: str) -> bool:
        """Whether there is such a file."""
        with self._lock:
            return name in self._known()

    def __len__(self) -> int:
        """How many files there are."""
        with self._lock:
            return len(self._known())

    def _known(self) -> dict[str, Entry]:
        if self._entries is None:
            files = list(self._list_files())
            self._entries = {file.name: Entry(file.name, file.size_bytes, made_at_s(file)) for file in files}
            self._bytes = sum(file.size_bytes for file in files)
        return self._entries
