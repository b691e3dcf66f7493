"""Why a simulator process ended or was given up, for a person: what it told, why it was killed, what the kernel saw."""

import os
import signal
from collections.abc import Sequence

from penstock.fleet.process_slot import ProcessSlot, Stage
from penstock.types import RunFailed

_LAST_WORDS = 500  # characters of a simulator's output


def end_in_words(process: ProcessSlot, status: int, last_words: str) -> str:
    """The reason of an end.

    Args:
        process: Whose; not buried yet.
        status: As `os.waitpid` gives it.
        last_words: The end of what it wrote to its output.
    """
    if process.failure is not None:
        failure = process.failure
        return f"{failure.where} (slot {failure.slot}) raised {failure.kind}: {failure.message}"
    said = f"; it last wrote: {last_words[-_LAST_WORDS:].strip()}" if last_words.strip() else ""
    if process.reason:
        return process.reason + said
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}{said}"
    return f"it ended by itself with code {os.waitstatus_to_exitcode(status)}{said}"


def given_up_in_words(process: ProcessSlot) -> str:
    """Its last failure, and the limit that it passed."""
    return f"{process.reason}; {process.limit}"


def raise_if_all_given_up(processes: Sequence[ProcessSlot]) -> None:
    """Nothing comes any more from processes that were all given up.

    Raises:
        RunFailed: they were; with the last one's failure, the limit that it passed, and its key.
    """
    if all(process.stage is Stage.QUARANTINED for process in processes):
        last = processes[-1]
        raise RunFailed(
            f"all {len(processes)} simulator processes were given up; the last one (task {last.task!r}): "
            f"{given_up_in_words(last)}"
        )
