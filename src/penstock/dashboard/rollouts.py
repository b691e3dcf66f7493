"""What `penstock rollouts` shows of a run directory, chosen by its options.

Groups and conversations of language runs (`groups`, `conversation`), the table of fragments of simulator runs in their
place, and the answer to a query, as a table or as JSON lines.
"""

import datetime
import json
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dashboard.conversation import Coloring, ConversationStyle, header, print_conversations, token_table
from penstock.dashboard.datasets import DatasetFormat, DatasetReport, DatasetRequest, Selection, export_dataset
from penstock.dashboard.groups import (
    LINES_AROUND,
    Column,
    GroupFilter,
    RunCounts,
    count_rollouts,
    counts_text,
    fitted_table,
    or_dash,
    print_groups,
    print_groups_json,
    print_line,
    run_title,
    state_style,
    totals,
    version_span,
)
from penstock.dashboard.lookup import find_rollouts
from penstock.dashboard.tokens import TokenText
from penstock.rundir import QueryResult, RunViews
from penstock.rundir.commands import command_line
from penstock.text.safe_text import printable, shortened
from penstock.types import ConfigError, Fate, RunDirectoryError

_FRAGMENTS = """
SELECT coalesce(trained_step, fate_step) AS step, task, rollout_id, worker_id, slot, steps,
       steps - trainable_steps AS faulty_steps, episode_reward,
       list_sum(terminated::INTEGER[]) AS terminated, list_sum(truncated::INTEGER[]) AS truncated,
       weight_step, newest_weight_step, CASE WHEN step >= weight_step THEN step - weight_step END AS staleness,
       state, fate_reason, timestamp, count(*) OVER () AS total
FROM fragments
WHERE ($step IS NULL OR coalesce(trained_step, fate_step) = $step
       OR rollout_id IN (SELECT rollout_id FROM uses WHERE survives AND step = $step))
  AND ($lesson IS NULL OR task = $lesson) AND ($fate IS NULL OR state = $fate)
ORDER BY 1 DESC NULLS FIRST, timestamp DESC, rollout_id
"""


def is_of_fragments(views: RunViews) -> bool:
    """Whether a run is one of simulators: it has fragments, or its config says so."""
    if views.select("SELECT 1 FROM fragments", limit=1).to_dicts():
        return True
    try:
        return views.directory.config_path.is_file() and "fleet" in views.directory.read_config()
    except RunDirectoryError:  # a broken config hinders nobody who looks at files
        return False


def print_fragments(views: RunViews, wanted: GroupFilter, limit: int | None, console: Console) -> None:
    """Prints the newest fragments that a filter lets through, how many there are, and what to try next."""
    rows = _rows(views, wanted, limit if limit is not None else max(console.height - LINES_AROUND, 5))
    counts = count_rollouts(views, "fragments")
    console.print(run_title(views), highlight=False)
    if not rows:
        print_line(console, _nothing(wanted, counts))
        return
    console.print(fitted_table(_COLUMNS, rows, console.width))
    print_line(console, totals(counts, "fragments"), style="dim")
    if rows[0]["total"] > len(rows):
        more = f"{rows[0]['total'] - len(rows):,} older fragments are not shown: --limit {rows[0]['total']}, --step N, "
        print_line(console, more + "--lesson TASK, --fate F", style="dim")
    query = "select task, rewards, faults from fragments limit 5"
    print_line(console, f"  {command_line('rollouts', views.directory.path, '--sql', query)}", style="cyan")


def print_fragments_json(views: RunViews, wanted: GroupFilter, limit: int | None) -> None:
    """Prints one JSON object per fragment and line, without its arrays: all that match, where there is no limit."""
    for row in _rows(views, wanted, limit):
        row |= {name: int(row[name]) for name in ("terminated", "truncated")}  # DuckDB's sums are of 128 bits
        print(json.dumps({name: value for name, value in row.items() if name != "total"}))


def refuse_fragments(views: RunViews, option: str) -> None:
    """Where a run is of simulators, says what to do in place of an option that is about text.

    Raises:
        ConfigError: it is.
    """
    if is_of_fragments(views):
        raise ConfigError(
            f"{option} shows conversations, but {views.directory.path} is a run of simulators: look at its fragments "
            'with --sql "select * exclude (observations, final_observations) from fragments"'
        )


def _rows(views: RunViews, wanted: GroupFilter, limit: int | None) -> list[dict[str, Any]]:
    parameters = {"step": wanted.step, "lesson": wanted.lesson_id, "fate": wanted.state}
    return views.select(_FRAGMENTS, parameters, limit).to_dicts()


