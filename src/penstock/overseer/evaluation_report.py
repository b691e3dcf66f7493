"""What an offline evaluation found: per lesson the mean reward, success rate and pass@k, each with its 95% interval.

Where another checkpoint answered the same prompts, what differs, prompt by prompt. Plain records made from rollouts;
generating those is `penstock.overseer.language.evaluation`'s.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.types import ConfigError, RolloutBatch
from penstock.types.intervals import (
    Interval,
    difference_interval,
    number_text,
    pass_at_k,
    proportion_interval,
    reward_interval,
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with the 95% interval in which its true value lies.

    Attributes:
        value: The estimate.
        low: Lower end; −inf where nothing is known.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, interval: Interval) -> "Estimate":
        """An estimate with its interval."""
        return cls(value, interval.low, interval.high)

    def __str__(self) -> str:
        return f"{number_text(self.value)} {Interval(self.low, self.high)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A lesson beside what a baseline did on the same prompts with the same seeds: checkpoint minus baseline.

    Attributes:
        prompts: Number of distinct prompts that both answered.
        reward_mean: Of the episode reward; see `penstock.types.intervals.difference_interval`.
        success_rate: Of the share that reaches the lesson's success threshold.
        unpaired: Number of rollouts of either that have no counterpart, because a group failed.
        pass_at: k → of pass@k, over the prompts that both answered k times or more.
    """

    prompts: int
    reward_mean: Estimate
    success_rate: Estimate
    unpaired: int
    pass_at: dict[int, Estimate]

    @classmethod
    def of(
        cls, batch: RolloutBatch, baseline: RolloutBatch, success_threshold: float, ks: Sequence[int] = ()
    ) -> "Difference":
        """Compares two batches of one lesson, problem by problem."""
        ours, theirs = _rewards_by_prompt(batch), _rewards_by_prompt(baseline)
        paired = sum(min(len(ours[prompt]), len(theirs.get(prompt, ()))) for prompt in ours)
        wins = [
            {prompt: [float(reward >= success_threshold) for reward in rewards] for prompt, rewards in side.items()}
            for side in (ours, theirs)
        ]
        return cls(
            prompts=len(ours.keys() & theirs.keys()),
            reward_mean=Estimate.of(*difference_interval(ours, theirs)),
            success_rate=Estimate.of(*difference_interval(*wins)),
            unpaired=sum(map(len, (*ours.values(), *theirs.values()))) - 2 * paired,
            pass_at={k: Estimate.of(*difference_interval(*(_chances(side, k) for side in wins))) for k in ks},
        )


