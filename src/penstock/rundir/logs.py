"""Append-only logs of one JSON object per line, their readers, and JSON that every reader takes.

Every append is one write to the kernel, so a process killed by SIGKILL loses no line that `append` returned
from; `sync` makes them survive a power loss too. A machine that dies in the middle of a line leaves an unfinished
one: readers ignore it, and the next writer cuts it off. An append that fails leaves nothing behind. One process writes
a log; any number of its threads may.

`to_json` writes halves of surrogate pairs, which Python's strings may hold (of undecodable bytes in an error message,
say), as the text of their escapes: DuckDB and others would refuse them together with the whole file. NaN and
infinities, which JSON does not have, become null.
"""

import errno
import io
import json
import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsFloat

from penstock.rundir.storage import sync_directory
from penstock.types import Clock, RunDirectoryError


def to_json(value: Any, indent: int | None = None, allow_nan: bool = False) -> str:
    """`value` as JSON, in ASCII.

    Args:
        value: Plain values.
        indent: For people; None puts all in one line.
        allow_nan: Write NaN and infinities as Python does, which not every reader takes; otherwise they are null.

    Raises:
        TypeError: it holds something that JSON has no form for.
    """
    try:
        text = json.dumps(value, indent=indent, allow_nan=allow_nan)
    except ValueError:  # a number that is not finite
        value = _finite(value)
        text = json.dumps(value, indent=indent, allow_nan=False)
    if "\\ud" not in text:  # which few texts have: a pair, or half of one
        return text
    return json.dumps(encodable(value), indent=indent, allow_nan=allow_nan)


def encodable(value: Any) -> Any:
    """With escapes for halves of surrogate pairs, which cannot be encoded."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(member) for member in value]
    return value


def _finite(value: Any) -> Any:
    """With None for numbers that are not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return value


LIFE_BEGINS = ("resume", "start")
"""Events with which a life of a run begins: a resume is told some moments before the start of its process's work."""
LINKED = "is a link, and a run does not write through links: put the file itself there, or remove the link"
_MOST_STATUS_BYTES = 16 << 20
_REMEDY = "restore the file from a copy, or take that line out: the others can be read without it"
_NOT_PLAIN = "is no plain file: put the log itself there, or remove it"


class JsonLinesLog:
    """A file of JSON objects, one a line, that only grows.

    Args:
        path: Created when missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._torn_at: int | None = None
        descriptor = open_unlinked(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._descriptor: int | None = descriptor
        _cut_unfinished_line(descriptor)
        if not os.fstat(descriptor).st_size:
            sync_directory(path.parent)  # or `sync` would flush a file that has no name after a power loss

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Writes rows; when this returns they survive the death of the process, when it raises none is there."""
        lines = "".join(to_json(row) + "\n" for row in rows)
        with self._lock:
            descriptor = self._open_descriptor()
            self._repair(descriptor)
            self._torn_at = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, lines.encode())
            except BaseException:
                with suppress(OSError):  # the next append tries it again; this one has its error already
                    self._repair(descriptor)
                raise
            self._torn_at = None

    def sync(self) -> None:
        """Flushes to the disk: what was appended survives the death of the machine."""
        with self._lock:
            os.fsync(self._open_descriptor())

    def close(self) -> None:
        """Flushes and closes; a second call does nothing."""
        with self._lock:
            if self._descriptor is not None:
                with suppress(OSError):  # the next writer cuts off what is no whole line
                    self._repair(self._descriptor)
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = None

    def _repair(self, descriptor: int) -> None:
        """Cuts off what a write that failed, of a full disk say, left of its lines."""
        if self._torn_at is not None:
            os.ftruncate(descriptor, self._torn_at)
            self._torn_at = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise RunDirectoryError(f"{self.path} is closed: nothing can be appended to it any more")
        return self._descriptor


class MetricsLog:
    """``metrics.jsonl``: numbers named ``<group>/<name>`` by step; one writer per run.

    Args:
        path: The file.
        clock: Stamps each line.
    """

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        self._log = JsonLinesLog(path)
        self._clock = clock

    def append(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Writes one line; a value that is not finite becomes null, which every JSON reader knows."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._log.append({"step": int(step), "time": self._clock(), **numbers})

    def close(self) -> None:
        """Flushes and closes the file."""
        self._log.close()


class EventLog:
    """``events.jsonl``: starts, deaths, restarts, weight versions, checkpoints.

    Args:
        path: The file.
        clock: Stamps each line.
    """

    def __init__(self, path: Path, clock: Clock = time.time) -> None:
        self._log = JsonLinesLog(path)
        self._clock = clock

    def append(self, event: str, **details: Any) -> None:
        """Writes one event with its details."""
        self._log.append({"time": self._clock(), "event": event, **details})

    def close(self) -> None:
        """Flushes and closes the file."""
        self._log.close()


def open_unlinked(path: str | Path, flags: int) -> int:
    """Opens a file that the run keeps writing; also an `opener` of the built-in `open`.

    A link there would have the run write where somebody else points. New files have the rights that the umask leaves.

    Raises:
        RunDirectoryError: it is a link, or no plain file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise RunDirectoryError(f"{path} {LINKED if error.errno == errno.ELOOP else _NOT_PLAIN}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDirectoryError(f"{path} {_NOT_PLAIN}")
    return descriptor


def has_log(path: Path) -> bool:
    """Whether a log is there to be read.

    Raises:
        RunDirectoryError: something else is there, such as a pipe, which a reader would wait at for ever.
    """
    if path.exists() and not path.is_file():
        raise RunDirectoryError(f"{path} {_NOT_PLAIN}")
    return path.exists()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The finished lines of a log, in order; nothing where the file is missing.

    Raises:
        RunDirectoryError: a finished line is not a JSON object, or it is no plain file.
    """
    if not has_log(path):
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _parse(path, number, line)


def parse_lines(path: Path, content: bytes, offset: int = 0) -> Iterator[dict[str, Any]]:
    """The objects in some finished lines of a log.

    Args:
        path: The log, for messages.
        content: The lines.
        offset: In bytes, where they begin in it.

    Raises:
        RunDirectoryError: a line is not a JSON object.
    """
    for index, line in enumerate(io.BytesIO(content)):
        try:
            yield _parse(path, index + 1, line)
        except RunDirectoryError:
            with path.open("rb") as file:
                before = file.read(offset).count(b"\n")
            yield _parse(path, before + index + 1, line)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every line of ``metrics.jsonl``; safe while the run goes on."""
    return list(read_json_lines(path))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every line of ``events.jsonl``; safe while the run goes on."""
    return list(read_json_lines(path))


def read_status(path: Path) -> dict[str, Any] | None:
    """The last ``status.json``; None before the first, and where it cannot be read.

    It is not flushed when it is written, so a power loss may leave it empty; whoever looks can do without it.
    """
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return _parse(path, 1, file.read(_MOST_STATUS_BYTES))
    except (OSError, RunDirectoryError):
        return None


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path}, line {number} is not JSON: {error}; {_REMEDY}") from error
    if not isinstance(row, dict):
        raise RunDirectoryError(f"{path}, line {number} is not a JSON object but a {type(row).__name__}; {_REMEDY}")
    return row


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut_unfinished_line(descriptor: int) -> None:
    """Truncates a log after its last line end, so that the next line does not continue a torn one."""
    end = keep = os.fstat(descriptor).st_size
    while keep > 0:
        start = max(0, keep - 4096)
        newline = os.pread(descriptor, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep != end:
        os.ftruncate(descriptor, keep)
