"""Output streams whose reader may go away: a closed pipe, a dead terminal or a full disk fails no run.

What can no longer be written is dropped; where somebody still wanted it (a full disk), `lost` says so. Not covered:
output of child processes.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class LastingOutput(io.TextIOBase):
    """A text stream that raises no error of its own.

    Args:
        stream: What is written to, as long as it takes anything.

    Attributes:
        lost: Why something was dropped that a reader waits for; None where nothing was, or the reader went away.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stream's."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Writes what the stream's encoding has; the rest is escaped."""
        try:
            self._attempt(lambda: self._stream.write(text))
        except UnicodeEncodeError:
            known = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            self._attempt(lambda: self._stream.write(known))
        return len(text)

    def flush(self) -> None:
        """Writes what is held back."""
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with suppress(ValueError):  # closed
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except UnicodeEncodeError:
            raise
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in _READER_GONE and self.lost is None:
                self.lost = error
            self._forget_reader()

    def _forget_reader(self) -> None:
        """From now on it leads nowhere, also what the stream still holds and the interpreter flushes at its end."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


def lasting(stream: TextIO | None) -> TextIO | None:
    """The stream as `LastingOutput`; None where there is none."""
    return None if stream is None else cast(TextIO, LastingOutput(stream))


@contextmanager
def lasting_output() -> Iterator[LastingOutput | None]:
    """Standard output and standard error are `LastingOutput` meanwhile; a standard stream that is closed leads nowhere.

    Otherwise the next file that is opened would take a closed one's number, and with it what libraries write there.

    Yields:
        Standard output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(lasting, before)
    try:
        yield cast(LastingOutput | None, sys.stdout)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
