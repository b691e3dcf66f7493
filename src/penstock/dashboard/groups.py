"""The groups of a run, summed up by the update that trained them or at which they ended, and their table.

Two queries: a narrow one finds the newest groups that a filter lets through, a second one sums up those alone, so that
a page of a large run does not read all its tokens. The table has as many columns as fit, and ids whole.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dashboard.status import read_run_status
from penstock.rundir.commands import command_line
from penstock.rundir.views import RunViews, known_status
from penstock.text.safe_text import printable
from penstock.types import ConfigError, PenstockError

_MATCHING = """
WITH marked AS (
    SELECT group_id, lesson_id, state, timestamp, coalesce(trained_step, fate_step) AS step,
           $step IS NULL OR coalesce(trained_step, fate_step) = $step
           OR rollout_id IN (SELECT rollout_id FROM uses WHERE survives AND step = $step) AS at_step
    FROM rollouts WHERE $lesson IS NULL OR lesson_id = $lesson
)
SELECT group_id, max(step) AS step, count(*) OVER () AS total
FROM marked GROUP BY group_id
HAVING bool_or(at_step) AND ($fate IS NULL OR bool_or(state = $fate))
ORDER BY step DESC NULLS FIRST, max(timestamp) DESC, group_id
"""
_DETAILS = """
SELECT group_id, any_value(lesson_id) AS lesson_id, any_value(group_key) AS group_key, max(timestamp) AS timestamp,
       list({'reward': episode_reward, 'tokens': len(response_mask), 'oldest': weight_step,
             'newest': newest_weight_step, 'state': state, 'advantage': advantage}
            ORDER BY try_cast(regexp_extract(rollout_id, '[0-9]+$') AS BIGINT), rollout_id) AS members
FROM rollouts WHERE group_id IN (SELECT unnest($groups)) GROUP BY group_id
"""
_STORED = "SELECT state, count(*) AS rollouts FROM {view} GROUP BY state"
_UNSTORED = """
SELECT coalesce(fate, 'in_flight') AS state, count(*) AS rollouts
FROM (SELECT ticket_id || '/' || unnest(range(rollouts)) AS rollout_id FROM tickets
      UNION SELECT rollout_id FROM fates)
