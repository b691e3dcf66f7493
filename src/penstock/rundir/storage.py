"""Folders of files that never change: the protocol, and the one on the local disk (`remote` has the other).

A file appears under its name only when it is whole and durable, and is deleted whole; there is no other operation. Not
covered: locks. One process writes.
"""

import os
import stat
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from penstock.rundir.atomic import UNFINISHED_PATTERN, replaced_atomically
from penstock.rundir.store_urls import is_remote, local_root, shown_url
from penstock.types import ConfigError

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
                if not stat.S_ISREG(status.st_mode):
                    continue  # a reader would wait at a pipe for ever
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

    def set_aside(self, name: str) -> str:
        """See `Storage.set_aside`."""
        target = self.root / DAMAGED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.root / name, target)
        return str(target)

    def prepare(self, folders: Sequence[str]) -> None:
        """See `Storage.prepare`."""
        for folder in folders:
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def remove_unfinished(self, folders: Sequence[str]) -> None:
        """See `Storage.remove_unfinished`."""
        for folder in folders:
            for path in (self.root / folder).glob(UNFINISHED_PATTERN):
                path.unlink(missing_ok=True)

    def locate(self, name: str) -> str:
        """See `Storage.locate`."""
        return str(self.root / name)


def open_storage(root: Path, url: str | None) -> Storage:
    """Where files lie: under `root`, or where a URL or path says.

    Raises:
        ConfigError: the URL's protocol is unknown, or the package for it is not installed.
    """
    if url is None or not is_remote(url):
        return LocalStorage(local_root(root, url))
    from penstock.rundir.remote import RemoteStorage

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
