"""The table of fragments, for runs of simulator fleets: what `penstock rollouts` shows in place of groups."""

import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.dashboard.group_table import LINES_AROUND, counts_text, run_title, say, state_style, totals
from penstock.dashboard.groups import GroupFilter, RunCounts, count_rollouts
from penstock.dashboard.safe_text import printable
from penstock.rundir.views import RunViews
from penstock.types import ConfigError, RunDirectoryError

_FRAGMENTS = """
SELECT coalesce(trained_step, fate_step) AS step, task, rollout_id, worker_id, slot, steps,
       steps - trainable_steps AS faulty_steps, episode_reward,
       list_sum(terminated::INTEGER[]) AS terminated, list_sum(truncated::INTEGER[]) AS truncated,
       weight_step, newest_weight_step, coalesce(trained_step, fate_step) - weight_step AS staleness,
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
        say(console, _nothing(wanted, counts))
        return
    console.print(_table(rows))
    say(console, totals(counts, "fragments"), style="dim")
    if rows[0]["total"] > len(rows):
        more = f"{rows[0]['total'] - len(rows):,} older fragments are not shown: --limit {rows[0]['total']}, --step N, "
        say(console, more + "--lesson TASK, --fate F", style="dim")
    query = shlex.join([str(views.directory.path), "--sql", "select task, rewards, faults from fragments limit 5"])
    say(console, f"  penstock rollouts {query}", style="cyan")


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


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("step", "task", "fragment", "steps", "faulty", "reward", "ends", "weights", "age", "state"):
        left = title in ("task", "fragment", "state")
        table.add_column(
            title,
            justify="left" if left else "right",
            no_wrap=title != "fragment",
            overflow="fold" if title == "fragment" else "ellipsis",
        )
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[Text]:
    oldest, newest = row["weight_step"], row["newest_weight_step"]
    plain = [
        _or_dash(row["step"]),
        row["task"],
        row["rollout_id"].rpartition("/")[0],
        str(row["steps"]),
        str(row["faulty_steps"] or ""),
        f"{row['episode_reward']:.4g}",
        str(int(row["terminated"] + row["truncated"]) or ""),
        str(oldest) if oldest == newest else f"{oldest}–{newest}",
        _or_dash(row["staleness"]),
    ]
    return [*(Text(printable(cell)) for cell in plain), Text(printable(row["state"]), style=state_style(row["state"]))]


def _or_dash(number: int | None) -> str:
    return "–" if number is None else str(number)


def _nothing(wanted: GroupFilter, counts: RunCounts) -> str:
    if wanted.words and counts.stored:
        return f"No fragments match {wanted.words}; there are {totals(counts, 'fragments')}."
    if counts.unstored:
        return f"No fragments are stored yet: {counts_text(counts.unstored)}."
    return "No fragments yet: the simulators have sent none so far."
