"""The child process in which a user's reward function runs, and the keeper above it; see `reward_process`.

Run as ``python -m penstock.environments.reward_worker FUNCTION LIFELINE ID``. This process becomes the *keeper*: it
forks the worker, which imports the function and says so in a reply to ID, and adopts whatever the function starts and
leaves behind, sessions of its own included. When the worker ends, or the parent closes the lifeline or dies, the keeper
kills all of it and ends as the worker did.

Worker and parent speak one JSON object a line: requests on standard input, replies on a copy of standard output. A
reply carries the id of its request and the ids of the completions. Only the process that was asked answers: a forked
child that comes back ends. Whatever the function prints goes to standard error.

Not covered: a function that kills its keeper and has begun other sessions; code that forges a reply on purpose.
"""

import asyncio
import inspect
import io
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from penstock.environments.simulators.processes import adopt_orphans, die_with_parent, kill_trees

if TYPE_CHECKING:
    from penstock.environments.base import Scores

RewardFunction = Callable[..., Any]

_MOST_TRACEBACK_CHARS = 20_000
_END_LIMIT_S = 5.0


def main() -> None:
    """Forks the worker and keeps it."""
    name, lifeline, first = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    adopt_orphans()
    keeper, worker = os.getpid(), os.fork()  # nothing has started a thread yet
    if worker == 0:
        die_with_parent(keeper)
        os.setsid()  # a function that kills its own process group leaves the keeper
        os.close(lifeline)
        _serve(name, first)
        os._exit(0)
    with open(os.devnull, "r+") as nothing:  # only the worker holds the ends of requests and replies
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    _keep(worker, lifeline)


# --- the keeper -------------------------------------------------------------------------------------------------------


def _keep(worker: int, lifeline: int) -> NoReturn:
    """Waits for the end of the worker or of the parent, then ends all that is below and itself, like the worker."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(lifeline, select.POLLIN)
    ended = _reap()
    while worker not in ended and lifeline not in [descriptor for descriptor, _ in poller.poll()]:
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        ended |= _reap()
    _end_all()
    _end_like(ended.get(worker, 0))


def _reap() -> dict[int, int]:
    """Exit statuses of the children that have ended, by process id."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _end_all() -> None:
    """Kills everything below this process; what loses its parent comes here and is killed in the next turn."""
    end_s = time.monotonic() + _END_LIMIT_S
    while (below := psutil.Process().children()) and time.monotonic() < end_s:
        kill_trees(below)
        _reap()
        time.sleep(0.001)


def _end_like(status: int) -> NoReturn:
    """Ends this process with a child's exit code, or by the signal that ended the child."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler to take back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# --- the worker -------------------------------------------------------------------------------------------------------


class _Channel:
    """Requests and replies, on descriptors that nothing the function starts inherits."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._requests, self._replies = os.dup(0), os.dup(1)
        self._pipe = os.fstat(self._replies)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)  # the function's prints must not mix with replies
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # a process that is ended flushes nothing
        os.register_at_fork(after_in_child=self._leave)
        self.requests = open(self._requests, encoding="utf-8", closefd=False)

    def reply(self, message: dict[str, Any]) -> None:
        """Sends one line, from the process that was asked and into the pipe that was given, or ends this process."""
        if os.getpid() != self._owner:
            self._give_up("a process that the reward function forked came back from it and was ended")
        line = json.dumps(message).encode() + b"\n"
        try:
            if not os.path.samestat(os.fstat(self._replies), self._pipe):
                self._give_up("the reward function closed or replaced the descriptor on which rewards are returned")
            while line:
                line = line[os.write(self._replies, line) :]
        except OSError as error:
            self._give_up(f"rewards cannot be returned: {error.strerror}")

    def _leave(self) -> None:
        """A forked child can neither answer nor keep the ends open."""
        for descriptor in (self._requests, self._replies):
            with suppress(OSError):
                os.close(descriptor)

    @staticmethod
    def _give_up(reason: str) -> NoReturn:
        with suppress(OSError):
            os.write(2, f"{reason}\n".encode())
        os._exit(1)


