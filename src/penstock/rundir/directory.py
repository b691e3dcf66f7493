"""Where everything of a run lies, and the rules for making, opening and continuing it.

A run directory is one that holds a ``config.yaml``. It is never overwritten: a new run needs a new or an empty
directory, an existing one is only continued. docs/run_directory.md lists the files; this module knows their names,
and of their contents only the forks in ``lineages.jsonl``: a lineage continues from an older one, so whoever follows
forks back reaches lineage 0 in the end, and files in which that is not so are refused here, once for all who follow
them.

Not covered: Parquet files that lie elsewhere (`penstock.rundir.storage`).
"""

import fcntl
import grp
import hashlib
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.rundir.logs import LINKED, open_unlinked, read_json_lines, to_json
from penstock.rundir.storage import check_name, is_full_disk, keep_room, write_atomically, write_into_kept_room
from penstock.rundir.yaml_documents import dump_yaml, read_mapping
from penstock.types import ConfigError, RunDirectoryError, RunFailed

_FOLDERS = ("rollouts", "batches", "checkpoints")
_PRIVATE = 0o700
_LOCK = ".lock"
_LOGS = (
    "metrics.jsonl", "events.jsonl", "tickets.jsonl", "fates.jsonl", "lineages.jsonl", "samples.jsonl", "stacks.txt",
)  # fmt: skip
_ROOM_BYTES = 16 * 1024
"""Room for status.json is kept in multiples of this, twice what it takes."""
_UNFINISHED = (".config.yaml.*.tmp", ".status.json.*.tmp", "videos/.*.tmp", "evaluations/.*.tmp")


