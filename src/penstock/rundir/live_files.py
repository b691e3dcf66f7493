"""How a folder is read while its writer merges and deletes files.

A file that was merged into another does not count where both are there. A file that is gone when it is opened was
merged or has expired: the folder is listed again. What was read already is not read twice, since files never change.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.rundir.parquet import opened_parquet, replaced_names
from penstock.rundir.storage import Storage
from penstock.types import InvalidRolloutError, RunDirectoryError, SchemaVersionError

Read = TypeVar("Read")

_ATTEMPTS = 16
_LOST_GROUPS = "its groups are generated again when the run resumes"
UNREADABLE = (
    RunDirectoryError, InvalidRolloutError, pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError,
    AttributeError, OverflowError, MemoryError,
)  # fmt: skip
"""What reading a file may raise whose bytes are not those that were written."""
_LOSS = {
    "batches": "what it trained stays trained, but cannot be looked at any more",
    "fragments": "its fragments are lost, and the run goes on with others",
}


@contextmanager
def opened_part(storage: Storage, name: str) -> Generator[pq.ParquetFile, None, None]:
    """Opens one file of a folder.

    Raises:
        FileNotFoundError: it was merged, or has expired.
        SchemaVersionError: a newer Penstock wrote it.
        RunDirectoryError: it is not Parquet; the message says how the run can go on without it.
    """
    try:
        with storage.opened(name) as source, opened_parquet(source, storage.locate(name)) as file:
            yield file
    except RunDirectoryError as error:
        folder = name.rpartition("/")[0]
        raise RunDirectoryError(
            f"{error}; restore it from a copy, or move it out of {folder}/: {_LOSS.get(folder, _LOST_GROUPS)}"
        ) from error


def read_live(
    storage: Storage,
    folder: str,
    read: Callable[[pq.ParquetFile, str], Read],
    on_damage: Callable[[str, Exception], None] | None = None,
) -> dict[str, Read]:
    """Reads every file of a folder that counts.

    Args:
        storage: Where the folder is.
        folder: Its name.
        read: Takes an opened file and its name.
        on_damage: Told of a file that cannot be read, which does not count then; None makes that an error.

    Returns:
        What was read, by name, in the order of names.

    Raises:
        SchemaVersionError: a newer Penstock wrote a file.
        RunDirectoryError: a file is not Parquet, or files vanish faster than they can be read.
    """
    found: dict[str, tuple[Read, tuple[str, ...]]] = {}
    damaged: set[str] = set()
    for _ in range(_ATTEMPTS):
        names = [file.name for file in storage.files(folder) if file.name not in damaged]
        try:
            for name in list(names):
                if name in found:
                    continue
                try:
                    with opened_part(storage, name) as file:
                        found[name] = (read(file, name), replaced_names(file.schema_arrow))
                except (FileNotFoundError, SchemaVersionError):
                    raise
                except UNREADABLE as error:
                    if on_damage is None:
                        raise
                    damaged.add(name)
                    names.remove(name)
                    on_damage(name, error)
        except FileNotFoundError:
            continue
        replaced = {f"{folder}/{old}" for name in names for old in found[name][1]}
        return {name: found[name][0] for name in names if name not in replaced}
    raise RunDirectoryError(
        f"{storage.locate(folder)}: files vanished {_ATTEMPTS} times while they were read; try again later"
    )
