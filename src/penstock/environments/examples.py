"""Problems as records: drawing them by a key, and splitting them into training and held-out sets.

Splits depend on the problem's own text by a stable hash, never on its position or on Python's salted `hash`, so
they are the same on every machine, and (with `split_by_hash`) adding problems moves no other problem.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from penstock.environments.base import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    """One problem.

    Attributes:
        example_id: Unique within the environment.
        prompt: Plain text or chat messages.
        answer: The reference answer; empty where there is none.
        columns: What else a reward needs to know.
    """

    example_id: str
    prompt: Prompt
    answer: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


def draw(examples: Sequence[T], n: int, rng: np.random.Generator) -> list[T]:
    """Some examples in random order; none comes again before all have come.

    Args:
        examples: At least one.
        n: How many; may exceed the number of examples.
        rng: Decides.
    """
    rounds, rest = divmod(n, len(examples))
    order = [index for _ in range(rounds) for index in rng.permutation(len(examples))]
    order.extend(rng.choice(len(examples), rest, replace=False))
    return [examples[index] for index in order]


def stable_unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56


def split_by_rank(examples: Sequence[T], eval_fraction: float, identity: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Splits a fixed list: the given share (at least one) of smallest hash is held out.

    Returns:
        Training and held-out examples, each in the order given.
    """
    held_out = max(1, round(eval_fraction * len(examples)))
    ranked = sorted(range(len(examples)), key=lambda i: (stable_unit(identity(examples[i])), i))
    chosen = set(ranked[:held_out])
    train = [example for i, example in enumerate(examples) if i not in chosen]
    return train, [example for i, example in enumerate(examples) if i in chosen]


def split_by_hash(examples: Sequence[T], eval_fraction: float, identity: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Splits a list that may grow: held out is what hashes under the fraction.

    Equal identities stay together. Where chance left one side empty, the example nearest to the border changes
    sides with its equals, so that both have at least one unless all identities are equal.

    Returns:
        Training and held-out examples, each in the order given.
    """
    hashes = [stable_unit(identity(example)) for example in examples]
    border = eval_fraction
    if hashes and min(hashes) >= border:
        border = float(np.nextafter(min(hashes), 1.0))
    elif hashes and max(hashes) < border:
        border = max(hashes)
    train = [example for example, value in zip(examples, hashes, strict=True) if value >= border]
    return train, [example for example, value in zip(examples, hashes, strict=True) if value < border]
