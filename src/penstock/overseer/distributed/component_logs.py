"""The logs of a component's process: ``logs/<name>.jsonl`` and ``logs/<name>.out`` in the run directory.

The first holds one JSON object a line of what was logged, the second what was printed by whomever, native code
included. Both go on over all incarnations of the component. On a machine that does not share the run directory they lie
under the same path there. A log that cannot be written does not stop the component.
"""

import logging
import os
import sys
import traceback
from pathlib import Path

from penstock.overseer.distributed.records import Identity
from penstock.rundir import JsonLinesLog
from penstock.rundir.logs import open_unlinked
from penstock.types import RunDirectoryError


def open_component_logs(directory: Path, identity: Identity) -> None:
    """Sends all that this process logs and prints into a component's files.

    Args:
        directory: Made when missing.
        identity: Names the files; its incarnation is in every logged line.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = ComponentLog(directory / f"{identity.name}.jsonl", identity.incarnation)
        _redirect_output(directory / f"{identity.name}.out")
    except (OSError, RunDirectoryError) as error:
        logging.getLogger(__name__).warning("no logs of %s: %s", identity, error)
        return
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.INFO)
    logging.captureWarnings(True)


class ComponentLog(logging.Handler):
    """Writes log records as JSON lines.

    Args:
        path: The file.
        incarnation: Of the component that logs.
    """

    def __init__(self, path: Path, incarnation: int) -> None:
        super().__init__()
        self._incarnation = incarnation
        self._lines = JsonLinesLog(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one record; an error in doing so is printed."""
        try:
            line = {
                "time": record.created,
                "incarnation": self._incarnation,
                "level": record.levelname,
                "logger": record.name,
                "thread": record.threadName,
                "message": record.getMessage(),
            }
            if record.exc_info and record.exc_info[1] is not None:
                line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
            self._lines.append(line)
        except Exception:  # as every handler of the standard library
            self.handleError(record)

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()
        super().close()


def _redirect_output(path: Path) -> None:
    """Both streams into one file, below Python: native code prints there, too."""
    descriptor = open_unlinked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(descriptor, number)
    finally:
        os.close(descriptor)
