"""Runs that are watched: found under a folder by their names, their curves, events and index read on by one thread.

A run is known by the name of its directory, looked up among those that are there: what a browser sends is never joined
to a path. Reading goes piece by piece, the runs that somebody looked at lately first, so that the first picture does
not wait for the last row; `progress` says what is still to come. A run whose files cannot be read has a `problem` in
its place. Nothing is written into a run, and nothing of it executed.
"""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from penstock.dashboard.index import RunIndex
from penstock.dashboard.status import RunStatus, read_run_status
from penstock.dashboard.tokens import TokenText
from penstock.rundir import RunDirectory
from penstock.rundir.curves import Curves
from penstock.rundir.live_files import UNREADABLE
from penstock.rundir.logs import has_log, parse_lines
from penstock.types import ConfigError, PenstockError, RunDirectoryError

LOOK_S = 1.0
"""Between two looks at what has grown, at least."""
REST, LONGEST_REST_S = 200.0, 30.0
"""After a look it rests so many times as long as that took of the processor, lest a run that goes on be slowed."""
WANTED_S = 60.0
"""A run is read on for so long after it was asked for; its curves are read once in any case."""
FRESH_S = 1.0
"""Who asks for a run that was let alone waits for a look at it, but not longer."""
MOST_EVENTS = 20_000
"""Kept of one run: the newest."""
MOST_SWAPS = 100_000
"""Of each engine."""
_EVENT_BYTES = 1 << 20
"""So much of the events is read at once."""
_MOST = 2**53
"""No step and no moment is greater."""


