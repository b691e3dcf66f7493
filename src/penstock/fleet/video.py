"""Writes films (H.264 in MP4) in a thread of its own, one after the other, and never lets its caller wait.

Frames that come faster than they can be encoded are dropped and counted: at most `MOST_WAITING_BYTES` wait. A film
appears under its name when it is whole. Whatever encoding raises ends that film, is told as the event ``film_failed``,
and ends nothing else. Needs the extra ``gym`` (PyAV, Pillow).
"""

import importlib.util
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.fleet.runner import OnEvent
from penstock.types import ConfigError

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
        on_event: Told of ``film_written`` and ``film_failed``, in the thread.
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
        self._draft = folder / f".{name}.mp4.tmp"
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
            self._encoder = _Encoder(self._draft, self._fps, pixels.shape)
        self._encoder.add(pixels)
        with self._changed:
            self._counts["film_frames"] += 1

    def _finish(self, name: str | None) -> None:
        if name is None or self._encoder is None:
            self._throw_away()
            return
        encoder, self._encoder = self._encoder, None
        encoder.close()
        path = self._folder / name
        os.replace(self._draft, path)
        with self._changed:
            self._counts["films"] += 1
            dropped = self._dropped_now
        self._on_event("film_written", {"path": str(path), "frames": encoder.frames, "dropped_frames": dropped})

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
        try:
            if encoder is not None:
                encoder.close()
        finally:
            self._draft.unlink(missing_ok=True)


class _Encoder:
    """A film that is being written."""

    def __init__(self, path: Path, fps: int, shape: tuple[int, ...]) -> None:
        import av

        self._shape, self.frames = shape, 0
        self._container = av.open(str(path), "w", format="mp4")
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

    def close(self) -> None:
        try:
            self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()


def captioned(picture: np.ndarray, words: tuple[str, ...]) -> np.ndarray:
    """A picture with lines of white words on black below it, enlarged to at least `LEAST_WIDTH`, with even sides.

    Args:
        picture: uint8 [height, width, 3].
        words: Lines.

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


def require_film_packages(what: str, names: tuple[str, ...] = ("av", "PIL")) -> None:
    """Sees that films can be encoded.

    Args:
        what: Needs them, for the error.
        names: The packages as they are imported.

    Raises:
        ConfigError: packages are missing.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {' and '.join(missing)}, missing here: pip install 'penstock[gym]'")
