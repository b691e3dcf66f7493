"""Films of a worker's chosen episodes: a pool that takes pictures along with its actions, and the writer of films.

Every so many episodes that begin in a worker, the slot of that one is chosen, and its *next* episode is filmed from its
first observation to its last: a simulator must know before an episode begins that it is to draw it. One film at a time;
where the last one is not written yet, the choice is skipped and counted. An episode that a fault or a restart cuts ends
its film there. Frame t shows observation t, the reward that led to it, and the policy's value of it. Pictures are
copied out of the shared block just before the process acts again. Without films a worker's pool is not wrapped, and
nothing of this runs.

The writer (H.264 in MP4) has a thread of its own and never lets its caller wait: frames that come faster than they can
be encoded are dropped and counted, at most `MOST_WAITING_BYTES` wait. A film appears under its name when it is whole;
until then its file has none, so that nothing is left whatever ends the process. Whatever encoding raises ends that
film, is logged as the event ``film_failed``, and ends nothing else. Needs the extra ``gym`` (PyAV, Pillow).
"""

import importlib.util
import re
import shutil
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from penstock.fleet.config import VideoConfig
from penstock.fleet.policy import OnEvent
from penstock.fleet.pool import SimulatorPool
from penstock.fleet.shared_block import Frame, FrameLabel
from penstock.fleet.steps import Leaves, StepBatch
from penstock.rundir.storage import replaced_atomically
from penstock.types import ConfigError, Spaces

MOST_WAITING_BYTES = 1 << 26
"""Of frames that wait for the encoder."""
LEAST_WIDTH = 256
"""Smaller pictures are enlarged by a whole factor, so that the words below them can be read."""
LINE_HEIGHT = 14
"""Pixels of a line of words."""


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    picture: np.ndarray
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _End:
    name: str | None  # None: the film is thrown away


