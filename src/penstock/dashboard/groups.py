"""The groups of a run, summed up: by the update that trained them or at which they ended.

Two queries: a narrow one finds the newest groups that a filter lets through, a second one sums up those alone, so that
a page of a large run does not read all its tokens.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.rundir.views import RunViews
from penstock.types import ConfigError

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
        staleness: Updates between the oldest weights and `step`; None while it waits.
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
        wanted: The filter.
        limit: Most groups; None means all.

    Raises:
        ConfigError: the run has rollouts, but none of that lesson.
    """
    parameters = {"step": wanted.step, "lesson": wanted.lesson_id, "fate": wanted.state}
    found = views.select(_MATCHING, parameters, limit).to_dicts()
    if not found:
        _check_lesson(views, wanted.lesson_id)
        return GroupPage((), 0)
    details = views.select(_DETAILS, {"groups": [row["group_id"] for row in found]}).to_dicts()
    by_id = {row["group_id"]: row for row in details}
    return GroupPage(tuple(_summary(by_id[row["group_id"]], row["step"]) for row in found), int(found[0]["total"]))


def count_rollouts(views: RunViews, view: str = "rollouts") -> RunCounts:
    """Rollouts by state, of the whole run; or fragments, as the view says."""
    stored, unstored = (
        {row["state"]: int(row["rollouts"]) for row in views.select(query.format(view=view)).to_dicts()}
        for query in (_STORED, _UNSTORED)
    )
    return RunCounts(stored, unstored)


def lessons_of(views: RunViews) -> list[str]:
    """The lessons that have rollouts."""
    return [row[0] for row in views.select("SELECT DISTINCT lesson_id FROM rollouts ORDER BY 1").rows()]


def _check_lesson(views: RunViews, lesson_id: str | None) -> None:
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
        staleness=None if step is None else step - oldest,
        states=dict(Counter(member["state"] for member in members).most_common()),
        timestamp=row["timestamp"],
    )
