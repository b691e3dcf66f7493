"""What to type next: command lines that work where they are shown, for they name the executable that was used."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def command_line(*words: str | Path) -> str:
    """A ``penstock`` command as the user would type it here.

    Begins with ``penstock`` where that is on the PATH, as it is for library users; else with the path of the executable
    that was used, or with ``python -m penstock``.

    Args:
        words: The command and its arguments; quoted where a shell needs it.
    """
    return shlex.join([*executable(sys.argv), *map(str, words)])


def executable(arguments: Sequence[str]) -> list[str]:
    """The first words of a command line like this process's own.

    Args:
        arguments: Those of the process, as `sys.argv`.
    """
    program = Path(arguments[0]) if arguments else Path()
    if program.name == "penstock":
        return [_typed(program)]
    if program.name == "__main__.py" and program.parent.name == "penstock":
        return [_typed(Path(sys.executable)), "-m", "penstock"]
    return ["penstock"]


def _typed(program: Path) -> str:
    """Its name where the PATH leads to it, else its path, relative to the working directory where it lies below."""
    path, here = os.path.abspath(program), os.getcwd()
    found = shutil.which(program.name)
    if found is not None and os.path.abspath(found) == path:
        return program.name
    return os.path.relpath(path, here) if Path(path).is_relative_to(here) else path
