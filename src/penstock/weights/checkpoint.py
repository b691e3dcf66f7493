"""Weights as safetensors files in a directory, or under any fsspec URL, that both sides reach.

Files appear whole (`rundir.Storage`); the pointer is replaced last. Each job has a folder of its own. Slow, but it
needs no connection between the two sides, and its files can be read by everybody who reads safetensors: 8 bytes with
the length of a JSON header, the header, the arrays.

They are read here without the library of safetensors, because a file may be a stream from a remote URL, and the library
reads those from bytes, which is a second copy: for 480 MiB of arrays a fetch took 480 MiB at its peak, with
`safetensors.numpy.load` (0.8) 960 MiB and 1.3 to 5 times as long. The header that a reader compares is then all that
writing takes.
"""

import hashlib
import json
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import override

from penstock.rundir.storage import LocalStorage, Storage, open_storage
from penstock.types import ConfigError, UnreachableError, WeightsError
from penstock.weights.files import POINTER, VersionFiles, free_name
from penstock.weights.manifest import MAX_MANIFEST_BYTES, Manifest, from_raw_bytes, raw_bytes

_FOLDER_CHARACTERS = 64
_PREFIX_BYTES = 8
_ALIGNMENT = 8
_NAMES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)
}
"""Of dtypes, in safetensors."""


class CheckpointFiles(VersionFiles):
    """A job's folder, for both sides.

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
        self.poll_s = 0.05 if isinstance(self._storage, LocalStorage) else 0.5

    @override
    def prepare(self) -> None:
        try:
            self._storage.prepare([self._folder])
            self._storage.remove_unfinished([self._folder])
        except (ConfigError, OSError) as error:
            raise _about_weights(error) from error

    @override
    def begin_arrays(self, arrays: Mapping[str, np.ndarray], taken: set[str]) -> str:
        """A name alone, since the file begins with the digests of all arrays."""
        return free_name("weights", ".safetensors", taken)

    @override
    def write_arrays(self, name: str, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
        with self._writing(name) as path, path.open("wb") as file:
            write_tensors(file, manifest, arrays)

    @override
    def write_delta(self, name: str, buffers: Iterable[bytes]) -> None:
        with self._writing(name) as path, path.open("wb") as file:
            file.writelines(buffers)

    @override
    def write_pointer(self, content: bytes) -> None:
        self.write_delta(POINTER, [content])

    @override
    def discard(self, names: set[str]) -> None:
        for name in names:
            self._storage.delete(f"{self._folder}/{name}")

    @override
    def endpoint(self) -> dict[str, Any]:
        return {"url": self._url}

    @override
    def read_pointer(self) -> bytes | None:
        try:
            return self.read_delta(POINTER, MAX_MANIFEST_BYTES)
        except _MissingFile:
            return None

    @override
    def read_arrays(self, name: str, manifest: Manifest) -> Mapping[str, np.ndarray]:
        with self._reading(name) as file:
            return read_tensors(file, manifest)

    @override
    def read_delta(self, name: str, max_bytes: int) -> bytes:
        with self._reading(name) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise WeightsError(f"{self._where(name)} has more than {max_bytes} bytes")
        return content

    @override
    def close(self) -> None:
        """The files stay."""

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
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", job)[:_FOLDER_CHARACTERS]
    return f"{readable}-{hashlib.blake2b(job.encode(), digest_size=4).hexdigest()}"


def _about_weights(error: Exception) -> ConfigError:
    return ConfigError(str(error).replace("replay.store.url", "weights.url"))


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