_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("step", lambda row: or_dash(row["step"])),
    Column("task", lambda row: row["task"], right=False),
    Column("fragment", lambda row: row["rollout_id"].rpartition("/")[0], right=False, whole=True),
    Column("steps", lambda row: str(row["steps"])),
    Column("faulty", lambda row: str(row["faulty_steps"] or "")),
    Column("reward", lambda row: f"{row['episode_reward']:.4g}"),
    Column("ends", lambda row: str(int(row["terminated"] + row["truncated"]) or "")),
    Column("weights", lambda row: version_span(row["weight_step"], row["newest_weight_step"])),
    Column("age", lambda row: or_dash(row["staleness"])),
    Column("state", lambda row: Text(printable(row["state"]), style=state_style(row["state"])), right=False),
]


def _nothing(wanted: GroupFilter, counts: RunCounts) -> str:
    if wanted.words and counts.stored:
        return f"No fragments match {wanted.words}; there are {totals(counts, 'fragments')}."
    if counts.unstored:
        return f"No fragments are stored yet: {counts_text(counts.unstored)}."
    return "No fragments yet: the simulators have sent none so far."


LINES_AROUND_ANSWER = 4
"""Lines of a screen that are not rows."""

_CELL_WIDTH = 400
_READABLE_WIDTH = 16
_GAP = 2


def print_query(views: RunViews, sql: str, limit: int | None, console: Console) -> None:
    """Runs a query and prints as many of its rows as fit a screen, or as many as asked for.

    Raises:
        ConfigError: the query does more than read, or cannot be answered.
    """
    result = views.select(sql, limit=limit if limit is not None else max(console.height - LINES_AROUND_ANSWER, 5))
    rows = [[_cell(value) for value in row] for row in result.rows()]
    if not rows:
        console.print("0 rows", style="dim")
        return
    console.print(_rows_across(result, rows) if _fits(result, rows, console.width) else _rows_down(result, rows))
    if result.more:
        console.print(f"{result.table.num_rows} rows; there are more: --limit N, or --json for all", style="dim")


def print_query_json(views: RunViews, sql: str, limit: int | None) -> None:
    """Prints one JSON object per row and line; columns of the same name are told apart by number.

    Raises:
        ConfigError: the query does more than read, or cannot be answered.
    """
    result = views.select(sql, limit=limit)
    names = distinct_names(result)
    for row in result.rows():
        print(json.dumps(dict(zip(names, map(plain, row), strict=True))))


def _fits(result: QueryResult, rows: list[list[str]], width: int) -> bool:
    """Whether each column can have a readable width."""
    widths = [max(map(cell_len, column)) for column in zip(result.columns, *rows, strict=True)]
    return sum(min(natural, _READABLE_WIDTH) + _GAP for natural in widths) - _GAP <= width


def _rows_across(result: QueryResult, rows: list[list[str]]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in result.table.schema:
        numeric = str(column.type).startswith(("int", "uint", "float", "double", "decimal"))
        table.add_column(Text(printable(column.name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _rows_down(result: QueryResult, rows: list[list[str]]) -> Table:
    """One line per value: for rows with more columns than the screen has room for."""
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for number, row in enumerate(rows, start=1):
        table.add_row(Text(f"row {number}", style="bold"))
        for name, value in zip(result.columns, row, strict=True):
            table.add_row(Text(printable(name)), Text(value))
    return table


def distinct_names(result: QueryResult) -> list[str]:
    """The columns of an answer, those of the same name told apart by a number."""
    names: list[str] = []
    for name in result.columns:
        count = 2
        given = name
        while given in names:
            given, count = f"{name}_{count}", count + 1
        names.append(given)
    return names


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return shortened(value, _CELL_WIDTH)
    if isinstance(value, float):
        return str(_rounded(value))
    rounded = _rounded(plain(value))
    return shortened(rounded if isinstance(rounded, str) else json.dumps(rounded, ensure_ascii=False), _CELL_WIDTH)


def _rounded(value: Any) -> Any:
    """Floats to six digits, Unix seconds to the millisecond."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return round(value, 3) if abs(value) >= 1e6 else float(f"{value:.6g}")


def plain(value: Any) -> Any:
    """What JSON knows: numbers that are not finite become null, dates ISO text, anything else its own text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, str | bool | int) else str(value)


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
        eval: Of evaluations in place of training.
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
    eval: bool = False

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
        if self.eval and self.fate is not None:
            raise ConfigError("--fate does not go with --eval: evaluations are not trained, and have no fate")
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
    with RunViews(request.run_dir, request.trust, "eval" if request.eval else "train") as views:
        if request.eval or mode in ("show", "export"):
            refuse_fragments(views, _option("eval" if request.eval else mode))
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
