"""A low-rank adapter's arrays: stacked pairs beside a frozen model's matrices, and their names in PEFT's files.

Engine and learner both compute base and adapter apart and add the two in float32. Merged into a bfloat16 matrix, what
an adapter has learned is mostly rounded away. In each pair x is rounded to A's dtype, x A to B's, as what goes into any
product is; the sums are float32.

At first B is 0, so that the adapted model is the base.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from penstock.model.arrays import digests_of
from penstock.model.json_files import write_json
from penstock.model.language.config import ADAPTER, ModelConfig
from penstock.model.language.lora import CONFIG_FILE, MATRICES, WEIGHTS_FILE, write_adapter_config
from penstock.model.language.precision import linear, rounded
from penstock.model.tensor_files import TensorFiles
from penstock.types import CheckpointError, generator

_OUTER = {"a": "lora_A.weight", "b": "lora_B.weight"}
_DIGEST = "penstock_base_digest"


class LoraPair(eqx.Module):
    """What is added to one matrix: s · A B, in two factors.

    Attributes:
        a: From inputs to rank; with a layer axis first in an `Adapter` of all layers.
        b: From rank to outputs.
        scale: S.
    """

    a: Float[Array, "*layers inputs rank"]
    b: Float[Array, "*layers rank outputs"]
    scale: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        """S · (x A) B, float32; for one layer's pair."""
        narrow = rounded(linear(rounded(x, self.a.dtype), self.a), self.b.dtype)
        return self.scale * linear(narrow, self.b)


class Adapter(eqx.Module):
    """A pair for each matrix that is adapted, by the matrix's name in a `Layer`."""

    query: LoraPair | None = None
    key: LoraPair | None = None
    value: LoraPair | None = None
    output: LoraPair | None = None
    gate: LoraPair | None = None
    up: LoraPair | None = None
    down: LoraPair | None = None

    @classmethod
    def from_arrays(cls, config: ModelConfig, arrays: Mapping[str, Array]) -> "Adapter | None":
        """From all arrays of `ModelConfig.parameter_shapes` whose names begin with ``adapter.``; None if none may.

        Args:
            config: Of the model.
            arrays: By name, and others, too.
        """
        lora = config.lora
        if lora is None:
            return None
        pairs = {
            name: LoraPair(arrays[f"{ADAPTER}{name}.a"], arrays[f"{ADAPTER}{name}.b"], lora.scale)
            for name in lora.matrices
        }
        return cls(**pairs)


def drawn_adapter(config: ModelConfig, seed: int) -> dict[str, Array]:
    """An adapter's first arrays: B is 0, A uniform within ± 1/√inputs (Kaiming, as PEFT draws it).

    Args:
        config: Of the model, with an adapter.
        seed: What A is drawn by, an integer.
    """
    rng = generator(seed)
    assert config.lora is not None  # or there is nothing to draw
    dtype, arrays = jnp.dtype(config.lora.dtype or config.dtype), dict[str, Array]()
    for name, shape in adapter_shapes(config).items():
        bound = 1 / math.sqrt(shape[1])
        values = np.zeros(shape) if name.endswith(".b") else rng.uniform(-bound, bound, shape)
        arrays[name] = jnp.asarray(values.astype(np.float32), dtype)
    return arrays


def adapter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of `ModelConfig.parameter_shapes` what belongs to the adapter."""
    return {name: shape for name, shape in config.parameter_shapes().items() if name.startswith(ADAPTER)}


def tensor_names(name: str, depth: int) -> list[str]:
    """Where an adapter's array stands in PEFT's file: a tensor per layer, the transpose of ours.

    Args:
        name: Such as ``adapter.query.a``.
        depth: How many layers.
    """
    _, matrix, factor = name.split(".")
    module = next(target for target, own in MATRICES.items() if own == matrix)
    block = "mlp" if matrix in ("gate", "up", "down") else "self_attn"
    return [f"base_model.model.model.layers.{layer}.{block}.{module}.{_OUTER[factor]}" for layer in range(depth)]


def base_digest(arrays: Mapping[str, Array | np.ndarray]) -> str:
    """Of a base's arrays, 16 hexadecimal digits: the same in float32 and in bfloat16, to which they are rounded for it.

    Args:
        arrays: All of them, by name.
    """
    found = hashlib.sha256()
    for name in sorted(arrays):
        (digest,) = digests_of({"base": arrays[name].astype(jnp.bfloat16)}).values()
        found.update(f"{name}={digest};".encode())
    return found.hexdigest()[:16]


def write_adapter(decoder: Any, directory: Path, digest: str) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``, as PEFT does.

    Args:
        decoder: A `Decoder` with an adapter, which is written in its own dtype.
        directory: Path of what is written; must exist.
        digest: `base_digest` of its base; kept among the metadata of the tensors' file.
    """
    config: ModelConfig = decoder.config
    assert config.lora is not None  # or it has no adapter
    tensors: dict[str, np.ndarray] = {}
    for name, shape in adapter_shapes(config).items():
        stacked = np.asarray(getattr(getattr(decoder.adapter, name.split(".")[1]), name[-1]))
        tensors |= {tensor: np.ascontiguousarray(stacked[i].T) for i, tensor in enumerate(tensor_names(name, shape[0]))}
    write_json(write_adapter_config(config.lora, config.base), directory / CONFIG_FILE)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt", _DIGEST: digest})


def read_adapter(directory: Path, config: ModelConfig, digest: str) -> dict[str, Array]:
    """An adapter's arrays by name, stacked, in the dtype of its config.

    Args:
        directory: As `write_adapter` or PEFT writes it.
        config: Of the base, with the adapter.
        digest: `base_digest` of the base that was loaded.

    Raises:
        CheckpointError: a file is missing or broken, its tensors fit neither configuration nor base or are not finite,
            or it was trained beside other weights.
    """
    path, shapes = directory / WEIGHTS_FILE, adapter_shapes(config)
    assert config.lora is not None  # or there is nothing to read
    dtype = jnp.dtype(config.lora.dtype or config.dtype)
    try:
        with safe_open(str(path), framework="np") as file:
            files = TensorFiles(dict.fromkeys(file.keys(), file), directory)
            _check(path, config, files)
            trained_beside = (file.metadata() or {}).get(_DIGEST, digest)
            if trained_beside != digest:
                raise CheckpointError(
                    f"{directory} was trained beside other weights than those in {config.base}: name its own base by "
                    "model.base, or put that back"
                )
            return {name: jnp.asarray(_stacked(files, name, shape).astype(dtype)) for name, shape in shapes.items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: save the adapter in safetensors format (peft's save_pretrained does)"
        ) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _stacked(files: TensorFiles, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.stack([files.read(tensor).T for tensor in tensor_names(name, shape[0])])


def _check(path: Path, config: ModelConfig, files: TensorFiles) -> None:
    expected = {
        tensor: shape[:0:-1]
        for name, shape in adapter_shapes(config).items()
        for tensor in tensor_names(name, shape[0])
    }
    problems = sorted(files.misfits(expected))
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{path} does not fit the base in {config.base}: {'; '.join(problems[:3])}{more}")


def merged(matrix: Any, pair: LoraPair, layer: int) -> np.ndarray:
    """W + s A B of one layer, added in float32 and rounded to W's dtype once.

    Args:
        matrix: W, [in, out], of the base.
        pair: Of all layers.
        layer: The number of it, from 0.
    """
    a, b = (np.asarray(each[layer], np.float32) for each in (pair.a, pair.b))
    return (np.asarray(matrix, np.float32) + np.float32(pair.scale) * (a @ b)).astype(matrix.dtype)