def cache_folder() -> Path:
    """Where what can be made again of runs is kept: ``$XDG_CACHE_HOME/penstock``, or ``~/.cache/penstock``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


class RunDirectory:
    """Paths of one run.

    Args:
        path: The directory. Nothing is made or checked; use `create` or `open_existing`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], private: bool = False) -> "RunDirectory":
        """Makes the directory of a new run and writes its resolved config.

        Args:
            path: Missing, or empty; or what a process left there that was killed while it made a run directory.
            config: Plain values only (strings, numbers, lists, mappings).
            private: Nobody but the user can open it; else who can is what the umask leaves.

        Raises:
            RunDirectoryError: there is something at `path` already, or it cannot be written.
        """
        directory = cls(path)
        check_name(directory.path, "the run directory")
        with directory._writable():
            directory._refuse_if_taken()
            directory.path.mkdir(_PRIVATE if private else 0o777, parents=True, exist_ok=True)
            with directory.locked():
                directory._refuse_if_taken()  # another process may have made a run of it just now
                for folder in _FOLDERS:
                    (directory.path / folder).mkdir(exist_ok=True)
                if private:
                    directory.make_private()
                # The config comes last and makes it a run directory, so a half-made one is never taken for a run.
                directory.write_config(config)
        return directory

    @classmethod
    def open_existing(cls, path: str | Path) -> "RunDirectory":
        """Opens the directory of a run, running or dead.

        Raises:
            RunDirectoryError: there is no run at `path`, or a folder of it is missing and cannot be made.
        """
        directory = cls(path)
        if not directory.config_path.is_file():
            raise RunDirectoryError(
                f"{directory.path} is not a run directory: it has no config.yaml; begin a run there with --run-dir "
                "(run_dir in Python)"
            )
        for path in (directory.path / folder for folder in _FOLDERS):
            try:
                path.mkdir(exist_ok=True)
            except OSError as error:  # a link, say, to a disk that is not there
                reason = "it is no folder, or a link to none" if os.path.lexists(path) else error.strerror
                raise RunDirectoryError(f"{path} cannot be used: {reason}; restore it, and resume again") from error
        return directory

    def _refuse_if_taken(self) -> None:
        if self.path.exists() and not (self.path.is_dir() and all(map(_is_left_by_creation, self.path.iterdir()))):
            raise RunDirectoryError(
                f"{self.path} exists already and is not overwritten: "
                "choose another --run-dir (run_dir in Python), or continue that run with --resume (resume=True)"
            )

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be written: {error.strerror or error}: choose another place"
            ) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the run as its one writer; the lock ends with the process, however that ends.

        What a killed writer left unfinished in the run's own folder is deleted.

        Raises:
            RunDirectoryError: another process writes this run, it cannot be written, or one of its logs is a link.
        """
        check_name(self.path, "the run directory")
        with self._writable():
            file = open(self.path / _LOCK, "a+", opener=open_unlinked)
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunDirectoryError(
                    f"{self.path} is being written by another process: stop that run first, or wait for it to end"
                ) from error
            for name in _LOGS:  # before anything is written; each is opened so, too
                if (self.path / name).is_symlink():
                    raise RunDirectoryError(f"{self.path / name} {LINKED}")
            for pattern in _UNFINISHED:
                for path in self.path.glob(pattern):
                    path.unlink(missing_ok=True)
            yield

    def check_is_there(self) -> None:
        """For the run's writer, which must not make half of it anew.

        Raises:
            RunFailed: it was deleted, or moved.
        """
        if not self.config_path.exists():
            raise RunFailed(f"the run directory {self.path} is gone: it was deleted or moved while the run wrote to it")

    def read_config(self) -> dict[str, Any]:
        """The resolved config, as written when the run was created.

        Raises:
            RunDirectoryError: the file is not a YAML mapping.
        """
        try:
            return read_mapping(self.config_path)
        except ConfigError as error:
            raise RunDirectoryError(str(error)) from error
        except OSError as error:
            raise RunDirectoryError(f"{self.config_path} cannot be read: {error}") from error

    def make_private(self) -> None:
        """Closes it, and the folders in it, to everybody but the user."""
        for folder in ("", *_FOLDERS):
            (self.path / folder).chmod(_PRIVATE)

    def why_foreign(self) -> str | None:
        """Who else than the user may have written what the run says of itself, as a clause; None: nobody.

        Its directory and its config must be the user's, and closed to writers in other groups. A group that is the
        user's alone, as many systems make one for each, is no other.
        """
        for path in (self.path, self.config_path):
            with suppress(FileNotFoundError):
                if (reason := _why_foreign(path, path.stat())) is not None:
                    return reason
        return None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes or replaces the resolved config; plain values only."""
        write_atomically(self.config_path, dump_yaml(config))

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replaces status.json; not flushed to the disk, since the next one follows in seconds.

        On a full disk it goes where room was kept for it.

        Raises:
            OSError: it cannot be written, not even there.
        """
        content = (to_json(dict(status), indent=1, allow_nan=True) + "\n").encode()
        try:
            write_atomically(self.status_path, content, durable=False)
        except OSError as error:
            if not is_full_disk(error):
                raise
            write_into_kept_room(self.status_path, content)
            return
        with suppress(OSError):  # there is too little room, or it cannot be kept here
            keep_room(self.status_path, -(-2 * len(content) // _ROOM_BYTES) * _ROOM_BYTES)

    @property
    def identity(self) -> str:
        """24 digits by which what is kept elsewhere belongs to it: of its path, and how ``events.jsonl`` begins."""
        first = b""
        with suppress(OSError), self.events_path.open("rb") as file:
            first = file.readline(4096)
        return hashlib.sha256(str(self.path.resolve()).encode() + b"\0" + first).hexdigest()[:24]

    def cached(self, what: str, batch_id: str, ending: str) -> Path:
        """Where something that was computed of one batch of it is kept in the user's cache, or would be."""
        name = hashlib.sha256(f"{self.identity}/{batch_id}".encode()).hexdigest()[:24]
        return cache_folder() / f"{what}-{name}.{ending}"

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """Metrics by step; see `MetricsLog`."""
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """What happened when; see `EventLog`."""
        return self.path / "events.jsonl"

    @property
    def status_path(self) -> Path:
        """The present state, replaced every few seconds."""
        return self.path / "status.json"

    @property
    def tickets_path(self) -> Path:
        """Which groups were started: one line per ticket that was handed out."""
        return self.path / "tickets.jsonl"

    @property
    def fates_path(self) -> Path:
        """How rollouts ended: one line per rollout and decision; the last one counts."""
        return self.path / "fates.jsonl"

    @property
    def lineages_path(self) -> Path:
        """The lives of the run: one line per resume."""
        return self.path / "lineages.jsonl"

    @property
    def rollouts(self) -> Path:
        """Folder of sealed rollout groups, ``part-<uuid>.parquet``."""
        return self.path / "rollouts"

    @property
    def batches(self) -> Path:
        """Folder of training batches, ``batch_<uuid>_<time>.parquet``."""
        return self.path / "batches"

    @property
    def evaluations(self) -> Path:
        """Folder of what was said in evaluations, ``<label>-<lineage>-<step>.parquet``; made with the first."""
        return self.path / "evaluations"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints, ``step-<n>``."""
        return self.path / "checkpoints"

    @property
    def videos(self) -> Path:
        """Folder of films of training episodes; made with the first."""
        return self.path / "videos"


def _why_foreign(path: Path, status: os.stat_result) -> str | None:
    user = os.geteuid()
    if status.st_uid != user:
        return f"{path} belongs to {_name_of_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return f"everybody can write {path} (chmod o-w closes it)"
    if status.st_mode & stat.S_IWGRP and not _is_alone_in(status.st_gid, user):
        return f"the group {status.st_gid} can write {path} (chmod g-w closes it)"
    return None


def _name_of_user(user: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"the user {user}"


def _is_alone_in(group: int, user: int) -> bool:
    """Whether a group has the user's name and, besides the user, no member."""
    try:
        account, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return account.pw_gid == group and found.gr_name == account.pw_name and not {*found.gr_mem} - {account.pw_name}


def _is_left_by_creation(path: Path) -> bool:
    """Whether a process that was killed before it wrote the config may have made this, and nobody used it since."""
    if path.name in _FOLDERS:
        return path.is_dir() and not any(path.iterdir())
    return path.name == _LOCK or path.match(_UNFINISHED[0])


NO_FORK = 2**62
"""Later than every step."""


def read_forks(path: Path) -> dict[int, tuple[int, int]]:
    """The parent lineage and the step of every life but the first; nothing where the file is missing.

    Raises:
        RunDirectoryError: a line does not say from which older lineage, and at which step, a lineage begins.
    """
    return dict(fork_of(f"{path}, line {number}", row) for number, row in enumerate(read_json_lines(path), start=1))


def fork_of(where: str, row: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """The lineage of a line, and its entry of `read_forks`, which see; `where` the line is, for the error."""
    lineage, parent, step = (row.get(key) for key in ("lineage", "parent", "step"))
    if not isinstance(lineage, int) or not isinstance(parent, int) or not isinstance(step, int):
        raise RunDirectoryError(f"{where}: lineage, parent and step must be whole numbers, but it is {row}")
    if not 0 <= parent < lineage < 2**31 or abs(step) > NO_FORK:
        raise RunDirectoryError(
            f"{where}: lineage {lineage} cannot begin from lineage {parent} at step {step}: a parent must be older"
        )
    return lineage, (parent, step)
