"""Files that are either the old ones or the new ones, never something between.

A file is written under a name that no reader's pattern matches (``.<name>.<random>.tmp``), flushed to the disk,
and renamed. A process killed in between leaves the unfinished file behind; `LocalStorage.prepare` deletes such files
before a run resumes. Concurrent writers of one path do not disturb one another: the last wins.

A full disk has no place for a new file. `keep_room` keeps one beforehand, for a small file that must tell the truth
even then, and `write_into_kept_room` uses it. `check_place` asks before the work whether a file can be made at all.
"""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.types import ConfigError

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
            _flush(temporary)
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
        ConfigError: it cannot, or the path cannot be printed.
    """
    check_name(path, what)
    made: list[Path] = []
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
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
    _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
