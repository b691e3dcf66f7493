"""Finding rollouts by id, with everything that a run knows about them.

An id may be written in part, as long as only one group or rollout begins so.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.dashboard.groups import source_of
from penstock.rundir import examples_from_table
from penstock.rundir.views import RunViews
from penstock.text.safe_text import printable
from penstock.types import ConfigError, RolloutRecord

_CANDIDATES_NAMED = 8
_NEWEST_NAMED = 3

_STORY = """
SELECT rollout_id, state, fate, fate_step, fate_reason, uses, trained_step
FROM rollouts WHERE rollout_id IN (SELECT unnest(?))
"""


@dataclass(frozen=True, slots=True)
class BatchUse:
    """One update that had a rollout in its batch.

    Attributes:
        batch_id: The batch.
        step: The update.
        lineage: The life of the run that computed it.
        survives: Whether the newest life descends from it; otherwise it was rolled back.
        advantages: float32 [r], of each response token; 0 where the policy did not sample it.
    """

    batch_id: str
    step: int
    lineage: int
    survives: bool
    advantages: np.ndarray

    def advantage(self, mask: np.ndarray) -> float | None:
        """That of the first sampled token."""
        sampled = self.advantages[mask]
        return float(sampled[0]) if len(sampled) else None


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout and its story.

    Attributes:
        record: As stored.
        state: Its fate, or `waiting` or `training`.
        fate_step: The update that was next when its fate was decided; None without a fate.
        fate_reason: Why, in words.
        uses: The batches that hold it, oldest first.
    """

    record: RolloutRecord
    state: str
    fate_step: int | None
    fate_reason: str | None
    uses: tuple[BatchUse, ...]

    @property
    def rollout_id(self) -> str:
        """Its id."""
        return self.record.rollout.rollout_id

    @property
    def advantages(self) -> np.ndarray | None:
        """float32 [r], as it was last trained; None where no batch holds it."""
        return self.uses[-1].advantages if self.uses else None

    @property
    def advantage(self) -> float | None:
        """That of its first sampled token, as it was last trained."""
        return self.uses[-1].advantage(self.record.rollout.response_mask) if self.uses else None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        rollout, metadata = self.record.rollout, self.record.rollout.metadata
        steps, advantages = rollout.response_weight_steps, self.advantages
        return {
            "rollout_id": rollout.rollout_id,
            "group_id": self.record.group_id,
            "group_key": self.record.group_key,
            "lesson_id": rollout.lesson_id,
            "env_name": rollout.env_name,
            "env_example_id": rollout.env_example_id,
            "episode_reward": float(rollout.episode_reward),
            "advantage": self.advantage,
            "state": self.state,
            "fate_step": self.fate_step,
            "fate_reason": self.fate_reason,
            "uses": [{"step": u.step, "lineage": u.lineage, "survives": u.survives, "batch_id": u.batch_id}
                     for u in self.uses],
            "worker_id": None if metadata is None else metadata.worker_id,
            "timestamp": None if metadata is None else metadata.timestamp,
            "lineage": None if metadata is None else metadata.lineage,
            "weight_step": None if metadata is None else metadata.weight_step,
            "newest_weight_step": rollout.newest_weight_step,
            "finish_reason": rollout.finish_reason,
            "timings": dict(rollout.timings),
            "rewards_by_function": dict(rollout.rewards_by_function),
            "turns": [{"role": t.role, "content": t.content, "start": t.start, "stop": t.stop,
                       "timings": dict(t.timings)} for t in rollout.turns],
            "sample_starts": list(rollout.sample_starts),
            "prompt_tokens": rollout.prompt_tokens.tolist(),
            "response_tokens": rollout.response_tokens.tolist(),
            "response_logprobs": rollout.response_logprobs.tolist(),
            "response_mask": rollout.response_mask.tolist(),
            "token_rewards": rollout.token_rewards.tolist(),
            "response_weight_steps": None if steps is None else steps.tolist(),
            "token_advantages": None if advantages is None else advantages.tolist(),
        }  # fmt: skip


def find_rollouts(views: RunViews, name: str) -> list[StoredRollout]:
    """The rollouts that a name means: one, or all of a group in their order.

    Args:
        views: Of the run.
        name: The id of a rollout or a group, or the beginning of only one.

    Raises:
        ConfigError: several begin so, or none is stored under it.
    """
    return views.look(lambda: _find(views, name))


def _find(views: RunViews, name: str) -> list[StoredRollout]:
    ids = _resolve(views, name)
    story = {row["rollout_id"]: row for row in views.select(_STORY, [ids]).to_dicts()}
    records = views.files.read_rollouts(ids)
    uses = _uses(views, records)
    ids = [rollout_id for rollout_id in ids if rollout_id in story and rollout_id in records]
    if not ids:  # they expired since they were found
        raise ConfigError(printable(_why_missing(views, name)))
    return [
        StoredRollout(
            records[rollout_id],
            story[rollout_id]["state"],
            story[rollout_id]["fate_step"],
            story[rollout_id]["fate_reason"],
            uses[rollout_id],
        )
        for rollout_id in ids
    ]


