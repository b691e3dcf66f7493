"""Continue a sequence of numbers that grows or falls by the same step."""

import re
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from penstock.environments.base import Template
from penstock.environments.episode import SingleTurnEnvironment
from penstock.environments.example_environment import Example, split_by_rank
from penstock.types import Completion

EVAL_FRACTION = 0.2
_SHOWN = 4


class DigitsEnvironment(SingleTurnEnvironment):
    """Rewards the terms that follow, for example ``8 10 12`` after ``0 2 4 6``.

    Args:
        terms: How many terms are to be given.
        largest: No number is larger.
        steps: Differences between terms; negative ones fall.
        name: Stands on every rollout.
        template: How prompts are put to the policy.
    """

    least_reported: ClassVar[int] = 0  # nobody can give it more

    def __init__(
        self,
        terms: int = 3,
        largest: int = 30,
        steps: tuple[int, ...] = (1, 2, 3, -1, -2),
        name: str = "digits",
        template: Template = "auto",
    ) -> None:
        super().__init__(name, template)
        if terms < 1:
            raise ValueError(f"terms is {terms}: at least one term has to be asked for")
        self._split = split_by_rank(_examples(terms, largest, steps), EVAL_FRACTION, lambda e: e.example_id)

    @override
    def score(self, example: Example, text: str, completion: Completion) -> float:
        return score_terms(text, example.answer.split(), completion.finish_reason == "stop")


def score_terms(text: str, expected: Sequence[str], ended: bool) -> float:
    """The share of right terms from the first on, halved where the answer goes on or holds anything else.

    Args:
        text: The policy's answer, decoded.
        expected: The terms that follow.
        ended: Whether the policy ended the answer by itself.
    """
    found = re.findall(r"-?\d+", text)
    right = 0
    while right < min(len(found), len(expected)) and found[right] == expected[right]:
        right += 1
    clean = ended and len(found) <= len(expected) and re.fullmatch(r"[\s\d-]*", text) is not None
    return right / len(expected) * (1.0 if clean else 0.5)


def _examples(terms: int, largest: int, steps: Sequence[int]) -> list[Example]:
    span = _SHOWN + terms
    sequences = [
        [str(start + step * i) for i in range(span)]
        for step in steps
        for start in range(largest + 1)
        if 0 <= start + step * (span - 1) <= largest
    ]
    if len(sequences) < 5:
        raise ValueError(f"largest is {largest}: too small for sequences of {span} numbers with steps {list(steps)}")
    return [_example(sequence[:_SHOWN], sequence[_SHOWN:]) for sequence in sequences]


def _example(shown: list[str], following: list[str]) -> Example:
    prompt = " ".join(shown)
    return Example(prompt, prompt, " " + " ".join(following))
