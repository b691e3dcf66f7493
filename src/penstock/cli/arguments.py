"""What several commands share: arguments, how they are read, and how a report is printed."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from penstock.text.safe_text import printable
from penstock.types import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the configuration, as dotted keys.", show_default=False),
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A run's checkpoints/step-<n>, or a Hugging Face directory.")
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory; the run may go on, or be dead.")]
UpdateStep = Annotated[int, typer.Option(help="The update that led to this version, as in metrics.jsonl.")]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate chain in PEM, to speak HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option(help="Its unencrypted key in PEM.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Believe what a run directory says that others than you may have written.")
]


class PrintableReport(Protocol):
    """What a command found out."""

    def print(self, console: "Console") -> None:
        """For people."""
        ...

    def to_json(self) -> Any:
        """For programs, as plain data."""
        ...


def read_token(path: Path | None) -> str | None:
    """A server's token; never taken from the command line, which every user of the machine can read.

    Raises:
        ConfigError: the file cannot be read, or no client could send what it holds.
    """
    source = "PENSTOCK_TOKEN" if path is None else f"--token-file {path}"
    try:
        token = os.environ.get("PENSTOCK_TOKEN") if path is None else path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    if token is not None and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise ConfigError(f"{source} holds what no header can carry: a token is one line of printable ASCII")
    return token


def print_report(report: PrintableReport, as_json: bool = False) -> None:
    """Prints a report for people, or as one JSON object, in which numbers that are not finite are null."""
    if as_json:
        from penstock.rundir.logs import to_json

        print(to_json(report.to_json(), indent=2))
        return
    report.print(text_console())


def text_console() -> "Console":
    """Standard output, for text as it is: names and paths may hold brackets and colons, which are no markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Shows on standard error, where that is a terminal, what a command does meanwhile, and for how long."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=hidden) as shown:
        shown.add_task(doing, total=None)
        yield


def only(names: Sequence[str], what: str, example: str) -> str:
    """The one name among the words of a command line.

    Args:
        names: Words that are not of the form ``key=value``.
        what: It is, in words.
        example: A command line that has it.

    Raises:
        ConfigError: there is none, or more than one.
    """
    if not names:
        raise ConfigError(f"{what} is missing; for example: {example}")
    if len(names) > 1:
        extra = ", ".join(repr(name) for name in names[1:])
        raise ConfigError(f"{extra} beside {names[0]!r} is not of the form key=value; for example: {example}")
    return names[0]


def refuse_run_directory(path: Path) -> None:
    """Names the newest checkpoint of a run directory that was given in its place.

    Raises:
        ConfigError: it is a run directory.
    """
    steps = [int(found.name.removeprefix("step-")) for found in path.glob("checkpoints/step-*") if found.is_dir()]
    if steps:
        newest = path / "checkpoints" / f"step-{max(steps)}"
        raise ConfigError(f"{path} is a run directory: give one of its checkpoints, such as {newest}")


def recorded_config(run_dir: Path, overrides: Sequence[str], trust: bool, sections: Sequence[str] | None = None) -> Any:
    """The config of a run, after the code that it names is said.

    Args:
        run_dir: A run directory.
        overrides: Changes to the configuration, as ``key=value`` words.
        trust: Believe what others may have written there.
        sections: Those of which code is going to be imported; by default all.

    Raises:
        ConfigError: it is not valid, or others may have written it.
    """
    from penstock.overseer.config_loading import load_recorded_config
    from penstock.rundir import RunDirectory

    directory = RunDirectory(run_dir)
    config, code = load_recorded_config(directory, overrides, trust, sections)
    if code:
        print(printable(f"{directory.config_path} names code that is imported:"), file=sys.stderr)
    for named in code:
        print(f"  {printable(str(named))}", file=sys.stderr, flush=True)
    return config
