"""What the pages about rollouts show, as plain data: the list of groups, one group token by token, a timeline.

Lists come from the index alone. A group is read from the one part that holds it, its advantages from the batch that
trained it. Of a very long answer the first `MOST_TOKENS` tokens are given; the number of all says so. Ratios and
entropies are those that `penstock why` computed of that update, where it did.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.dashboard.index import AGE
from penstock.dashboard.lookup import BatchUse, uses_in
from penstock.dashboard.observation import ObservedRun
from penstock.dashboard.tokens import TokenText, breaks_within, turns_of
from penstock.rundir.commands import command_line
from penstock.rundir.example_rows import EXAMPLE_SCHEMA
from penstock.rundir.live_files import opened_part
from penstock.rundir.rescored_rows import RescoredRollout, read_rescored
from penstock.rundir.rollout_rows import records_from_table
from penstock.rundir.storage import LocalStorage, Storage
from penstock.types import AnyRollout, ConfigError, RolloutRecord, RunDirectoryError, Turn

MOST_TOKENS = 4096
"""Of one answer that a page shows, its prompt included."""
MOST_MEMBERS = 64
"""Of one group that a page shows."""
SMALL_BYTES = 1 << 20
"""A part of at most so many bytes is read whole, and kept for the next group; of others only a row group is read."""
MOST_KEPT = 8
MOST_ROWS = 500
"""Of a list, at once."""
MOST_BARS = 1500
"""Of a timeline: rollouts, but for the rest of a group."""

WAITING = "waiting"
_ORDERS: dict[str, str] = {
    "newest": "max(r.time) DESC NULLS LAST, r.g DESC",
    "oldest": "max(r.time) NULLS LAST, r.g",
    "step": "max(r.step) DESC NULLS LAST, r.g",
    "reward": "avg(r.reward) DESC NULLS LAST, r.g",
    "reward_low": "avg(r.reward) NULLS LAST, r.g",
    "spread": "max(r.reward) - min(r.reward) DESC NULLS LAST, r.g",
    "tokens": "avg(r.tokens) DESC NULLS LAST, r.g",
    "staleness": f"max({AGE}) DESC NULLS LAST, r.g",
    "seconds": "max(r.seconds) DESC NULLS LAST, r.g",
}
_CONDITIONS = {
    "lesson": "g.lesson = $lesson",
    "state": "coalesce(r.state, 'waiting') = $state",
    "from_step": "r.step >= $from_step",
    "to_step": "r.step <= $to_step",
    "min_reward": "r.reward >= $min_reward",
    "max_reward": "r.reward <= $max_reward",
    "min_tokens": "r.tokens >= $min_tokens",
    "max_tokens": "r.tokens <= $max_tokens",
    "min_staleness": f"{AGE} >= $min_staleness",
    "worker": "r.worker = $worker",
    "finish": "coalesce(r.finish, 'not stored') = $finish",
    "search": "contains(lower(g.group_id), lower($search))",
}
_NUMBERS = {
    "from_step": int, "to_step": int, "min_reward": float, "max_reward": float, "min_tokens": int, "max_tokens": int,
    "min_staleness": int,
}  # fmt: skip
_OF = {"train": "g.evaluation IS NULL", "eval": "g.evaluation IS NOT NULL", "all": "true"}
_SUMMARY = f"""
SELECT g.group_id, g.lesson, g.evaluation, s.* EXCLUDE (g)
FROM (SELECT g, count(*) AS n, count(part) AS stored, avg(reward) AS reward, min(reward) AS low, max(reward) AS high,
             list(reward ORDER BY position) AS rewards, min(advantage) AS advantage_low,
             max(advantage) AS advantage_high, avg(tokens) AS tokens, min(weight_step) AS oldest,
             max(newest) AS newest, max(step) AS step, max({AGE}) AS staleness, max(seconds) AS seconds,
             max(time) AS time, any_value(worker) AS worker, any_value(reason) AS reason,
             list_sort(list_distinct(list(coalesce(state, 'waiting')))) AS states
      FROM rollouts r WHERE g IN (SELECT unnest($groups)) GROUP BY g) s JOIN groups g ON g.g = s.g
