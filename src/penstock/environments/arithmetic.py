"""Arithmetic of graded difficulty, answered exactly or not at all: one lesson each for easy, medium and hard.

- ``easy``: the sum of two single digits. All 100 sums are taught; held out are combinations of sum and wording.
- ``medium``: sums and differences of two-digit numbers; held out are pairs of numbers, whatever the wording.
- ``hard``: expressions of three or four small numbers with parentheses; held out are expressions.

The answer is the text after the last ``=``, so a policy may write its steps first: ``19*3=57``. Rewards are sparse;
start a random policy with `learner.warm_start`.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from typing_extensions import override

from penstock.environments.base import Reference, Template
from penstock.environments.calculator import calculate, show_number
from penstock.environments.episode import SingleTurnEnvironment
from penstock.environments.example_environment import Example, split_by_rank
from penstock.types import Completion, fold, generator

EVAL_FRACTION = 0.2
_WORDINGS = ("{}=", "What is {}?", "Compute {}:")
_HARD_POOL = 4000
"""Expressions drawn for `hard`, the same in every run."""

Difficulty = Literal["easy", "medium", "hard"]


class ArithmeticEnvironment(SingleTurnEnvironment):
    """Rewards the right number, and nothing else.

    Args:
        difficulty: ``easy``, ``medium`` or ``hard``, as the module describes them.
        name: Stands on every rollout; by default ``arithmetic-<difficulty>``.
        template: How prompts are put to the policy.
    """

    def __init__(self, difficulty: Difficulty = "easy", name: str | None = None, template: Template = "auto") -> None:
        super().__init__(name or f"arithmetic-{difficulty}", template)
        self._train, self._eval = _POOLS[difficulty]()

    @override
    def train_examples(self) -> Sequence[Example]:
        return self._train

    @override
    def eval_examples(self) -> Sequence[Example]:
        return self._eval

    def references(self, example: Example) -> list[Reference]:
        """The answer, for `hard` after one line of steps."""
        steps = worked_steps(example.columns["expression"])
        return [Reference(self.shaped(example), "=".join(steps[1:]) if len(steps) > 2 else example.answer)]

    def score(self, example: Example, text: str, completion: Completion) -> float:
        """1 for a finished answer that is exactly right, else 0."""
        finished = completion.finish_reason == "stop"
        return float(finished and text.rpartition("=")[2].strip() == example.answer)


def worked_steps(expression: str) -> list[str]:
    """The expression, then what is left of it after each operation, the result last.

    Innermost parentheses come first, then products, then from left to right: ``["(2+3)*4", "5*4", "20"]``.
    """
    steps = [expression]
    while (left := _after_one_operation(steps[-1])) is not None:
        steps.append(left)
    return steps


def _after_one_operation(expression: str) -> str | None:
    start = expression.rfind("(")
    end = expression.find(")", start) if start >= 0 else len(expression)
    inner = expression[start + 1 : end]
    operators = [i for i, c in enumerate(inner) if c in "+-*" and i > 0 and inner[i - 1] not in "+-*"]
    if not operators:
        return None
    products = [i for i in operators if inner[i] == "*"]
    at = (products or operators)[0]
    place = operators.index(at)
    left = operators[place - 1] + 1 if place else 0
    right = operators[place + 1] if place + 1 < len(operators) else len(inner)
    reduced = inner[:left] + show_number(calculate(inner[left:right])) + inner[right:]
    if start >= 0 and len(operators) > 1:
        reduced = f"({reduced})"
    return expression[: max(start, 0)] + reduced + expression[end + 1 :]


def _example(wording: str, expression: str) -> Example:
    prompt = wording.format(expression)
    answer = show_number(calculate(expression))
    return Example(prompt, prompt, answer, {"expression": expression})


def _easy() -> tuple[list[Example], list[Example]]:
    sums = [f"{a}+{b}" for a in range(10) for b in range(10)]
    examples = [_example(wording, expression) for wording in _WORDINGS for expression in sums]
    return split_by_rank(examples, EVAL_FRACTION, lambda e: e.example_id)


def _medium() -> tuple[list[Example], list[Example]]:
    pairs = [f"{a}{sign}{b}" for a in range(10, 100) for b in range(10, 100) for sign in "+-" if sign == "+" or b <= a]
    return _split_expressions(pairs)


def _hard() -> tuple[list[Example], list[Example]]:
    rng = generator(fold(0, "arithmetic", "hard"))
    drawn = dict.fromkeys(_hard_expression(rng) for _ in range(_HARD_POOL))  # a set that keeps its order
    return _split_expressions(list(drawn))


def _hard_expression(rng: np.random.Generator) -> str:
    a, b, c, d = (int(number) for number in rng.integers(2, 13, size=4))
    shapes = (f"({a}+{b})*{c}", f"{a}*{b}+{c}", f"{a}+{b}*{c}-{d}", f"({a}+{b})*{c}+{d}", f"{a}*(({b}+{c})*{d})")
    return shapes[int(rng.integers(len(shapes)))]


def _split_expressions(expressions: list[str]) -> tuple[list[Example], list[Example]]:
    train, held_out = split_by_rank(expressions, EVAL_FRACTION, str)
    return [_worded(expression) for expression in train], [_worded(expression) for expression in held_out]


def _worded(expression: str) -> Example:
    return _example(_WORDINGS[fold(0, expression) % len(_WORDINGS)], expression)


_POOLS: dict[Difficulty, Callable[[], tuple[list[Example], list[Example]]]] = {
    "easy": _easy,
    "medium": _medium,
    "hard": _hard,
}