@dataclass(frozen=True, slots=True)
class LessonReport:
    """The evaluation of one lesson.

    Attributes:
        lesson_id: Which lesson.
        prompts: Number of distinct prompts; the independent draws.
        rollouts: Number of rollouts.
        reward_mean: Mean episode reward; `penstock.types.intervals.reward_interval` over prompts.
        success_rate: Share of rollouts that reach the lesson's success threshold; Wilson's interval.
        pass_at: k → pass@k, unbiased: for the ks asked for, else for k = 1, 2, 4, … and the responses per prompt.
        response_tokens: Mean tokens per response.
        truncated_fraction: Share of rollouts that a length limit cut.
        failed_groups: Number of prompts that gave no rollouts; nothing above counts them.
        difference: To the baseline, where there is one.
    """

    lesson_id: str
    prompts: int
    rollouts: int
    reward_mean: Estimate
    success_rate: Estimate
    pass_at: dict[int, Estimate]
    response_tokens: float
    truncated_fraction: float
    failed_groups: int = 0
    difference: Difference | None = None

    @classmethod
    def of(
        cls,
        lesson_id: str,
        batch: RolloutBatch,
        success_threshold: float,
        ks: Sequence[int] = (),
        failed_groups: int = 0,
        baseline: RolloutBatch | None = None,
    ) -> "LessonReport":
        """Summarises a batch; prompts that were drawn twice count as one.

        Raises:
            ValueError: a k exceeds the responses to some prompt.
        """
        keys = [group.key for group in batch.groups for _ in group.rollouts]
        rollouts = list(batch.rollouts())
        rewards = [rollout.episode_reward for rollout in rollouts]
        wins = [float(reward >= success_threshold) for reward in rewards]
        pass_at = _pass_at(wins, keys, ks)
        return cls(
            lesson_id=lesson_id,
            prompts=len(set(keys)),
            rollouts=len(rollouts),
            reward_mean=Estimate.of(_mean(rewards), reward_interval(rewards, keys)),
            success_rate=Estimate.of(_mean(wins), proportion_interval(wins, keys)),
            pass_at=pass_at,
            response_tokens=_mean(len(rollout.response_tokens) for rollout in rollouts),
            truncated_fraction=_mean(float(rollout.finish_reason == "length") for rollout in rollouts),
            failed_groups=failed_groups,
            difference=None if baseline is None else Difference.of(batch, baseline, success_threshold, [*pass_at]),
        )


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The outcome of `penstock.evaluate`.

    Attributes:
        checkpoint: The model directory, or the server's URL.
        lessons: Lesson id → report, in the recipe's order.
        seconds: Wall seconds of generation and scoring, the engine's compilation included.
        rollouts_path: Where the rollouts were written as Parquet; None: nowhere.
        baseline: The same of the checkpoint that it is compared with; None without one.
    """

    checkpoint: Path | str
    lessons: dict[str, LessonReport]
    seconds: float
    rollouts_path: Path | None = None
    baseline: "EvaluationReport | None" = None

    def to_json(self) -> dict[str, Any]:
        """As plain data; an end of an interval that is not finite is None."""
        return {
            "checkpoint": str(self.checkpoint),
            "seconds": self.seconds,
            "rollouts_path": None if self.rollouts_path is None else str(self.rollouts_path),
            "lessons": {lesson_id: plain(asdict(lesson)) for lesson_id, lesson in self.lessons.items()},
            "baseline": None if self.baseline is None else self.baseline.to_json(),
        }

    def print(self, console: Console) -> None:
        """Prints a table, and where the rollouts are."""
        console.print(f"{self.checkpoint}: estimates with 95% intervals", soft_wrap=True, highlight=False)
        console.print(self._table())
        if self.baseline is not None:
            told = "difference  checkpoint minus baseline, on the same prompts with the same seeds"
            console.print(told, soft_wrap=True, highlight=False)
            console.print(f"baseline  {self.baseline.checkpoint}", soft_wrap=True, highlight=False)
        if self.rollouts_path is not None:
            console.print(f"rollouts  {self.rollouts_path}", soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        table = Table()
        for column in ("lesson", *(lesson.lesson_id for lesson in self.lessons.values())):
            table.add_column(column)
        reports = list(self.lessons.values())
        table.add_row("prompts", *(str(lesson.prompts) for lesson in reports))
        table.add_row("rollouts", *(str(lesson.rollouts) for lesson in reports))
        if any(lesson.failed_groups for lesson in reports):
            table.add_row("failed groups", *(str(lesson.failed_groups) for lesson in reports))
        self._compare(table, "mean reward", lambda found: found.reward_mean)
        self._compare(table, "pass@1", lambda found: found.success_rate)
        for k in sorted({k for lesson in reports for k in lesson.pass_at if k > 1}):
            self._compare(table, f"pass@{k}", lambda found, k=k: found.pass_at.get(k, ""))
        table.add_row("tokens", *(f"{lesson.response_tokens:.1f}" for lesson in reports))
        return table

    def _compare(self, table: Table, name: str, of: "Callable[[LessonReport | Difference], object]") -> None:
        """Adds a row of estimates, and below it the baseline's and the differences, where there is one."""
        table.add_row(name, *(str(of(lesson)) for lesson in self.lessons.values()))
        if self.baseline is not None:
            differences = (lesson.difference for lesson in self.lessons.values())
            table.add_row("  baseline", *(str(of(self.baseline.lessons[lesson_id])) for lesson_id in self.lessons))
            table.add_row("  difference", *("" if one is None else str(of(one)) for one in differences))


def chosen_of(names: Sequence[str] | None, known: Collection[str], what: str) -> list[str]:
    """Those of a recipe's lessons or tasks that are asked for; None: all.

    Args:
        names: What is asked for.
        known: What the recipe has.
        what: One of it is called.

    Raises:
        ConfigError: none is asked for, or one that the recipe does not have.
    """
    if names is None:
        return list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        why = f"{what} {unknown[0]!r} is not in the recipe: its" if unknown else f"{what}s is empty: name some; the"
        raise ConfigError(f"{why} {what}s are {', '.join(known)}")
    return list(names)


def _rewards_by_prompt(batch: RolloutBatch) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in batch.groups:
        rewards[group.key] += [rollout.episode_reward for rollout in group.rollouts]
    return dict(rewards)


def _chances(wins: dict[str, list[float]], k: int) -> dict[str, list[float]]:
    """Prompt → its pass@k, of those that were answered often enough."""
    return {prompt: [pass_at_k(len(group), round(sum(group)), k)] for prompt, group in wins.items() if len(group) >= k}


def _pass_at(wins: list[float], keys: list[str], ks: Sequence[int]) -> dict[int, Estimate]:
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for win, key in zip(wins, keys, strict=True):
        by_prompt[key].append(win)
    samples = min((len(group) for group in by_prompt.values()), default=0)
    ks = sorted(set(ks) or {2**power for power in range(samples.bit_length())} | {samples} - {0})
    estimates: dict[int, Estimate] = {}
    for k in ks:
        values = [pass_at_k(len(group), round(sum(group)), k) for group in by_prompt.values()]
        estimates[k] = Estimate.of(_mean(values), proportion_interval(values))
    return estimates


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def plain(value: Any) -> Any:
    """As JSON has it: keys are text, and a number that is not finite is None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
