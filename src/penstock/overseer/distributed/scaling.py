"""`penstock scale`: another process asks for more or fewer components of a role, by a file in the run directory.

A request is ``requests/scale-<id>.json``, written whole or not at all; the overseer takes it at its next turn and
leaves ``requests/scale-<id>.answer.json``, which the asker takes. Whoever may write in the run directory may ask. A
request that nobody took within the asker's limit is withdrawn. Not covered: the next life of the run, which begins with
the numbers of its configuration.
"""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.rundir import write_atomically
from penstock.types import ConfigError, UnreachableError

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
        ConfigError: the overseer refused; the message says why.
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
    told = json.loads(answer.read_bytes())
    answer.unlink(missing_ok=True)
    if not told["accepted"]:
        raise ConfigError(told["message"])
    return str(told["message"])


class ScaleDesk:
    """The overseer's side.

    Args:
        run_dir: Of the run. What was asked of an earlier life of it is deleted.
        scale: (role, number) → done; raises ConfigError to refuse.
        clock: Unix seconds.
    """

    def __init__(
        self, run_dir: Path, scale: Callable[[str, int], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = run_dir / FOLDER
        self._scale = scale
        self._clock = clock
        self._folder.mkdir(exist_ok=True)
        for path in self._files():
            if _REQUEST.fullmatch(path.name) or _ANSWER.fullmatch(path.name):
                path.unlink(missing_ok=True)

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
        except FileNotFoundError:  # somebody deleted the folder; the next asker makes it again
            return []

    def _answer(self, path: Path, name: str) -> None:
        try:
            role, count = _read(path)
            self._scale(role, count)
            told = {"accepted": True, "message": f"{role}={count}: the overseer has begun to make it so"}
        except FileNotFoundError:
            return  # withdrawn just now
        except ConfigError as error:
            told = {"accepted": False, "message": str(error)}
        path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk ends no run, and the asker has a limit of its own
            write_atomically(self._folder / f"scale-{name}.answer.json", json.dumps(told), durable=False)

    def _forget(self, answer: Path) -> None:
        try:
            age_s = self._clock() - answer.stat().st_mtime
        except FileNotFoundError:
            return  # taken just now
        if age_s > ANSWER_KEPT_S:
            answer.unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, int]:
    """Role and number.

    Raises:
        ConfigError: it is no request.
        FileNotFoundError: it is not there any more.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error}") from error
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ConfigError(f"{path.name} is larger than {LARGEST_BYTES} bytes: it is no request")
    try:
        asked: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error
    role, count = (asked.get("role"), asked.get("count")) if isinstance(asked, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(count, int) or isinstance(count, bool):
        raise ConfigError(f"{path.name} has no role and count: write it with penstock scale")
    return role, count
