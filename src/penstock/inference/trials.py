"""What an inference server's answer means for a request, and what became of the request so far.

- *status 429*: the server has too much to do; asked again after a pause, elsewhere where the request may;
- *status 502 to 504*: it cannot answer; asked again, elsewhere;
- *status 400 or 413*: the request itself is at fault, and asking again is useless;
- *any other status, or an answer that cannot be read*: asked again, but `MOST_BAD_ANSWERS` are the end of it.
"""

import json
from collections import Counter
from typing import TypeVar

from penstock.inference.link import Answer
from penstock.inference.routing import Server
from penstock.inference.server_request import MalformedAnswer, ServerRequest
from penstock.types import ConfigError, EnvironmentFailure, RunFailed

MOST_BAD_ANSWERS = 8
"""Of one request; with the pauses between them they take about ten seconds."""

LONGEST_MESSAGE = 1000

_T = TypeVar("_T")


class Unanswered(Exception):
    """A request that should be asked again."""


class Refused(Unanswered):
    """By a server that has too much to do."""


class BadAnswer(Unanswered):
    """By a server that seems to be broken, or none of ours."""


class Trials:
    """What became of one request so far."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._bad_answers = 0

    def begin(self, server: Server) -> None:
        """It is asked once more."""
        self._times[str(server)] += 1
        self._last[str(server)] = "no answer yet"

    def add(self, server: Server, failure: Unanswered) -> None:
        """It did not answer.

        Raises:
            RunFailed: the answers were bad too often.
        """
        self._last[str(server)] = str(failure)
        self._bad_answers += isinstance(failure, BadAnswer)
        if self._bad_answers >= MOST_BAD_ANSWERS:
            raise RunFailed(f"the answers of inference servers cannot be used: {self}") from failure

    def __str__(self) -> str:
        told = [f"{name} (times: {self._times[name]}, at last: {what})" for name, what in self._last.items()]
        return "asked " + ", ".join(told) if told else "none that may be asked was there and had room"


def judged(answer: Answer, request: ServerRequest[_T]) -> _T | EnvironmentFailure:
    """The result that an answer holds.

    Raises:
        Unanswered: there is none; the request should be asked again.
        ConfigError: it asks for what no server can do.
    """
    if answer.status == 200:
        try:
            return request.read(answer.content)
        except MalformedAnswer as error:
            raise BadAnswer(str(error)) from error
    message, code = _error(answer.content)
    if answer.status == 413 or (answer.status == 400 and code == "invalid_prompt"):
        return EnvironmentFailure(message)
    if answer.status == 400:
        raise ConfigError(f"an inference server refused the request: {message}")
    if answer.status == 429:
        raise Refused(f"status 429, {message}")
    if answer.status in (502, 503, 504):
        raise Unanswered(f"status {answer.status}, {message}")
    raise BadAnswer(f"status {answer.status}, {message}")


def _error(content: bytes) -> tuple[str, str]:
    """Message and code of an error object; something for whatever else it is."""
    try:
        error = json.loads(content)["error"]
        return str(error["message"])[:LONGEST_MESSAGE], str(error["code"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"with a body of {len(content)} bytes that is no error object", ""