def _serve(name: str, first: str) -> None:
    """Imports the function and answers requests until there are no more."""
    channel = _Channel()
    from penstock.types import PenstockError
    from penstock.types.importing import load_attribute  # loads NumPy, which the keeper does without

    try:
        function = load_attribute(name, "reward")
        if not callable(function):
            raise PenstockError(f"reward {name!r} is a {type(function).__name__}: it must be a function")
    except BaseException as error:
        channel.reply({"id": first, "error": _error_of(error, f"reward {name!r}: importing it")})
        return
    channel.reply({"id": first})
    for line in channel.requests:
        request = json.loads(line)
        given = {"id": request["id"], "completion_ids": request["completion_ids"]}
        channel.reply(given | _answer(function, name, request["arguments"]))


def _answer(function: RewardFunction, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        scores = call(function, name, arguments)
        return {"rewards": list(scores.rewards), "metrics": dict(scores.metrics)}
    except BaseException as error:  # the function's own mistake is the reply, SystemExit and KeyboardInterrupt too
        return {"error": _error_of(error, f"reward function {name}")}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far training is, for rewards that change with it.

    Attributes:
        global_step: Updates that the newest weights had seen with which the answers were sampled.
    """

    global_step: int


class _Notes:
    """What a reward function says beside its rewards, in one call."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Takes a number for the metrics; several of one name give their mean. What is none is left out, and said."""
        from penstock.environments.base import MOST_METRIC_NAME_CHARS, MOST_METRICS

        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, int | float) or not math.isfinite(number):
            print(f"log_metric({name!r}, {value!r}): left out, because it is no finite number")
        elif len(str(name)) > MOST_METRIC_NAME_CHARS or len(self._values.keys() | {str(name)}) > MOST_METRICS:
            limits = f"a call may name {MOST_METRICS} metrics in {MOST_METRIC_NAME_CHARS} characters each"
            print(f"log_metric({str(name)[:MOST_METRIC_NAME_CHARS]!r}): left out, because {limits}")
        else:
            self._values.setdefault(str(name), []).append(float(number))

    def log_extra(self, column: str, values: Any) -> None:
        """Prints what TRL would put beside the completions."""
        print(f"{column}: {values!r}")

    @property
    def metrics(self) -> dict[str, float]:
        return {name: math.fsum(values) / len(values) for name, values in self._values.items()}


def call(function: RewardFunction, name: str, arguments: dict[str, Any]) -> "Scores":
    """Calls a reward function, sync or async, with what it takes, and checks what it returns.

    Raises:
        EnvironmentFailure: it asks for something that is not given, or returned something else than one finite number,
            or None, per completion.
    """
    from penstock.environments.base import Scores, check_function_rewards
    from penstock.types.errors import EnvironmentFailure

    expected, notes = len(arguments["completions"]), _Notes()
    arguments = {
        **arguments,
        "trainer_state": TrainerState(**arguments.get("trainer_state", {"global_step": 0})),
        "log_extra": notes.log_extra,
        "log_metric": notes.log_metric,
    }
    parameters = inspect.signature(function).parameters.values()
    asked = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = ", ".join(parameter for parameter in asked if parameter not in arguments)
    if missing:
        raise EnvironmentFailure(
            f"reward function {name} asks for {missing}, which is not given; what is: {', '.join(sorted(arguments))}"
        )
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = {key: value for key, value in arguments.items() if key in {p.name for p in parameters}}
    rewards = function(**arguments)
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(_awaited(rewards))
    return Scores(check_function_rewards(rewards, expected, f"reward function {name}"), notes.metrics)


async def _awaited(rewards: Any) -> Any:
    return await rewards


def _error_of(error: BaseException, source: str) -> str:
    """What to say about an error of the function; its traceback goes to standard error, in bounds."""
    from penstock.types.errors import MOST_FAILURE_CHARS, PenstockError, raised_at, shortened

    if isinstance(error, PenstockError):
        return shortened(str(error), MOST_FAILURE_CHARS)
    text = shortened("".join(traceback.format_exception(error)), _MOST_TRACEBACK_CHARS)
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    said = _text_of(error)
    words = f"{source} raised {type(error).__name__}{': ' if said else ''}{said}{raised_at(error)}"
    return shortened(words, MOST_FAILURE_CHARS)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as unprintable:
        return f"(its text cannot be had: {type(unprintable).__name__})"


if __name__ == "__main__":
    main()
