"""The Parquet files of a run: how a folder is read while its writer merges and deletes files, and which files count.

A file that was merged into another does not count where both are there. A file that is gone when it is opened was
merged or has expired: the folder is listed again. What was read already is not read twice, since files never change.

A `RunFiles` is a snapshot of names: which files count, in which versions, and how to scan them. It stays valid until
some are merged or expire; `vanished` says whether that happened. Rollouts and batches may lie in another place than the
rest of the run, where ``replay.store.url`` says; evaluations never do. Of a run directory that others may have written,
no store in the network is asked. Nothing is written or made here. Not covered: the logs.
"""

import concurrent.futures
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from penstock.rundir.directory import RunDirectory
from penstock.rundir.evaluation_rows import EVALUATION_SCHEMA
from penstock.rundir.example_rows import EXAMPLE_SCHEMA
from penstock.rundir.fragment_rows import FRAGMENT_SCHEMA
from penstock.rundir.parquet import opened_parquet, replaced_names, schema_version
from penstock.rundir.rollout_rows import ROLLOUT_SCHEMA, records_from_batch, records_from_table, table_from_records
from penstock.rundir.storage import LocalStorage, RemoteStorage, Storage, is_refused
from penstock.rundir.store_urls import is_remote, local_root, url_problem
from penstock.types import (
    ConfigError,
    InvalidRolloutError,
    Mode,
    PenstockError,
    RolloutRecord,
    RunDirectoryError,
    SchemaVersionError,
)
from penstock.types.calls import in_background

if TYPE_CHECKING:
    import pyarrow.dataset as ds  # it imports pandas where that is there: loaded when something is read

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
    "evaluations": "its numbers stay in metrics.jsonl",
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
        remedy = f"restore it from a copy, or move it out of {folder}/: {_LOSS.get(folder, _LOST_GROUPS)}"
        if is_refused(error):
            remedy = "it is not damaged: see that it may be read, and try again"
        raise RunDirectoryError(f"{error}; {remedy}") from error


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
        on_damage: Told of a file that cannot be read, which does not count then; None makes that an error, as one that
            is refused always is.

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
                    if on_damage is None or is_refused(error):
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


FIRST_ANSWER_S = 30.0
"""So long may a store in the network take for its first listing."""


class StoreError(RunDirectoryError):
    """The store that ``replay.store.url`` names refuses, or cannot be reached."""


