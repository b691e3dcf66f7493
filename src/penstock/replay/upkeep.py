"""The thread that keeps the store in order while a run goes on: small files are merged when enough have gathered.

It wakes when files were written, and every few seconds for what has to be deleted a while after a merge. A failure is a
full or broken disk, which ends the run with an error that says so.
"""

import threading
from collections.abc import Callable

from penstock.replay.store import ExperienceStore
from penstock.types import PenstockError, RunFailed

_ROUND_S = 5.0
"""Longest sleep between two looks; one that finds nothing to do touches no file."""


class Upkeep:
    """Runs `ExperienceStore.maintain` in the background.

    Args:
        store: What to keep in order.
        on_failure: Told of the error that ended it.
    """

    def __init__(self, store: ExperienceStore, on_failure: Callable[[RunFailed], None]) -> None:
        self._store = store
        self._on_failure = on_failure
        self._news = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        """A file was written."""
        self._news.set()
        with self._starting:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="replay-upkeep", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end, without waiting: closing the store abandons a merge that is under way."""
        self._stopping = True
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait(_ROUND_S)
            self._news.clear()
            if self._stopping:
                return
            try:
                self._store.maintain()
            except (OSError, PenstockError) as error:
                self._on_failure(RunFailed(f"merging small rollout files failed: {error}"))
                return
