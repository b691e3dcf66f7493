"""What `penstock rollouts` does: one look at a run directory, chosen by its options."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.text import Text

from penstock.dashboard.conversation import Coloring, ConversationStyle, header, print_conversations
from penstock.dashboard.dataset_files import DatasetFormat
from penstock.dashboard.datasets import DatasetReport, DatasetRequest, Selection, export_dataset
from penstock.dashboard.fragment_table import (
    is_of_fragments,
    print_fragments,
    print_fragments_json,
    refuse_fragments,
)
from penstock.dashboard.group_table import print_groups, print_groups_json
from penstock.dashboard.groups import GroupFilter
from penstock.dashboard.lookup import find_rollouts
from penstock.dashboard.query_table import print_query, print_query_json
from penstock.dashboard.safe_text import printable
from penstock.dashboard.token_table import token_table
from penstock.dashboard.token_text import TokenText
from penstock.rundir.views import RunViews
from penstock.types import ConfigError, Fate

STATES = ("waiting", "training", *get_args(Fate))
"""What `--fate` takes."""

_MODES = ("show", "sql", "export")
_BELONGS = {
    "step": ("table", "export"),
    "lesson": ("table", "export"),
    "fate": ("table", "export"),
    "limit": ("table", "sql"),
    "json": ("table", "show", "sql"),
    "color": ("show",),
    "tokens": ("show",),
    "out": ("export",),
    "select": ("export",),
    "min_reward": ("export",),
    "min_margin": ("export",),
}
_CHOICES = {
    "fate": STATES,
    "export": get_args(DatasetFormat),
    "select": get_args(Selection),
    "color": get_args(Coloring),
}


@dataclass(frozen=True, slots=True)
class RolloutsRequest:
    """The words of the command; None or False where one was not given.

    Attributes:
        run_dir: The run directory.
        step: Groups of this update only.
        lesson: Of this lesson only.
        fate: With a rollout in this state only.
        limit: Most groups or rows.
        show: Id of a rollout or a group.
        color: By which number its tokens are coloured.
        tokens: Its tokens as a table instead.
        sql: A query.
        json: Print JSON lines.
        export: Write a data set of this format.
        out: To this path.
        select: Of these rollouts.
        min_reward: From this reward on.
        min_margin: Pairs at least so far apart.
        trust: Connect to the store in the network that the run names, whoever may have written that.
    """

    run_dir: Path
    step: int | None = None
    lesson: str | None = None
    fate: str | None = None
    limit: int | None = None
    show: str | None = None
    color: str | None = None
    tokens: bool = False
    sql: str | None = None
    json: bool = False
    export: str | None = None
    out: Path | None = None
    select: str | None = None
    min_reward: float | None = None
    min_margin: float | None = None
    trust: bool = False

    @property
    def mode(self) -> str:
        """`show`, `sql`, `export`, or `table`.

        Raises:
            ConfigError: options do not go together, or one has an unknown value.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name for name, value in values.items() if value is not None and value is not False}  # 0 is given
        modes = [mode for mode in _MODES if mode in given]
        if len(modes) > 1:
            raise ConfigError(f"{' and '.join(map(_option, modes))} do not go together: give one of them")
        mode = modes[0] if modes else "table"
        for name, places in _BELONGS.items():
            if name in given and mode not in places:
                raise ConfigError(f"{_option(name)} goes {_with(places)}, not {_with((mode,))}")
        for name, choices in _CHOICES.items():
            if name in given and values[name] not in choices:
                raise ConfigError(f"{_option(name)} is {values[name]!r}: it must be one of {', '.join(choices)}")
        return mode


def show_rollouts(request: RolloutsRequest, console: Console) -> None:
    """Prints or writes what was asked for.

    Args:
        request: The words of the command.
        console: Where to print tables; JSON goes to standard output.

    Raises:
        ConfigError: options that do not go together, an unknown id, a wrong query, a path that exists.
        RunDirectoryError: there is no run.
        SchemaVersionError: a newer Penstock wrote it.
    """
    mode = request.mode
    if mode == "export" and request.out is None:
        raise ConfigError(f"--export {request.export} needs --out PATH, a path that does not exist yet")
    if request.min_margin is not None and request.select != "pairs":
        raise ConfigError("--min-margin goes with --select pairs")
    wanted = GroupFilter(request.step, request.lesson, request.fate)
    with RunViews(request.run_dir, request.trust) as views:
        if mode in ("show", "export"):
            refuse_fragments(views, _option(mode))
        if mode == "show":
            _show(views, request, console)
        elif mode == "sql":
            assert request.sql is not None
            if request.json:
                print_query_json(views, request.sql, request.limit)
            else:
                print_query(views, request.sql, request.limit, console)
        elif mode == "export":
            _export(views, request, wanted, console)
        elif is_of_fragments(views):
            if request.json:
                print_fragments_json(views, wanted, request.limit)
            else:
                print_fragments(views, wanted, request.limit, console)
        elif request.json:
            print_groups_json(views, wanted, request.limit)
        else:
            print_groups(views, wanted, request.limit, console)


def _show(views: RunViews, request: RolloutsRequest, console: Console) -> None:
    assert request.show is not None
    stored = find_rollouts(views, request.show)
    if request.json:
        import json

        for rollout in stored:
            print(json.dumps(rollout.to_json()))
        return
    token_text = _token_text(views, console)
    if request.tokens:
        for number, rollout in enumerate(stored):
            console.print(header(rollout, stored[0] if number else None), token_table(rollout, token_text), Text())
        return
    coloring: Coloring = request.color or "logprob"  # pyright: ignore[reportAssignmentType]  # checked by `mode`
    print_conversations(stored, ConversationStyle.of(stored, token_text, coloring), console)


def _token_text(views: RunViews, console: Console) -> TokenText | None:
    try:
        return TokenText.of_run(views.directory)
    except ConfigError as error:
        console.print(Text(printable(f"{error}: the text of the turns is shown, without colours"), style="magenta"))
        return None


def _export(views: RunViews, request: RolloutsRequest, wanted: GroupFilter, console: Console) -> None:
    assert request.out is not None
    report = export_dataset(
        views,
        DatasetRequest(
            request.export,  # pyright: ignore[reportArgumentType]  # checked by `mode`
            request.out,
            request.select or "all",  # pyright: ignore[reportArgumentType]  # likewise
            wanted,
            request.min_reward,
            request.min_margin,
        ),
    )
    console.print(Text(printable(_report_text(report))), soft_wrap=True)


def _report_text(report: DatasetReport) -> str:
    text = f"{report.examples:,} examples of {report.considered:,} rollouts in {report.path}"
    text += f"; {report.without_text:,} without text left out" if report.without_text else ""
    return text + (
        f"; {report.indistinct:,} pairs of equal texts or different prompts left out" if report.indistinct else ""
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with(modes: tuple[str, ...]) -> str:
    return "with " + " or ".join("the table of groups" if mode == "table" else _option(mode) for mode in modes)