def _resolve(views: RunViews, name: str) -> list[str]:
    """Ids of the rollouts that a name means."""
    found = views.select("SELECT rollout_id, group_id FROM rollouts WHERE starts_with(rollout_id, ?)", [name])
    groups = dict(found.rows())
    if name in groups:
        return [name]
    starting = sorted(set(groups.values()) if any(g == name or "/" not in name for g in groups.values()) else groups)
    if name in starting:
        starting = [name]
    if not starting:
        raise ConfigError(printable(_why_missing(views, name)))
    if len(starting) > 1:
        named = ", ".join(starting[:_CANDIDATES_NAMED]) + (", …" if len(starting) > _CANDIDATES_NAMED else "")
        raise ConfigError(printable(f"--show {name}: {len(starting)} ids begin so ({named}): write more of it"))
    only = starting[0]
    return [only] if only in groups else sorted((r for r, group in groups.items() if group == only), key=_position)


def _position(rollout_id: str) -> tuple[int, str]:
    tail = rollout_id.rpartition("/")[2]
    return (int(tail) if tail.isdecimal() else 0, rollout_id)


def _why_missing(views: RunViews, name: str) -> str:
    """What the logs know about an id without a row, or which ids there are."""
    if views.mode == "train":
        evaluated = views.select("SELECT 1 FROM evaluations WHERE starts_with(rollout_id, ?)", [name], 1)
        if evaluated.table.num_rows:
            return f"--show {name}: that was an evaluation, which is not trained: add --eval"
    fates = views.select(
        "SELECT fate, step, reason FROM fates WHERE rollout_id = $n OR starts_with(rollout_id, $n || '/') "
        "ORDER BY line DESC LIMIT 1", {"n": name},
    ).to_dicts()  # fmt: skip
    if fates:
        fate, step, reason = (fates[0][key] for key in ("fate", "step", "reason"))
        return f"--show {name}: its tokens are not stored; it was {fate} at step {step}: {reason}"
    ticket = name.rpartition("/")[0] or name
    if views.select("SELECT 1 FROM tickets WHERE ticket_id IN ($a, $b)", {"a": name, "b": ticket}, 1).table.num_rows:
        return f"--show {name}: it was started, but has not been stored yet"
    newest = views.select(
        "SELECT group_id FROM rollouts GROUP BY group_id ORDER BY max(timestamp) DESC, group_id", limit=_NEWEST_NAMED
    )
    known = ", ".join(row[0] for row in newest.rows())
    source = source_of(views)
    none = "the run has stored none yet" if source is None else f"the run trains on those of {source}: look there"
    hint = f"the newest groups are {known}" if known else none
    return f"--show {name}: there is no rollout or group with this id; {hint}"


def _uses(views: RunViews, records: dict[str, RolloutRecord]) -> dict[str, tuple[BatchUse, ...]]:
    """The batches of each rollout."""
    if not records:
        return {}
    survives = dict(views.select("SELECT DISTINCT batch_id, survives FROM uses").rows())
    return uses_in(views.files.read_uses(list(records)), survives, records)


def uses_in(
    table: pa.Table, survives: dict[str, bool], records: dict[str, RolloutRecord]
) -> dict[str, tuple[BatchUse, ...]]:
    """What some rows of batch files say of some rollouts, the oldest use first.

    Args:
        table: Rows of batch files; one may be shared by several rollouts.
        survives: By batch, whether the newest life of the run descends from its update.
        records: The rollouts, by id.
    """
    uses: dict[str, list[BatchUse]] = {rollout_id: [] for rollout_id in records}
    for row, example in enumerate(examples_from_table(table)):
        for segment, rollout_id in enumerate(example.rollout_ids, start=1):
            if rollout_id not in records:
                continue
            rollout = records[rollout_id].rollout
            own = example.segment_ids == segment if len(example.rollout_ids) > 1 else example.segment_ids > 0
            trained = example.advantage[own][len(rollout.prompt_tokens) :]
            advantages = np.zeros(len(rollout.response_tokens), np.float32)
            advantages[: len(trained)] = trained  # an update may have cut off the end of a long response
            uses[rollout_id].append(_use(table, row, survives, advantages))
    return {key: tuple(sorted(found, key=lambda use: (use.lineage, use.step))) for key, found in uses.items()}


def _use(table: pa.Table, row: int, survives: dict[str, bool], advantages: np.ndarray) -> BatchUse:
    batch_id, step, lineage = (table.column(name)[row].as_py() for name in ("batch_id", "step", "lineage"))
    return BatchUse(batch_id, step, lineage, survives.get(batch_id, False), advantages)
