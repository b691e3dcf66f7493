"""Sequences."""

import pytest

from penstock.environments import DigitsEnvironment
from penstock.environments.digits import score_terms


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        (" 8 10 12", True, 1.0),
        ("8, 10, 12", True, 0.5),  # something else between the terms
        (" 8 10 12", False, 0.5),
        (" 8 10 12 14", True, 0.5),
        (" 8 10 13", True, 2 / 3),
        (" 8", True, 1 / 3),
        (" 9 10 12", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_rewards(text, ended, reward):
    assert score_terms(text, ["8", "10", "12"], ended) == pytest.approx(reward)


def test_sequences_go_on_with_the_same_step():
    environment = DigitsEnvironment(terms=2, largest=12, steps=(2, -1))
    for example in [*environment.train_examples(), *environment.eval_examples()]:
        numbers = [int(word) for word in (str(example.prompt) + example.answer).split()]
        assert len(numbers) == 6
        assert {b - a for a, b in zip(numbers, numbers[1:], strict=False)} in ({2}, {-1})
        assert 0 <= min(numbers) and max(numbers) <= 12
    with pytest.raises(ValueError, match="largest is 3: too small"):
        DigitsEnvironment(largest=3)
