"""The command line.

Exit codes: 0 success; 1 a failed run or check; 2 bad input, with one line on standard error; 130 interrupted.
``PENSTOCK_TRACEBACK=1`` shows the traceback behind any of them. Whatever a command needs is imported inside it, so
that ``penstock --help`` takes a fraction of a second. Nothing is computed here: commands read their words, call
`penstock.overseer`, `penstock.inference` or `penstock.dashboard`, and print what comes back.
"""

import errno
import os
import sys
import threading
from collections.abc import Sequence
from typing import Annotated

import typer

from penstock.cli import machine, policies, runs
from penstock.text.lasting_output import lasting_output
from penstock.text.safe_text import printable, shortened
from penstock.types import CheckpointError, ConfigError, PenstockError, SchemaVersionError, Stopped, UnreachableError

__all__ = ["main"]

_LONGEST_MESSAGE = 600
_LONGEST_END_S = 20.0
_TOO_LARGE = ("RESOURCE_EXHAUSTED", "array is too big", "Maximum allowed dimension exceeded")
"""How messages of XLA and NumPy begin about what cannot be allocated, or on no machine."""

_app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement learning for language models and simulator agents.",
    epilog="Start with: penstock train cats",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for _module in (policies, runs, machine):
    _app.add_typer(_module.commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The words after ``penstock``; None takes the process's, which then ends within 20 s, whatever user
            code left running in it.

    Returns:
        The exit code.
    """
    code = _run(arguments)
    if arguments is None:
        _end_within(_LONGEST_END_S, code)
    return code


def _end_within(limit_s: float, code: int) -> None:
    """Ends this process after a limit, whatever user code left running in it: a thread, an exit handler."""

    def end() -> None:
        threading.Event().wait(limit_s)
        others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
        names = ", ".join(thread.name for thread in others if not thread.daemon) or "an exit handler"
        print(
            f"penstock: ended; what still ran after {limit_s:g} s was cut short: {names}", file=sys.stderr, flush=True
        )
        os._exit(code)

    threading.Thread(target=end, name="limit of the end", daemon=True).start()


def _run(arguments: Sequence[str] | None) -> int:
    with lasting_output() as output:
        code = _exit_code(arguments)
    command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    if code == 0 and command != "train" and output is not None and output.lost is not None:  # a run is in its files
        print(f"penstock: the output could not be written: {output.lost.strerror}", file=sys.stderr)
        return 1
    return code


def _exit_code(arguments: Sequence[str] | None) -> int:
    try:
        return int(_app(args=arguments, prog_name="penstock", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("PENSTOCK_TRACEBACK"):
            import traceback

            print(printable(traceback.format_exc(), newlines=True), file=sys.stderr, end="")
        line, code = _explained(error)
        print(f"penstock: {line}", file=sys.stderr)
        return code


@_app.callback(invoke_without_command=True)
def _penstock(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    if version:
        from importlib.metadata import version as installed_version

        print(f"penstock {installed_version('penstock')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def _explained(error: Exception) -> tuple[str, int]:
    """One line about an error, and the exit code."""
    usage = getattr(error, "format_message", None)  # of the command-line parser's own errors
    if usage is not None:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "penstock"
        line = _one_line(usage())
        if "=" in line and context is not None and any("--set" in option.opts for option in context.command.params):
            line += " Changes are given by --set KEY=VALUE"
        return f"{line} (see {command} --help)", 2
    notes = [note for note in getattr(error, "__notes__", []) if "JAX has removed its internal frames" not in note]
    message = _one_line("; ".join([str(error), *notes]))
    if isinstance(error, ConfigError | CheckpointError | SchemaVersionError):
        return message, 2
    if isinstance(error, Stopped):
        return f"stopped: {message}", 130
    if isinstance(error, UnreachableError):
        return message, 1
    if isinstance(error, PenstockError):
        return f"the run failed: {message}", 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{_one_line(str(error.filename))} is no path: its name is longer than a file's may be", 2
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        what = f"{error.filename}: {error.strerror}"
        return f"{_one_line(what)} (PENSTOCK_TRACEBACK=1 shows where)", 1
    if isinstance(error, MemoryError) or message.startswith(_TOO_LARGE):
        return (
            f"not enough memory: {message or 'nothing more could be allocated'}: lower what takes it, such as "
            "inference.max_slots, inference.max_seq_len, learner.row_length or learner.micro_batch_rows; penstock "
            "train RECIPE --dry-run estimates it (PENSTOCK_TRACEBACK=1 shows where)"
        ), 1
    return f"unexpected {type(error).__name__}: {message} (PENSTOCK_TRACEBACK=1 shows where)", 1


def _one_line(text: str) -> str:
    """A message in one line that cannot act on the terminal: it may quote what a run, or its policy, wrote."""
    return shortened(" ".join(text.split()), _LONGEST_MESSAGE)
