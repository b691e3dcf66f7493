"""Folders of files at an fsspec URL; see `storage` for the promises.

On an object store a file appears by one upload under its final key, which is atomic; on any other remote file system
by an upload aside and a move, which is as atomic as that file system's move. Listings are never taken from a cache.
"""

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from penstock.rundir.storage import DAMAGED, SUFFIX, StoredFile, open_filesystem
from penstock.types import ConfigError

_ATOMIC_UPLOAD = frozenset("s3 s3a gs gcs abfs abfss az adl oss obs tos memory".split())
"""Protocols on which an upload appears under its key when it is complete, and not before."""


class RemoteStorage:
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

    def files(self, folder: str) -> list[StoredFile]:
        """See `Storage.files`."""
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
    def writing(self, name: str) -> Generator[Path, None, None]:
        """See `Storage.writing`."""
        with tempfile.TemporaryDirectory(prefix="penstock-upload-") as folder:
            path = Path(folder) / "file"
            yield path
            self._upload(path, name)

    @contextmanager
    def opened(self, name: str) -> Generator[BinaryIO, None, None]:
        """See `Storage.opened`."""
        with self.filesystem.open(f"{self.root}/{name}", "rb") as file:
            yield file

    def delete(self, name: str) -> None:
        """See `Storage.delete`."""
        try:
            self.filesystem.rm_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return

    def set_aside(self, name: str) -> str:
        """See `Storage.set_aside`."""
        target = f"{DAMAGED}/{name}"
        self._make_folder(target.rpartition("/")[0])
        self.filesystem.mv(f"{self.root}/{name}", f"{self.root}/{target}")
        return self.locate(target)

    def prepare(self, folders: Sequence[str]) -> None:
        """See `Storage.prepare`."""
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

    def remove_unfinished(self, folders: Sequence[str]) -> None:
        """See `Storage.remove_unfinished`."""
        if self._protocol in _ATOMIC_UPLOAD:
            return
        for folder in folders:
            for entry in self.filesystem.ls(f"{self.root}/{folder}", detail=False):
                base = str(entry).rpartition("/")[2]
                if base.startswith(".") and base.endswith(".tmp"):
                    self.filesystem.rm_file(entry)

    def locate(self, name: str) -> str:
        """See `Storage.locate`."""
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
