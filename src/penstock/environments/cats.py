"""Say "cat", at a natural length; in the second variant, say the animal that the prompt names.

A first task for a policy that knows nothing: the reward climbs in small steps from random tokens to a short, finished
answer. In the ``named`` variant a policy that ignores its prompt earns about one over the number of animals, and one
that lists them all earns nothing.
"""

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from typing_extensions import override

from penstock.environments.base import Reference, Template
from penstock.environments.episode import SingleTurnEnvironment
from penstock.environments.example_environment import Example, split_by_rank
from penstock.types import Completion, ConfigError

ANIMALS = ("cat", "dog", "cow", "pig")
EVAL_FRACTION = 0.2
NATURAL_WORDS = range(2, 9)
"""An answer of so many words has a natural length."""

_PURRS = (
    "Who says meow?", "Who purrs?", "Who hunts mice?", "A pet, please.", "Name a pet.", "Who naps all day?",
    "What is on the mat?", "Who has whiskers?", "Who likes milk?", "Who climbed the tree?",
)  # fmt: skip
_MANNERS = ("", "Quick: ", "Please: ", "Now: ", "Well, ", "So, ")
_NAMING = (
    "Say {}.", "Say a {}.", "I see a {}.", "Here is a {}.", "My pet is a {}.", "Name it: {}.", "Name a {}.",
    "What is a {}?", "Look, a {}!", "We met a {}.", "Tell me of the {}.", "Call the {}.", "Call it {}.",
    "The {} is here.", "Draw a {}.", "Who says {}?", "Please say {}.", "Now name the {}.", "So it is a {}.",
    "The {} and me.",
)  # fmt: skip


class CatsEnvironment(SingleTurnEnvironment):
    """Rewards saying an animal in a short answer that ends by itself.

    Args:
        variant: ``cat``: the animal is always the cat. ``named``: it is the one that the prompt names.
        animals: Those that may be named, or must not be said instead; single words.
        name: Stands on every rollout.
        template: How prompts are put to the policy.
    """

    least_reported: ClassVar[int] = 0  # nobody can give it more

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
        self._split = split_by_rank(_examples(variant, animals), EVAL_FRACTION, lambda e: e.example_id)

    @override
    def references(self, example: Example) -> list[Reference]:
        return [Reference(self.shaped(example), f" a {example.answer}.")]

    @override
    def score(self, example: Example, text: str, completion: Completion) -> float:
        others = [animal for animal in self._animals if animal != example.answer]
        return score_answer(text, example.answer, others, completion.finish_reason == "stop")


def score_answer(text: str, animal: str, others: Sequence[str], ended: bool) -> float:
    """The reward of one answer, in [0, 1].

    0.4 for the animal, 0.4 more for ending by itself, and 0.2 more for ending at a natural number of words with the
    animal at most twice. The sum is halved where the animal stands inside another word only ("catch"), multiplied by
    3/m where it is said m > 3 times and by a quarter beside one other animal, and nothing beside more of them. An
    answer that ends without any animal earns 0.1: a policy that knows nothing must first learn to end at all.

    Args:
        text: The policy's answer, decoded.
        animal: What is to be said.
        others: What is not to be said instead.
        ended: Whether the policy ended the answer by itself.
    """
    words, mentions = len(text.split()), _mentions(text, animal)
    wrong = sum(other in text.lower() for other in others)
    said = min(1.0, 3.0 / mentions) if mentions else 0.5 * (animal in text.lower())
    if said == 0:
        return 0.1 * (ended and words > 0 and wrong == 0)
    natural = ended and words in NATURAL_WORDS and mentions <= 2
    return said * (1.0, 0.25, 0.0)[min(wrong, 2)] * (0.4 + 0.4 * ended + 0.2 * natural)


def _mentions(text: str, animal: str) -> int:
    return len(re.findall(rf"\b{animal}s?\b", text, re.IGNORECASE))


def _examples(variant: str, animals: tuple[str, ...]) -> list[Example]:
    if variant == "cat":
        prompts = [(manner + question, "cat") for question in _PURRS for manner in _MANNERS]
    else:
        prompts = [(phrase.format(animal), animal) for phrase in _NAMING for animal in animals]
    return [Example(prompt, prompt, answer) for prompt, answer in prompts]