class ObservedRun:
    """One run.

    Args:
        path: The run directory.
        cache: Folder of indices; None keeps them in memory.
        trust: As in `RunFiles.list_now`.
    """

    def __init__(self, path: Path, cache: Path | None = None, trust: bool = False) -> None:
        self.directory = RunDirectory(path)
        self.curves = Curves(self.directory.metrics_path)
        self.problem = ""
        self.progress = "not read yet"
        self.version = 0
        self.reads = 0  # how often all of it was read
        self._has_news = False
        self.trust = trust
        self._cache = cache
        self._events: list[dict[str, Any]] = []
        self._swaps: dict[str, tuple[array[float], array[int]]] = {}
        self._events_offset = 0
        self._index: RunIndex | None = None
        self._pieces: Iterator[str] | None = None
        self._lock = threading.Lock()
        self._config: tuple[tuple[int, ...], dict[str, Any]] | None = None
        self._token_text: TokenText | None = None
        self.asked_at = self.rests_until = self.taken_s = 0.0
        self.looked = threading.Event()
        """Set where a look has ended since it was cleared."""
        self._read_bytes = 0

    @property
    def name(self) -> str:
        """By which it is asked for."""
        return self.directory.path.name

    @property
    def index(self) -> RunIndex:
        """Of its rollouts.

        Raises:
            ConfigError: its store is not opened.
        """
        with self._lock:
            if self._index is None:
                self._index = RunIndex(self.directory, self._cache, self.trust)
            return self._index

    @property
    def config(self) -> dict[str, Any]:
        """What config.yaml says; empty where that cannot be read."""
        try:
            return self._read_config()
        except (RunDirectoryError, OSError):
            return {}

    def _read_config(self) -> dict[str, Any]:
        """Parsed once, and again where a resume has replaced it: it is asked for with every status."""
        found = self.directory.config_path.stat()
        stamp = found.st_mtime_ns, found.st_size, found.st_ino
        if self._config is None or self._config[0] != stamp:
            self._config = stamp, self.directory.read_config()
        return self._config[1]

    @property
    def token_text(self) -> TokenText:
        """What decodes its tokens.

        Raises:
            ConfigError: it has no tokenizer that can be read.
        """
        if self._token_text is None:
            self._token_text = TokenText.of_run(self.directory)
        return self._token_text

    @property
    def is_of_simulators(self) -> bool:
        """Whether it trains a control policy."""
        return "fleet" in self.config

    def status(self) -> RunStatus:
        """As `penstock status` says it; a run whose config is broken is dead, with the reason."""
        try:
            return read_run_status(self.directory.path, config=self._read_config())
        except (PenstockError, OSError) as error:
            return RunStatus(self.directory.path, "dead", str(error), None, "local", {})

    def events(self) -> list[dict[str, Any]]:
        """The lines of ``events.jsonl`` so far, in order, without those of `swaps`."""
        with self._lock:
            self._read_events()
            return list(self._events)

    def swaps(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """When engines and fleets' workers began to sample with another version.

        Returns:
            By name: Unix seconds, float64 [n], in order, and the versions' steps, int64 [n].
        """
        with self._lock:
            self._read_events()
            found = {who: (np.array(times), np.array(steps, np.int64)) for who, (times, steps) in self._swaps.items()}
        return {who: (np.sort(times), steps[np.argsort(times, kind="stable")]) for who, (times, steps) in found.items()}

    def look(self) -> bool:
        """Reads one more piece; returns whether there was any."""
        try:
            more = self._look()
        except (*UNREADABLE, PenstockError, duckdb.Error) as error:  # the other runs are read on
            self.problem = " ".join(str(error).split())
            self._pieces = None
            self._tell_news()
            more = False
        if not more:
            self._read_bytes = self._metric_bytes()
            self.looked.set()
        return more

    @property
    def has_grown(self) -> bool:
        """Whether it has other metrics than when all of it was read last."""
        return self._metric_bytes() != self._read_bytes

    def _metric_bytes(self) -> int:
        try:
            return self.directory.metrics_path.stat().st_size
        except OSError:
            return 0

    def catch_up(self) -> None:
        """Reads all that is there, of a run that no thread reads on."""
        while self.look():
            pass

    def close(self) -> None:
        """Frees the index."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def _look(self) -> bool:
        if self.curves.read_on():
            self._grown("reading curves")
            return True
        index = self.index
        if self._pieces is None:
            self._pieces = index.read_on()
        piece = next(self._pieces, None)
        if piece is None:
            self._pieces, self.progress = None, ""
            self.reads += 1
            self._tell_news()
            self.problem = next(iter(index.damaged.values()), "")
            return False
        left = f", {index.waiting} files to go" if index.waiting > 1 else ""
        self._grown(f"reading rollouts{left}")
        return True

    def _grown(self, words: str) -> None:
        """Of a run that was read before, a page is drawn anew once all that is new is there, not for each piece."""
        self.progress, self._has_news = words, True
        if not self.reads:
            self._tell_news()

    def _tell_news(self) -> None:
        self.version += self._has_news
        self._has_news = False

    def _read_events(self) -> None:
        path = self.directory.events_path
        if not has_log(path):
            return
        with path.open("rb") as file:
            file.seek(self._events_offset)
            whole = True
            while whole and (content := file.read(_EVENT_BYTES) + file.readline()):
                whole = content.endswith(b"\n")
                content = content[: content.rfind(b"\n") + 1]
                for event in parse_lines(path, content, self._events_offset):
                    if event.get("event") == "weights_served":
                        self._note_swap(event)
                    else:
                        self._events.append(event)
                self._events_offset += len(content)
                del self._events[:-MOST_EVENTS]

    def _note_swap(self, event: Mapping[str, Any]) -> None:
        who, held, moment = str(event.get("component", event.get("worker"))), event.get("version"), event.get("time")
        match held, moment:
            case [int(), int() as step], int() | float() as seconds if abs(step) < _MOST and abs(seconds) < _MOST:
                times, steps = self._swaps.setdefault(who, (array("d"), array("q")))
                times.append(float(seconds))
                steps.append(step)
                del times[:-MOST_SWAPS], steps[:-MOST_SWAPS]
            case _:
                pass  # of no form that this Penstock knows


class ObservedRuns:
    """A run, or all runs of a folder, and the thread that reads them on; a context manager.

    Args:
        path: A run directory, or a folder of such.
        cache: Folder of indices; None keeps them in memory.
        trust: As in `RunFiles.list_now`.
        clock: Of monotonic seconds.

    Raises:
        RunDirectoryError: it is neither.
    """

    def __init__(
        self,
        path: Path,
        cache: Path | None = None,
        trust: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path.resolve() if ".." in path.parts else path.absolute()  # it needs a name
        self._cache, self._trust, self._clock = cache, trust, clock
        self._known: dict[str, ObservedRun] = {}
        self._listed_at = -WANTED_S
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._read, name="dashboard-reader", daemon=True)
        if not self.all():
            (self._path / "config.yaml").is_file()  # says where it may not be read
            protocol, separator, rest = str(path).partition(":/")
            if separator and protocol.isalnum() and not path.exists():
                raise RunDirectoryError(
                    f"{protocol}://{rest.lstrip('/')} is a URL: a run's config.yaml, metrics.jsonl and events.jsonl "
                    "lie in its directory on a disk. Give that directory: rollouts that lie in a store (its "
                    "replay.store.url) are read from there"
                )
            raise RunDirectoryError(
                f"{path} is no run directory and holds none: give one that penstock train wrote, or the folder where "
                "several are, such as runs"
            )

    def __enter__(self) -> "ObservedRuns":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(30.0)
        for run in self._known.values():
            run.close()

    def all(self) -> list[ObservedRun]:
        """Those that are there now, by name; what was deleted is forgotten, for another may take its name."""
        found = [self._path] if _is_run(self._path) else sorted(filter(_is_run, _children(self._path)))
        with self._lock:
            self._known = {
                path.name: self._known.get(path.name) or ObservedRun(path, self._cache, self._trust) for path in found
            }
            return list(self._known.values())

    def listed(self) -> list[ObservedRun]:
        """Those that are there now, by name, after a look at those that have grown."""
        self._listed_at = self._clock()
        runs = self.all()
        self._await_look([run for run in runs if run.reads and run.has_grown and run.rests_until <= self._listed_at])
        return runs

    def find(self, name: str) -> ObservedRun:
        """The run of a name.

        Raises:
            ConfigError: there is none.
        """
        run = next((run for run in self.all() if run.name == name), None)
        if run is None:
            raise ConfigError(f"there is no run {name!r} here: it may have been deleted")
        now = self._clock()
        was_let_alone, run.asked_at = run.reads and now - run.asked_at >= WANTED_S, now
        if was_let_alone:
            run.rests_until = 0.0
        self._await_look([run] if was_let_alone else [])
        return run

    def _await_look(self, runs: list[ObservedRun]) -> None:
        """Gives the thread a moment to look at some runs."""
        for run in runs:
            run.looked.clear()
        self._wake.set()
        end = time.monotonic() + FRESH_S * self._thread.is_alive()
        for run in runs:
            run.looked.wait(max(0.0, end - time.monotonic()))

    def _read(self) -> None:
        """Whoever was asked for last is first; a run that nobody asks for, or lists, is read once."""
        while not self._ending.is_set():
            runs, now = sorted(self.all(), key=lambda run: -run.asked_at), self._clock()
            wanted = [run for run in runs if run.rests_until <= now and self._is_wanted(run, now)]
            self._wake.clear()
            if not any(self._read_one(run) for run in wanted):
                self._wake.wait(LOOK_S)

    def _is_wanted(self, run: ObservedRun, now: float) -> bool:
        is_listed = now - self._listed_at < WANTED_S
        return run.version == 0 or now - run.asked_at < WANTED_S or (is_listed and run.has_grown)

    def _read_one(self, run: ObservedRun) -> bool:
        """A few pieces, until somebody asks for another; once all is read, the run is let alone for a while."""
        grew, begun, more = False, time.thread_time(), True
        while more and not (grew and self._wake.is_set()) and not self._ending.is_set():
            more = run.look()
            grew |= more
        run.taken_s += time.thread_time() - begun
        if not more:
            spent = run.taken_s if run.reads > 1 else 0.0  # the first time says nothing of the next
            run.rests_until = self._clock() + min(max(LOOK_S, REST * spent), LONGEST_REST_S)
            run.taken_s = 0.0
        return grew


def _is_run(path: Path) -> bool:
    try:
        return (path / "config.yaml").is_file()
    except PermissionError:  # somebody else's, in a folder that many use
        return False


def _children(path: Path) -> list[Path]:
    try:
        return [child for child in path.iterdir() if child.name.isprintable()]
    except OSError:
        return []
