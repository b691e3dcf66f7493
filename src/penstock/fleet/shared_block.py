"""The shared memory of one simulator process: what its k simulators observed and got, what they shall do, and pictures.

One block, laid out from the spaces and k alone, so both sides compute the same layout and only a file descriptor
travels. The simulator process makes the block (a sealed `memfd`; where there is none, a nameless file), so it vanishes
with its last holder and no name can leak. At any time one side owns a part's rows: the simulator process from the
part's step token to its answer, the rollout worker otherwise; only `clock` may be read at any time.

Only where films are wanted there is room for pictures. The rollout worker asks for a row; the simulator process answers
with one picture per step, from the row's next episode on until that ends, and then takes the request back. One side
owns it at a time here too, so a picture is whole. The room is fixed; pages that no picture touched take no memory.

Not covered: more than one writer, other machines.
"""

import fcntl
import mmap
import os
import tempfile
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from penstock.fleet.steps import STEP_ROW, Leaves, StepRows
from penstock.types import ConfigError, LeafSpace, Spaces

MOST_PICTURE_BYTES = 1 << 22
"""Room for a picture: 1280 × 1024 in colour. Of a larger one every second row and column is taken, or every third, …"""

_HEADER_BYTES = 4096  # a page, so that pictures begin at one
_ASKED, _LABEL, _HEIGHT, _WIDTH = range(4)

FILM_AREA_BYTES = _HEADER_BYTES + MOST_PICTURE_BYTES


class FrameLabel(IntEnum):
    """What a picture shows."""

    NOTHING = 0
    FIRST = 1
    """An episode's first observation."""
    NEXT = 2
    LAST = 3
    """What an episode ended with; no next picture."""
    FAILED = 4
    """No picture, but the words why there is none; the episode is not filmed further."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What was taken.

    Attributes:
        label: What it shows.
        picture: uint8 [height, width, 3]; None where there is none.
        trouble: Why it failed; empty otherwise.
    """

    label: FrameLabel = FrameLabel.NOTHING
    picture: np.ndarray | None = None
    trouble: str = ""


class FrameArea:
    """One row's pictures, one at a time.

    Args:
        memory: At least `FILM_AREA_BYTES`, writable, the same on both sides.
    """

    def __init__(self, memory: memoryview) -> None:
        self._header = np.frombuffer(memory, np.int64, 4)
        self._pixels = np.frombuffer(memory, np.uint8, MOST_PICTURE_BYTES, _HEADER_BYTES)

    @property
    def asked(self) -> int | None:
        """The row whose next episode is wanted, or is being filmed."""
        row = int(self._header[_ASKED]) - 1
        return row if row >= 0 else None

    def ask(self, row: int | None) -> None:
        """Wants a row's next episode; None: no more pictures."""
        self._header[_ASKED] = 0 if row is None else row + 1

    def put(self, label: FrameLabel, picture: Any) -> None:
        """Leaves a picture.

        Args:
            label: What it shows.
            picture: uint8 [height, width], or with 1, 3 or 4 channels; None: the episode ended with no known one.
        """
        height = width = 0
        if picture is not None:
            pixels = _coloured(picture)
            height, width = pixels.shape[:2]
            self._pixels[: height * width * 3].reshape(pixels.shape)[...] = pixels
        self._header[_LABEL:] = label, height, width

    def fail(self, trouble: str) -> None:
        """Leaves the words why there is no picture, and takes the request back."""
        words = np.frombuffer(trouble.encode()[:2000], np.uint8)
        self._pixels[: len(words)] = words
        self._header[:] = 0, FrameLabel.FAILED, len(words), 0

    def take(self) -> Frame:
        """What was left since the last call; the picture is a copy."""
        label, height, width = (
            FrameLabel(int(self._header[_LABEL])),
            int(self._header[_HEIGHT]),
            int(self._header[_WIDTH]),
        )
        self._header[_LABEL] = FrameLabel.NOTHING
        if label is FrameLabel.FAILED:
            return Frame(label, trouble=self._pixels[:height].tobytes().decode(errors="replace"))
        if label is FrameLabel.NOTHING or not height:
            return Frame(label)
        return Frame(label, self._pixels[: height * width * 3].reshape(height, width, 3).copy())


