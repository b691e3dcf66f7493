"""Lettered options."""

import pytest

from penstock.environments import MultipleChoiceEnvironment
from penstock.environments.multiple_choice import score_choice
from penstock.types import ConfigError


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        ("B", True, 1.0),
        (" (B). ", True, 1.0),
        ("B)", True, 1.0),
        ("B because", True, 0.5),
        ("B", False, 0.5),
        ("C", True, 0.1),
        ("Because", True, 0.0),
        ("b", True, 0.0),
        ("E", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_rewards(text, ended, reward):
    assert score_choice(text, "B", "ABCD", ended) == reward


def test_letters_are_spread_evenly_and_the_right_option_belongs_to_the_kind():
    environment = MultipleChoiceEnvironment(options=3)
    examples = [*environment.train_examples(), *environment.eval_examples()]
    assert len(examples) > 1500
    for letter in "ABC":
        assert 0.28 < sum(e.answer == letter for e in examples) / len(examples) < 0.39
    colours = [e for e in examples if e.prompt.startswith("Which is a colour?")]
    words = {e.prompt.split(f"{e.answer}) ")[1].split()[0] for e in colours}
    assert words == {"red", "blue", "green", "black", "white", "pink"}
    with pytest.raises(ConfigError, match="options is 7: it takes 2 to 6"):
        MultipleChoiceEnvironment(options=7)
