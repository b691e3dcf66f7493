"""Every error that Penstock raises on purpose.

::

    PenstockError
    ├── ConfigError             bad input: exit code 2, one line, no traceback
    │   └── IdleKeyError        a configuration key that could not act (`penstock.types.idle_keys`)
    ├── CheckpointError         a checkpoint or model directory that cannot be read or does not fit
    ├── RunDirectoryError       a run directory that exists, is missing, or is not one
    ├── InvalidRolloutError     a rollout whose fields disagree (a counted failure, never a crash)
    │   └── DuplicateGroupError a group that was delivered before
    ├── EnvironmentFailure      an environment or reward function that broke its contract (counted likewise)
    │   └── PromptTooLong       a prompt that leaves no room for an answer
    ├── WeightsError            arrays missing, extra, misshaped, or damaged
    │   └── SupersededVersionError  a version that is not kept any more, or not published yet
    ├── SchemaVersionError      a record written by a newer Penstock
    ├── TransferError           a message of rollouts that is torn, corrupt, or not one
    ├── UnreachableError        a component in another process that is dead or silent
    ├── SupersededError         a message of an incarnation that was replaced
    └── RunFailed               a run that ends with exit code 1
        ├── NoProgressError     a component that owes progress did not deliver it in time
        ├── MismatchError       learner and engine disagree about log-probabilities
        └── NonFiniteError      too many updates in a row were not finite
    Stopped                     a wait that ended because the run is stopping; not a failure
"""

import os
import traceback
from collections.abc import Generator
from contextlib import contextmanager

MOST_FAILURE_CHARS = 4_000
"""Longest message of a failure that quotes the user's code, which may raise an error of any size."""

_OMISSION_CHARS = 40  # room for the words that stand for what is left out
_PENSTOCK = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def shortened(text: str, most_chars: int) -> str:
    """A text without its middle where it is longer than so many characters; says how much is left out."""
    if len(text) <= most_chars:
        return text
    kept = (most_chars - _OMISSION_CHARS) // 2
    return f"{text[:kept]} … {len(text) - 2 * kept:,} characters … {text[-kept:]}"


class PenstockError(Exception):
    """Base class of all deliberate errors."""


class ConfigError(PenstockError):
    """Bad input by the user. The message names the field, the value and the remedy."""


class CheckpointError(PenstockError):
    """A checkpoint or model directory is unreadable, or does not fit this model."""


class RunDirectoryError(ConfigError):
    """A run directory exists already, is missing, or holds something else."""


class InvalidRolloutError(PenstockError, ValueError):
    """A rollout's fields have the wrong dtype, disagree in length, or hold values that are not finite."""


class DuplicateGroupError(InvalidRolloutError):
    """A group of that id was delivered before: a storage delivered it again, or an id was used twice."""


class EnvironmentFailure(PenstockError):
    """An environment or a reward function broke its contract; its group counts as failed."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MOST_FAILURE_CHARS))


class PromptTooLong(EnvironmentFailure):
    """A prompt leaves no room for an answer."""


class WeightsError(PenstockError):
    """Published arrays are missing, extra, misshaped, or of another version than asked for."""


class SupersededVersionError(WeightsError):
    """The version asked for is not there.

    Attributes:
        newest: The newest version that is, as (lineage, step); None before the first.
    """

    def __init__(self, message: str, newest: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.newest = newest


class SchemaVersionError(PenstockError):
    """A stored record has a schema version that this Penstock does not know."""


class TransferError(PenstockError):
    """A message of rollouts between two processes is torn, corrupt, or not one."""


class UnreachableError(PenstockError):
    """A component in another process is dead, is not there yet, or did not answer within the limit."""


class SupersededError(PenstockError):
    """A message of an incarnation that was replaced meanwhile; its sender should end."""


class RunFailed(PenstockError):
    """A run ended without reaching its goal; the command line exits with 1."""


class NoProgressError(RunFailed):
    """A component made no progress within its limit. The message names the component and the wait."""


class MismatchError(RunFailed):
    """The learner's and the engine's log-probabilities differ by more than the stated tolerance."""


class NonFiniteError(RunFailed):
    """Several updates in a row had a loss or gradient that was not finite."""


class Stopped(PenstockError):
    """A bounded wait was ended by a stop request. Loops catch it to leave in good order."""


def raised_at(error: BaseException) -> str:
    """Where a user's code raised, as `` (rewards.py:9)``; empty where none of it is on the stack.

    The innermost line that is neither Penstock's, Python's own, nor of an installed package; else of a package.
    """
    own = installed = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = os.path.abspath(frame.filename)
        if "site-packages" in path.split(os.sep):
            installed = f" ({os.path.basename(path)}:{frame.lineno})"
        elif not frame.filename.startswith("<") and not path.startswith((_PENSTOCK, _STANDARD_LIBRARY)):
            own = f" ({os.path.basename(path)}:{frame.lineno})"
    return own or installed


@contextmanager
def errors_of_user_code(kind: type[PenstockError], told: str, after: str = "", about: str = "") -> Generator[None]:
    """What a user's code raises inside, `SystemExit` too, is raised as one error with its place; Penstock's own go on.

    Args:
        kind: Of the error.
        told: Its message up to the name of what was raised: ``lesson 'a' raised``.
        after: How the message ends, behind what was raised said.
        about: What stands behind its name: `` about 'problem 7'``.
    """
    try:
        yield
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{told} {type(error).__name__}{about}: {error}{raised_at(error)}{after}") from error
