"""`penstock why`: which rollouts moved an update, and by how much.

The update is made again (`penstock.overseer.rerun.replay`), and of each rollout its gradient is compared with the step
that was taken (`penstock.learner.influence`). Sums by staleness, version, lesson, reward function and the advantage's
sign say which kind of rollout the update was made of; those that moved it most are shown with their text. Beside them
stand those that are unlike the others of the update: a rollout may be stale, or its log-probabilities wrong, and still
be one of many.

Beside that the update's tokens are scored by two forward passes: under the weights that it began with, entropies
included, and under the run's newest. `WhyReport.keep_tokens` writes that, and what each rollout did, where the
dashboard finds it, in the user's cache; into the run nothing is written.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jaxtyping import Float32
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.learner.influence import RolloutInfluence, influences
from penstock.overseer.config import RunConfig
from penstock.overseer.rerun.replay import UpdateWalk
from penstock.overseer.rerun.stored_run import StoredRun
from penstock.rundir import RescoredRollout, RunDirectory, write_rescored
from penstock.rundir.commands import command_line
from penstock.text import Tokenizer
from penstock.text.safe_text import printable, shortened
from penstock.types import ConfigError, RLExample, RolloutRecord

MOST = 10
"""Rollouts that are shown with their text."""
_LONGEST_TEXT = 300
_LEAST_SPREAD = {"staleness": 2.0, "drift": 0.1, "surprise": 1.0}
"""By trait, in versions and nats per token: less of a spread is no measure of what is usual."""
_USUAL = 0.5
"""Deviations from the median within which a rollout is like the others."""
_MEDIAN_TO_DEVIATION = 1.4826
"""Of a normal distribution: its standard deviation by the median of distances from its median."""


@dataclass(frozen=True, slots=True)
class ExplainedRollout:
    """One rollout of an update.

    Attributes:
        influence: What it did.
        lesson: Its lesson.
        version: The oldest version that sampled any of its tokens; None in a run on stored rollouts, where none did.
        staleness: How many versions before the update's that is; None likewise.
        advantage: What the loss weighed it with, the mean over its sampled tokens; with a value head, over its values.
        tokens: How many were sampled.
        drift: Mean over them of ℓ_θ − ℓ_b, in nats: of the weights that the update began with, less of those that are
            said to have sampled them.
        surprise: Mean over them of −ℓ_θ, in nats, under the same weights.
        reward: Of the episode; None where the rollout's file is not there any more.
        rewarded_by: The environment's reward functions that gave it another reward than 0; None where they are not
            told apart, or the file is gone.
        prompt: Its text, by the run's tokenizer.
        response: What followed it, tool answers included.
        spans: The text of each of `influence.spans`.
    """

    influence: RolloutInfluence
    lesson: str
    version: int | None
    staleness: int | None
    advantage: float
    tokens: int
    drift: float
    surprise: float
    reward: float | None
    prompt: str
    response: str
    spans: tuple[str, ...] = ()
    rewarded_by: tuple[str, ...] | None = None

    @property
    def has_finite_gradient(self) -> bool:
        """Else it alone had an optimiser step skipped."""
        return math.isfinite(self.influence.gradient_norm)

    @property
    def sign(self) -> str:
        """Of the advantage, in words."""
        return "zero" if not self.advantage else "positive" if self.advantage > 0 else "negative"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        values = asdict(self)
        influence = values.pop("influence")
        spans = [{**span, "text": text} for span, text in zip(influence["spans"], self.spans, strict=True)]
        return {**influence, **values, "spans": spans}


@dataclass(frozen=True, slots=True)
class KindOfRollouts:
    """A row of a sum.

    Attributes:
        value: What they have in common.
        rollouts: How many there are.
        gradient_norm: Root of the sum of the squares of theirs.
        inner_product: The sum of theirs.
        along: The sum of theirs: their share of the update.
    """

    value: str
    rollouts: int
    gradient_norm: float
    inner_product: float
    along: float


@dataclass(frozen=True, slots=True)
class UnusualRollout:
    """A rollout that is unlike the others of its update.

    Attributes:
        rollout_id: Of the rollout, in the update's batch.
        trait: In which of its numbers: ``staleness``, ``drift``, or, of one with a positive advantage, ``surprise``.
        value: The rollout's own number, in versions or nats per token.
        usual: The median of the update's rollouts, in the same unit.
        deviations: How many robust standard deviations lie between; above 0.5.
    """

    rollout_id: str
    trait: str
    value: float
    usual: float
    deviations: float


@dataclass(frozen=True, slots=True)
class WhyReport:
    """What an update was made of.

    Attributes:
        run_dir: Whose update.
        step: The version that it led to.
        checkpoint: Where the replay began.
        rollouts: All, those that moved it most first; before them any whose own gradient is not finite.
        sums: By ``staleness``, ``version``, ``lesson``, ``reward_function`` and ``advantage``.
        unusual: Those that are least like the others, of what moved it at all; see `unusual_of`.
        batch_id: The batch that it trained on.
        tokens: What forward passes say of each of its rollouts' tokens.
    """

    run_dir: Path
    step: int
    checkpoint: str
    rollouts: tuple[ExplainedRollout, ...]
    sums: Mapping[str, tuple[KindOfRollouts, ...]]
    unusual: tuple[UnusualRollout, ...] = ()
    batch_id: str = ""
    tokens: tuple[RescoredRollout, ...] = ()

    def keep_tokens(self) -> Path:
        """Writes the numbers of tokens for the dashboard, and returns where; see `penstock.rundir.rescored_rows`.

        Raises:
            OSError: the user's cache cannot be written.
        """
        return write_rescored(RunDirectory(self.run_dir), self.batch_id, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "run_dir": str(self.run_dir),
            "step": self.step,
            "checkpoint": self.checkpoint,
            "sums": {name: [asdict(row) for row in rows] for name, rows in self.sums.items()},
            "unusual": [asdict(one) for one in self.unusual],
            "rollouts": [rollout.to_json() for rollout in self.rollouts],
        }

    def print(self, console: Console) -> None:
        """Prints the sums, then those that moved the update most, and those unlike the others, with their text."""
        title = f"{self.run_dir}: what moved update {self.step} ({len(self.rollouts)} rollouts)"
        console.print(Text(title), soft_wrap=True)
        console.print(self._table_of_sums())
        endless = sum(not rollout.has_finite_gradient for rollout in self.rollouts)
        if endless:
            console.print(f"{endless} with a gradient that is not finite, first here: a step with one is skipped")
        for place, rollout in enumerate(self.rollouts[:MOST], 1):
            for line in _lines(place, rollout):
                console.print(Text(line), soft_wrap=True)
        if self.unusual:
            console.print("\nunlike the others")
        by_id = {rollout.influence.rollout_id: rollout for rollout in self.rollouts}
        for one in self.unusual:
            rollout = by_id[one.rollout_id]
            told = f"{one.trait} {one.value:.3g}, usual {one.usual:.3g}  moved {rollout.influence.moved:.1%}"
            console.print(Text(f"    {printable(one.rollout_id)}  {told}"), soft_wrap=True)
            console.print(Text(f"        {_texts(rollout)}"), soft_wrap=True)

    def _table_of_sums(self) -> Table:
        table = Table()
        for column in ("", "", "rollouts", "|gradient|", "inner product", "share"):
            table.add_column(column, justify="right" if column else "left")
        for name, rows in self.sums.items():
            for row in rows:
                numbers = [f"{row.gradient_norm:.3g}", f"{row.inner_product:.3g}", f"{row.along:.1%}"]
                table.add_row(name.replace("_", " "), Text(printable(row.value)), str(row.rollouts), *numbers)
            table.add_section()
        return table


def _lines(place: int, rollout: ExplainedRollout) -> list[str]:
    found = rollout.influence
    reward = "expired" if rollout.reward is None else f"{rollout.reward:.3g}"
    sampled_by = "no version" if rollout.version is None else f"version {rollout.version} ({rollout.staleness} old)"
    lines = [
        f"{place:2}. {printable(found.rollout_id)}  moved {found.moved:.1%}  share {found.along:.1%}  |gradient| "
        f"{found.gradient_norm:.3g}  inner product {found.inner_product:.3g}",
        f"    reward {reward}  advantage {rollout.advantage:+.3g}  {rollout.tokens} tokens  {sampled_by}  "
        f"drift {rollout.drift:+.3f}  surprise {rollout.surprise:.3g}",
        f"    {_texts(rollout)}",
    ]
    for span, text in zip(found.spans, rollout.spans, strict=True):
        numbers = f"|gradient| {span.gradient_norm:.3g}  inner product {span.inner_product:.3g}"
        lines.append(f"      {span.start}–{span.stop}  {numbers}  {_in_a_line(text)}")
    return lines


def _texts(rollout: ExplainedRollout) -> str:
    return f"{_in_a_line(rollout.prompt)} → {_in_a_line(rollout.response)}"


def _in_a_line(text: str) -> str:
    return shortened(" ".join(text.split()), _LONGEST_TEXT)


def explain_update(run_dir: Path | str, step: int, trust: bool = False) -> WhyReport:
    """Says of each rollout of an update what it did to it.

    Args:
        run_dir: A run directory of a language policy; the run may go on.
        step: The update, named by the version that it led to, as in metrics.jsonl.
        trust: Believe what others than the user may have written into the run directory.

    Raises:
        ConfigError: no run, no such update, or a run of a control policy.
        CheckpointError: no checkpoint before `step` is left.
    """
    run = StoredRun(run_dir, trust)
    if not isinstance(run.config, RunConfig):
        raise ConfigError(
            f"{run_dir} trains a control policy: rollouts of language policies alone are explained; "
            f"{command_line('replay', run_dir, '--step', str(step))} computes that update again"
        )
    checkpoint = run.checkpoint_before(step)
    walk = UpdateWalk(run, checkpoint, (step, step))
    *before, update = walk.updates
    for each in before:
        walk.make(each)
    batch = walk.prepare(update)
    scores, entropies = walk.learner.score(batch.examples), walk.learner.score(batch.examples, entropy=True)
    logprobs = {example.rollout_ids[0]: found for example, found in zip(batch.examples, scores, strict=True)}
    found = influences(walk.learner, walk.learner.optimizer, batch, update.stored.version.step)
    tokenizer = Tokenizer.load(run.checkpoints[checkpoint] / "model")
    records = run.records(update.stored.rollout_ids)
    examples = {example.rollout_ids[0]: example for example in batch.examples}
    explained = [
        _explained(
            one,
            examples[one.rollout_id],
            logprobs[one.rollout_id],
            records.get(one.rollout_id),
            update.step - 1,
            tokenizer,
        )
        for one in found
    ]
    explained.sort(key=lambda rollout: (rollout.has_finite_gradient, -rollout.influence.moved))
    newest = max(run.checkpoints)
    under_newest = walk.learner.score(batch.examples, run.start(run.checkpoints[newest]).policy)
    scored = zip(batch.examples, scores, entropies, under_newest, strict=True)
    by_id = {one.influence.rollout_id: one for one in explained}
    return WhyReport(
        run.directory.path,
        step,
        f"step-{checkpoint}",
        tuple(explained),
        sums_of(explained),
        unusual_of(explained),
        batch.batch_id,
        tuple(_rescored(example, newest, by_id[example.rollout_ids[0]], *numbers) for example, *numbers in scored),
    )


def _rescored(
    example: RLExample, newest: int, found: ExplainedRollout, *numbers: Float32[np.ndarray, " pos"]
) -> RescoredRollout:
    """Without padding, and without numbers of what no loss was on."""
    own = example.segment_ids > 0
    logprobs, entropies, newest_logprobs = (
        np.where(example.loss_mask, each, np.float32(np.nan))[own] for each in numbers
    )
    told = {name: getattr(found.influence, name) for name in ("moved", "along", "gradient_norm", "inner_product")}
    told |= {"drift": found.drift, "surprise": found.surprise}
    if found.staleness is not None:
        told["staleness"] = float(found.staleness)
    return RescoredRollout(example.rollout_ids[0], newest, logprobs, entropies, newest_logprobs, tuple(told.items()))


def unusual_of(rollouts: Sequence[ExplainedRollout]) -> tuple[UnusualRollout, ...]:
    """The ten rollouts of an update, or fewer, that are least like its others, of those that moved it at all.

    Three traits, each with an order of its own: `staleness`; `drift`, whichever way; and `surprise` of what has a
    positive advantage, an answer that the policy would hardly give and that was rewarded. Distances are from the
    update's median, in robust standard deviations (1.4826 times the median distance, but no less than two versions,
    0.1 and 1 nats per token); what lies within half of one is usual. The traits take turns, so that one that many are
    unusual in leaves room for the others.
    """
    orders = [_order(rollouts, trait) for trait in _LEAST_SPREAD]
    turns = (each[place] for place in range(len(rollouts)) for each in orders if place < len(each))
    chosen: dict[str, UnusualRollout] = {}
    for one in turns:
        chosen.setdefault(one.rollout_id, one)
    return tuple(chosen.values())[:MOST]


def _order(rollouts: Sequence[ExplainedRollout], trait: str) -> list[UnusualRollout]:
    """Those that are unusual in a trait, the most unusual first."""
    compared = [
        rollout
        for rollout in rollouts
        if (trait != "surprise" or rollout.advantage > 0) and getattr(rollout, trait) is not None
    ]
    if not compared:
        return []
    values: list[float] = [getattr(rollout, trait) for rollout in compared]
    usual = median(values)
    spread = max(_MEDIAN_TO_DEVIATION * median(abs(value - usual) for value in values), _LEAST_SPREAD[trait])
    found = [
        UnusualRollout(rollout.influence.rollout_id, trait, value, usual, distance)
        for rollout, value in zip(compared, values, strict=True)
        if (distance := (abs(value - usual) if trait == "drift" else value - usual) / spread) > _USUAL
        and rollout.influence.moved > 0
    ]
    return sorted(found, key=lambda one: -one.deviations)


def _explained(
    influence: RolloutInfluence,
    example: RLExample,
    logprobs: Float32[np.ndarray, " pos"],
    record: RolloutRecord | None,
    version_step: int,
    tokenizer: Tokenizer,
) -> ExplainedRollout:
    first = (example.first_sampled or 0) if record is None else len(record.rollout.prompt_tokens)
    version = int(example.weight_steps[example.loss_mask].min())
    sampled = logprobs[example.loss_mask].astype(float)
    return ExplainedRollout(
        influence,
        influence.rollout_id.rsplit("-", 2)[0] if record is None else record.rollout.lesson_id,
        None if version < 0 else version,
        None if version < 0 else version_step - version,
        influence.advantage,
        int(example.loss_mask.sum()),
        float((sampled - example.generator_log_probs[example.loss_mask]).mean()),
        float(-sampled.mean()),
        None if record is None else record.rollout.episode_reward,
        tokenizer.decode(example.tokens[:first], skip_special_tokens=False),
        tokenizer.decode(example.tokens[first:], skip_special_tokens=False),
        tuple(
            tokenizer.decode(example.tokens[span.start : span.stop], skip_special_tokens=False)
            for span in influence.spans
        ),
        None if record is None else _rewarded_by(record.rollout.rewards_by_function),
    )


def _rewarded_by(given: Sequence[tuple[str, float | None]]) -> tuple[str, ...] | None:
    """None of an environment that does not tell its reward functions apart."""
    return tuple(name for name, reward in given if reward) if given else None


def sums_of(rollouts: Sequence[ExplainedRollout]) -> dict[str, tuple[KindOfRollouts, ...]]:
    """By what is told: ``staleness``, ``version``, ``lesson``, ``reward_function``, ``advantage``.

    A rollout that several reward functions gave something counts in the row of each, one that all gave 0 under
    ``none``.
    """

    def functions(rollout: ExplainedRollout) -> Sequence[str]:
        return () if rollout.rewarded_by is None else rollout.rewarded_by or ("none",)

    return {
        "staleness": _sums(rollouts, lambda rollout: _if_known(rollout.staleness)),
        "version": _sums(rollouts, lambda rollout: _if_known(rollout.version)),
        "lesson": _sums(rollouts, lambda rollout: (rollout.lesson,)),
        "reward_function": _sums(rollouts, functions),
        "advantage": _sums(rollouts, lambda rollout: (rollout.sign,)),
    }


def _if_known(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def _sums(
    rollouts: Sequence[ExplainedRollout], keys: Callable[[ExplainedRollout], Sequence[int | str]]
) -> tuple[KindOfRollouts, ...]:
    """One row per value, in their order; of those without one, none."""
    rows: list[KindOfRollouts] = []
    for value in sorted({value for rollout in rollouts for value in keys(rollout)}):
        members = [rollout.influence for rollout in rollouts if value in keys(rollout)]
        norm = math.sqrt(sum(member.gradient_norm**2 for member in members))
        inner, along = (sum(getattr(member, name) for member in members) for name in ("inner_product", "along"))
        rows.append(KindOfRollouts(str(value), len(members), norm, inner, along))
    return tuple(rows)
