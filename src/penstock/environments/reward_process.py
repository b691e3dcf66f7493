"""Reward functions, one or several, weighted: `RewardFunctions`. The graders of `rewards` run here.

A user's function that is named runs in a process of its own: it may be slow, crash, hang or print, and harms only its
group. One that is given as an object, from a notebook's cell, is called here (`_called_here`), with none of that.

Parent and child speak JSON lines over pipes (no pickle). One question has one answer: both carry the id of the call and
the ids of the completions. Whatever else comes through the channel ends the process and fails the group that meets it,
so that no group gets the rewards of another. Every exchange has a time limit and every read a size limit; a process
that broke a rule is killed with all that it started (`reward_worker`) and begun anew at the next call. `RewardPool`
runs several side by side, so that scoring keeps up with generation.
"""

import collections
import copy
import errno
import hashlib
import json
import logging
import math
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import IO, Any

import psutil

from penstock.environments import rewards as graders
from penstock.environments.base import (
    MOST_METRIC_NAME_CHARS,
    MOST_METRICS,
    Scores,
    check_function_rewards,
    validate_metrics,
)
from penstock.environments.reward_worker import RewardFunction, call
from penstock.environments.simulators.processes import kill_trees
from penstock.types import ConfigError, EnvironmentFailure
from penstock.types.errors import MOST_FAILURE_CHARS, shortened
from penstock.types.importing import OBJECT, load_attribute, name_of_object

logger = logging.getLogger(__name__)

_STDERR_LINES_KEPT = 20
_MOST_LINE_BYTES = 4_096
_MOST_LINES_OF_A_CALL = 1_000
_STOP_TIMEOUT_S = 10.0
_EXIT_CODE_S = 2.0  # from the end of its pipe to its exit code
_LAST_WORDS_S = 1.0
_PIPE_BYTES = 1 << 16
# JSON escapes a character in up to twelve bytes, and a number takes no more than 32
_MOST_REPLY_BYTES = 4_096 + 12 * MOST_FAILURE_CHARS + MOST_METRICS * (12 * MOST_METRIC_NAME_CHARS + 32)
_MOST_REWARD_BYTES = 64  # of one completion in a reply: its id and its reward
_SHOWN_BYTES = 60


