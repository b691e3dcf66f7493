"""Rollouts as training examples for supervised fine-tuning or preference training, in TRL's conversational form.

The prompt is every message before the policy's first; the completion is all the rest, with what tools and the
environment said in between. A rollout without stored turns, or in which the policy said nothing, gives no example.
Texts are streamed file by file: a group lies in one file, so no more than a few groups are in memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from penstock.dashboard.dataset_files import DatasetFormat, write_dataset
from penstock.dashboard.groups import GroupFilter
from penstock.rundir.views import RunViews
from penstock.types import ConfigError

Selection = Literal["all", "best", "pairs"]

_CANDIDATES = """
SELECT rollout_id, group_id, episode_reward AS reward, advantage
FROM rollouts
WHERE ($lesson IS NULL OR lesson_id = $lesson) AND ($fate IS NULL OR state = $fate)
  AND ($step IS NULL OR coalesce(trained_step, fate_step) = $step
       OR rollout_id IN (SELECT rollout_id FROM uses WHERE survives AND step = $step))
ORDER BY group_id, episode_reward DESC, try_cast(regexp_extract(rollout_id, '[0-9]+$') AS BIGINT), rollout_id
"""
_TEXT_COLUMNS = [
    "rollout_id", "group_id", "lesson_id", "env_name", "env_example_id", "weight_step", "finish_reason", "turns",
]  # fmt: skip
_SCAN_ROWS = 1024


@dataclass(frozen=True, slots=True)
class DatasetRequest:
    """What to export.

    Attributes:
        format: `jsonl`, `parquet`, or `hf` for a directory that Hugging Face datasets loads.
        path: Where; must not exist.
        selection: `all` rollouts, the `best` of each group, or `pairs` of best and worst.
        wanted: Which rollouts are considered.
        min_reward: Leaves out rollouts below it; in pairs, pairs whose better one is below it.
        min_margin: Leaves out pairs whose rewards differ by less.
    """

    format: DatasetFormat
    path: Path
    selection: Selection = "all"
    wanted: GroupFilter = field(default_factory=GroupFilter)
    min_reward: float | None = None
    min_margin: float | None = None


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """What came of an export.

    Attributes:
        path: Where it is.
        examples: How many.
        considered: Rollouts that the filter let through.
        without_text: Chosen rollouts or pairs that gave no example, for they have no text.
        indistinct: Pairs whose completions or prompts did not fit together: the same text twice, or different prompts.
    """

    path: Path
    examples: int
    considered: int
    without_text: int
    indistinct: int


@dataclass(slots=True)
class _Tally:
    examples: int = 0
    without_text: int = 0
    indistinct: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """One example to be: a rollout, or a better and a worse one."""

    group_id: str
    ids: tuple[str, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float | None, ...]


def export_dataset(views: RunViews, request: DatasetRequest) -> DatasetReport:
    """Writes a data set; the path appears only when all of it is there.

    Raises:
        ConfigError: the path exists or cannot be written, or there is nothing to write.
    """
    return views.look(lambda: _export(views, request))


def _export(views: RunViews, request: DatasetRequest) -> DatasetReport:
    wanted = request.wanted
    parameters = {"lesson": wanted.lesson_id, "fate": wanted.state, "step": wanted.step}
    candidates = views.select(_CANDIDATES, parameters).to_dicts()
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in candidates:
        groups[row["group_id"]].append(row)
    choices = [choice for members in groups.values() for choice in _choose(members, request)]
    if not choices:
        words = f" that match {wanted.words}" if wanted.words else ""
        raise ConfigError(
            f"--select {request.selection} finds nothing among {len(candidates)} rollouts{words}: "
            "loosen --min-reward, --min-margin or the filters"
        )
    tally = _Tally()
    is_pairs = request.selection == "pairs"
    examples = _at_least_one(_examples(views, choices, tally), tally, request)
    write_dataset(request.path, request.format, examples, is_pairs, views.directory.path.name)
    return DatasetReport(request.path, tally.examples, len(candidates), tally.without_text, tally.indistinct)


def _at_least_one(
    examples: Iterator[dict[str, Any]], tally: _Tally, request: DatasetRequest
) -> Iterator[dict[str, Any]]:
    """Fails at its end where there was none, so that no empty data set is left."""
    yield from examples
    if not tally.examples:
        raise ConfigError(
            f"--select {request.selection} finds no example: of what it chose, {tally.without_text:,} have no text"
            + (f" and {tally.indistinct:,} are pairs of equal texts or different prompts" if tally.indistinct else "")
            + ": choose others by --select, --step, --lesson or --fate"
        )


def _choose(members: Sequence[Mapping[str, Any]], request: DatasetRequest) -> list[_Choice]:
    """Which examples a group gives; its members come best first."""
    best, worst = members[0], members[-1]
    if request.selection == "pairs":
        margin = best["reward"] - worst["reward"]
        fits = margin > 0 and margin >= (request.min_margin or 0) and _good(best, request)
        return [_choice(best, worst)] if fits else []
    considered = members[:1] if request.selection == "best" else members
    return [_choice(member) for member in considered if _good(member, request)]


def _good(member: Mapping[str, Any], request: DatasetRequest) -> bool:
    return request.min_reward is None or member["reward"] >= request.min_reward


def _choice(*members: Mapping[str, Any]) -> _Choice:
    return _Choice(
        members[0]["group_id"],
        tuple(member["rollout_id"] for member in members),
        tuple(member["reward"] for member in members),
        tuple(member["advantage"] for member in members),
    )


def _examples(views: RunViews, choices: Sequence[_Choice], tally: _Tally) -> Iterator[dict[str, Any]]:
    """Joins choices with their texts, in the order of the files."""
    pending: dict[str, list[_Choice]] = defaultdict(list)
    for choice in choices:
        for rollout_id in choice.ids:
            pending[rollout_id].append(choice)
    texts: dict[str, dict[str, Any]] = {}
    for batch in views.files.scan_rollouts(_TEXT_COLUMNS, _SCAN_ROWS):
        ids = batch.column("rollout_id").to_pylist()
        wanted = pa.array([rollout_id in pending for rollout_id in ids], pa.bool_())
        for row in batch.filter(wanted).to_pylist():
            texts[row["rollout_id"]] = row
            for choice in pending[row["rollout_id"]]:
                if all(rollout_id in texts for rollout_id in choice.ids):
                    yield from _example(choice, [texts[rollout_id] for rollout_id in choice.ids], tally)
                    for rollout_id in choice.ids:
                        del texts[rollout_id]


def _example(choice: _Choice, rows: Sequence[Mapping[str, Any]], tally: _Tally) -> Iterator[dict[str, Any]]:
    """The example of a choice, or none."""
    parted = [_parted(row["turns"]) for row in rows]
    if any(part is None for part in parted):
        tally.without_text += 1
        return
    (prompt, completion), *rest = [part for part in parted if part is not None]
    first = rows[0]
    origin = {key: first[key] for key in ("lesson_id", "env_name", "env_example_id")}
    tally.examples += 1
    if not rest:
        yield {
            "prompt": prompt,
            "completion": completion,
            "reward": choice.rewards[0],
            "advantage": choice.advantages[0],
            "rollout_id": choice.ids[0],
            "group_id": choice.group_id,
            **origin,
            "weight_step": first["weight_step"],
            "finish_reason": first["finish_reason"],
        }
        return
    (other_prompt, rejected) = rest[0]
    if other_prompt != prompt or rejected == completion:
        tally.examples -= 1
        tally.indistinct += 1
        return
    yield {
        "prompt": prompt,
        "chosen": completion,
        "rejected": rejected,
        "reward_chosen": choice.rewards[0],
        "reward_rejected": choice.rewards[1],
        "rollout_id_chosen": choice.ids[0],
        "rollout_id_rejected": choice.ids[1],
        "group_id": choice.group_id,
        **origin,
    }


Messages = list[dict[str, str]]


def _parted(turns: Sequence[Mapping[str, Any]] | None) -> tuple[Messages, Messages] | None:
    """Messages before the policy's first one, and the others; None where it said nothing."""
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns or ()]
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
    return (messages[:first], messages[first:]) if first else None
