"""Why a simulator process ended, for a person: what it told, why it was killed, or how the kernel saw it end."""

import os
import signal

from penstock.fleet.process_slot import ProcessSlot

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
