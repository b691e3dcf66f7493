"""The child process in which a user's reward function runs; see `penstock.environments.reward_process`.

Run as ``python -m penstock.environments.reward_worker FUNCTION``. One JSON object a line: requests on standard input,
replies on a copy of standard output. Whatever the function prints goes to standard error, so it cannot break the
protocol. The process ends when its parent closes the pipe or dies, also in the middle of a call.
"""

import asyncio
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from penstock.environments.validation import check_rewards
from penstock.types import PenstockError
from penstock.types.importing import load_attribute

RewardFunction = Callable[..., Any]


def call(function: RewardFunction, name: str, arguments: dict[str, Any]) -> list[float]:
    """Calls a reward function, sync or async, with what it takes, and checks what it returns."""
    expected = len(arguments["completions"])
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = {key: value for key, value in arguments.items() if key in {p.name for p in parameters}}
    rewards = function(**arguments)
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(_awaited(rewards))
    return check_rewards(rewards, expected, f"reward function {name}")


async def _awaited(rewards: Any) -> Any:
    return await rewards


def main() -> None:
    """Serves requests until standard input ends."""
    name = sys.argv[1]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the function's prints must not mix with replies
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(_take_standard_input(), requests), daemon=True).start()
    try:
        function = load_attribute(name, "reward")
        if not callable(function):
            raise PenstockError(f"reward {name!r} is a {type(function).__name__}: it must be a function")
    except PenstockError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"ready": True})
    while True:
        _reply(replies, _answer(function, name, requests.get()))


def _take_standard_input() -> TextIO:
    """Moves the requests to a descriptor of their own, so that nothing the function starts can read them."""
    source = os.fdopen(os.dup(0), "r", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return source


def _read(source: TextIO, requests: "queue.Queue[str]") -> None:
    for line in source:
        requests.put(line)
    if os.getpgrp() == os.getpid():  # the parent is gone: end at once, hanging or not, with all that was started
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _answer(function: RewardFunction, name: str, line: str) -> dict[str, Any]:
    try:
        return {"rewards": call(function, name, json.loads(line))}
    except PenstockError as error:
        return {"error": str(error)}
    except Exception as error:  # the function's own mistake is the reply
        traceback.print_exc()
        return {"error": f"reward function {name} raised {type(error).__name__}: {error}"}


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
