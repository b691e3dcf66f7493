"""Folders of files that never change, on the local disk or at an fsspec URL; file names; files that are written whole.

A file appears under its name only when it is whole and durable, and is deleted whole; there is no other operation. On
an object store it appears by one upload under its final key, which is atomic; on any other remote file system by an
upload aside and a move, which is as atomic as that file system's move. Listings are never taken from a cache.

On the local disk a file is written under a name that no reader's pattern matches (``.<name>.<random>.tmp``), flushed,
and renamed: readers find the old file or the new one, never something between. A process killed in between leaves the
unfinished file behind; `LocalStorage.prepare` deletes such files before a run resumes. Concurrent writers of one path
do not disturb one another: the last wins. A full disk has no place for a new file: `keep_room` keeps one beforehand,
for a small file that must tell the truth even then, and `write_into_kept_room` uses it. `check_place` asks before the
work whether a file can be made at all.

A part is named by a UUID of version 7 (RFC 9562), which begins with its time; so files in the order of their names
are in the order of ingest, for every reader, and a file's age needs neither its content nor the file system's clock.

Not covered: locks. One process writes.
"""

import errno
import os
import re
import secrets
import stat
import tempfile
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from typing_extensions import override

from penstock.rundir.store_urls import is_remote, local_root, shown_url
from penstock.types import Clock, ConfigError

UNFINISHED_PATTERN = ".*.tmp"
"""Glob pattern of what a killed writer leaves behind."""