LEFT JOIN (SELECT rollout_id, arg_max(fate, line) AS fate FROM fates GROUP BY rollout_id) USING (rollout_id)
WHERE rollout_id NOT IN (SELECT rollout_id FROM {view}) GROUP BY 1
"""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups; None lets all through.

    Attributes:
        step: Used by this update, or ended at it.
        lesson_id: Of this lesson.
        state: With a rollout in this state: a fate, `waiting` or `training`.
    """

    step: int | None = None
    lesson_id: str | None = None
    state: str | None = None

    @property
    def words(self) -> str:
        """The filter as the options that make it."""
        options = {"--step": self.step, "--lesson": self.lesson_id, "--fate": self.state}
        return " ".join(f"{name} {value}" for name, value in options.items() if value is not None)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group.

    Attributes:
        group_id: The ticket.
        lesson_id: The lesson.
        group_key: Environment and example.
        step: The update that used it last, or at which it ended; None while it waits.
        rewards: Of its stored members, in their order.
        advantages: Of those that were in a batch.
        response_tokens: Mean per member.
        oldest_weight_step: The oldest weights behind any sampled token.
        newest_weight_step: The newest.
        staleness: Updates between the oldest weights and `step`; None while it waits, and where a resume went back
            to before these weights.
        states: Members per state.
        timestamp: When its last member was finished, in Unix seconds.
    """

    group_id: str
    lesson_id: str
    group_key: str
    step: int | None
    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    response_tokens: float
    oldest_weight_step: int
    newest_weight_step: int
    staleness: int | None
    states: dict[str, int]
    timestamp: float

    @property
    def reward_mean(self) -> float:
        """Mean reward of its members."""
        return math.fsum(self.rewards) / len(self.rewards)

    def to_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "group_id": self.group_id,
            "lesson_id": self.lesson_id,
            "group_key": self.group_key,
            "step": self.step,
            "rollouts": len(self.rewards),
            "reward_mean": self.reward_mean,
            "reward_min": min(self.rewards),
            "reward_max": max(self.rewards),
            "rewards": list(self.rewards),
            "advantage_min": min(self.advantages, default=None),
            "advantage_max": max(self.advantages, default=None),
            "response_tokens": self.response_tokens,
            "oldest_weight_step": self.oldest_weight_step,
            "newest_weight_step": self.newest_weight_step,
            "staleness": self.staleness,
            "states": self.states,
            "timestamp": self.timestamp,
        }


@dataclass(frozen=True, slots=True)
class GroupPage:
    """The newest groups, newest first: those that wait, then by step.

    Attributes:
        groups: As many as were asked for.
        total: How many match.
    """

    groups: tuple[GroupSummary, ...]
    total: int


@dataclass(frozen=True, slots=True)
class RunCounts:
    """How many rollouts there are.

    Attributes:
        stored: Rollouts with a row, by state.
        unstored: Those that were started but have none (yet, or any more), by state; `in_flight` without a fate.
    """

    stored: dict[str, int] = field(default_factory=dict)
    unstored: dict[str, int] = field(default_factory=dict)


def list_groups(views: RunViews, wanted: GroupFilter, limit: int | None) -> GroupPage:
    """The newest groups that a filter lets through.

    Args:
        views: Of the run.
        wanted: Which groups are listed.
        limit: Most groups; None means all.

    Raises:
        ConfigError: the run has rollouts, but none of that lesson.
    """
    parameters = {"step": wanted.step, "lesson": wanted.lesson_id, "fate": wanted.state}
    found = views.select(_MATCHING, parameters, limit).to_dicts()
    if not found:
        check_lesson(views, wanted.lesson_id)
        return GroupPage((), 0)
    details = views.select(_DETAILS, {"groups": [row["group_id"] for row in found]}).to_dicts()
    by_id = {row["group_id"]: row for row in details}
    return GroupPage(tuple(_summary(by_id[row["group_id"]], row["step"]) for row in found), int(found[0]["total"]))


def count_rollouts(views: RunViews, view: str = "rollouts") -> RunCounts:
    """Rollouts by state, of the whole run; or fragments, as the view says. Of evaluations all are stored."""
    stored, unstored = (
        {row["state"]: int(row["rollouts"]) for row in views.select(query.format(view=view)).to_dicts()}
        for query in (_STORED, _UNSTORED)
    )
    return RunCounts(stored, unstored if views.mode == "train" else {})


def lessons_of(views: RunViews) -> list[str]:
    """The lessons that have rollouts."""
    return [row[0] for row in views.select("SELECT DISTINCT lesson_id FROM rollouts ORDER BY 1").rows()]


def source_of(views: RunViews) -> str | None:
    """Whose rollouts a run trains on that has none of its own; None where it generates them."""
    source = views.directory.read_config().get("replay", {}).get("from_rollouts")
    return None if source is None else str(source)


def check_lesson(views: RunViews, lesson_id: str | None) -> None:
    """Refuses a lesson of which a run has no rollouts, if it has some of others.

    Raises:
        ConfigError: it is such a lesson.
    """
    lessons = lessons_of(views)
    if lesson_id is not None and lessons and lesson_id not in lessons:
        raise ConfigError(
            f"--lesson is {lesson_id!r}, of which there are no rollouts: there are some of {', '.join(lessons)}"
        )


def _summary(row: dict[str, Any], step: int | None) -> GroupSummary:
    members: list[dict[str, Any]] = row["members"]
    oldest = min(member["oldest"] for member in members)
    return GroupSummary(
        group_id=row["group_id"],
        lesson_id=row["lesson_id"],
        group_key=row["group_key"],
        step=step,
        rewards=tuple(member["reward"] for member in members),
        advantages=tuple(member["advantage"] for member in members if member["advantage"] is not None),
        response_tokens=math.fsum(member["tokens"] for member in members) / len(members),
        oldest_weight_step=oldest,
        newest_weight_step=max(member["newest"] for member in members),
        staleness=None if step is None or step < oldest else step - oldest,
        states=dict(Counter(member["state"] for member in members).most_common()),
        timestamp=row["timestamp"],
    )


STATE_STYLES = {
    "trained": "green",
    "waiting": "magenta",
    "training": "magenta",
    **dict.fromkeys(("eval", "micro_eval", "untrained", "before", "after"), "cyan"),
}
"""Every other state means that a rollout was dropped; those of evaluations say which."""
DROPPED_STYLE = "red"
LINES_AROUND = 9
"""Lines of a screen that are not groups: title, heading, footer, and the prompt after it."""

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 8
_GAPS = (2, 1)
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """How one column of a table is made.

    Attributes:
        title: Its heading.
        cell: A row's cell; a plain one may hold anything.
        rank: Columns of the highest rank are left out first where the table is too wide; 0 always stays.
        right: Whether it is of numbers.
        whole: Whether its cells are never cut: they go on in another line.
    """

    title: str
    cell: Callable[[Row], Text | str]
    rank: int = 0
    right: bool = True
    whole: bool = False

    def text(self, row: Row) -> Text:
        """What is printed: never markup, and no control characters."""
        cell = self.cell(row)
        return cell if isinstance(cell, Text) else Text(printable(cell))


def print_groups(views: RunViews, wanted: GroupFilter, limit: int | None, console: Console) -> None:
    """Prints the newest groups, what else there is, and what to try next."""
    page = list_groups(views, wanted, limit if limit is not None else max(console.height - LINES_AROUND, 5))
    counts = count_rollouts(views)
    console.print(run_title(views), highlight=False)
    if not page.groups:
        print_line(console, _nothing(views, wanted, counts))
        return
    console.print(group_table(page.groups, console.width))
    print_line(console, totals(counts) + _left_over(views, counts), style="dim")
    if views.mode == "train" and any(group.step is not None for group in page.groups):
        print_line(console, "a step is the version that it trained: the log calls the update by the next", style="dim")
    if page.total > len(page.groups):
        more = f"{page.total - len(page.groups):,} older groups are not shown: --limit {page.total}, --step N, "
        print_line(console, more + ("--lesson L, --fate F" if views.mode == "train" else "--lesson L"), style="dim")
    mode = [] if views.mode == "train" else ["--eval"]
    hint = command_line("rollouts", views.directory.path, *mode, "--show", page.groups[0].group_id)
    print_line(console, f"  {hint}", style="cyan")


def print_groups_json(views: RunViews, wanted: GroupFilter, limit: int | None) -> None:
    """Prints one JSON object per group and line: all that match, where there is no limit."""
    for group in list_groups(views, wanted, limit).groups:
        print(json.dumps(group.to_json()))


def group_table(groups: Sequence[GroupSummary], width: int) -> Table:
    """The groups as a table that fits a width, as far as whole ids let it."""
    return fitted_table(_columns(groups), groups, width)


def fitted_table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> Table:
    """A table in which columns move closer, and then are left out by their ranks, until the rest fits or is needed."""
    columns, gap = _fitting(columns, rows, width)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        justify, overflow = "right" if column.right else "left", "fold" if column.whole else "ellipsis"
        table.add_column(column.title, justify=justify, no_wrap=not column.whole, overflow=overflow)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    return table


def state_style(state: str) -> str:
    """The colour of a state."""
    return STATE_STYLES.get(state, DROPPED_STYLE)


def counts_text(counts: dict[str, int]) -> str:
    """Counts in words, the largest first, equal ones by name."""
    largest_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {state}" for state, count in largest_first)


def _columns(groups: Sequence[GroupSummary]) -> list[Column[GroupSummary]]:
    low = min(min(group.rewards) for group in groups)
    high = max(max(group.rewards) for group in groups)
    in_id = all(group.group_id.startswith(f"{group.lesson_id}-") for group in groups)
    return [
        Column("step", lambda group: or_dash(group.step)),
        Column("lesson", lambda group: group.lesson_id, 7 if in_id else 1, right=False),
        Column("group", lambda group: group.group_id, right=False, whole=True),
        Column("n", lambda group: str(len(group.rewards))),
        Column("reward", lambda group: Text(_number(group.reward_mean), style="bold")),
        Column("min", lambda group: _number(min(group.rewards)), 4),
        Column("max", lambda group: _number(max(group.rewards)), 4),
        Column("rewards", lambda group: _sparkline(sorted(group.rewards), low, high), 5, right=False),
        Column("advantage", lambda group: _spread(group.advantages), 6),
        Column("tokens", lambda group: f"{group.response_tokens:.0f}", 2),
        Column("weights", lambda group: version_span(group.oldest_weight_step, group.newest_weight_step), 2),
        Column("age", lambda group: or_dash(group.staleness), 3),
        Column("state", lambda group: _states(group.states), right=False),
    ]


def _fitting(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> tuple[Sequence[Column[Row]], int]:
    """The columns that are shown, and how far apart."""
    widths = {
        column.title: max(cell_len(column.title), *(cell_len(column.text(row).plain) for row in rows))
        for column in columns
    }
    for rank in sorted({column.rank for column in columns}, reverse=True):
        columns = [column for column in columns if column.rank <= rank]
        for gap in _GAPS:
            if sum(widths[column.title] + gap for column in columns) - gap <= width:
                return columns, gap
    return columns, _GAPS[-1]


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def _spread(advantages: Iterable[float]) -> str:
    values = list(advantages)
    return f"{min(values):+.2f} … {max(values):+.2f}" if values else "–"


def or_dash(number: int | None) -> str:
    """A number, or a dash where there is none."""
    return "–" if number is None else str(number)


def version_span(oldest: int, newest: int) -> str:
    """The versions behind something, in few characters."""
    return str(oldest) if oldest == newest else f"{oldest}–{newest}"


def _states(states: dict[str, int]) -> Text:
    (state, count), total = next(iter(states.items())), sum(states.values())
    shown = printable(state)
    return Text(shown if count == total else f"{shown} {count}/{total}", style=state_style(state))


def _sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Values as blocks over a given range; more of them than fit are averaged."""
    columns = min(_SPARKLINE_WIDTH, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    return "".join(_SPARKS[round((mean - low) / ((high - low) or 1.0) * (len(_SPARKS) - 1))] for mean in means)


def run_title(views: RunViews) -> Text:
    """The run directory, and what status.json says of it."""
    text = Text(printable(str(views.directory.path)), style="bold")
    status = known_status(views.directory)
    if status is not None:
        words = f"  {_state(views) or 'unknown state'}, step {status.get('step', '?')}"
        words += "" if status.get("steps") is None else f" of {status['steps']}"
        text.append(printable(words), style="not bold dim")
    return text


def _state(views: RunViews) -> str:
    """As `penstock status` has it, dead runs too; empty before the first status, and where it is broken."""
    state = str((known_status(views.directory) or {}).get("state", ""))
    if state == "running":
        with suppress(PenstockError, OSError):  # without a config that can be read it is believed
            return read_run_status(views.directory.path).state
    return state


def totals(counts: RunCounts, kind: str = "rollouts") -> str:
    """How many rollouts, or whatever `kind` says, there are in each state."""
    text = f"{sum(counts.stored.values()):,} {kind} stored: {counts_text(counts.stored)}"
    return text + (f"; not stored: {counts_text(counts.unstored)}" if counts.unstored else "")


def _left_over(views: RunViews, counts: RunCounts) -> str:
    """What becomes of rollouts that a run left in flight, where it has ended."""
    if _state(views) in ("", "running") or "in_flight" not in counts.unstored:
        return ""
    return " (in_flight when the run ended: a resume counts them as aborted)"


def _nothing(views: RunViews, wanted: GroupFilter, counts: RunCounts) -> str:
    if wanted.words and counts.stored:
        return f"No groups match {wanted.words}; there are {totals(counts)}."
    if views.mode == "eval":
        return "No evaluation yet: none has ended so far, or the run was made before evaluations were kept."
    if counts.unstored:
        yet = " yet" if counts.unstored.keys() == {"in_flight"} else ""
        return f"No rollouts are stored{yet}: {counts_text(counts.unstored)}{_left_over(views, counts)}."
    if (source := source_of(views)) is not None:
        return f"No rollouts of its own: the run trains on those of {printable(source)}."
    return "No rollouts yet: the run has started no group so far."


def print_line(console: Console, line: str, style: str = "") -> None:
    """Prints a line of words; a command in cyan is never broken."""
    console.print(Text(printable(line), style=style), soft_wrap=style == "cyan")
