"""Say "cat", at a natural length; in the second variant, say the animal that the prompt names.

A first task for a policy that knows nothing: the reward climbs in small steps from random tokens to a short, finished
answer. In the ``named`` variant a policy that ignores its prompt earns about one over the number of animals, and one
that lists them all earns nothing.
"""

import re
from collections.abc import Sequence
from typing import Literal

from penstock.environments.base import Reference
from penstock.environments.examples import Example, split_by_rank
from penstock.environments.prompts import Template
from penstock.environments.single_turn import SingleTurnEnvironment
from penstock.types import Completion, ConfigError

ANIMALS = ("cat", "dog", "cow", "pig", "fox", "owl")
EVAL_FRACTION = 0.2
NATURAL_WORDS = range(2, 9)
"""An answer of so many words has a natural length."""

_PURRS = (
    "Who says meow?", "Who purrs?", "Who hunts mice?", "A pet, please.", "Name a pet.", "Who naps all day?",
    "What is on the mat?", "Who has whiskers?", "Who likes milk?", "Who climbed the tree?",
)  # fmt: skip
_MANNERS = ("", "Quick: ", "Please: ", "Now: ", "Well, ", "So, ")
_NAMING = (
    "Say {}.", "I see a {}.", "Here is a {}.", "My pet is a {}.", "Name it: {}.", "What is a {}?", "Look, a {}!",
    "We met a {}.", "Tell me of the {}.", "Call the {}.", "The {} is here.", "Draw a {}.",
)  # fmt: skip


class CatsEnvironment(SingleTurnEnvironment):
    """Rewards saying an animal in a short answer that ends by itself.

    Args:
        variant: ``cat``: the animal is always the cat. ``named``: it is the one that the prompt names.
        animals: Those that may be named, or must not be said instead; single words.
        name: Stands on every rollout.
        template: How prompts are put to the policy.
    """

    def __init__(
        self,
        variant: Literal["cat", "named"] = "cat",
        animals: tuple[str, ...] = ANIMALS,
        name: str = "cats",
        template: Template = "auto",
    ) -> None:
        super().__init__(name, template)
        if "cat" not in animals or len(set(animals)) != len(animals) or not all(map(str.isalpha, animals)):
            raise ConfigError(f"env_args.animals is {list(animals)}: it takes different single words, 'cat' among them")
        self._animals = animals
        self._train, self._eval = split_by_rank(_examples(variant, animals), EVAL_FRACTION, lambda e: e.example_id)

    def train_examples(self) -> Sequence[Example]:
        """See `ExampleEnvironment.train_examples`."""
        return self._train

    def eval_examples(self) -> Sequence[Example]:
        """See `ExampleEnvironment.eval_examples`."""
        return self._eval

    def references(self, example: Example) -> list[Reference]:
        """See `ExampleEnvironment.references`."""
        return [Reference(self.shaped(example), f" a {example.answer}.")]

    def score(self, example: Example, text: str, completion: Completion) -> float:
        """See `score_answer`."""
        others = [animal for animal in self._animals if animal != example.answer]
        return score_answer(text, example.answer, others, completion.finish_reason == "stop")


def score_answer(text: str, animal: str, others: Sequence[str], ended: bool) -> float:
    """The reward of one answer, in [0, 1]: 0.5 for the animal, 0.3 for ending, 0.2 for a natural length.

    Nothing counts without the animal. Inside another word ("catch") it is worth a quarter, said m > 2 times 2/m of
    its credit, beside one other animal a quarter, beside more of them nothing.

    Args:
        text: The answer.
        animal: What is to be said.
        others: What is not to be said instead.
        ended: Whether the policy ended the answer by itself.
    """
    said = _said(text, animal)
    wrong = sum(_mentions(text, other) > 0 for other in others)
    if said == 0 or wrong > 1:
        return 0.0
    if wrong == 1:
        said *= 0.25
    natural = _natural(len(text.split()))
    return said * (0.5 + 0.3 * ended + 0.2 * natural)


def _said(text: str, animal: str) -> float:
    mentions = _mentions(text, animal)
    if mentions:
        return min(1.0, 2.0 / mentions)
    return 0.25 if animal in text.lower() else 0.0


def _mentions(text: str, animal: str) -> int:
    return len(re.findall(rf"\b{animal}s?\b", text, re.IGNORECASE))


def _natural(words: int) -> float:
    """1 inside the natural lengths, falling by a quarter per word outside."""
    outside = max(NATURAL_WORDS.start - words, words - NATURAL_WORDS[-1], 0)
    return max(0.0, 1.0 - 0.25 * outside)


def _examples(variant: str, animals: tuple[str, ...]) -> list[Example]:
    if variant == "cat":
        prompts = [(manner + question, "cat") for question in _PURRS for manner in _MANNERS]
    else:
        prompts = [(phrase.format(animal), animal) for phrase in _NAMING for animal in animals]
    return [Example(prompt, prompt, answer) for prompt, answer in prompts]
