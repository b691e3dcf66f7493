"""Weights as safetensors files in a directory, or under any fsspec URL, that both sides reach.

Files appear whole (`rundir.Storage`); the marker is replaced last. Each job has a folder of its own. Slow, but it needs
no connection between the two sides, and its files can be read by everybody who reads safetensors.

A publication as one safetensors file: 8 bytes with the length of a JSON header, the header, the arrays.

Readers that have the manifest know where each array lies from the file's end, so the header is for everybody else.
"""

import hashlib
import json
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.rundir.storage import LocalStorage, Storage, open_storage
from penstock.types import ConfigError, UnreachableError, WeightsError
from penstock.weights.files import CurrentVersion, free_name
from penstock.weights.manifest import MAX_MANIFEST_BYTES, Manifest, from_raw_bytes, raw_bytes

_PREFIX_BYTES = 8
_ALIGNMENT = 8
_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def write_tensors(file: BinaryIO, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the file; copies nothing."""
    header = _header(manifest)
    file.write(len(header).to_bytes(_PREFIX_BYTES, "little"))
    file.write(header)
    for spec in manifest.arrays:
        file.write(raw_bytes(arrays[spec.name]).data)


def read_tensors(file: BinaryIO, manifest: Manifest) -> dict[str, np.ndarray]:
    """The arrays of a file that `write_tensors` wrote for this manifest, read-only; not verified.

    Raises:
        WeightsError: the file is cut short, or not of this manifest.
    """
    length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
    if length > MAX_MANIFEST_BYTES or file.read(length) != _header(manifest):
        raise WeightsError(f"a file of weights is damaged, or not of {manifest.version}: its header differs")
    arrays: dict[str, np.ndarray] = {}
    for spec in manifest.arrays:
        data = np.empty(spec.nbytes, np.uint8)
        _fill(file, data, spec.name)
        data.flags.writeable = False
        arrays[spec.name] = from_raw_bytes(spec, data)
    return arrays


def _header(manifest: Manifest) -> bytes:
    entries: dict[str, object] = {
        "__metadata__": {"lineage": str(manifest.version.lineage), "step": str(manifest.version.step)}
    }
    offset = 0
    for spec in manifest.arrays:
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _fill(file: BinaryIO, data: np.ndarray, name: str) -> None:
    """Reads exactly as many bytes as the array has."""
    memory, at = data.data, 0
    while at < len(memory):
        count = file.readinto(memory[at:])  # type: ignore[attr-defined]
        if not count:
            raise WeightsError(f"a file of weights is cut short within {name}")
        at += count


_MARKER = "marker.json"
_CHARACTERS = 64


class CheckpointFiles:
    """A job's folder, for both sides (`shelf_store.WritableShelf` and `shelf.Shelf`).

    Args:
        url: Directory or fsspec URL.
        job: The run; its folder in there.

    Raises:
        ConfigError: the URL cannot be opened.
    """

    may_hang = True

    def __init__(self, url: str, job: str) -> None:
        self._url = url
        self._folder = _folder_name(job)
        try:
            self._storage: Storage = open_storage(Path(url), url)
        except ConfigError as error:
            raise _about_weights(error) from error
        self.look_every_s = 0.05 if isinstance(self._storage, LocalStorage) else 0.5

    def prepare(self, token: str | None, job: str, max_bytes: int) -> CurrentVersion | None:
        """Makes the folder for writing.

        Returns:
            What a broadcaster before offers there; None where there is nothing, or nothing of this token.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self._storage.prepare([self._folder])
            self._storage.remove_unfinished([self._folder])
        except (ConfigError, OSError) as error:
            raise _about_weights(error) from error
        content = self.marker()
        try:
            return None if content is None else CurrentVersion.from_bytes(content, job, token, max_bytes)
        except WeightsError:
            return None  # of a life of the run with another token, or damaged: it is written over

    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        """See `WritableShelf.begin_arrays`: a name, since the file begins with what is known of all arrays."""
        return free_name("weights", ".safetensors", taken)

    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        """See `WritableShelf.write_arrays`."""
        with self._writing(name) as path, path.open("wb") as file:
            write_tensors(file, manifest, arrays)

    def write_message(self, name: str, buffers: Iterable[bytes]) -> None:
        """See `WritableShelf.write_message`."""
        with self._writing(name) as path, path.open("wb") as file:
            file.writelines(buffers)

    def write_marker(self, content: bytes) -> None:
        """See `WritableShelf.write_marker`."""
        self.write_message(_MARKER, [content])

    def discard(self, names: set[str]) -> None:
        """See `WritableShelf.discard`."""
        for name in names:
            self._storage.delete(f"{self._folder}/{name}")

    def endpoint(self) -> dict[str, Any]:
        """See `WritableShelf.endpoint`."""
        return {"url": self._url}

    def close(self) -> None:
        """Nothing to free: the files stay."""

    def marker(self) -> bytes | None:
        """See `Shelf.marker`."""
        try:
            return self.message(_MARKER, MAX_MANIFEST_BYTES)
        except _MissingFile:
            return None

    def arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        """See `Shelf.arrays`."""
        with self._reading(name) as file:
            return read_tensors(file, manifest)

    def message(self, name: str, most_bytes: int) -> bytes:
        """See `Shelf.message`."""
        with self._reading(name) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise WeightsError(f"{self._where(name)} has more than {most_bytes} bytes")
        return content

    @contextmanager
    def _writing(self, name: str) -> Generator[Path, None, None]:
        try:
            with self._storage.writing(f"{self._folder}/{name}") as path:
                yield path
        except Exception as error:  # every remote file system raises errors of its own
            raise WeightsError(f"{self._where(name)} cannot be written: {type(error).__name__}: {error}") from error

    @contextmanager
    def _reading(self, name: str) -> Generator[BinaryIO, None, None]:
        try:
            with self._storage.opened(f"{self._folder}/{name}") as place:
                if isinstance(place, Path):
                    with place.open("rb") as file:
                        yield file
                else:
                    yield place
        except WeightsError:
            raise
        except FileNotFoundError as error:
            raise _MissingFile(f"{self._where(name)} is gone") from error
        except Exception as error:  # as above
            raise UnreachableError(f"{self._where(name)} cannot be read: {type(error).__name__}: {error}") from error

    def _where(self, name: str) -> str:
        return self._storage.locate(f"{self._folder}/{name}")


class _MissingFile(WeightsError):
    """A file is not there: superseded meanwhile, or never written."""


def _folder_name(job: str) -> str:
    """A folder for a job: readable, and nobody else's."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", job)[:_CHARACTERS]
    return f"{readable}-{hashlib.blake2b(job.encode(), digest_size=4).hexdigest()}"


def _about_weights(error: Exception) -> ConfigError:
    return ConfigError(str(error).replace("replay.store.url", "weights.url"))
