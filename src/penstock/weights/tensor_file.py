"""A publication as one safetensors file: 8 bytes with the length of a JSON header, the header, the arrays.

Readers that have the manifest know where each array lies from the file's end, so the header is for everybody else.
"""

import json
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from penstock.types import WeightsError
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