class RewardProcess:
    """One child that serves one reward function.

    Args:
        function: ``package.module.function`` or ``path/to/file.py:function``.
        start_timeout_s: Longest wait for its imports.

    Raises:
        ConfigError: the function cannot be loaded.
        EnvironmentFailure: the machine has no room for a process: descriptors, memory, processes.
    """

    def __init__(self, function: str, start_timeout_s: float) -> None:
        self._function = function
        first = secrets.token_hex(8)
        self._child, self._lifeline = self._start(first)
        assert self._child.stdin and self._child.stdout and self._child.stderr
        os.set_blocking(self._child.stdin.fileno(), False)
        self._output = _Output(function, self._child.stderr)
        self._await_ready(first, start_timeout_s)

    def _start(self, first: str) -> tuple["subprocess.Popen[bytes]", IO[bytes]]:
        """The child, and the pipe whose end ends it: the kernel closes it, too, when this process dies."""
        ends: tuple[int, ...] = ()
        try:
            kept, lifeline = ends = os.pipe()
            child = subprocess.Popen(
                [sys.executable, "-m", "penstock.environments.reward_worker", self._function, str(kept), first],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(kept,),
                bufsize=0,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as error:
            for descriptor in ends:
                os.close(descriptor)
            raise EnvironmentFailure(f"reward function {self._function}: {_no_room(error)}") from error
        os.close(kept)
        return child, open(lifeline, "wb", buffering=0)

    def _await_ready(self, first: str, timeout_s: float) -> None:
        try:
            reply = self._exchange({"id": first}, b"", timeout_s, "to start")
        except EnvironmentFailure as failure:
            raise ConfigError(str(failure)) from failure
        if "error" in reply:
            self.kill()
            raise ConfigError(reply["error"])

    def score(self, arguments: Mapping[str, Any], timeout_s: float) -> Scores:
        """Calls the function.

        Args:
            arguments: Its keyword arguments; what JSON does not know goes as text.
            timeout_s: Longest wait for the rewards.

        Returns:
            Its rewards, and what it gave to ``log_metric``.

        Raises:
            EnvironmentFailure: it raised, returned something malformed, crashed, hung, or something else than its
                answer came through the channel. `alive` says whether the process can be used again.
        """
        asked = {"id": secrets.token_hex(8), "completion_ids": _ids_of(arguments["completions"])}
        request = json.dumps({**asked, "arguments": arguments}, default=str).encode() + b"\n"
        reply = self._exchange(asked, request, timeout_s, "to score")
        if "error" in reply:
            raise EnvironmentFailure(reply["error"])
        source = f"reward function {self._function}"
        rewards = check_function_rewards(reply["rewards"], len(asked["completion_ids"]), source)
        return Scores(rewards, validate_metrics(reply.get("metrics", {}), self._function))

    @property
    def alive(self) -> bool:
        """Whether the process runs and is in step with its parent."""
        assert self._child.stdout
        return self._child.poll() is None and not self._child.stdout.closed and not _hung_up(self._child.stdout)

    def stop(self) -> None:
        """Ends the process and everything that it started; a call under way in another thread fails.

        Bounded in time, whatever the function left behind.
        """
        self._lifeline.close()
        self._child.send_signal(signal.SIGCONT)  # the function may have stopped its keeper
        if not self._has_ended(_STOP_TIMEOUT_S):  # or its keeper is starved
            with suppress(psutil.NoSuchProcess):
                kill_trees([psutil.Process(self._child.pid)])
            if not self._has_ended(_STOP_TIMEOUT_S):
                logger.warning("reward function %s: process %d does not end", self._function, self._child.pid)

    def kill(self) -> None:
        """Like `stop`, and lets go of the pipes: for the thread that calls the function, or none does."""
        self.stop()
        for pipe in (self._child.stdin, self._child.stdout):  # its standard error is its reader's to close
            assert pipe is not None
            pipe.close()

    def _has_ended(self, within_s: float) -> bool:
        try:
            self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _exchange(self, asked: dict[str, Any], request: bytes, timeout_s: float, purpose: str) -> dict[str, Any]:
        """Writes a request and reads its reply; kills the process if anything else comes, or too late, or it ends."""
        deadline = time.monotonic() + timeout_s
        self._output.begin_call()
        try:
            if request:
                if unasked := self._unasked():
                    raise _BrokenChannelError(unasked, "before it was asked")
            self._write(request, deadline)
            return self._reply_to(asked, deadline)
        except (OSError, EOFError, _BrokenChannelError) as error:
            if isinstance(error, EOFError | BrokenPipeError):
                self._has_ended(_EXIT_CODE_S)
            code = self._child.poll()
            self.kill()
            raise EnvironmentFailure(self._obituary(error, code, timeout_s, purpose)) from error

    def _unasked(self) -> bytes:
        """What lies in the channel though nothing was asked; empty in good order."""
        assert self._child.stdout
        if not _ready(self._child.stdout, select.POLLIN, 0.0):
            return b""
        return os.read(self._child.stdout.fileno(), _PIPE_BYTES)

    def _write(self, request: bytes, deadline: float) -> None:
        assert self._child.stdin
        descriptor = self._child.stdin.fileno()
        while request:
            if not _ready(self._child.stdin, select.POLLOUT, deadline - time.monotonic()):
                raise TimeoutError
            request = request[os.write(descriptor, request[:_PIPE_BYTES]) :]

    def _reply_to(self, asked: dict[str, Any], deadline: float) -> dict[str, Any]:
        line, rest = self._read_line(
            _MOST_REPLY_BYTES + _MOST_REWARD_BYTES * len(asked.get("completion_ids", ())), deadline
        )
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise _BrokenChannelError(line, "that is no reply") from None
        if not isinstance(reply, dict) or {key: reply.get(key) for key in asked} != asked:
            raise _BrokenChannelError(line, "that is no reply to this call")
        if not isinstance(reply.get("error", ""), str) or not (
            {"error", "rewards"} & {*reply} or "completion_ids" not in asked
        ):
            raise _BrokenChannelError(line, "that is a reply without rewards")
        if rest:
            raise _BrokenChannelError(rest, "after its reply")
        return reply

    def _read_line(self, most_bytes: int, deadline: float) -> tuple[bytes, bytes]:
        """The first line, and what came behind it."""
        assert self._child.stdout
        line = bytearray()
        while b"\n" not in line:
            if len(line) > most_bytes:
                raise _BrokenChannelError(bytes(line), f"and more, without an end within {most_bytes:,} bytes")
            if not _ready(self._child.stdout, select.POLLIN, deadline - time.monotonic()):
                raise TimeoutError
            chunk = os.read(self._child.stdout.fileno(), _PIPE_BYTES)
            if not chunk:
                raise EOFError
            line += chunk
        first, _, rest = bytes(line).partition(b"\n")
        return first, rest

    def _obituary(self, error: Exception, code: int | None, timeout_s: float, purpose: str) -> str:
        function, said = f"reward function {self._function}", self._output.last_words()
        if isinstance(error, TimeoutError):
            return (
                f"{function} took longer than {timeout_s:g} s {purpose} and was stopped: make it faster or raise "
                f"reward_timeout_s{said}"
            )
        if isinstance(error, _BrokenChannelError):
            return f"{function}: {error}; only the function's return value counts, so its process was stopped{said}"
        if code is None:
            return f"{function}: its process closed its channel ({error or 'end of file'}) and was stopped{said}"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"(exit code {code})"
        return f"{function} ended its process {how}{said}"


class _BrokenChannelError(Exception):
    """Something came through the channel that is not the one answer to the one question."""

    def __init__(self, seen: bytes, when: str) -> None:
        more = "…" if len(seen) > _SHOWN_BYTES else ""
        super().__init__(f"its process wrote {seen[:_SHOWN_BYTES]!r}{more} {when}")


class _Output:
    """What a process prints, shown in the log line by line, in bounds; its thread alone reads and closes the pipe."""

    def __init__(self, function: str, pipe: IO[bytes]) -> None:
        self._function = function
        self._kept: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES_KEPT)
        self._left = _MOST_LINES_OF_A_CALL
        self._reader = threading.Thread(target=self._read, args=(pipe,), name=f"stderr of {function}", daemon=True)
        self._reader.start()

    def begin_call(self) -> None:
        self._left = _MOST_LINES_OF_A_CALL

    def last_words(self) -> str:
        """What was written last, for a message about the end of the process."""
        self._reader.join(_LAST_WORDS_S)
        return f"; it last wrote: {self._kept[-1]}" if self._kept else ""

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            line = bytearray()
            while chunk := os.read(pipe.fileno(), _PIPE_BYTES):
                *whole, begun = chunk.split(b"\n")
                for part in whole:
                    line += part[: _MOST_LINE_BYTES - len(line)]
                    self._show(line)
                    line.clear()
                line += begun[: _MOST_LINE_BYTES - len(line)]  # what is longer is cut
            self._show(line)

    def _show(self, raw: bytearray) -> None:
        line = raw.decode(errors="replace").rstrip()
        if not line:
            return
        self._kept.append(line)
        self._left -= 1
        if self._left > 0:
            logger.info("%s: %s", self._function, line)
        elif self._left == 0:
            logger.info("%s: … more than %d lines in one call", self._function, _MOST_LINES_OF_A_CALL)


