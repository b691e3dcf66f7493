"""Damage to the run's files: bytes flipped in the newest checkpoint, or in the newest file of rollouts."""

import random
from pathlib import Path

import pyarrow.parquet as pq

FLIPPED = 64
"""Bytes that are flipped in one file, of its last half: where the rows' tail and the footer are."""


def flip_bytes(path: Path, seed: int) -> int:
    """Inverts bytes of a file in place, and the last one; returns how many."""
    draws, size = random.Random(seed), path.stat().st_size
    places = {draws.randrange(size // 2, size) for _ in range(FLIPPED)} | {size - 1}
    with path.open("r+b") as file:
        for place in sorted(places):
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0xFF]))
    return len(places)


def newest_part(rollouts: Path) -> Path | None:
    """The file of rollouts that was written last; their names are in the order of time."""
    return max(rollouts.glob("part-*.parquet"), default=None)


def ids_in(part: Path) -> list[str]:
    """The rollouts of one file, in its order."""
    return pq.read_table(part, columns=["rollout_id"]).column(0).to_pylist()


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest; None where there are fewer than two: one must remain to go back to."""
    found = sorted(
        (path for path in checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit()),
        key=lambda path: int(path.name.removeprefix("step-")),
    )
    return found[-1] if len(found) > 1 else None


def largest_file(folder: Path) -> Path:
    """Of a checkpoint: its arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