@contextmanager
def replaced_atomically(path: Path, durable: bool = True) -> Iterator[Path]:
    """Gives a temporary path to write to; it becomes `path` when the block ends without an error.

    Args:
        path: The file to make or replace.
        durable: Flush the file and its directory entry to the disk, so that the file survives a power loss.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        if durable:
            flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Makes or replaces `path` with `content` (text is UTF-8); see `replaced_atomically`."""
    with replaced_atomically(path, durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def is_full_disk(error: OSError) -> bool:
    """Whether a write failed for want of room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBUSY, errno.ESTALE, errno.ENETDOWN, errno.EHOSTUNREACH)


def is_refused(error: BaseException | None) -> bool:
    """Whether a file was not given to its reader, for want of rights or over a network: that is no damage of it."""
    while error is not None:
        if isinstance(error, PermissionError | ConnectionError | TimeoutError | BlockingIOError):
            return True
        if isinstance(error, OSError) and error.errno in _BUSY:
            return True
        error = error.__cause__
    return False


def keep_room(path: Path, size_bytes: int) -> None:
    """Makes sure that `write_into_kept_room` can write so much to `path`: in two files beside it, used in turn.

    Raises:
        OSError: there is no room to keep, or the disk refuses it otherwise.
    """
    for spare in _spares(path):
        with open(spare, "ab", opener=_open_no_link) as file:
            missing_bytes = size_bytes - file.tell()
            if missing_bytes > 0:
                file.write(bytes(missing_bytes))


def write_into_kept_room(path: Path, content: bytes) -> None:
    """Replaces `path` with `content` and blanks behind it, and takes no new room for that.

    The kept file that `path` does not name at present is written, and takes its name as a link.

    Raises:
        OSError: too little room was kept.
    """
    spare = next(spare for spare in _spares(path) if not (path.exists() and spare.exists() and spare.samefile(path)))
    room_bytes = spare.stat().st_size if spare.exists() else 0
    if room_bytes < len(content):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, and {room_bytes} bytes were kept", str(path))
    with open(spare, "r+b", opener=_open_no_link) as file:
        file.write(content.ljust(room_bytes))
    linked = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    os.link(spare, linked)
    os.replace(linked, path)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _spares(path: Path) -> list[Path]:
    return [path.with_name(f".{path.name}.room-{number}") for number in range(2)]


def check_name(path: Path, what: str) -> None:
    """Refuses a path that cannot be printed: logs and messages could not name it, nor could JSON.

    Args:
        path: Of what is to be written.
        what: The option or key that it was given by.

    Raises:
        ConfigError: it holds a line break, another control character, or bytes that are no UTF-8.
    """
    place = str(path.absolute())
    if not place.isprintable():
        raise ConfigError(f"{what} {place!a} holds characters that cannot be printed: choose another path")


def check_place(path: Path, what: str) -> None:
    """Tries whether a file can be made at `path`, before the work that is to go there; leaves nothing behind.

    Raises:
        ConfigError: it cannot, something is there, or the path cannot be printed.
    """
    check_name(path, what)
    made: list[Path] = []
    try:
        with suppress(FileNotFoundError):
            path.lstat()
            raise ConfigError(f"{what} {path} exists already and is not overwritten: choose another path")
        made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        trial = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be written: {error.strerror or error}: choose another place"
        ) from error
    finally:
        for folder in made:
            with suppress(OSError):  # somebody uses it by now
                folder.rmdir()


def sync_directory(directory: Path) -> None:
    """Flushes a directory's entries, so that a rename in it survives a power loss."""
    flush(directory)


def flush(path: Path) -> None:
    """Flushes a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_S3_LIMITS = {"connect_timeout": 5, "read_timeout": 15, "retries": {"mode": "standard", "max_attempts": 2}}
_HURRIED = {protocol: {"config_kwargs": _S3_LIMITS} for protocol in ("s3", "s3a")}
SUFFIX = ".parquet"
DAMAGED = "damaged"
"""Folder of what was put aside because it could not be read."""


class StoredFile(NamedTuple):
    """One file.

    Attributes:
        name: Folder and file name, ``rollouts/part-….parquet``.
        size_bytes: Its size.
        modified_s: Unix seconds at which it was made.
    """

    name: str
    size_bytes: int
    modified_s: float


class Storage(Protocol):
    """Where a run's Parquet files lie."""

    def files(self, folder: str) -> list[StoredFile]:
        """The finished Parquet files of a folder, by name; none where the folder is missing."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Gives a local path to write to, which becomes the named file when the block ends."""
        ...

    def opened(self, name: str) -> AbstractContextManager[Path | BinaryIO]:
        """Gives what `penstock.rundir.parquet.opened_parquet` takes.

        Raises:
            FileNotFoundError: there is no such file, or no more.
        """
        ...

    def delete(self, name: str) -> None:
        """Deletes a file; nothing happens where it is gone already."""
        ...

    def set_aside(self, name: str) -> str:
        """Moves a damaged file where no reader looks; returns where that is, for people."""
        ...

    def prepare(self, folders: Sequence[str]) -> None:
        """Makes folders, and sees whether files can be written.

        Raises:
            ConfigError: the place cannot be written.
        """
        ...

    def remove_unfinished(self, folders: Sequence[str]) -> None:
        """Deletes what a killed writer left unfinished; for the one process that writes here."""
        ...

    def locate(self, name: str) -> str:
        """The file's full name, for people."""
        ...


class LocalStorage(Storage):
    """Files under a local folder.

    Args:
        root: The folder; it may be missing until something is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @override
    def files(self, folder: str) -> list[StoredFile]:
        found: list[StoredFile] = []
        try:
            entries = list(os.scandir(self.root / folder))
        except FileNotFoundError:
            return found
        for entry in entries:
            if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # deleted meanwhile
                if not stat.S_ISREG(status.st_mode):
                    continue  # a reader would wait at a pipe for ever
                found.append(StoredFile(f"{folder}/{entry.name}", status.st_size, status.st_mtime))
        return sorted(found)

    @contextmanager
    @override
    def writing(self, name: str) -> Generator[Path, None, None]:
        with replaced_atomically(self.root / name) as temporary:
            yield temporary

    @contextmanager
    @override
    def opened(self, name: str) -> Generator[Path, None, None]:
        yield self.root / name

    @override
    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    def set_aside(self, name: str) -> str:
        target = self.root / DAMAGED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.root / name, target)
        return str(target)

    @override
    def prepare(self, folders: Sequence[str]) -> None:
        for folder in folders:
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    @override
    def remove_unfinished(self, folders: Sequence[str]) -> None:
        for folder in folders:
            for path in (self.root / folder).glob(UNFINISHED_PATTERN):
                path.unlink(missing_ok=True)

    @override
    def locate(self, name: str) -> str:
        return str(self.root / name)


def open_storage(root: Path, url: str | None) -> Storage:
    """Where files lie: under `root`, or where a URL or path says.

    Raises:
        ConfigError: the URL's protocol is unknown, or the package for it is not installed.
    """
    if url is None or not is_remote(url):
        return LocalStorage(local_root(root, url))

    return RemoteStorage(url)


def open_filesystem(url: str, hurried: bool = False) -> tuple[Any, str]:
    """An fsspec file system that caches no listings, and the path on it.

    Args:
        url: With its protocol.
        hurried: Give a store up that does not answer, where it otherwise is tried again for minutes: for people who
            wait.

    Raises:
        ConfigError: the protocol is unknown, or the package for it is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0]
    options = _HURRIED.get(protocol, {}) if hurried else {}
    try:
        return fsspec.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:
        package = str(known_implementations.get(protocol, {}).get("class", protocol)).partition(".")[0]
        wanted = "'penstock[s3]'" if package == "s3fs" else package
        raise ConfigError(
            f"replay.store.url is {shown_url(url)!r}, which needs the package {package}: pip install {wanted}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"replay.store.url is {shown_url(url)!r}, which fsspec cannot open: {error}") from error


_ATOMIC_UPLOAD = frozenset("s3 s3a gs gcs abfs abfss az adl oss obs tos memory".split())
"""Protocols on which an upload appears under its key when it is complete, and not before."""


class RemoteStorage(Storage):
    """Files under an fsspec URL.

    Args:
        url: With its protocol, ``s3://bucket/run``.
        hurried: Give a silent store up within a minute or so, for people who wait; a run tries longer.

    Raises:
        ConfigError: the protocol is unknown, or the package for it is not installed.
    """

    def __init__(self, url: str, hurried: bool = False) -> None:
        self._url = url.rstrip("/")
        self.filesystem, root = open_filesystem(url, hurried)
        self.root = root.rstrip("/")
        self._protocol = url.partition("://")[0]

    @override
    def files(self, folder: str) -> list[StoredFile]:
        path = f"{self.root}/{folder}"
        self.filesystem.invalidate_cache(path)
        try:
            entries = self.filesystem.ls(path, detail=True)
        except FileNotFoundError:
            return []
        names = [(str(entry["name"]).rpartition("/")[2], entry) for entry in entries if entry["type"] == "file"]
        return sorted(
            StoredFile(f"{folder}/{name}", int(entry["size"] or 0), _modified_s(entry))
            for name, entry in names
            if name.endswith(SUFFIX) and not name.startswith(".")
        )

    @contextmanager
    @override
    def writing(self, name: str) -> Generator[Path, None, None]:
        with tempfile.TemporaryDirectory(prefix="penstock-upload-") as folder:
            path = Path(folder) / "file"
            yield path
            self._upload(path, name)

    @contextmanager
    @override
    def opened(self, name: str) -> Generator[BinaryIO, None, None]:
        with self.filesystem.open(f"{self.root}/{name}", "rb") as file:
            yield file

    @override
    def delete(self, name: str) -> None:
        try:
            self.filesystem.rm_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return

    @override
    def set_aside(self, name: str) -> str:
        target = f"{DAMAGED}/{name}"
        self._make_folder(target.rpartition("/")[0])
        self.filesystem.mv(f"{self.root}/{name}", f"{self.root}/{target}")
        return self.locate(target)

    @override
    def prepare(self, folders: Sequence[str]) -> None:
        probe = f"{folders[0]}/.probe"
        try:
            for folder in folders:
                self._make_folder(folder)
            with self.writing(probe) as path:
                path.write_bytes(b"")
            self.delete(probe)
        except Exception as error:  # every remote file system raises errors of its own: credentials, network, rights
            raise ConfigError(
                f"replay.store.url is {self._url!r}, which cannot be written: {type(error).__name__}: {error}"
            ) from error

    @override
    def remove_unfinished(self, folders: Sequence[str]) -> None:
        if self._protocol in _ATOMIC_UPLOAD:
            return
        for folder in folders:
            for entry in self.filesystem.ls(f"{self.root}/{folder}", detail=False):
                base = str(entry).rpartition("/")[2]
                if base.startswith(".") and base.endswith(".tmp"):
                    self.filesystem.rm_file(entry)

    @override
    def locate(self, name: str) -> str:
        return f"{self._url}/{name}"

    def _upload(self, path: Path, name: str) -> None:
        target = f"{self.root}/{name}"
        if self._protocol == "memory":  # its files grow visibly while they are uploaded piece by piece
            self.filesystem.pipe_file(target, path.read_bytes())
        elif self._protocol in _ATOMIC_UPLOAD:
            self.filesystem.put_file(str(path), target)
        else:
            folder, _, base = target.rpartition("/")
            aside = f"{folder}/.{base}.tmp"
            self.filesystem.put_file(str(path), aside)
            self.filesystem.mv(aside, target)

    def _make_folder(self, folder: str) -> None:
        if self._protocol not in _ATOMIC_UPLOAD:  # object stores have none, and some would make a bucket
            self.filesystem.makedirs(f"{self.root}/{folder}", exist_ok=True)


def _modified_s(entry: dict[str, Any]) -> float:
    """Unix seconds from whichever key the file system has; 0 where it says nothing."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


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
