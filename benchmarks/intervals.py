"""Whether the dashboard's intervals are right: simulated evaluations whose truth is known.

    python -m benchmarks.intervals [--evaluations 2000] [--seed 0]

*Coverage*: how often a 95% interval holds the truth, for the mean reward of an evaluation and for the difference of two
policies on the same problems, over designs of rewards, problems and answers to each. A problem has a chance of success
of its own, or a mean; the truth is that of the population that problems are drawn from. *Different*: how often two
equal policies are called different. Coverage is to be 94 to 96%, and equal policies are to be called different at most
5% of the time; so many evaluations tell that to a percent. Exits with 1 where a mark is missed.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.marks import Marks
from penstock.dashboard.compare import Comparison
from penstock.types.intervals import reward_interval

Draw = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Design:
    """One kind of evaluation.

    Attributes:
        name: In words.
        problems: How many.
        answers: To each.
        hardness: Draws what a policy is worth on each of n problems.
        mean: Of that over all problems there are.
        answer: Draws k answers' rewards for each of those.
    """

    name: str
    problems: int
    answers: int
    hardness: Callable[[np.random.Generator, int], np.ndarray]
    mean: float
    answer: Draw


def share(rng: np.random.Generator, worth: np.ndarray, answers: int) -> np.ndarray:
    """Right or wrong."""
    return (rng.random((len(worth), answers)) < worth[:, None]).astype(float)


def spread(rng: np.random.Generator, worth: np.ndarray, answers: int) -> np.ndarray:
    """Any number, around what the problem is worth."""
    return worth[:, None] + rng.normal(0, 0.5, (len(worth), answers))


DESIGNS = (
    Design("64 problems, 1 answer, right or wrong", 64, 1, lambda r, n: r.beta(2, 2, n), 0.5, share),
    Design("64 problems, 8 answers, right or wrong", 64, 8, lambda r, n: r.beta(2, 2, n), 0.5, share),
    Design("256 problems, 4 answers, rarely right", 256, 4, lambda r, n: r.beta(1, 9, n), 0.1, share),
    Design("32 problems, 4 answers, any reward", 32, 4, lambda r, n: r.normal(0, 1, n), 0.0, spread),
    Design("200 problems, 1 answer, any reward", 200, 1, lambda r, n: r.normal(3, 1, n), 3.0, spread),
)
EQUAL = (("half", 0.5, 64), ("rarely right", 0.03, 64), ("mostly right", 0.9, 200), ("few problems", 0.5, 12))
"""Equal policies: how often a problem is solved, and how many there are."""


def mean_covered(design: Design, evaluations: int, rng: np.random.Generator) -> float:
    """How often the interval of an evaluation's mean reward holds the population's."""
    problems = [problem for problem in range(design.problems) for _ in range(design.answers)]
    held = 0
    for _ in range(evaluations):
        worth = design.hardness(rng, design.problems)
        low, high = reward_interval(design.answer(rng, worth, design.answers).ravel().tolist(), problems)
        held += low <= design.mean <= high
    return held / evaluations


def difference_covered(design: Design, evaluations: int, rng: np.random.Generator) -> float:
    """How often the interval of B − A holds the truth, where B is worth more by 0.05 on every problem."""
    held, gain = 0, 0.05
    for _ in range(evaluations):
        worth = design.hardness(rng, design.problems) * (1 - gain)  # a chance stays one
        sides = [design.answer(rng, worth + more, design.answers) for more in (0.0, gain)]
        a, b = ({str(number): row.tolist() for number, row in enumerate(side)} for side in sides)
        low, high = Comparison.of(a, b).interval
        held += low <= gain <= high
    return held / evaluations


def called_different(rate: float, problems: int, evaluations: int, rng: np.random.Generator) -> float:
    """How often two equal policies get a verdict."""
    wrong = 0
    for _ in range(evaluations):
        worth = rng.beta(10 * rate, 10 * (1 - rate), problems)
        a, b = ({str(n): row.tolist() for n, row in enumerate(share(rng, worth, 1))} for _ in range(2))
        wrong += Comparison.of(a, b).verdict in ("better", "worse")
    return wrong / evaluations


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    marks, rng = Marks(), np.random.default_rng(options.seed)
    noise = 1.96 * math.sqrt(0.05 * 0.95 / options.evaluations)  # what so many evaluations can tell
    print(f"coverage of 95% intervals over {options.evaluations:,} evaluations; ± {noise:.1%} is chance")
    for design in DESIGNS:
        mean = mean_covered(design, options.evaluations, rng)
        difference = difference_covered(design, options.evaluations, rng)
        print(f"  {design.name:42}  mean {mean:6.1%}   difference {difference:6.1%}")
        for what, found in (("mean", mean), ("difference", difference)):
            marks.at_least(f"{design.name}: {what}, %", 100 * found, 94)
            marks.at_most(f"{design.name}: {what}, %", 100 * found, 96)
    print("equal policies that are called different (at most 5%)")
    for name, rate, problems in EQUAL:
        wrong = called_different(rate, problems, options.evaluations, rng)
        print(f"  {name:42}  {wrong:6.1%}")
        marks.at_most(f"{name}: called different, %", 100 * wrong, 5)
    return marks.report()


if __name__ == "__main__":
    sys.exit(main())
