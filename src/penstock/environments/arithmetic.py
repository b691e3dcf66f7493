"""Arithmetic of graded difficulty, answered exactly or not at all: one lesson each for easy, medium and hard.

- ``easy``: the sum of two single digits, in three wordings.
- ``medium``: sums and differences of two-digit numbers.
- ``hard``: expressions of three or four small numbers with parentheses.

Held out are operands: a sum that is asked in an evaluation occurs in no training problem, in no wording and in neither
order. Of `hard` it is the numbers of an expression, in any order and with any operators.

The answer is the text after the last ``=``, so a policy may write its steps first: ``19*3=57``. Worked solutions do so
for `medium` (``27+38``: ``50+15=65``) and `hard`. Rewards are sparse;
start a random policy with `learner.warm_start`.
"""

import re
from collections.abc import Callable
from typing import Literal

import numpy as np

from penstock.environments.base import Reference, Template
from penstock.environments.episode import SingleTurnEnvironment
from penstock.environments.example_environment import Example, split_by_rank
from penstock.environments.expressions import calculate, show_number
from penstock.types import Completion, fold, generator

EVAL_FRACTION = 0.2
_WORDINGS = ("{}=", "What is {}?", "Compute {}:")
_NUMBER = re.compile(r"\d+")
_TWO_DIGITS = re.compile(r"(\d\d)([+-])(\d\d)")
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
        self._split = _POOLS[difficulty]()

    def references(self, example: Example) -> list[Reference]:
        """The answer, for `medium` and `hard` after one line of steps."""
        expression = example.columns["expression"]
        two_digits = _TWO_DIGITS.fullmatch(expression)
        steps = [_by_column(*two_digits.groups()), example.answer] if two_digits else worked_steps(expression)[1:]
        return [Reference(self.shaped(example), "=".join(steps))]

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


def _by_column(first: str, sign: str, second: str) -> str:
    """Tens and ones of two numbers of two digits, each computed by itself: ``70-4`` of ``82``, ``-``, ``16``."""
    tens, ones = (int(a) + int(sign + b) for a, b in zip(first, second, strict=True))
    return f"{10 * tens}{ones:+}"


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
    halves = _split_by_operands([f"{a}+{b}" for a in range(10) for b in range(10)])
    train, held_out = ([_example(wording, one) for wording in _WORDINGS for one in half] for half in halves)
    return train, held_out


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


def _split_by_operands(expressions: list[str]) -> tuple[list[str], list[str]]:
    """Expressions of the same numbers, in whatever order, stay together."""
    operands = {expression: " ".join(sorted(_NUMBER.findall(expression))) for expression in expressions}
    _, held_out = split_by_rank(list(dict.fromkeys(operands.values())), EVAL_FRACTION, str)
    chosen = set(held_out)
    train = [expression for expression in expressions if operands[expression] not in chosen]
    return train, [expression for expression in expressions if operands[expression] in chosen]


def _split_expressions(expressions: list[str]) -> tuple[list[Example], list[Example]]:
    train, held_out = _split_by_operands(expressions)
    return [_worded(expression) for expression in train], [_worded(expression) for expression in held_out]


def _worded(expression: str) -> Example:
    return _example(_WORDINGS[fold(0, expression) % len(_WORDINGS)], expression)


_POOLS: dict[Difficulty, Callable[[], tuple[list[Example], list[Example]]]] = {
    "easy": _easy,
    "medium": _medium,
    "hard": _hard,
}
