"""Questions with lettered options: which of these is a colour?"""

import re

import numpy as np
from typing_extensions import override

from penstock.environments.base import Reference, Template
from penstock.environments.episode import SingleTurnEnvironment
from penstock.environments.example_environment import Example, split_by_rank
from penstock.types import Completion, ConfigError, fold, generator

EVAL_FRACTION = 0.2
LETTERS = "ABCDEF"
_POOL = 2000
_KINDS = {
    "an animal": ("cat", "dog", "cow", "pig", "fox", "owl"),
    "a colour": ("red", "blue", "green", "black", "white", "pink"),
    "a number": ("one", "two", "three", "four", "five", "six"),
    "a fruit": ("apple", "pear", "plum", "fig", "lemon", "peach"),
    "a tool": ("hammer", "saw", "drill", "axe", "spade", "rake"),
    "a place": ("town", "beach", "farm", "shop", "school", "park"),
}


class MultipleChoiceEnvironment(SingleTurnEnvironment):
    """Rewards the letter of the right option.

    Args:
        options: Number of options, 2 to 6.
        name: Stands on every rollout.
        template: How prompts are put to the policy.
    """

    def __init__(self, options: int = 4, name: str = "multiple-choice", template: Template = "auto") -> None:
        super().__init__(name, template)
        if not 2 <= options <= len(LETTERS):
            raise ConfigError(f"env_args.options is {options}: it takes 2 to {len(LETTERS)}")
        self._letters = LETTERS[:options]
        self._split = split_by_rank(_examples(options), EVAL_FRACTION, lambda e: e.example_id)

    @override
    def references(self, example: Example) -> list[Reference]:
        return [Reference(self.shaped(example), f" {example.answer}")]

    @override
    def score(self, example: Example, text: str, completion: Completion) -> float:
        return score_choice(text, example.answer, self._letters, completion.finish_reason == "stop")


def score_choice(text: str, letter: str, letters: str, ended: bool) -> float:
    """1 for the right letter alone, 0.5 for an answer that goes on after it, 0.1 for another letter, else 0.

    Args:
        text: The answer; a dot or parenthesis after the letter is as good as none.
        letter: The right one.
        letters: All that were offered.
        ended: Whether the policy ended the answer by itself.
    """
    match = re.match(rf"\s*\(?([{letters}])(?!\w)[).]*\s*", text)
    if match is None:
        return 0.0
    if match.group(1) != letter:
        return 0.1
    return 1.0 if ended and match.end() == len(text) else 0.5


def _examples(options: int) -> list[Example]:
    rng = generator(fold(0, "multiple-choice", options))
    drawn = (_example(rng, options) for _ in range(_POOL))
    return list({example.example_id: example for example in drawn}.values())


def _example(rng: np.random.Generator, options: int) -> Example:
    kinds = [list(_KINDS)[i] for i in rng.permutation(len(_KINDS))[:options]]
    words = [_KINDS[kind][int(rng.integers(len(_KINDS[kind])))] for kind in kinds]
    right = int(rng.integers(options))
    offered = " ".join(f"{letter}) {word}" for letter, word in zip(LETTERS, words, strict=False))
    question = f"Which is {kinds[right]}? {offered} Answer:"
    return Example(f"{kinds[right]}/{','.join(words)}", question, LETTERS[right])