ORDER BY list_position($groups, s.g)
"""


# Which groups first, by few numbers of each; then what is shown of those. An open buffer admits what is finished.
_BARS = """
WITH lives AS (
    SELECT r.g, greatest(max(r.time), coalesce(max(r.ended), 0)) AS over, count(*) AS n,
           coalesce(least(any_value(g.admitted), min(r.time - r.seconds)), min(r.time)) AS begun
    FROM rollouts r JOIN groups g USING (g) WHERE g.evaluation IS NULL GROUP BY r.g
), latest AS (
    SELECT g, over, n FROM lives WHERE ($low IS NULL OR over >= $low) AND ($high IS NULL OR begun <= $high)
    ORDER BY over DESC LIMIT $most
), chosen AS (
    SELECT g, over FROM latest QUALIFY coalesce(sum(n) OVER (ORDER BY over DESC, g ROWS BETWEEN UNBOUNDED PRECEDING
                                                             AND 1 PRECEDING), 0) < $most
)
SELECT g.group_id, g.lesson, least(any_value(g.admitted), min(r.time - r.seconds)) AS admitted,
       min(r.time - r.seconds) AS began, max(r.time) AS finished, max(r.ended) AS ended,
       any_value(r.worker) AS worker, avg(r.reward) AS reward, max(r.step) AS step,
       list_sort(list_distinct(list(coalesce(r.state, 'waiting')))) AS states,
       list([r.position, r.time, r.seconds, r.wait_ms / 1e3, r.prefill_ms / 1e3, r.decode_ms / 1e3,
             r.tool_ms / 1e3, r.reward_ms / 1e3, r.ended, r.reward]::DOUBLE[] ORDER BY r.position) AS lives,
       list(list_transform(r.turns, lambda ms: ms / 1e3) ORDER BY r.position) AS turns,
       list(coalesce(r.state, 'waiting') ORDER BY r.position) AS fates
