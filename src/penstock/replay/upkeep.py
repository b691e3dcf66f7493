"""The thread that keeps the store in order while a run goes on: files that are due are written, small ones merged.

It wakes when files were written, and every few seconds for what falls due by time. A failure is a full or broken disk,
which ends the run with an error that says so.
"""

import threading
from collections.abc import Callable

from penstock.types import RunFailed


class Upkeep:
    """Calls `tend` in the background, again and again.

    Args:
        tend: Looks what is to be done, and does it; cheap where that is nothing.
        round_s: Longest sleep between two looks.
        on_failure: Told of the error that ended it.
    """

    def __init__(self, tend: Callable[[], None], round_s: float, on_failure: Callable[[RunFailed], None]) -> None:
        self._tend = tend
        self._round_s = round_s
        self._on_failure = on_failure
        self._news = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Starts the thread, once."""
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="replay-upkeep", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """A file was written."""
        self._news.set()

    def stop(self) -> None:
        """Asks the thread to end, without waiting: closing the store abandons a merge that is under way."""
        self._stopping = True
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait(self._round_s)
            self._news.clear()
            if self._stopping:
                return
            try:
                self._tend()
            except Exception as error:  # whatever it is, the run must not go on without
                self._on_failure(RunFailed(f"keeping the rollout files in order failed: {error}"))
                return
