"""Checkpoints: one directory per version, whole or not there.

Layout of ``<root>/step-<n>/``: ``model/`` (a Hugging Face directory), ``learner.safetensors`` (optimiser state
and counters), ``state.json`` (every other component's state), ``manifest.json`` (size and CRC-32 of each file).
Everything is written into ``.tmp-…`` beside it, flushed to the disk, and renamed; the rename is the run's only
commit. Each step is written once. Leftovers of a writer that died are ignored by readers and removed by the next
writer. No pickle.
"""

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from penstock.learner.config import LearnerConfig
from penstock.learner.learner import Learner
from penstock.model.language import Decoder, load_decoder, save_decoder
from penstock.model.language.hugging_face import PolicyTokenizer
from penstock.types import CheckpointError

FORMAT_VERSION = 1
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint read back.

    Attributes:
        path: Its directory; ``path / "model"`` is a Hugging Face directory with the tokenizer.
        step: The version of the parameters.
        decoder: The parameters, in the dtype they were trained in.
        learner_arrays: For `Learner.restore_arrays`.
        states: State of each other component by name, for `Checkpointable.restore`.
    """

    path: Path
    step: int
    decoder: Decoder
    learner_arrays: dict[str, np.ndarray]
    states: dict[str, Any]


def save_checkpoint(
    root: Path, step: int, learner: Learner, tokenizer: PolicyTokenizer, states: Mapping[str, Any], keep_last: int = 2
) -> Path:
    """Writes ``root/step-<step>`` and returns it once it is on the disk.

    Args:
        root: The run's ``checkpoints`` directory; made if missing. It has one writer.
        step: The version that the learner holds.
        learner: Parameters and optimiser state.
        tokenizer: Goes into ``model/``.
        states: JSON-serialisable, by component.
        keep_last: How many checkpoints stay; the oldest beyond are removed.

    Raises:
        CheckpointError: the step exists already, or a state cannot be written as JSON.
    """
    target = root / f"step-{step}"
    if target.exists():
        raise CheckpointError(f"{target} exists already: a run writes each step once")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    temporary = root / f"{_TEMPORARY}step-{step}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    _write(temporary, step, learner, tokenizer, states)
    _flush_tree(temporary)
    os.rename(temporary, target)
    _flush(root)
    _remove_oldest(root, keep_last, target)
    return target


_REMEDY = "move it out of the way, and --resume goes on from the checkpoint before it"


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint with the highest step; None where there is none."""
    found = _checkpoints(root)
    return found[-1] if found else None


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        CheckpointError: naming what is missing, damaged, or from a newer Penstock.
    """
    _verify(path)
    state = _read_json(path / "state.json")
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {state.get('format_version')}, this Penstock reads {FORMAT_VERSION}"
        )
    try:
        arrays = safetensors.numpy.load_file(path / "learner.safetensors")
        decoder = load_decoder(path / "model", state["dtype"])
        return Checkpoint(path, int(state["step"]), decoder, arrays, dict(state["states"]))
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def restore_learner(checkpoint: Checkpoint, config: LearnerConfig, total_steps: int) -> Learner:
    """A learner that goes on exactly where the checkpoint was taken.

    Raises:
        CheckpointError: the optimiser state does not fit the model or the configuration.
    """
    learner = Learner(checkpoint.decoder, config, total_steps)
    learner.restore_arrays(checkpoint.learner_arrays)
    return learner


def _write(directory: Path, step: int, learner: Learner, tokenizer: PolicyTokenizer, states: Mapping[str, Any]) -> None:
    save_decoder(learner.decoder, directory / "model", tokenizer)
    safetensors.numpy.save_file(learner.state_arrays(), directory / "learner.safetensors")
    content = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "dtype": learner.decoder.config.dtype,
        "states": states,
    }
    try:
        (directory / "state.json").write_text(json.dumps(content))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a component's state is not JSON ({error}): {sorted(states)}") from error
    (directory / "manifest.json").write_text(json.dumps(_manifest(directory), indent=1))


def _manifest(directory: Path) -> dict[str, dict[str, int]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): _fingerprint(path) for path in files}


def _fingerprint(path: Path) -> dict[str, int]:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}


def _verify(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory: name a checkpoint, for example checkpoints/step-100")
    manifest = _read_json(path / "manifest.json")
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing; {_REMEDY}")
        if _fingerprint(file) != expected:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written; {_REMEDY}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no object")
    return content


def _checkpoints(root: Path) -> list[Path]:
    """All checkpoints, the lowest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _remove_oldest(root: Path, keep_last: int, newest: Path) -> None:
    others = [path for path in _checkpoints(root) if path != newest]
    for path in others[: len(others) + 1 - max(keep_last, 1)]:
        doomed = root / f"{_TEMPORARY}removed-{path.name}-{uuid.uuid4().hex[:8]}"
        os.rename(path, doomed)  # half a checkpoint must never look like one
        shutil.rmtree(doomed)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _flush_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            _flush(Path(folder) / name)
        _flush(Path(folder))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
