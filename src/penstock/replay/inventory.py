"""What the writer knows of its files: sizes, and which of them somebody has plans for. Thread-safe.

Each folder is listed once, before the writer's first file; from then on the writer's own doings are counted. A file is
in one of four states: *kept*; *merging*, while its rows are copied; *replaced*, when they are in another file and it
only waits to be deleted; *offered*, when it may go at the next checkpoint. Only kept files are merged or offered, so
the two never meet, and a merged file is touched by neither as long as one that it replaces is still there.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.rundir.part_names import made_at_s
from penstock.rundir.storage import StoredFile


class State(Enum):
    """What somebody plans with a file; the module says what each means."""

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
        readable: False where somebody looked and it was not a Parquet file of ours.
    """

    name: str
    size_bytes: int
    made_at_s: float
    rows: int | None = None
    mergeable: bool = True
    state: State = State.KEPT
    replaces: set[str] = field(default_factory=set[str])
    groups: frozenset[str] | None = None
    readable: bool = True


class Inventory:
    """The writer's files.

    Args:
        folders: That are counted.
        list_files: Lists a folder; called once for each.
    """

    def __init__(self, folders: Sequence[str], list_files: Callable[[str], Iterable[StoredFile]]) -> None:
        self._folders = folders
        self._list_files = list_files
        self._lock = threading.RLock()
        self._listed: dict[str, dict[str, Entry]] | None = None
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What all files take."""
        with self._lock:
            self._by_folder()
            return self._bytes

    def begin(self) -> None:
        """Lists what is there, unless that is done; before the first write.

        So a file whose write failed, though it may have appeared, is unknown here until another try has written it
        anew: nobody merges or deletes it meanwhile.
        """
        with self._lock:
            self._by_folder()

    def add(self, file: StoredFile, rows: int | None = None, replaces: Collection[str] = ()) -> None:
        """A file was written; those that it replaces only wait to be deleted."""
        with self._lock:
            self.remove(file.name)
            entries = self._siblings(file.name)
            waiting = {name for name in replaces if name in entries}
            entries[file.name] = Entry(file.name, file.size_bytes, made_at_s(file), rows, replaces=waiting)
            self._bytes += file.size_bytes
            for name in waiting:
                entries[name].state = State.REPLACED

    def remove(self, name: str) -> None:
        """A file was deleted, or is there no more."""
        with self._lock:
            entries = self._siblings(name)
            entry = entries.pop(name, None)
            if entry is None:
                return
            self._bytes -= entry.size_bytes
            if entry.state is State.REPLACED:
                for other in entries.values():
                    other.replaces.discard(name)

    def change(self, names: Iterable[str], state: State, only: State | None = None) -> list[str]:
        """Files change their state, all or those in one state; names that are gone are passed over.

        Returns:
            The names of those that did.
        """
        with self._lock:
            known = [entry for name in names if (entry := self._siblings(name).get(name)) is not None]
            changed = [entry for entry in known if only is None or entry.state is only]
            for entry in changed:
                entry.state = state
            return [entry.name for entry in changed]

    def kept(self, folders: Sequence[str]) -> list[Entry]:
        """Files of some folders that nobody has plans for, the oldest first."""
        with self._lock:
            entries = [entry for folder in folders for entry in self._by_folder()[folder].values()]
            free = [entry for entry in entries if entry.state is State.KEPT and not entry.replaces]
        return sorted(free, key=lambda entry: (entry.made_at_s, entry.name))

    def in_state(self, state: State) -> list[Entry]:
        """Files in a state."""
        with self._lock:
            return [e for entries in self._by_folder().values() for e in entries.values() if e.state is state]

    def names(self, folder: str) -> list[str]:
        """Names of the files that a folder has."""
        with self._lock:
            return list(self._by_folder()[folder])

    def count(self, folder: str) -> int:
        """How many files a folder has."""
        with self._lock:
            return len(self._by_folder()[folder])

    def _siblings(self, name: str) -> dict[str, Entry]:
        return self._by_folder()[name.partition("/")[0]]

    def _by_folder(self) -> dict[str, dict[str, Entry]]:
        if self._listed is None:
            files = {folder: list(self._list_files(folder)) for folder in self._folders}
            self._listed = {
                folder: {file.name: Entry(file.name, file.size_bytes, made_at_s(file)) for file in found}
                for folder, found in files.items()
            }
            self._bytes = sum(file.size_bytes for found in files.values() for file in found)
        return self._listed