class FilesVanished(RunDirectoryError):
    """A file was merged into another, or has expired, since the files were listed: list them again."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Files of one run; made by `list_now`.

    Attributes:
        rollouts: Every rollout of the mode once, in the present schema; those of evaluations have its columns, too.
        evaluations: The rows of all files of evaluations.
        batches: The rows of all batch files; those of a fleet have no tokens.
        fragments: The rows of all fragment files.
        paths: The files behind them.
        filesystem: Where those are.
        url: Of the store; None: the run directory.
    """

    rollouts: "ds.Dataset"
    evaluations: "ds.Dataset"
    batches: "ds.Dataset"
    fragments: "ds.Dataset"
    paths: tuple[str, ...]
    filesystem: pafs.FileSystem
    url: str | None

    @classmethod
    def list_now(cls, directory: RunDirectory, trust: bool = False, mode: Mode = "train") -> "RunFiles":
        """What is there at this moment.

        Args:
            directory: Of the run whose files are wanted; it may lack a config.
            trust: Connect to the store in the network that its config names, whoever may have written that.
            mode: Whose rollouts are its `rollouts`: those of training, or those of evaluations.

        Raises:
            SchemaVersionError: a newer Penstock wrote a file.
            ConfigError: ``replay.store.url`` names a place that is not opened, that cannot be read, or is silent.
            RunDirectoryError: a file is not Parquet.
        """
        url = _store_url(directory, trust)
        evaluations = _evaluations(directory)
        with _telling(url):
            storage, filesystem, root = _open(directory, url)
            legacy = read_live(storage, "rollouts", _read_legacy)
            current, batches, fragments = (
                [f"{root}/{name}" for name in names]
                for names in (
                    [name for name, table in legacy.items() if table is None],
                    read_live(storage, "batches", _read_nothing),
                    read_live(storage, "fragments", _read_nothing),
                )
            )
            tables = [table for table in legacy.values() if table is not None]
            trained = _together(_dataset(filesystem, current, ROLLOUT_SCHEMA), tables)
            return cls(
                rollouts=trained if mode == "train" else evaluations,
                evaluations=evaluations,
                batches=_dataset(filesystem, batches, EXAMPLE_SCHEMA),
                fragments=_dataset(filesystem, fragments, FRAGMENT_SCHEMA),
                paths=(*current, *batches, *fragments),
                filesystem=filesystem,
                url=url,
            )

    @property
    def vanished(self) -> bool:
        """Whether a file is gone by now: merged into another, or expired."""
        with _telling(self.url):
            found = self.filesystem.get_file_info(list(self.paths))
        return any(info.type == pafs.FileType.NotFound for info in found)

    @contextmanager
    def reading(self) -> Generator[None, None, None]:
        """Around every read of the data sets: says by `FilesVanished` that a file is gone."""
        try:
            with _telling(self.url):
                yield
        except (OSError, pa.ArrowException, StoreError) as error:
            if self.vanished:
                raise FilesVanished(f"files of the run changed while they were read: {error}") from error
            reason = " ".join(str(error).split())
            raise RunDirectoryError(self.first_damaged() or f"files of the run cannot be read: {reason}") from error

    def first_damaged(self) -> str:
        """Which file a failed scan, which does not say, was about; empty where all can be read, or none is here."""
        evaluations: list[str] = getattr(self.evaluations, "files", [])  # none in the empty table of no files
        for path in (*(() if is_remote(self.url) else self.paths), *evaluations):
            place = Path(path)
            try:
                with opened_part(LocalStorage(place.parent.parent), f"{place.parent.name}/{place.name}") as file:
                    for _ in file.iter_batches():
                        pass
            except RunDirectoryError as error:
                return str(error)
        return ""

    def scan_rollouts(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Some columns of all rollouts, at most so many rows at a time, file by file."""
        batches = self.rollouts.to_batches(columns=list(columns), batch_size=rows)
        while True:
            with self.reading():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def read_rollouts(self, rollout_ids: Sequence[str]) -> dict[str, RolloutRecord]:
        """Whole records, by id; ids without a row are left out."""
        wanted = pc.field("rollout_id").isin(list(rollout_ids))
        with self.reading():
            table = self.rollouts.to_table(columns=ROLLOUT_SCHEMA.names, filter=wanted)
        return {record.rollout.rollout_id: record for record in records_from_table(self._versioned(table))}

    def records(self, rows: int = 4096) -> Iterator[RolloutRecord]:
        """All of them whole, read so many rows at a time, file by file."""
        for batch in self.scan_rollouts(ROLLOUT_SCHEMA.names, rows):
            yield from records_from_batch(batch, "rollouts")

    def read_uses(self, rollout_ids: Sequence[str]) -> pa.Table:
        """Rows of batch files, those of some rollouts at least; rows that several rollouts share are always there."""
        wanted = pc.field("rollout_id").isin(list(rollout_ids)) | pc.field("rollout_id").is_null()
        with self.reading():
            return self._versioned(self.batches.to_table(filter=wanted))

    @staticmethod
    def _versioned(table: pa.Table) -> pa.Table:
        """Datasets drop the metadata in which readers look for the version."""
        schema = ROLLOUT_SCHEMA if "turns" in table.column_names else EXAMPLE_SCHEMA
        return table.replace_schema_metadata(schema.metadata)


def open_run_storage(directory: RunDirectory, trust: bool = False) -> Storage:
    """Where a run's parts and batches are, for readers who list them time and again.

    Args:
        directory: Of the run; it may lack a config.
        trust: Connect to the store in the network that its config names, whoever may have written that.

    Raises:
        ConfigError: ``replay.store.url`` names a place that is not opened, that cannot be read, or is silent.
    """
    url = _store_url(directory, trust)
    with _telling(url):
        return _open(directory, url)[0]


def _open(directory: RunDirectory, url: str | None) -> tuple[Storage, pafs.FileSystem, str]:
    """Where rollouts and batches are: for listing, and for scanning with the path of its root."""
    if url is None or not is_remote(url):
        root = local_root(directory.path, url)
        return LocalStorage(root), pafs.LocalFileSystem(), str(root)
    storage = RemoteStorage(url, hurried=True)
    _first_answer(url, lambda: storage.files("rollouts"))
    return storage, pafs.PyFileSystem(pafs.FSSpecHandler(storage.filesystem)), storage.root


def _evaluations(directory: RunDirectory) -> "ds.Dataset":
    """They are always in the run directory, and stay there."""
    folder = directory.evaluations
    names = read_live(LocalStorage(directory.path), folder.name, _read_nothing)
    return _dataset(pafs.LocalFileSystem(), [str(directory.path / name) for name in names], EVALUATION_SCHEMA)


def _store_url(directory: RunDirectory, trust: bool) -> str | None:
    """What the run's config says, where it may be opened: it is data that anybody may have written."""
    url: Any = directory.read_config() if directory.config_path.is_file() else {}
    for key in ("replay", "store", "url"):
        url = url.get(key) if isinstance(url, dict) else None
    if url is None:
        return None
    place = f"{directory.config_path}: replay.store.url"
    if not isinstance(url, str):
        raise ConfigError(f"{place} is a {type(url).__name__}: it must be a path or a URL")
    if (problem := url_problem(url)) is not None:
        raise ConfigError(f"{place} {problem}")
    if is_remote(url) and not trust and (reason := directory.why_foreign()) is not None:
        raise ConfigError(
            f"{place} is {url!r}, and {reason}: nothing connects to where somebody else may have pointed; give --trust "
            "if you know that place"
        )
    return url


@contextmanager
def _telling(url: str | None) -> Generator[None, None, None]:
    """Around whatever asks a store in the network.

    Raises:
        StoreError: it refuses, or cannot be reached.
    """
    try:
        yield
    except Exception as error:  # every remote file system raises errors of its own: credentials, network, rights
        if not is_remote(url) or isinstance(error, PenstockError):
            raise
        reason = " ".join(str(error).split())
        raise StoreError(
            f"replay.store.url is {url!r}, which cannot be read: {type(error).__name__}: {reason}"
        ) from error


def _first_answer(url: str, ask: Callable[[], object]) -> None:
    """Sees that a store answers at all: libraries try a silent one again for many minutes."""
    answer = in_background(ask, "store")
    done, _ = concurrent.futures.wait([answer], FIRST_ANSWER_S)
    if not done:
        raise StoreError(f"replay.store.url is {url!r}: nothing there answered within {FIRST_ANSWER_S:g} s")
    answer.result()


def _read_legacy(file: pq.ParquetFile, name: str) -> pa.Table | None:
    """The rows of a file of version 0, as its reader understands them; such files are small and few."""
    if schema_version(file.schema_arrow) > 0:
        return None
    records = records_from_table(file.read(), Path(name).stem)
    return table_from_records(records).replace_schema_metadata(None)


def _read_nothing(file: pq.ParquetFile, name: str) -> None:
    """Opening a file checks its version."""


def _dataset(filesystem: pafs.FileSystem, paths: list[str], schema: pa.Schema) -> "ds.Dataset":
    import pyarrow.dataset as ds

    if not paths:
        return ds.dataset(schema.empty_table())
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)  # or changed tokens are no error
    parquet = ds.ParquetFileFormat(default_fragment_scan_options=checked)
    return ds.dataset(paths, schema=schema, format=parquet, filesystem=filesystem)


def _together(files: "ds.Dataset", tables: list[pa.Table]) -> "ds.Dataset":
    import pyarrow.dataset as ds

    return ds.dataset([files, *(ds.dataset(table) for table in tables)]) if tables else files