class VideoWriter:
    """One thread that encodes one film at a time. One other thread begins, adds and ends.

    Args:
        folder: Where films appear; made when the first one is begun.
        name: Of the writer, unique among those that write into the folder at a time.
        fps: Frames per second.
        on_event: Called with ``film_written`` and ``film_failed``, in the thread.
        most_waiting_bytes: See `MOST_WAITING_BYTES`.

    Raises:
        ConfigError: a package is missing; says how to install it.
    """

    def __init__(
        self, folder: Path, name: str, fps: int, on_event: OnEvent = lambda kind, values: None,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:  # fmt: skip
        require_film_packages("a film")
        self._folder, self._name, self._fps, self._on_event = folder, name, fps, on_event
        self._most_waiting_bytes = most_waiting_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Frame | _End] = deque()
        self._waiting_bytes = 0
        self._busy = False  # a film was begun and is not written yet
        self._closing = False
        self._dropped_now = 0
        self._counts = {"films": 0, "films_failed": 0, "film_frames": 0, "film_frames_dropped": 0}
        self._encoder: _Encoder | None = None
        self._failed = False  # this film
        self._thread: threading.Thread | None = None

    def begin(self) -> bool:
        """Begins a film. False while the last one is still being written: then there is none."""
        with self._changed:
            if self._busy or self._closing:
                return False
            self._busy, self._dropped_now = True, 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._name}.film", daemon=True)
            self._thread.start()
        return True

    def add(self, picture: np.ndarray, words: tuple[str, ...]) -> bool:
        """Adds a frame to the film that was begun.

        Args:
            picture: uint8 [height, width, 3]; not to be changed any more.
            words: Lines to stand below it.

        Returns:
            False where it was dropped, since too many wait.
        """
        with self._changed:
            if self._waiting_bytes + picture.nbytes > self._most_waiting_bytes:
                self._dropped_now += 1
                self._counts["film_frames_dropped"] += 1
                return False
            self._waiting_bytes += picture.nbytes
            self._waiting.append(_Frame(picture, words))
            self._changed.notify_all()
            return True

    def end(self, name: str | None) -> None:
        """Ends the film that was begun; it appears as `name`, a file's name. None: it is thrown away."""
        with self._changed:
            self._waiting.append(_End(name))
            self._changed.notify_all()

    def counts(self) -> dict[str, int]:
        """``films`` written, ``films_failed``, ``film_frames`` encoded, and ``film_frames_dropped``."""
        with self._changed:
            return dict(self._counts)

    @property
    def waiting_bytes(self) -> int:
        """Of frames that wait."""
        return self._waiting_bytes

    def close(self, timeout_s: float) -> bool:
        """Writes what was ended, throws away what was not, and ends the thread.

        Returns:
            False where it did not end in time; it goes on, and dies with the process.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                if isinstance(item, _End):
                    self._finish(item.name)
                elif not self._failed:
                    self._encode(item)
            except Exception as error:  # whatever a codec or a full disk raises: told, and the film is over
                self._fail(error)
            if isinstance(item, _End):
                self._failed = False
                with self._changed:
                    self._busy = False
        self._throw_away()

    def _next(self) -> _Frame | _End | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
            if not self._waiting:
                return None
            item = self._waiting.popleft()
            if isinstance(item, _Frame):
                self._waiting_bytes -= item.picture.nbytes
            return item

    def _encode(self, frame: _Frame) -> None:
        pixels = captioned(frame.picture, frame.words)
        if self._encoder is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._encoder = _Encoder(self._folder, self._fps, pixels.shape)
        self._encoder.add(pixels)
        with self._changed:
            self._counts["film_frames"] += 1

    def _finish(self, name: str | None) -> None:
        if name is None or self._encoder is None:
            self._throw_away()
            return
        path, frames = self._folder / name, self._encoder.frames
        self._encoder.save(path)
        self._throw_away()
        with self._changed:
            self._counts["films"] += 1
            dropped = self._dropped_now
        self._on_event("film_written", {"path": str(path), "frames": frames, "dropped_frames": dropped})

    def _fail(self, error: Exception) -> None:
        self._failed = True
        with self._changed:
            self._counts["films_failed"] += 1
        reason = f"{type(error).__name__}: {error}"
        try:
            self._throw_away()
        except Exception as another:  # the same codec, or the same disk
            reason += f"; and then {type(another).__name__}: {another}"
        self._on_event("film_failed", {"worker": self._name, "reason": reason})

    def _throw_away(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            encoder.close()


class _Encoder:
    """A film that is being written, in a file without a name in that folder."""

    def __init__(self, folder: Path, fps: int, shape: tuple[int, ...]) -> None:
        import av

        self._shape, self.frames = shape, 0
        self._file = TemporaryFile(dir=folder)
        self._container = av.open(self._file, "w", format="mp4")
        self._stream: Any = self._container.add_stream("libx264", rate=fps, options={"preset": "veryfast"})
        self._stream.height, self._stream.width = shape[:2]
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.thread_count = 1  # the cores are the simulators'

    def add(self, pixels: np.ndarray) -> None:
        import av

        if pixels.shape != self._shape:  # a film has one size, its first frame's
            canvas = np.zeros(self._shape, np.uint8)
            height, width = np.minimum(pixels.shape[:2], self._shape[:2])
            canvas[:height, :width] = pixels[:height, :width]
            pixels = canvas
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        self.frames += 1

    def save(self, path: Path) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        self._file.seek(0)
        with replaced_atomically(path, durable=False) as draft, draft.open("wb") as film:
            shutil.copyfileobj(self._file, film)

    def close(self) -> None:
        try:
            self._container.close()
        finally:
            self._file.close()


def captioned(picture: np.ndarray, words: tuple[str, ...]) -> np.ndarray:
    """A picture with lines of white words on black below it, enlarged to at least `LEAST_WIDTH`, with even sides.

    Args:
        picture: uint8 [height, width, 3].
        words: One caption line each, top to bottom.

    Returns:
        uint8 [2 h, 2 w, 3].
    """
    from PIL import Image, ImageDraw

    factor = max(1, -(-LEAST_WIDTH // picture.shape[1]))
    enlarged = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = enlarged.shape[:2]
    total = height + LINE_HEIGHT * len(words)
    canvas = np.zeros((total + total % 2, width + width % 2, 3), np.uint8)
    canvas[:height, :width] = enlarged
    strip = Image.fromarray(np.ascontiguousarray(canvas[height:])) if words else None
    if strip is not None:
        draw = ImageDraw.Draw(strip)
        for line, text in enumerate(words):
            draw.text((4, LINE_HEIGHT * line + 1), text, fill=(255, 255, 255))
        canvas[height:] = np.asarray(strip)
    return canvas


def require_film_packages(what: str) -> None:
    """Sees that films can be encoded.

    Args:
        what: Needs them, for the error.

    Raises:
        ConfigError: packages are missing.
    """
    missing = [name for name in ("av", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}, missing here: pip install 'penstock[gym]'")


CLOSE_S = 10.0
"""For the last film to be written when a worker ends."""


class RecordingPool:
    """A `SimulatorPool` that is filmed: what is not said here is the pool's own.

    Its `note` is to be told of each batch, in the thread that acts.

    Args:
        pool: Of a fleet with ``video.every_episodes``.
        video: What is filmed.
        folder: Where films appear.
        name: Of the worker's life: the begin of each film's name.
        on_event: Called with ``film_written`` and ``film_failed``.
        writer: Of films; None: one of its own.

    Raises:
        ConfigError: a package is missing; says how to install it.
    """

    def __init__(
        self, pool: SimulatorPool, video: VideoConfig, folder: Path, name: str,
        on_event: OnEvent = lambda kind, values: None, writer: VideoWriter | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._video, self._name, self._on_event = pool, video, name, on_event
        self.tasks, self.env_names, self.num_slots = pool.tasks, pool.env_names, pool.num_slots
        self.start, self.poll, self.given_up = pool.start, pool.poll, pool.given_up
        self._writer = writer or VideoWriter(folder, name, video.fps, on_event)
        self._rows = pool.num_slots // len(pool.process_ids())
        self._begun = 0
        self._numbers = np.zeros(pool.num_slots, np.int64)  # of the episode each slot plays
        self._skipped = 0
        self._failed = 0  # since a simulator did not draw
        self._slot: int | None = None  # chosen
        self._filming = False
        self._stopping = False  # its simulator still draws, and need not
        self._frame = Frame()
        self._frames = 0
        self._return = 0.0

    @property
    def spaces(self) -> Spaces:
        """The pool's."""
        return self._pool.spaces

    @property
    def live_slots(self) -> int:
        """The pool's."""
        return self._pool.live_slots

    def act(self, process: int, actions: Leaves, part: int = 0) -> None:
        """Takes the picture that came with the process's arrival, and acts."""
        if self._slot is not None and process == self._slot // self._rows:
            self._look(process, self._slot % self._rows)
        self._pool.act(process, actions, part)

    def counts(self) -> dict[str, int]:
        """The pool's, the films' (`VideoWriter.counts`), and ``films_skipped``."""
        counts = self._writer.counts()
        counts["films_failed"] += self._failed
        return self._pool.counts() | counts | {"films_skipped": self._skipped}

    def close(self) -> None:
        """Closes the pool, and waits for the film that is being written; an unfinished one is thrown away."""
        self._pool.close()
        if not self._writer.close(CLOSE_S):
            self._on_event("film_failed", {"worker": self._name, "reason": f"it was not written within {CLOSE_S:g} s"})

    def note(self, batch: StepBatch) -> None:
        """Takes a batch in: what to say about the picture, where an episode ended, and whose turn comes."""
        if self._slot is not None and not self._stopping:
            rows = np.flatnonzero(batch.slots == self._slot)
            if len(rows):
                self._follow(batch, int(rows[0]))
        if batch.first.any():
            self._count(batch)

    def _look(self, process: int, row: int) -> None:
        area = self._pool.film_area(process)
        if area is None:  # the process is gone
            self._frame = Frame()
        elif self._stopping:
            area.ask(None)
        else:
            self._frame = area.take()
            if self._frame.label is FrameLabel.NOTHING and not self._filming:
                area.ask(row)  # again for every life of the process
        if self._stopping:
            self._slot, self._stopping = None, False

    def _count(self, batch: StepBatch) -> None:
        self._numbers[batch.slots[batch.first & batch.acted]] += 1
        begun = batch.slots[batch.first]
        every = self._video.every_episodes
        turn = every - 1 - self._begun % every  # which of these is the next to choose
        self._begun += len(begun)
        if turn >= len(begun):
            return
        if self._slot is None:
            self._slot = int(begun[turn])
        else:
            self._skipped += 1

    def _follow(self, batch: StepBatch, row: int) -> None:
        frame, self._frame = self._frame, Frame()
        if frame.label is FrameLabel.FAILED:
            self._give_up(frame.trouble)
        elif self._filming and (batch.first[row] or frame.label in (FrameLabel.LAST, FrameLabel.FIRST)):
            self._end(batch, row, frame)
        elif self._filming or frame.label is FrameLabel.FIRST:
            self._go_on(batch, row, frame)

    def _go_on(self, batch: StepBatch, row: int, frame: Frame) -> None:
        if not self._filming:
            if not self._writer.begin():
                self._skipped, self._stopping = self._skipped + 1, True
                return
            self._filming, self._frames, self._return = True, 0, 0.0
        else:
            self._return += float(batch.rewards[row])
        reward = float(batch.rewards[row]) if self._frames else 0.0
        self._add(frame, reward, f"value {float(batch.decision.values[row]):.3f}")
        if self._frames >= self._video.most_frames:
            self._stopping = True
            self._finish(self._return)

    def _end(self, batch: StepBatch, row: int, frame: Frame) -> None:
        fault = bool(batch.faults[row])
        if not fault:
            self._return += float(batch.rewards[row])
            if frame.label is FrameLabel.LAST:
                self._add(frame, float(batch.rewards[row]), "the end")
        known = not fault and bool(batch.has_final[row])
        self._finish(float(batch.returns[row]) if known else self._return)
        self._slot = None

    def _add(self, frame: Frame, reward: float, value: str) -> None:
        if frame.picture is not None:
            words = (f"step {self._frames}  {value}", f"reward {reward:g}  return {self._return:g}")
            self._writer.add(frame.picture, words)
        self._frames += 1

    def _finish(self, episode_return: float) -> None:
        slot = self._slot
        assert slot is not None
        task = re.sub(r"[^\w.-]", "_", self._pool.tasks[slot])
        self._writer.end(f"{self._name}_{task}_slot{slot}_episode{self._numbers[slot]}_return{episode_return:g}.mp4")
        self._filming = False

    def _give_up(self, trouble: str) -> None:
        assert self._slot is not None
        self._failed += 1
        self._on_event("film_failed", {"worker": self._name, "task": self._pool.tasks[self._slot], "reason": trouble})
        if self._filming:
            self._writer.end(None)
        self._filming, self._slot = False, None
