"""The tensors of a model's directory: one ``model.safetensors``, or shards with an index, as Hugging Face names them.

Shapes are known before any data is read, and tensors are read one at a time, so that loading needs little more
memory than the model; they are written shard by shard. Numbers that are not finite are refused: with them a policy
writes nonsense, which nothing says. Only safetensors is read: a ``.bin`` file is a pickle, which
could run code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from penstock.model.json_files import read_json, write_json
from penstock.types.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Most bytes of a file, as of transformers' and of most published checkpoints."""
_FLOATS = ("F64", "F32", "F16", "BF16")


class TensorFiles:
    """The tensors of an open directory, by name. Made by `open_tensors`.

    Args:
        handles: Open files, by the names of their tensors.
        directory: Where they lie, for errors.
    """

    def __init__(self, handles: Mapping[str, Any], directory: Path) -> None:
        self._handles, self._directory = handles, directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, handle in handles.items():
            view = handle.get_slice(name)
            if view.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"{directory}: {name} is stored as {view.get_dtype()}: only floating point is supported "
                    f"({', '.join(_FLOATS)}); save the model in one of these"
                )
            self.shapes[name] = tuple(view.get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype that it was saved in.

        Raises:
            CheckpointError: one of its numbers is not finite.
        """
        tensor = self._handles[name].get_tensor(name)
        if not _is_finite(tensor):
            raise CheckpointError(
                f"{self._directory}: {name} holds numbers that are not finite: the file is damaged, or training had "
                "diverged before it was saved; take an earlier checkpoint, or copy it again"
            )
        return tensor

    def misfits(
        self, expected: Mapping[str, tuple[int, ...]], spare: Callable[[str], bool] = lambda name: False
    ) -> list[str]:
        """In words, which tensors are missing, unknown, or of another shape.

        Args:
            expected: The shape of each by its name.
            spare: Whether one may be there beside those.
        """
        missing = [f"{name} is missing" for name in expected if name not in self.shapes]
        unknown = [f"{name} is unknown" for name in self.shapes if name not in expected and not spare(name)]
        return [*missing, *unknown] + [
            f"{name} has shape {list(self.shapes[name])}, not {list(shape)}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        ]


_PIECE = 1 << 20
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits that are all set in what is not finite."""


def _is_finite(tensor: np.ndarray) -> bool:
    """In pieces that stay in a processor's cache, and by the bits of what NumPy has no arithmetic of its own for."""
    numbers, bits = tensor.reshape(-1), _EXPONENTS.get(tensor.dtype.name)
    if bits is not None:
        numbers = numbers.view(np.uint16)
    pieces = (numbers[start : start + _PIECE] for start in range(0, numbers.size, _PIECE))
    if bits is None:
        return all(np.isfinite(piece).all() for piece in pieces)
    return not any(((piece & bits) == bits).any() for piece in pieces)


@contextmanager
def open_tensors(directory: Path) -> Iterator[TensorFiles]:
    """Opens a directory's weights.

    Raises:
        CheckpointError: they are missing, cut short, not safetensors, or not what the index promises.
    """
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for path, wanted in _files(directory).items():
            try:
                handle = stack.enter_context(safe_open(str(path), framework="np"))
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            except SafetensorError as error:
                again = "it is cut short or no safetensors file (a pointer of Git LFS, say): download or copy it again"
                raise CheckpointError(f"{path} cannot be read: {error}: {again}") from error
            present = set(handle.keys())
            missing = sorted((wanted or set()) - present)
            if missing:
                raise CheckpointError(f"{path} lacks {missing[0]}, which the index says it holds")
            handles |= dict.fromkeys(present if wanted is None else wanted, handle)
        yield TensorFiles(handles, directory)


def save_tensors(tensors: Mapping[str, np.ndarray], directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes one file, or shards with an index where there is more than `shard_bytes`.

    Args:
        tensors: By name. Views (such as transposed ones) are copied shard by shard.
        directory: Must exist. What the other form left there is removed, lest it be read.
        shard_bytes: Most bytes of one shard; a tensor that is larger has one of its own.
    """
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    if len(shards) == 1:
        _write(tensors, directory / WEIGHTS_FILE)
        (directory / INDEX_FILE).unlink(missing_ok=True)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json({"metadata": {"total_size": size}, "weight_map": weight_map}, directory / INDEX_FILE)
    (directory / WEIGHTS_FILE).unlink(missing_ok=True)


def _write(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Contiguous: safetensors writes a transposed view's bytes as they lie."""
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, path, metadata={"format": "pt"})


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """Each file to open, with the tensors to take from it (None: all)."""
    if (directory / WEIGHTS_FILE).is_file():
        return {directory / WEIGHTS_FILE: None}
    if not (directory / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: "
            "save the model in safetensors format (transformers' save_pretrained does)"
        )
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map")
    files: dict[Path, set[str] | None] = {}
    for shard in sorted(set(weight_map.values()), key=str):
        if not isinstance(shard, str) or Path(shard).name != shard or not (directory / shard).is_file():
            raise CheckpointError(f"{directory / INDEX_FILE} names {shard!r}, which is not a file beside it")
        files[directory / shard] = {name for name, file in weight_map.items() if file == shard}
    return files