def _ready(pipe: IO[bytes], event: int, within_s: float) -> bool:
    """Whether a pipe can be read or written now, or has ended; `poll` takes descriptors of any number."""
    poller = select.poll()
    poller.register(pipe.fileno(), event)
    return bool(poller.poll(max(0.0, within_s * 1e3)))


def _hung_up(pipe: IO[bytes]) -> bool:
    poller = select.poll()
    poller.register(pipe.fileno(), 0)  # the end is told unasked
    return bool(poller.poll(0))


def _ids_of(completions: Sequence[Any]) -> list[str]:
    """One name per completion: its position and a digest of its text."""
    texts = [json.dumps(completion, default=str).encode() for completion in completions]
    return [f"{i}-{hashlib.blake2b(text, digest_size=6).hexdigest()}" for i, text in enumerate(texts)]


def _no_room(error: OSError) -> str:
    remedies = {
        errno.EMFILE: "this process has too many open files: raise `ulimit -n`, or lower reward_processes",
        errno.ENFILE: "the machine has too many open files",
        errno.EAGAIN: "this user has too many processes: raise `ulimit -u`, or lower reward_processes",
        errno.ENOMEM: "the machine has no memory left",
    }
    return f"its process cannot be started: {remedies.get(error.errno or 0, error.strerror or str(error))}"


