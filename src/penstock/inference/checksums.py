"""Whether a server of another make holds the weights that it was given, as far as its checksums tell. Imports no JAX.

Not covered: whether it computes with them, which the learner sees, who rescores what was sampled.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

from penstock.types import MismatchError, WeightVersion

NO_BYTES = hashlib.sha256(b"").hexdigest()
"""What a checksum says of a parameter whose values are kept elsewhere, as the CPU build does of prepared matrices."""

ROWS = 64
"""Embeddings and output matrix are padded with zeros to a multiple of so many rows."""

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip
_ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def served_checksums(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """What a server's checksums are where each parameter lies there as it lies in a file, by its name there.

    Queries, keys and values are one matrix, and so are gate and up; embeddings and output matrix are padded.

    Args:
        tensors: By their names in a Hugging Face directory.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        own = words[-2]
        words[-2] = _FUSED.get(own, own)
        parts.setdefault(".".join(words), {})[own] = tensor
    return {name: _checksum(name, found) for name, found in parts.items()}


def _checksum(name: str, parts: Mapping[str, np.ndarray]) -> str:
    arrays = [parts[own] for own in sorted(parts, key=lambda own: _ORDER.index(own) if own in _ORDER else 0)]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    if name.startswith(("model.embed_tokens", "lm_head")):
        digest.update(bytes(-len(arrays[0]) % ROWS * math.prod(arrays[0].shape[1:]) * arrays[0].itemsize))
    return digest.hexdigest()


class ChecksumProof:
    """Whether a server holds what it was given, as far as its checksums tell. One server; one thread at a time.

    A parameter whose checksum once was that of the file is compared with every later one. Of the others, which the
    server keeps in another form (split, padded, prepared), it is asked that they change where those in the file do.
    """

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._given: dict[str, str] = {}
        self._found: dict[str, str] = {}

    def judge(self, version: WeightVersion, given: Mapping[str, str], found: Mapping[str, str]) -> float:
        """Takes the checksums of a version.

        Args:
            version: The version that it was given.
            given: `served_checksums` of the tensors that were written.
            found: What the server says, by its names.

        Returns:
            Share of the tensors that were compared byte for byte.

        Raises:
            MismatchError: it holds others; naming them.
        """
        wrong: list[str] = []
        exact: set[str] = set()
        for full, digest in found.items():
            name = full.rpartition(":")[2].replace(".base_layer.", ".")
            expected = given.get(name)
            if expected is None or digest == NO_BYTES:
                continue
            if expected.startswith(digest):  # SGLang says how it begins
                exact.add(full)
            elif full in self._exact or (
                self._given.get(name, expected) != expected and self._found.get(full) == digest
            ):
                wrong.append(name)
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise MismatchError(
                f"the server serves version {version.step} with other weights than it was given: "
                f"{len(wrong)} of {len(given)} parameters are not those ({', '.join(sorted(wrong)[:5])}{more})"
            )
        self._exact |= exact
        self._given, self._found = dict(given), dict(found)
        return len({full.rpartition(":")[2] for full in exact}) / max(1, len(given))
