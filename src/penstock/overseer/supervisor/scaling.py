"""More or fewer components of a role while a run goes on, asked for by `penstock scale` from another process.

A request is ``requests/scale-<id>.json``, written whole or not at all; the overseer takes it at its next turn and
leaves ``requests/scale-<id>.answer.json``, which the asker takes. Whoever may write in the run directory may ask, and
nothing that is put there ends the run, or holds it up. A request that nobody took within the asker's limit is
withdrawn. Not covered: the next life of the run, which begins with the numbers of its configuration.
"""

import json
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

from penstock.overseer.supervisor.member import ComponentSpec
from penstock.rundir import write_atomically
from penstock.types import ConfigError, UnreachableError

SpecMaker = Callable[[int], ComponentSpec]
"""Gives a role's component of an index."""

MOST_OF_A_ROLE = 10_000
"""No role can be scaled beyond this."""


def size_changes(
    makers: Mapping[str, tuple[SpecMaker, int]],
    role: str,
    wanted: int,
    staying: Collection[int],
    taken: Collection[int],
) -> tuple[list[ComponentSpec], list[int]]:
    """What has to be done so that there are as many components of a role as are wanted.

    Args:
        makers: Of the roles that can be scaled: what makes one, and how few there may be.
        role: Which.
        wanted: How many there shall be.
        staying: Indexes of those that are there to stay.
        taken: These, and the indexes of those that are leaving: nobody new can have them yet.

    Returns:
        New components, of the lowest free indexes, and the indexes of those that have to leave, the highest first.

    Raises:
        ConfigError: the role cannot be scaled, or not to that number.
    """
    if role not in makers:
        known = ", ".join(sorted(makers)) or "none"
        raise ConfigError(f"the role {role!r} cannot be scaled in this run; those that can: {known}")
    make, least = makers[role]
    if not least <= wanted <= MOST_OF_A_ROLE:
        raise ConfigError(f"{role}={wanted} is outside of {least} to {MOST_OF_A_ROLE}: choose a number within")
    free = (index for index in count() if index not in taken)
    more = [make(index) for index in islice(free, max(0, wanted - len(staying)))]
    return more, sorted(staying, reverse=True)[: max(0, len(staying) - wanted)]


FOLDER = "requests"
LARGEST_BYTES = 4096
"""A file that is larger is no request."""
ANSWER_KEPT_S = 600.0
"""An answer that nobody took is deleted after so long."""
_REQUEST = re.compile(r"scale-([0-9a-f]{32})\.json")
_ANSWER = re.compile(r"scale-[0-9a-f]{32}\.answer\.json")
_SIZE = re.compile(r"([a-z]+)=([0-9]{1,9})")
_POLL_S = 0.05


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """Role → number, from words like ``rollout=8``.

    Raises:
        ConfigError: a word is not of that form, or a role comes twice.
    """
    sizes: dict[str, int] = {}
    for word in words:
        match = _SIZE.fullmatch(word)
        if match is None:
            raise ConfigError(f"{word!r} is not of the form role=number; for example: penstock scale RUN_DIR rollout=8")
        if match[1] in sizes:
            raise ConfigError(f"{match[1]} is given twice: give each role one number")
        sizes[match[1]] = int(match[2])
    return sizes


def ask_to_scale(run_dir: Path, role: str, count: int, timeout_s: float) -> str:
    """Asks the overseer of a running run, and waits for its answer.

    Args:
        run_dir: Of the run.
        role: Which components.
        count: How many there shall be.
        timeout_s: Longest wait.

    Returns:
        What the overseer said.

    Raises:
        ConfigError: the overseer refused; the message says why. Or what is there is no answer of it.
        UnreachableError: it did not answer in time; the request is withdrawn.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    name = uuid.uuid4().hex
    request, answer = folder / f"scale-{name}.json", folder / f"scale-{name}.answer.json"
    write_atomically(request, json.dumps({"role": role, "count": count}), durable=False)
    deadline = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > deadline:
            request.unlink(missing_ok=True)
            raise UnreachableError(
                f"the overseer of {run_dir} did not answer {role}={count} within {timeout_s:g} s, and the request is "
                f"withdrawn: penstock status {run_dir} shows whether it lives"
            )
        time.sleep(_POLL_S)
    told = _content(answer)
    answer.unlink(missing_ok=True)
    message = told.get("message") if isinstance(told, dict) else None
    if not isinstance(message, str) or not message.isprintable():  # it is about to be printed
        raise ConfigError(f"{answer} is no answer of an overseer")
    if told.get("accepted") is not True:
        raise ConfigError(message)
    return message


class ScaleRequests:
    """The overseer's side.

    Args:
        run_dir: Of the run. What was asked of an earlier life of it is deleted.
        scale: (role, number) → begun; raises ConfigError to refuse, and has changed nothing then.
        clock: Unix seconds.
    """

    def __init__(
        self, run_dir: Path, scale: Callable[[str, int], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = run_dir / FOLDER
        self._scale = scale
        self._clock = clock
        with suppress(FileExistsError):  # whatever it is, nobody can ask then
            self._folder.mkdir(exist_ok=True)
        for path in self._files():
            if _REQUEST.fullmatch(path.name) or _ANSWER.fullmatch(path.name):
                _take_away(path)

    def serve(self) -> None:
        """Answers every request that is there; returns at once where there is none."""
        for path in self._files():
            match = _REQUEST.fullmatch(path.name)
            if match is not None:
                self._answer(path, match[1])
            elif _ANSWER.fullmatch(path.name):
                self._forget(path)

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())
        except OSError:  # somebody deleted the folder; the next asker makes it again
            return []

    def _answer(self, path: Path, name: str) -> None:
        answer = self._folder / f"scale-{name}.answer.json"
        if answer.exists():
            return  # what could not be taken away was answered before
        try:
            role, count = _taken(path)
            self._scale(role, count)
            told = {"accepted": True, "message": f"{role}={count}: the overseer has begun to make it so"}
        except FileNotFoundError:
            return  # withdrawn just now
        except ConfigError as error:
            told = {"accepted": False, "message": str(error)}
        with suppress(OSError):  # a full disk ends no run, and the asker has a limit of its own
            write_atomically(answer, json.dumps(told), durable=False)

    def _forget(self, answer: Path) -> None:
        try:
            age_s = self._clock() - answer.lstat().st_mtime
        except OSError:
            return  # taken just now
        if age_s > ANSWER_KEPT_S:
            _take_away(answer)


def _taken(path: Path) -> tuple[str, int]:
    """Role and number; the request is gone then, as far as it can be taken away.

    Raises:
        ConfigError: it is no request.
        FileNotFoundError: it is not there any more.
    """
    try:
        asked = _content(path)
    finally:
        gone = _take_away(path)
    if not gone:  # it would be done again at every turn
        raise ConfigError(f"{path.name} cannot be taken away: the overseer must be able to write in {path.parent}")
    role, count = (asked.get("role"), asked.get("count")) if isinstance(asked, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(count, int) or isinstance(count, bool):
        raise ConfigError(f"{path.name} has no role and count: write it with penstock scale")
    return role, count


def _take_away(path: Path) -> bool:
    """Whether it is gone; a folder stays."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _content(path: Path) -> Any:
    """What a small file says, as JSON; waits for nobody, whatever lies there.

    Raises:
        ConfigError: it is no file of this kind.
        FileNotFoundError: it is not there any more.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path.name} cannot be read: it is no plain file")
            content = os.read(descriptor, LARGEST_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error}") from error
    if len(content) > LARGEST_BYTES:
        raise ConfigError(f"{path.name} is larger than {LARGEST_BYTES} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error
