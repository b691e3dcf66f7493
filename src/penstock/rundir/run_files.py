"""The Parquet files of a run at one moment: which of them count, in which versions, and how to scan them.

A `RunFiles` is a snapshot of names. Files never change once they have their name, so it stays valid until some are
merged or expire; `vanished` says whether that happened. Rollouts and batches may lie in another place than the rest of
the run, at any fsspec URL that ``replay.store.url`` names. Nothing is written or made here. Not covered: the logs.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from penstock.rundir.directory import RunDirectory
from penstock.rundir.example_rows import EXAMPLE_SCHEMA
from penstock.rundir.parquet import replaced_names, schema_version
from penstock.rundir.rollout_rows import ROLLOUT_SCHEMA, records_from_table, table_from_records
from penstock.types import ConfigError, RolloutRecord, RunDirectoryError, SchemaVersionError
from penstock.types.rollouts import SCHEMA_VERSION

FRAGMENT_SCHEMA = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("fragment_id", pa.string()),
        ("episode_id", pa.string()),
        ("env_name", pa.string()),
        ("worker_id", pa.string()),
        ("timestamp", pa.float64()),
        ("lineage", pa.int32()),
        ("weight_step", pa.int32()),
        ("steps", pa.int32()),
        ("reward", pa.float64()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
    ]
)
"""Columns of the view of simulator fragments where a run has none."""

_FOOTERS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Files of one run; made by `list_now`.

    Attributes:
        rollouts: Every rollout once, in the present schema.
        batches: The rows of all batch files.
        fragments: The rows of all fragment files.
        paths: The files behind them.
        filesystem: Where those are.
    """

    rollouts: ds.Dataset
    batches: ds.Dataset
    fragments: ds.Dataset
    paths: tuple[str, ...]
    filesystem: pafs.FileSystem

    @classmethod
    def list_now(cls, directory: RunDirectory) -> "RunFiles":
        """What is there at this moment.

        Raises:
            SchemaVersionError: a newer Penstock wrote a file.
            ConfigError: ``replay.store.url`` names a place that cannot be opened.
            RunDirectoryError: a file is not Parquet.
        """
        filesystem, root = _store_of(directory)
        folder = _Folder(filesystem, root)
        parts, batches, fragments = (folder.footers(name) for name in ("rollouts", "batches", "fragments"))
        replaced = {name for footer in parts.values() for name in replaced_names(footer)}
        parts = {path: footer for path, footer in parts.items() if path.rpartition("/")[2] not in replaced}
        legacy = [path for path, footer in parts.items() if schema_version(footer) == 0]
        current = [path for path in parts if path not in legacy]
        tables = [_upgraded(filesystem, path) for path in legacy]
        return cls(
            rollouts=_together(_dataset(filesystem, current, ROLLOUT_SCHEMA), tables),
            batches=_dataset(filesystem, list(batches), EXAMPLE_SCHEMA),
            fragments=_dataset(filesystem, list(fragments), FRAGMENT_SCHEMA if not fragments else None),
            paths=(*parts, *batches, *fragments),
            filesystem=filesystem,
        )

    @property
    def vanished(self) -> bool:
        """Whether a file is gone by now: merged into another, or expired."""
        return any(info.type == pafs.FileType.NotFound for info in self.filesystem.get_file_info(list(self.paths)))

    def read_rollouts(self, rollout_ids: Sequence[str]) -> dict[str, RolloutRecord]:
        """Whole records, by id; ids without a row are left out."""
        wanted = ds.field("rollout_id").isin(list(rollout_ids))
        records = records_from_table(self._versioned(self.rollouts.to_table(filter=wanted)))
        return {record.rollout.rollout_id: record for record in records}

    def read_uses(self, rollout_ids: Sequence[str]) -> pa.Table:
        """Rows of batch files, those of some rollouts at least; rows that several rollouts share are always there."""
        wanted = ds.field("rollout_id").isin(list(rollout_ids)) | ds.field("rollout_id").is_null()
        return self._versioned(self.batches.to_table(filter=wanted))

    @staticmethod
    def _versioned(table: pa.Table) -> pa.Table:
        """Datasets drop the metadata in which readers look for the version."""
        schema = ROLLOUT_SCHEMA if "turns" in table.column_names else EXAMPLE_SCHEMA
        return table.replace_schema_metadata(schema.metadata)


class _Folder:
    """Where ``rollouts/`` and its siblings are."""

    def __init__(self, filesystem: pafs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._root = root

    def footers(self, name: str) -> dict[str, pa.Schema]:
        """Schema of every Parquet file of a folder, by path; a file that goes meanwhile is none of them."""
        found = self._filesystem.get_file_info(pafs.FileSelector(f"{self._root}/{name}", allow_not_found=True))
        paths = sorted(
            info.path
            for info in found
            if info.is_file and info.base_name.endswith(".parquet") and not info.base_name.startswith(".")
        )
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as threads:
            schemas = list(threads.map(self._footer, paths))
        return {path: schema for path, schema in zip(paths, schemas, strict=True) if schema is not None}

    def _footer(self, path: str) -> pa.Schema | None:
        try:
            schema = pq.read_schema(path, filesystem=self._filesystem)
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowInvalid) as error:
            raise RunDirectoryError(f"{path} cannot be read as Parquet: {error}") from error
        version = schema_version(schema)
        if version > SCHEMA_VERSION:
            raise SchemaVersionError(
                f"{path} has schema version {version}, this Penstock reads up to {SCHEMA_VERSION}: "
                "read it with the Penstock that wrote it, or a newer one"
            )
        return schema


def _store_of(directory: RunDirectory) -> tuple[pafs.FileSystem, str]:
    """The file system and the folder that hold rollouts and batches."""
    config: Any = directory.read_config() if directory.config_path.is_file() else {}
    for key in ("replay", "store", "url"):
        config = config.get(key) if isinstance(config, dict) else None
    if not config:
        return pafs.LocalFileSystem(), str(directory.path)
    import fsspec

    try:
        filesystem, root = fsspec.url_to_fs(str(config))
    except (ValueError, ImportError) as error:
        raise ConfigError(f"replay.store.url is {config!r}, which cannot be opened: {error}") from error
    if "file" in filesystem.protocol:
        return pafs.LocalFileSystem(), root
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), root.rstrip("/")


def _dataset(filesystem: pafs.FileSystem, paths: list[str], schema: pa.Schema | None) -> ds.Dataset:
    if not paths:
        assert schema is not None
        return ds.dataset(schema.empty_table())
    return ds.dataset(paths, schema=schema, format="parquet", filesystem=filesystem)


def _together(files: ds.Dataset, tables: list[pa.Table]) -> ds.Dataset:
    return ds.dataset([files, *(ds.dataset(table) for table in tables)]) if tables else files


def _upgraded(filesystem: pafs.FileSystem, path: str) -> pa.Table:
    """The rows of a file of version 0, as its reader understands them; such files are small and few."""
    with filesystem.open_input_file(path) as file:
        table = pq.ParquetFile(file).read()
    return table_from_records(records_from_table(table, Path(path).stem)).replace_schema_metadata(None)
