"""Folders of files that never change, on the local disk or at an fsspec URL.

A file appears under its name only when it is whole and durable, and is deleted whole; there is no other operation. On
the local disk that is a rename after a flush; on an object store one upload under the final key, which is atomic; on any
other remote file system an upload aside and a move, which is as atomic as that file system's move. Listings are never
taken from a cache. Not covered: locks. One process writes.
"""

import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from penstock.rundir.atomic import UNFINISHED_PATTERN, replaced_atomically
from penstock.types import ConfigError

SUFFIX = ".parquet"

_ATOMIC_UPLOAD = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "obs", "r2", "tos", "memory"}
)  # fmt: skip
"""Protocols on which an upload appears under its key when it is complete, and not before."""


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

    def prepare(self, folders: Sequence[str]) -> None:
        """Makes ready for writing: makes folders, and deletes what a killed writer left unfinished.

        Raises:
            ConfigError: the place cannot be written.
        """
        ...

    def locate(self, name: str) -> str:
        """The file's full name, for people."""
        ...


class LocalStorage:
    """Files under a local folder.

    Args:
        root: The folder; it may be missing until something is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self, folder: str) -> list[StoredFile]:
        """See `Storage.files`."""
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
                found.append(StoredFile(f"{folder}/{entry.name}", status.st_size, status.st_mtime))
        return sorted(found)

    @contextmanager
    def writing(self, name: str) -> Generator[Path, None, None]:
        """See `Storage.writing`."""
        with replaced_atomically(self.root / name) as temporary:
            yield temporary

    @contextmanager
    def opened(self, name: str) -> Generator[Path, None, None]:
        """See `Storage.opened`."""
        yield self.root / name

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        (self.root / name).unlink(missing_ok=True)

    def prepare(self, folders: Sequence[str]) -> None:
        """See `Storage.prepare`."""
        for folder in folders:
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            for path in (self.root / folder).glob(UNFINISHED_PATTERN):
                path.unlink()

    def locate(self, name: str) -> str:
        """See `Storage.locate`."""
        return str(self.root / name)


class RemoteStorage:
    """Files under an fsspec URL.

    Args:
        url: With its protocol, ``s3://bucket/run``.

    Raises:
        ConfigError: the protocol is unknown, or the package for it is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._filesystem, root = open_filesystem(url)
        self._root = root.rstrip("/")
        self._protocol = url.partition("://")[0]

    def files(self, folder: str) -> list[StoredFile]:
        """See `Storage.files`."""
        path = f"{self._root}/{folder}"
        self._filesystem.invalidate_cache(path)
        try:
            entries = self._filesystem.ls(path, detail=True)
        except FileNotFoundError:
            return []
        names = [(str(entry["name"]).rpartition("/")[2], entry) for entry in entries if entry["type"] == "file"]
        return sorted(
            StoredFile(f"{folder}/{name}", int(entry["size"] or 0), _modified_s(entry))
            for name, entry in names
            if name.endswith(SUFFIX) and not name.startswith(".")
        )

    @contextmanager
    def writing(self, name: str) -> Generator[Path, None, None]:
        """See `Storage.writing`."""
        with tempfile.TemporaryDirectory(prefix="penstock-upload-") as folder:
            path = Path(folder) / "file"
            yield path
            self._upload(path, name)

    @contextmanager
    def opened(self, name: str) -> Generator[BinaryIO, None, None]:
        """See `Storage.opened`."""
        with self._filesystem.open(f"{self._root}/{name}", "rb") as file:
            yield file

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        try:
            self._filesystem.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return

    def prepare(self, folders: Sequence[str]) -> None:
        """See `Storage.prepare`."""
        probe = f"{folders[0]}/.probe"
        try:
            for folder in folders:
                self._make_folder(folder)
                self._remove_unfinished(folder)
            with self.writing(probe) as path:
                path.write_bytes(b"")
            self.delete(probe)
        except Exception as error:  # every remote file system raises errors of its own: credentials, network, rights
            raise ConfigError(
                f"replay.store.url is {self._url!r}, which cannot be written: {type(error).__name__}: {error}"
            ) from error

    def locate(self, name: str) -> str:
        """See `Storage.locate`."""
        return f"{self._url}/{name}"

    def _upload(self, path: Path, name: str) -> None:
        target = f"{self._root}/{name}"
        if self._protocol == "memory":  # its files grow visibly while they are uploaded piece by piece
            self._filesystem.pipe_file(target, path.read_bytes())
        elif self._protocol in _ATOMIC_UPLOAD:
            self._filesystem.put_file(str(path), target)
        else:
            folder, _, base = target.rpartition("/")
            aside = f"{folder}/.{base}.tmp"
            self._filesystem.put_file(str(path), aside)
            self._filesystem.mv(aside, target)

    def _make_folder(self, folder: str) -> None:
        if self._protocol not in _ATOMIC_UPLOAD:  # object stores have none, and some would make a bucket
            self._filesystem.makedirs(f"{self._root}/{folder}", exist_ok=True)

    def _remove_unfinished(self, folder: str) -> None:
        if self._protocol not in _ATOMIC_UPLOAD:
            for entry in self._filesystem.ls(f"{self._root}/{folder}", detail=False):
                base = str(entry).rpartition("/")[2]
                if base.startswith(".") and base.endswith(".tmp"):
                    self._filesystem.rm_file(entry)


def open_storage(root: Path, url: str | None) -> LocalStorage | RemoteStorage:
    """Where files lie: under `root`, or where a URL or path says.

    Raises:
        ConfigError: the URL's protocol is unknown, or the package for it is not installed.
    """
    if url is None:
        return LocalStorage(root)
    protocol, separator, path = url.partition("://")
    if not separator:
        return LocalStorage(Path(url).expanduser())
    return LocalStorage(Path(path)) if protocol in ("file", "local") else RemoteStorage(url)


def open_filesystem(url: str) -> tuple[Any, str]:
    """An fsspec file system that caches no listings, and the path on it.

    Raises:
        ConfigError: the protocol is unknown, or the package for it is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0]
    try:
        return fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = str(known_implementations.get(protocol, {}).get("class", protocol)).partition(".")[0]
        wanted = "'penstock[s3]'" if package == "s3fs" else package
        raise ConfigError(
            f"replay.store.url is {url!r}, which needs the package {package}: pip install {wanted}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"replay.store.url is {url!r}, which fsspec cannot open: {error}") from error


def _modified_s(entry: dict[str, Any]) -> float:
    """Unix seconds from whichever key the file system has; 0 where it says nothing."""
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0