FROM rollouts r JOIN chosen c USING (g) JOIN groups g USING (g)
GROUP BY g.group_id, g.lesson ORDER BY any_value(c.over) DESC
"""


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """Which groups, and in which order.

    Attributes:
        values: Filter → its value, as `of` checked them.
        of: `train`, `eval` or `all`.
        order: One of `_ORDERS`, by name.
    """

    values: tuple[tuple[str, str | int | float], ...]
    of: str = "train"
    order: str = "newest"

    @classmethod
    def parsed(cls, words: Mapping[str, str]) -> "GroupQuery":
        """From what stands in a URL; an empty word is none.

        Raises:
            ConfigError: a value is no number where one is needed, or no order is called so.
        """
        values: list[tuple[str, str | int | float]] = []
        for name in _CONDITIONS:
            if word := words.get(name, ""):
                values.append((name, _number(name, word) if name in _NUMBERS else word))
        of, order = words.get("of") or "train", words.get("order") or "newest"
        for name, word, known in (("of", of, _OF), ("order", order, _ORDERS)):
            if word not in known:
                raise ConfigError(f"{name} is {word!r}: it must be one of {', '.join(known)}")
        return cls(tuple(values), of, order)

    @property
    def sql(self) -> str:
        """The numbers of the groups with a rollout that passes, in order."""
        where = " AND ".join([_OF[self.of], *(_CONDITIONS[name] for name, _ in self.values)])
        return (
            f"SELECT r.g, count(*) FROM rollouts r JOIN groups g ON g.g = r.g WHERE {where} "
            f"GROUP BY r.g ORDER BY {_ORDERS[self.order]}"
        )


@lru_cache(maxsize=4)
def _groups_of(run: ObservedRun, version: int, query: GroupQuery) -> tuple[np.ndarray, int]:
    """Numbers of the groups, and how many rollouts pass; the last lists are kept, so that scrolling asks nothing anew.

    Args:
        run: Whose they are.
        version: Of its index; the list of another may differ.
        query: Which groups, and in which order.
    """
    groups, counts = run.index.columns(query.sql, dict(query.values))
    return groups, int(counts.sum())


def group_list(run: ObservedRun, words: Mapping[str, str]) -> dict[str, Any]:
    """A piece of the list of groups: ``offset`` and ``limit`` say which.

    Raises:
        ConfigError: a filter has no meaning.
    """
    query = GroupQuery.parsed(words)
    offset, limit = (max(0, int(_number(name, words.get(name) or "0"))) for name in ("offset", "limit"))
    groups, rollouts = _groups_of(run, run.index.version, query)
    shown = groups[offset : offset + min(limit or 100, MOST_ROWS)].tolist()
    return {
        "total": len(groups),
        "rollouts": rollouts,
        "offset": offset,
        "groups": run.index.rows(_SUMMARY, {"groups": shown}) if shown else [],
    }


def choices(run: ObservedRun) -> dict[str, Any]:
    """What the filters of the list can be set to."""

    def different(value: str, table: str) -> list[str]:
        rows = run.index.rows(f"SELECT DISTINCT {value} AS value FROM {table} ORDER BY 1")
        return [row["value"] for row in rows if row["value"] is not None]

    return {
        "lessons": different("lesson", "groups"),
        "states": different("coalesce(state, 'waiting')", "rollouts"),
        "finishes": different("coalesce(finish, 'not stored')", "rollouts"),
        "workers": different("worker", "rollouts"),
        "orders": list(_ORDERS),
    }


def group_page(run: ObservedRun, group_id: str) -> dict[str, Any]:
    """One group: its answers with their tokens, or of simulators its fragment step by step.

    Raises:
        ConfigError: there is no such group.
        RunDirectoryError: its part cannot be read.
    """
    index = run.index
    members = index.part_of(group_id)
    if not members:
        raise ConfigError(f"there is no group {group_id!r} in this run, or it is not read yet")
    first = members[0]
    found = {
        "group_id": group_id,
        "lesson": first["lesson"],
        "evaluation": first["evaluation"],
        "admitted": first["admitted"],
        "deadline": first["deadline"],
        "neighbours": _neighbours(run, first["g"]),
        "size": len(members),
        "note": "",
        "members": [_member(member) for member in members[:MOST_MEMBERS]],
    }
    places = {member["name"] for member in members if member["name"]}
    if not places:
        return found | {"note": "not stored: it ended before its rollouts were sealed, or its part has expired"}
    tables = [_rows_of(run, name, [m["row"] for m in members if m["name"] == name]) for name in sorted(places)]
    if run.is_of_simulators and not first["evaluation"]:
        return found | {"fragment": _fragment(tables[0])}
    records = {r.rollout.rollout_id: r for table in tables for r in records_from_table(table, group_id)}
    uses = _uses(run, members, records)
    text, note = _token_text(run)
    rescored, problem = _rescored(run, uses)
    for member, shown in zip(members, found["members"], strict=False):
        record = records.get(f"{group_id}/{member['position']}")
        if record is not None:
            own = record.rollout.rollout_id
            shown |= _conversation(record, uses.get(own, ()), rescored.get(own), text)
    return found | {"note": note or problem, "explained": _explained(run, uses, rescored)}


def timeline(run: ObservedRun, words: Mapping[str, str]) -> dict[str, Any]:
    """The lives of groups that ended between two moments, ``from`` and ``to`` in Unix seconds; by default the last.

    Raises:
        ConfigError: a moment is no number.
    """
    low, high = (float(_number(name, words[name])) if words.get(name) else None for name in ("from", "to"))
    span = run.index.rows(
        """SELECT min(least(g.admitted, r.time - r.seconds)) AS first, max(greatest(r.time, r.ended)) AS last
        FROM rollouts r JOIN groups g USING (g) WHERE g.evaluation IS NULL"""
    )[0]
    rows = run.index.rows(_BARS, {"low": low, "high": high, "most": MOST_BARS})
    steps, _, times = run.curves.series("train/loss")
    swaps = [[int(step), round(float(time), 3)] for step, time in zip(steps, times, strict=True)]
    first = min((row["admitted"] or row["began"] or row["finished"] or 0.0 for row in rows), default=0.0)
    last = max((row["ended"] or row["finished"] or 0.0 for row in rows), default=0.0)
    return {
        "span": [span["first"], span["last"]],
        "bars": rows,
        "most": MOST_BARS,
        "updates": [swap for swap in swaps if swap[1] >= first][-MOST_BARS:],
        "served": {who: _between(*found, first, last) for who, found in sorted(run.swaps().items())},
        "simulators": run.is_of_simulators,
    }


def _between(times: np.ndarray, steps: np.ndarray, first: float, last: float) -> list[list[float]]:
    """Step and moment of the versions that an engine had from one moment to another, the one it began with too."""
    begin, end = max(0, np.searchsorted(times, first, "right") - 1), np.searchsorted(times, last, "right")
    shown = slice(max(begin, end - MOST_BARS), end)
    return [list(pair) for pair in zip(steps[shown].tolist(), times[shown].round(3).tolist(), strict=True)]


def _number(name: str, word: str) -> int | float:
    try:
        number = float(word)
    except ValueError:
        raise ConfigError(f"{name} is {word!r:.40}: it must be a number") from None
    if number != number or abs(number) > 1e15:
        raise ConfigError(f"{name} is {word!r:.40}: it must be a number below 1e15")
    return int(number) if _NUMBERS.get(name) is int or name in ("offset", "limit") else number


def _neighbours(run: ObservedRun, number: int) -> list[str | None]:
    """The groups of its lesson before and after it, in the order in which the run knew them."""
    found = run.index.rows(
        """SELECT arg_max(o.group_id, o.g) FILTER (o.g < $n) AS before,
                  arg_min(o.group_id, o.g) FILTER (o.g > $n) AS after
        FROM groups o JOIN groups this ON this.g = $n AND o.lesson IS NOT DISTINCT FROM this.lesson
                                      AND (o.evaluation IS NULL) = (this.evaluation IS NULL)""",
        {"n": number},
    )[0]
    return [found["before"], found["after"]]


def _member(row: dict[str, Any]) -> dict[str, Any]:
    names = (
        "position", "reward", "advantage", "tokens", "weight_step", "newest", "lineage", "time", "seconds", "worker",
        "finish", "step", "ended", "reason",
    )  # fmt: skip
    return {name: row[name] for name in names} | {"state": row["state"] or WAITING, "stored": row["name"] is not None}


def _rows_of(run: ObservedRun, name: str, rows: Sequence[int]) -> pa.Table:
    """Some rows of a part: only their row groups are read."""
    try:
        if run.index.size_of(name) <= SMALL_BYTES:
            return _whole(run, name).take(sorted(rows))
        with opened_part(_storage(run, name), name) as file:
            tables: list[pa.Table] = []
            start = 0
            for number in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(number).num_rows
                inside = [row - start for row in sorted(rows) if start <= row < start + count]
                if inside:
                    tables.append(file.read_row_group(number).take(inside))
                start += count
            return pa.concat_tables(tables)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise RunDirectoryError(f"{name} was merged, or has expired, a moment ago: ask again") from error


@lru_cache(maxsize=MOST_KEPT)
def _whole(run: ObservedRun, name: str) -> pa.Table:
    """A file whole; the last few are kept, since groups are looked at one after another. Files never change."""
    with opened_part(_storage(run, name), name) as file:
        return file.read()


def _storage(run: ObservedRun, name: str) -> Storage:
    return LocalStorage(run.directory.path) if name.startswith("evaluations/") else run.index.storage


def _uses(
    run: ObservedRun, members: Sequence[dict[str, Any]], records: dict[str, RolloutRecord]
) -> dict[str, tuple[BatchUse, ...]]:
    """The batches that trained a group, as far as they are still there."""
    steps = sorted({member["step"] for member in members if member["step"] is not None and not member["evaluation"]})
    if not steps or not records:
        return {}
    names = run.index.rows(
        "SELECT name FROM parts WHERE part IN (SELECT unnest(?)) AND starts_with(name, 'batches/')",
        [[-step for step in steps]],
    )
    tables: list[pa.Table] = []
    for row in names:
        try:
            tables.append(_whole(run, row["name"]))
        except (FileNotFoundError, RunDirectoryError):
            continue  # it has expired: the numbers in the index stay
    tables = [table.replace_schema_metadata(EXAMPLE_SCHEMA.metadata) for table in tables]
    found: dict[str, list[BatchUse]] = {}
    for table in tables:
        batches = set(table.column("batch_id").to_pylist())
        for rollout_id, uses in uses_in(table, dict.fromkeys(batches, True), records).items():
            found.setdefault(rollout_id, []).extend(uses)
    return {rollout_id: tuple(sorted(uses, key=lambda use: use.step)) for rollout_id, uses in found.items()}


def _rescored(run: ObservedRun, uses: Mapping[str, Sequence[BatchUse]]) -> tuple[dict[str, RescoredRollout], str]:
    """By rollout, what was computed of the last update that trained it; and what of that cannot be read, in words."""
    found: dict[str, RescoredRollout] = {}
    try:
        of_batch = {each: read_rescored(run.directory, each) for each in set(_last_batches(uses).values())}
    except (RunDirectoryError, OSError) as error:
        return {}, f"{error}: tokens have no ratio"
    for rollout_id, batch_id in _last_batches(uses).items():
        if rollout_id in of_batch[batch_id]:
            found[rollout_id] = of_batch[batch_id][rollout_id]
    return found, ""


def _last_batches(uses: Mapping[str, Sequence[BatchUse]]) -> dict[str, str]:
    return {rollout_id: found[-1].batch_id for rollout_id, found in uses.items() if found}


def _explained(
    run: ObservedRun, uses: Mapping[str, Sequence[BatchUse]], rescored: Mapping[str, RescoredRollout]
) -> dict[str, Any]:
    """Which weights "now" are, and the commands that compute ratios, of updates that they are missing of, or all."""
    steps = {found[-1].step + 1 for rollout_id, found in uses.items() if found}
    missing = {found[-1].step + 1 for rollout_id, found in uses.items() if found and rollout_id not in rescored}
    return {
        "newest": sorted({one.newest_step for one in rescored.values()}),
        "missing": bool(missing),
        "commands": [command_line("why", run.directory.path, "--step", str(step)) for step in sorted(missing or steps)],
    }


def batches_of(run: ObservedRun, step: int) -> list[str]:
    """What an update trained on; several where a resume made it anew."""
    rows = run.index.rows("SELECT name FROM parts WHERE part = ? AND starts_with(name, 'batches/')", [-step])
    return [PurePosixPath(row["name"]).stem for row in rows]


def moved_by(run: ObservedRun, step: int) -> list[dict[str, Any]]:
    """What `penstock why` found that rollouts did to an update, what moved it most first; nothing where not asked."""
    found: dict[str, dict[str, float]] = {}
    for batch_id in batches_of(run, step):
        with suppress(RunDirectoryError, OSError):  # a group's page says what cannot be read
            batch = read_rescored(run.directory, batch_id)
            found |= {name: dict(one.numbers) for name, one in batch.items() if one.numbers}
    most = sorted(found, key=lambda name: -found[name].get("moved", 0.0))[:MOST_MEMBERS]
    rows = run.index.rows(
        """SELECT g.group_id || '/' || r.position AS rollout_id, g.group_id, g.lesson, r.reward, r.advantage, r.tokens
        FROM rollouts r JOIN groups g USING (g) WHERE g.group_id IN (SELECT unnest(?))""",
        [[name.rpartition("/")[0] for name in most]],
    )
    known = {row["rollout_id"]: row for row in rows}
    return [known[name] | found[name] for name in most if name in known]


def _token_text(run: ObservedRun) -> tuple[TokenText | None, str]:
    try:
        return run.token_text, ""
    except ConfigError as error:
        return None, f"{error}: the text of the turns is shown, without colours"


def _conversation(
    record: RolloutRecord, uses: Sequence[BatchUse], rescored: RescoredRollout | None, text: TokenText | None
) -> dict[str, Any]:
    rollout = record.rollout
    prompt, total = len(rollout.prompt_tokens), len(rollout.prompt_tokens) + len(rollout.response_tokens)
    advantages = uses[-1].advantages if uses else None
    numbers = None if rescored is None else _numbers(rescored, rollout)
    decoding = rollout.decoding
    shown = [turn for turn in turns_of(rollout) if turn.start < MOST_TOKENS]
    return {
        "problem": rollout.env_example_id,
        "environment": rollout.env_name,
        "prompt_tokens": prompt,
        "sampled": rollout.sampled_tokens,
        "timings": dict(rollout.timings),
        "rewards_by_function": [list(pair) for pair in rollout.rewards_by_function],
        "decoding": {"temperature": decoding.temperature, "max_output_tokens": decoding.max_output_tokens,
                     **{name: value for name, value in decoding.truncation.items()}},
        "uses": [[use.step, use.lineage, use.advantage(rollout.response_mask)] for use in uses],
        "logprob": _mean(rollout.response_logprobs[rollout.response_mask]),
        "cut": total > MOST_TOKENS,
        "turns": [_turn(turn, rollout, advantages, numbers, text) for turn in shown],
    }  # fmt: skip


def _numbers(rescored: RescoredRollout, rollout: AnyRollout) -> list[np.ndarray]:
    """Of each response token the log of its ratio then and now, and its entropy; NaN where it was not trained."""
    found: list[np.ndarray] = []
    for whole, behaviour in (
        (rescored.logprobs, rollout.response_logprobs),
        (rescored.newest_logprobs, rollout.response_logprobs),
        (rescored.entropies, np.float32(0)),
    ):
        own = np.full(len(rollout.response_tokens), np.nan, np.float32)
        of_response = whole[len(rollout.prompt_tokens) :][: len(own)]
        own[: len(of_response)] = of_response  # an update may have cut off the end of a long response
        found.append(own - behaviour)
    return found


def _turn(
    turn: Turn,
    rollout: AnyRollout,
    advantages: np.ndarray | None,
    numbers: Sequence[np.ndarray] | None,
    text: TokenText | None,
) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": turn.role, "tokens": turn.stop - turn.start, "timings": dict(turn.timings)}
    if text is None:
        return shown | {"text": turn.content[: 4 * MOST_TOKENS]}
    prompt, stop = len(rollout.prompt_tokens), min(turn.stop, MOST_TOKENS)
    tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])[turn.start : stop].tolist()
    versions = rollout.response_weight_steps
    pieces: list[list[Any]] = []
    for piece in text.pieces(tokens, breaks_within(rollout, turn.start, stop)):
        first, last = turn.start + piece.start - prompt, turn.start + piece.stop - prompt
        if first < 0 or not rollout.response_mask[first:last].all():
            pieces.append([piece.text])
            continue
        pieces.append([
            piece.text,
            _mean(rollout.response_logprobs[first:last]),
            None if advantages is None else _mean(advantages[first:last]),
            None if versions is None else int(versions[first]),
            float(f"{float(rollout.token_rewards[first:last].sum()):.5g}"),
            *(_mean(each[first:last]) for each in numbers or ()),
        ])  # fmt: skip
    return shown | {"pieces": pieces}


def _fragment(table: pa.Table) -> dict[str, Any]:
    """A fragment of simulator steps, without its observations."""
    kept = ("env_name", "slot", "steps", "trainable_steps", "complete", "rewards", "terminated", "truncated", "faults",
            "logprobs", "values", "weight_steps", "episodes", "timings")  # fmt: skip
    row = table.select([name for name in kept if name in table.column_names]).slice(0, 1).to_pylist()[0]
    row["timings"] = dict(row.get("timings") or ())
    return {name: value[:MOST_TOKENS] if isinstance(value, list) else value for name, value in row.items()}


def _mean(values: np.ndarray) -> float | None:
    mean = float(values.mean()) if len(values) else np.nan
    return float(f"{mean:.5g}") if np.isfinite(mean) else None
