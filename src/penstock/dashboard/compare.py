"""Is B better than A? Two runs over each other, and what their evaluations say, problem by problem.

Answers of both to the same held-out problem are paired in order, as `penstock eval --baseline` pairs them, and the
interval is that of the mean difference with the problems as clusters (`difference_interval`). Where only a few problems
differ, Student's t is too sure of itself: five that all point one way would be "different" once in sixteen times by
chance. So two policies are called different only where a sign-flip test of the problems' differences agrees, too, which
needs no assumption but that, if they were equal, A and B could have been swapped on any problem.

What it says is about two policies. Whether one *recipe* is better than another is a question to several seeds of each.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from penstock.dashboard.observation import ObservedRun, ObservedRuns
from penstock.types import ConfigError
from penstock.types.intervals import Interval, difference_interval

EXACT = 12
"""Up to so many differing problems all 2^n swaps are tried; with more, their sum is nearly normal."""
Rewards = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """B minus A on the problems that both answered.

    Attributes:
        problems: Number of distinct problems.
        unpaired: Number of rollouts of either without a counterpart.
        difference: Mean of B minus A; NaN where there is no pair.
        interval: Its 95% interval.
        chance: How probable so large a difference is between equal policies, by the sign-flip test.
    """

    problems: int
    unpaired: int
    difference: float
    interval: Interval
    chance: float

    @classmethod
    def of(cls, a: Rewards, b: Rewards) -> "Comparison":
        """Pairs the answers of A and B, problem by problem.

        Args:
            a: Rewards by problem, in the order of the answers.
            b: Those of the other policy.
        """
        difference, interval = difference_interval(b, a)
        sums = [
            math.fsum(theirs - ours for ours, theirs in zip(a[problem], b[problem], strict=False))
            for problem in a.keys() & b.keys()
        ]
        paired = sum(min(len(a[problem]), len(b[problem])) for problem in a.keys() & b.keys())
        total = sum(map(len, (*a.values(), *b.values())))
        return cls(len(sums), total - 2 * paired, difference, interval, _chance(sums))

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `unknown`, or `nothing` where no problem is shared."""
        if not self.problems or math.isnan(self.difference):
            return "nothing"
        if self.chance > 0.05:
            return "unknown"
        if self.interval.low > 0:
            return "better"
        return "worse" if self.interval.high < 0 else "unknown"

    def words(self, a: str, b: str, lesson: str) -> str:
        """The verdict as a sentence."""
        if self.verdict == "nothing":
            return f"{lesson}: {a} and {b} answered no problem in common, so nothing can be said."
        if self.problems < 2:
            return f"{lesson}: only one problem is shared, and one problem says nothing."
        span = f"{self.difference:+.3f} (95% interval {self.interval.low:+.3f} to {self.interval.high:+.3f})"
        on = f"on {self.problems} problems"
        if self.verdict == "unknown" and self.interval.low == self.interval.high == 0:
            return f"{lesson}: {a} and {b} were rewarded alike {on}: no difference was seen."
        if self.verdict == "unknown":
            half = (self.interval.high - self.interval.low) / 2
            return (
                f"{lesson}: it cannot be told whether {b} is better than {a}: {span} {on}. "
                f"A difference below about {half:.3f} does not show with so many problems."
            )
        return f"{lesson}: yes, {b} is {self.verdict} than {a}: {span} {on}." if self.verdict == "better" else (
            f"{lesson}: no, {b} is {self.verdict} than {a}: {span} {on}."
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As plain data; an end that is not finite is None."""
        ends = [end if math.isfinite(end) else None for end in self.interval]
        difference = None if math.isnan(self.difference) else self.difference
        return {"problems": self.problems, "unpaired": self.unpaired, "difference": difference, "low": ends[0],
                "high": ends[1], "chance": self.chance, "verdict": self.verdict}  # fmt: skip


def compare_page(runs: ObservedRuns, words: Mapping[str, str]) -> dict[str, Any]:
    """Two runs, ``a`` and ``b``, at their evaluations ``at_a`` and ``at_b`` (by default the last of each).

    Raises:
        ConfigError: there is no such run, or no such evaluation of it.
    """
    a, b = runs.find(words.get("a", "")), runs.find(words.get("b", ""))
    offered = {"a": evaluations(a), "b": evaluations(b)}
    usual = dict(zip("ab", latest(offered["a"], offered["b"]), strict=True))
    chosen = {side: _chosen(side, offered[side], words.get(f"at_{side}", "")) or usual[side] for side in ("a", "b")}
    lessons: list[dict[str, Any]] = []
    if all(chosen.values()):
        rewards = [rewards_of(run, chosen[side]) for side, run in (("a", a), ("b", b))]
        named = _named(a.name, b.name, *(_step(offered[side], chosen[side]) for side in ("a", "b")))
        for lesson in sorted(rewards[0].keys() & rewards[1].keys()):
            found = Comparison.of(rewards[0][lesson], rewards[1][lesson])
            lessons.append({"lesson": lesson, "words": found.words(*named, lesson), **found.to_json()})
        if len(lessons) > 1:
            whole = Comparison.of(*({f"{lesson}\0{problem}": answers for lesson, found in side.items()
                                     for problem, answers in found.items()} for side in rewards))  # fmt: skip
            lessons.insert(0, {"lesson": "all lessons", "words": whole.words(*named, "all lessons"),
                               **whole.to_json()})  # fmt: skip
    settings = _settings(a.config, b.config)
    same_recipe = bool(settings) and all(key.rpartition(".")[2] == "seed" for key, _, _ in settings)
    this = "Only the seed differs: this" if same_recipe else "This"
    return {
        "a": a.name,
        "b": b.name,
        "unread": [run.name for run in (a, b) if run.progress and not run.problem],
        "offered": offered,
        "chosen": chosen,
        "lessons": lessons,
        "settings": settings,
        "same_recipe": same_recipe,
        "metrics": sorted(set(a.curves.names) & set(b.curves.names)),
        "caution": f"{this} is about two policies. Runs of one recipe with other seeds differ, too: whether a recipe "
        "is better is a question to several seeds of each (penstock plot pools them).",
    }


def evaluations(run: ObservedRun) -> list[dict[str, Any]]:
    """The evaluations whose rollouts are kept, the oldest first."""
    return run.index.rows(
        """SELECT concat(g.evaluation, '-', r.lineage, '-', r.step) AS name, g.evaluation, r.step, r.lineage,
               count(*) AS rollouts, avg(r.reward) AS reward, max(r.time) AS time
        FROM rollouts r JOIN groups g USING (g) WHERE g.evaluation IS NOT NULL AND r.reward IS NOT NULL
        GROUP BY ALL ORDER BY time"""
    )


def rewards_of(run: ObservedRun, evaluation: str) -> dict[str, dict[str, list[float]]]:
    """Of one evaluation the rewards by lesson and problem, in the order of the answers."""
    rows = run.index.rows(
        """SELECT g.lesson, g.problem, list(r.reward ORDER BY r.g, r.position) AS rewards
        FROM rollouts r JOIN groups g USING (g)
        WHERE concat(g.evaluation, '-', r.lineage, '-', r.step) = ? AND r.reward IS NOT NULL GROUP BY ALL""",
        [evaluation],
    )
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for row in rows:
        found[row["lesson"]][str(row["problem"])] = row["rewards"]
    return dict(found)


def latest(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The newest evaluations of two runs by which they can be compared; empty where a run has none.

    Reports before and after training may have other problems than evaluations in between: of the two kinds, that one is
    taken of which both runs have the later one.
    """
    found: list[tuple[int, bool, str, str]] = []
    for kind in (True, False):
        ours, theirs = ([each for each in side if _is_in_between(each) == kind][-1:] for side in (a, b))
        if ours and theirs:
            found.append((min(ours[0]["step"], theirs[0]["step"]), not kind, ours[0]["name"], theirs[0]["name"]))
    if found:
        return max(found)[2:]
    return (a[-1]["name"] if a else "", b[-1]["name"] if b else "")


def _is_in_between(evaluation: Mapping[str, Any]) -> bool:
    return evaluation["evaluation"] in ("eval", "micro_eval")


def _named(a: str, b: str, step_a: int, step_b: int) -> tuple[str, str]:
    """The names of two runs, with the versions that were evaluated where these differ."""
    return (a, b) if step_a == step_b else (f"{a} at version {step_a}", f"{b} at version {step_b}")


def _step(offered: Sequence[Mapping[str, Any]], name: str) -> int:
    return next(each["step"] for each in offered if each["name"] == name)


def _chosen(side: str, offered: Sequence[Mapping[str, Any]], wanted: str) -> str:
    names = [str(each["name"]) for each in offered]
    if wanted and wanted not in names:
        raise ConfigError(f"at_{side} is {wanted!r:.60}: that run has the evaluations {', '.join(names) or 'none'}")
    return wanted


def _chance(sums: Sequence[float]) -> float:
    """The sign-flip test's two-sided p value of a sum of differences; of many, corrected for their steps."""
    values = np.array([value for value in sums if value != 0.0])
    if not len(values):
        return 1.0
    total = abs(float(values.sum()))
    if len(values) > EXACT:
        step = float(np.abs(values).min())
        return 2 * NormalDist().cdf(-max(0.0, total - step) / float(np.sqrt((values**2).sum())))
    signs = np.array([[-1.0 if number >> bit & 1 else 1.0 for bit in range(len(values))]
                      for number in range(2 ** len(values))])  # fmt: skip
    return float(np.mean(np.abs(signs @ values) >= total - 1e-9))


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[Any]]:
    """Keys that the two configs have otherwise, with both values."""
    ours, theirs = _flat(a), _flat(b)
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return [[name, ours.get(name), theirs.get(name)] for name in names[:200]]


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _flat(item, f"{name}.{key}" if name else str(key))
        return found
    return {name: str(value)}