class RewardPool:
    """Several processes that serve one reward function; safe to call from several threads.

    The first starts at once, so that a function that cannot be loaded is a config error; others when they are needed.

    Args:
        function: See `RewardProcess`.
        processes: How many calls may run at once.
        timeout_s: Longest time for one call.
        start_timeout_s: Longest time for a process to start.

    Raises:
        ConfigError: the function cannot be loaded.
    """

    def __init__(self, function: str, processes: int, timeout_s: float, start_timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._processes = processes
        self._closed = False
        self._busy: set[RewardProcess] = set()
        self._free: queue.LifoQueue[RewardProcess | None] = queue.LifoQueue()
        for _ in range(processes - 1):
            self._free.put(None)
        self._free.put(RewardProcess(function, start_timeout_s))

    def score(self, arguments: Mapping[str, Any]) -> Scores:
        """Calls the function in a process that is free.

        Raises:
            EnvironmentFailure: see `RewardProcess.score`; or no process became free in time.
        """
        process = self._take()
        try:
            if process is not None and not process.alive:
                process.kill()  # it ended while idle: free its pipes
                process = None
            process = process or self._start()
            self._busy.add(process)
            return process.score(arguments, self._timeout_s)
        finally:
            if process is not None:
                self._busy.discard(process)
            self._free.put(process if process is not None and process.alive else None)

    def close(self) -> None:
        """Ends the processes, after the calls under way; later calls fail.

        Calls that take longer than one may are ended with their processes, so that closing has a limit.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + self._timeout_s + self._start_timeout_s
        for _ in range(self._processes):
            with suppress(queue.Empty):
                if process := self._free.get(timeout=max(0.0, deadline - time.monotonic())):
                    process.kill()
        for process in list(self._busy):
            process.stop()

    def _take(self) -> RewardProcess | None:
        if self._closed:
            raise EnvironmentFailure(f"reward function {self._function}: its environment is closed")
        longest_s = self._timeout_s + self._start_timeout_s
        try:
            return self._free.get(timeout=longest_s)
        except queue.Empty:
            raise EnvironmentFailure(
                f"reward function {self._function}: none of {self._processes} processes became free in "
                f"{longest_s:g} s: raise reward_processes"
            ) from None

    def _start(self) -> RewardProcess:
        try:
            return RewardProcess(self._function, self._start_timeout_s)
        except ConfigError as error:  # it loaded when the run began, so now it is a failed group
            raise EnvironmentFailure(str(error)) from error


class RewardFunctions:
    """One or several weighted reward functions; safe to call from several threads.

    Args:
        functions: Dotted paths, ``path/to/file.py:function``, or functions themselves, which are called in this process
            without a time limit.
        weights: One number per function; None weighs each 1.
        processes: How many calls of each may run at once.
        timeout_s: Longest time for one call of one.
        start_timeout_s: Longest time for a process to start.

    Raises:
        ConfigError: no function, one named twice, one that cannot be loaded, or weights that do not fit.
    """

    def __init__(
        self,
        functions: Sequence[str | RewardFunction],
        weights: Sequence[float] | None,
        processes: int,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        paths = _named(functions)
        weights = _checked_weights(paths, weights)
        self._functions: list[_Weighted] = []
        self._has_warned = False
        with ExitStack() as begun:  # where one cannot be loaded, those before it end
            for given, path, name, weight in zip(functions, paths, _short_names(paths), weights, strict=True):
                if not isinstance(given, str):
                    score = _called_here(given, name, processes)
                elif path.startswith(OBJECT) or path.rpartition(".")[0] == graders.__name__:
                    score = _graded(load_attribute(path, "env_args.reward"), path)
                else:
                    pool = RewardPool(path, processes, timeout_s, start_timeout_s)
                    begun.callback(pool.close)
                    score = pool.score
                self._functions.append(_Weighted(name, weight, score))
            self._pools = begun.pop_all()

    def score(self, arguments: Mapping[str, Any]) -> Scores:
        """The weighted sum of what each function gives each completion; None, not applicable, adds nothing.

        A completion to which no function applies earns 0, which is warned of once.

        Args:
            arguments: Of every function; ``completions`` among them.

        Returns:
            Rewards, and as metrics ``rewards/<function>/mean``, ``…/std`` (over the completions to which it applies),
            ``…/applicable_fraction`` and what it logged itself.

        Raises:
            EnvironmentFailure: one of the functions failed.
        """
        totals = [0.0] * len(arguments["completions"])
        judged = [False] * len(totals)
        metrics: dict[str, float] = {}
        by_function: dict[str, Sequence[float | None]] = {}
        for function in self._functions:
            scores = function.score(arguments)
            by_function[function.name] = [None if reward is None else float(reward) for reward in scores.rewards]
            for position, reward in enumerate(scores.rewards):
                if reward is not None:
                    totals[position] += function.weight * reward
                    judged[position] = True
            metrics |= {f"rewards/{function.name}/{name}": value for name, value in _summary(scores).items()}
        if not all(judged) and not self._has_warned:
            self._has_warned = True
            names = ", ".join(function.name for function in self._functions)
            logger.warning(
                "%d of %d answers to one prompt earn 0, because every reward function (%s) returned None for them; "
                "this is said once: see rewards/…/applicable_fraction",
                judged.count(False), len(judged), names,
            )  # fmt: skip
        return Scores(totals, metrics, by_function)

    def close(self) -> None:
        """Ends the processes."""
        self._pools.close()


@dataclass(frozen=True, slots=True)
class _Weighted:
    name: str
    weight: float
    score: Callable[[Mapping[str, Any]], Scores]


def _called_here(function: RewardFunction, name: str, calls: int) -> Callable[[Mapping[str, Any]], Scores]:
    """Calls a function that was given as an object, sync or async, so many times at once.

    What it raises fails its group; nothing else is guarded. It gets a copy: the rows of the data set are among its
    arguments.
    """
    if not callable(function):
        raise ConfigError(f"env_args.reward is {function!r:.60}: give a function, or the name of one")
    free = threading.BoundedSemaphore(calls)

    def score(arguments: Mapping[str, Any]) -> Scores:
        try:
            with free:
                return call(function, name, copy.deepcopy(dict(arguments)))
        except EnvironmentFailure:
            raise
        except (Exception, SystemExit) as error:
            logger.info("reward function %s raised", name, exc_info=True)
            said = shortened(f"{type(error).__name__}: {error}".removesuffix(": "), MOST_FAILURE_CHARS)
            raise EnvironmentFailure(f"reward function {name} raised {said}") from error

    return score


def _graded(grader: Callable[..., list[float]], path: str) -> Callable[[Mapping[str, Any]], Scores]:
    if not callable(grader):
        raise ConfigError(f"env_args.reward {path!r} is a {type(grader).__name__}: it must be a function")
    return lambda arguments: Scores(grader(**arguments))


def _summary(scores: Scores) -> dict[str, float]:
    found = [reward for reward in scores.rewards if reward is not None]
    spread = {"mean": fmean(found), "std": pstdev(found)} if found else {}
    return {**scores.metrics, **spread, "applicable_fraction": len(found) / max(1, len(scores.rewards))}


def _checked_weights(functions: Sequence[str], weights: Sequence[float] | None) -> Sequence[float]:
    if not functions:
        raise ConfigError("env_args.reward is empty: name at least one reward function")
    if twice := [path for path, count in collections.Counter(functions).items() if count > 1]:
        raise ConfigError(f"env_args.reward names {twice[0]!r} twice: name it once, with a weight in reward_weights")
    if weights is None:
        return [1.0] * len(functions)
    if not isinstance(weights, Sequence) or not all(isinstance(weight, int | float) for weight in weights):
        raise ConfigError(f"env_args.reward_weights is {weights!r:.60}: it must be a list of numbers, one per function")
    if len(weights) != len(functions):
        raise ConfigError(
            f"env_args.reward_weights has {_counted(len(weights), 'number')} for "
            f"{_counted(len(functions), 'function')} of env_args.reward: give one for each"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"env_args.reward_weights is {list(weights)}: weights are finite numbers")
    return weights


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _named(functions: Sequence[str | RewardFunction]) -> list[str]:
    """Their paths; functions that were given and are called alike, as all lambdas of a module, are numbered."""
    paths: list[str] = []
    given: list[RewardFunction] = []
    for function in functions:
        if isinstance(function, str):
            paths.append(function)
            continue
        path = name_of_object(function)
        others = sum(each is not function and name_of_object(each) == path for each in given)
        paths.append(f"{path}{others + 1}" if others else path)
        given.append(function)
    return paths


def _short_names(functions: Sequence[str]) -> list[str]:
    """Names of functions for metrics; where two are called alike, with their modules', else as they are given."""
    parts = [_parted(path) for path in functions]
    own = [name for _, _, name in parts]
    modules = [f"{Path(where).stem if where.endswith('.py') else where}.{name}" for where, _, name in parts]
    for names in (own, modules):
        if len(set(names)) == len(names):
            return names
    return [path.replace("/", ".") for path in functions]


def _parted(path: str) -> tuple[str, str, str]:
    """Where a function is, and its name; of one from a cell ``__main__``."""
    if path.startswith(OBJECT):
        return path.removeprefix(OBJECT).replace(".<locals>", "").rpartition(".")
    return path.rpartition(":" if ":" in path else ".")