def _coloured(picture: Any) -> np.ndarray:
    """In three channels, and small enough."""
    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8:
        if pixels.dtype.kind not in "biu" or (pixels.size and not 0 <= pixels.min() <= pixels.max() <= 255):
            raise ValueError(f"a picture is {pixels.dtype}: it must be uint8, of 0 to 255")
        pixels = pixels.astype(np.uint8)
    if pixels.ndim not in (2, 3) or not pixels.size:
        raise ValueError(f"a picture has shape {pixels.shape}: it must be [height, width] or [height, width, channels]")
    if pixels.ndim == 2 or pixels.shape[2] < 3:
        pixels = np.broadcast_to(np.atleast_3d(pixels)[..., :1], (*pixels.shape[:2], 3))
    stride = 1
    while -(-pixels.shape[0] // stride) * -(-pixels.shape[1] // stride) * 3 > MOST_PICTURE_BYTES:
        stride += 1
    return pixels[::stride, ::stride, :3]


_ALIGNMENT = 64  # bytes of a cache line: no two fields share one
_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4  # F_ADD_SEALS; no more seals, no shrinking, no growing

RESULTS = ("rewards", "returns", "lengths", "terminated", "truncated", "faults", "cut", "has_final")
"""Fields of a row that say what the last action led to; `first` and the observations say what comes next."""

PHASE, SINCE, SIMULATE_S, ROW = range(4)
"""Places in `SharedBlock.clock`: a `SimulatorPhase`, its begin (monotonic seconds), seconds of the last answer, row."""


class SimulatorPhase(IntEnum):
    """What a simulator process is doing: each has a deadline of its own."""

    RESTING = 0
    STEPPING = 1
    RESETTING = 2
    BUILDING = 3


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class SharedRows(StepRows):
    """Some of a block's rows; views.

    Attributes:
        rows: `STEP_ROW` [n]; `slots` and `acted` are the rollout worker's to write, the rest is the process's.
        observations: By leaf name, [n, …]: what to act on next.
        final_observations: By leaf name, [n, …]: what an episode ended with; rows where `has_final`.
        actions: By leaf name, [n, …].
    """

    def __init__(self, rows: np.ndarray, observations: Leaves, final_observations: Leaves, actions: Leaves) -> None:
        self.rows = rows
        self.observations, self.final_observations, self.actions = observations, final_observations, actions

    def part(self, begin: int, end: int) -> "SharedRows":
        """Rows `begin` to `end` − 1."""
        groups = (self.observations, self.final_observations, self.actions)
        return SharedRows(
            self.rows[begin:end], *({leaf: array[begin:end] for leaf, array in group.items()} for group in groups)
        )

    def take_results(self, other: "SharedRows") -> None:
        """Copies what the last actions led to from as many rows of another block of the same layout."""
        for name in RESULTS:
            self.rows[name] = other.rows[name]
        for leaf, array in self.final_observations.items():
            array[:] = other.final_observations[leaf]

    def mark_lost(self) -> None:
        """Says of every row that its last action was lost with its simulator: a fault that cut the episode."""
        self.clear_results()
        self.truncated[:] = self.faults[:] = True

    def clear_results(self) -> None:
        """Says of every row that there was no last action."""
        for name in RESULTS:
            self.rows[name] = 0


class SharedBlock(SharedRows):
    """A mapped block: all rows. Arrays keep the mapping alive: it goes when the last of them does.

    Args:
        fd: Of the memory; it stays the caller's to close.
        spaces: Of the simulators.
        rows: k, simulators in the process.
        filmed: With room for pictures.

    Attributes:
        film: The room for pictures; None without.
        clock: Four float64: see `PHASE`.

    Raises:
        ConfigError: the memory is smaller than the layout.
    """

    def __init__(self, fd: int, spaces: Spaces, rows: int, filmed: bool = False) -> None:
        places = _layout(spaces, rows)
        length = block_bytes(spaces, rows, filmed)
        if os.fstat(fd).st_size < length:
            raise ConfigError(f"a simulator's block has {os.fstat(fd).st_size} bytes: its spaces need {length}")
        memory = memoryview(mmap.mmap(fd, length))
        arrays = {
            place.name: np.ndarray(place.shape, place.dtype, buffer=memory, offset=place.offset) for place in places
        }
        super().__init__(
            arrays["rows"],
            _group(arrays, "observations", spaces.observations),
            _group(arrays, "final_observations", spaces.observations),
            _group(arrays, "actions", spaces.actions),
        )
        self.clock = memory[places[0].offset : places[0].end].cast("d")
        self.film = FrameArea(memory[length - FILM_AREA_BYTES :]) if filmed else None


def block_bytes(spaces: Spaces, rows: int, filmed: bool = False) -> int:
    """Size of a block. Pictures come last, in pages of their own."""
    end = _layout(spaces, rows)[-1].end
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE + FILM_AREA_BYTES if filmed else end


def create_memory(nbytes: int) -> int:
    """Makes shared memory without a name and returns its file descriptor, which the caller closes."""
    try:
        fd = os.memfd_create("penstock-simulators", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # no such call, or forbidden: a file that has no name any more does as well
        return _nameless_file(nbytes)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, _ADD_SEALS, _SEALS)  # a mapping of a file that shrank would end its reader with SIGBUS
    return fd


def _nameless_file(nbytes: int) -> int:
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    fd, path = tempfile.mkstemp(prefix="penstock-simulators-", dir=folder)
    os.unlink(path)
    os.ftruncate(fd, nbytes)
    return fd


def _layout(spaces: Spaces, rows: int) -> list[_Place]:
    """Every array with its place; `clock` is the first."""
    wanted: list[tuple[str, np.dtype, tuple[int, ...]]] = [("clock", np.dtype(np.float64), (4,))]
    wanted.append(("rows", STEP_ROW, (rows,)))
    for group, leaves in (
        ("actions", spaces.actions),
        ("observations", spaces.observations),
        ("final_observations", spaces.observations),
    ):
        wanted += [(f"{group}/{leaf.name}", np.dtype(leaf.dtype), (rows, *leaf.shape)) for leaf in leaves]
    places: list[_Place] = []
    for name, dtype, shape in wanted:
        end = places[-1].end if places else 0
        places.append(_Place(name, dtype, shape, -(-end // _ALIGNMENT) * _ALIGNMENT))
    return places


def _group(arrays: dict[str, np.ndarray], group: str, leaves: tuple[LeafSpace, ...]) -> dict[str, np.ndarray]:
    return {leaf.name: arrays[f"{group}/{leaf.name}"] for leaf in leaves}
