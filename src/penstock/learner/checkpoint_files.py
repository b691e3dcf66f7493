"""Where checkpoints lie, whether they are whole, and what the components other than the learner left in them.

`penstock.learner.checkpoints` states the format. No array is read here, and no JAX is needed: any process may ask.
"""

import json
import os
import re
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.types import CheckpointError

FORMAT_VERSION = 1
TEMPORARY = ".tmp-"

_REMEDY = "move it out of the way, and --resume goes on from the checkpoint before it"


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint with the highest step; None where there is none."""
    found = find_checkpoints(root)
    return found[-1] if found else None


def newest_good_checkpoint(root: Path, on_damage: Callable[[str, str], None]) -> Path | None:
    """The newest checkpoint whose files are what was written; None where there is none.

    A damaged one is put aside, as ``damaged-step-<n>-<id>``, so that the run can write that step again.

    Args:
        root: The run's ``checkpoints`` directory.
        on_damage: Told where a damaged one lies now, and what is wrong with it.

    Raises:
        CheckpointError: the newest whole one was written by a newer Penstock.
    """
    for path in reversed(find_checkpoints(root)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            aside = root / f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"
            os.rename(path, aside)
            on_damage(str(aside), str(error))
        else:
            read_state(path)
            return path
    return None


def read_states(path: Path) -> dict[str, Any]:
    """State of each component but the learner, by name, for `Checkpointable.restore`.

    Raises:
        CheckpointError: it cannot be read, or a newer Penstock wrote it.
    """
    return dict(read_state(path)["states"])


def read_state(path: Path) -> dict[str, Any]:
    """What ``state.json`` holds.

    Raises:
        CheckpointError: it cannot be read, or a newer Penstock wrote it.
    """
    state = _read_json(path / "state.json")
    if state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {state.get('format_version')}, this Penstock reads {FORMAT_VERSION}"
        )
    if not isinstance(state.get("states"), dict):
        raise CheckpointError(f"{path} is damaged: state.json has no states")
    return state


def make_manifest(directory: Path) -> dict[str, dict[str, int]]:
    """Size and CRC-32 of every file of a checkpoint, by relative name."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): _fingerprint(path) for path in files}


def _fingerprint(path: Path) -> dict[str, int]:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}


def verify_checkpoint(path: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: naming what is missing or damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory: name a checkpoint, for example checkpoints/step-100")
    manifest = _read_json(path / "manifest.json")
    absent = sorted({"state.json", "learner.safetensors", "model/config.json"} - manifest.keys())
    if absent:
        raise CheckpointError(f"{path} is damaged: its manifest does not name {', '.join(absent)}; {_REMEDY}")
    for name, expected in manifest.items():
        file = _beneath(path, name)
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing; {_REMEDY}")
        if _fingerprint(file) != expected:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written; {_REMEDY}")


def _beneath(path: Path, name: str) -> Path:
    """A file of a checkpoint; never one outside it, nor one that no writer could have named so."""
    if len(name) > 255 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", name, re.ASCII) or ".." in name.split("/"):
        raise CheckpointError(f"{path} is damaged: its manifest names {name[:100]!r}; {_REMEDY}")
    return path / name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no object")
    return content


def find_checkpoints(root: Path) -> list[Path]:
    """All checkpoints, the lowest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
