"""Files that are either the old ones or the new ones, never something between.

A file is written under a name that no reader's pattern matches (``.<name>.<random>.tmp``), flushed to the disk,
and renamed. A process killed in between leaves the unfinished file behind; `LocalStorage.prepare` deletes such files
before a run resumes. Concurrent writers of one path do not disturb one another: the last wins.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def sync_directory(directory: Path) -> None:
    """Flushes a directory's entries, so that a rename in it survives a power loss."""
    _flush(directory)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
