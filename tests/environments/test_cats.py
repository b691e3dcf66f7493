"""The reward of saying cat, and of saying the right animal."""

import pytest

from penstock.environments import CatsEnvironment
from penstock.environments.cats import score_answer
from penstock.inference import ScriptedContext

from .conftest import CharacterTokenizer

OTHERS = ["dog", "cow", "pig"]


@pytest.mark.parametrize(
    ("text", "ended", "reward"),
    [
        (" a cat.", True, 1.0),
        ("The Cat sat on the mat", True, 1.0),
        ("two cats", True, 1.0),
        ("a cat", False, 0.4),  # cut by the length limit: not rewarded as finished
        ("cat", True, 0.8),  # one word is no natural length
        ("a b c d e f g h cat", True, 0.8),  # nor are nine
        ("a cat and a cat", True, 1.0),
        ("cat cat cat", True, 0.8),
        ("cat " * 6, True, 0.4),
        ("cat " * 12, False, 0.1),
        ("a catch", True, 0.5),
        ("xcaty", False, 0.2),
        ("hello there", True, 0.1),
        ("hello there", False, 0.0),
        ("", True, 0.0),
        ("a cat, a dog", True, 0.25),
        ("a cat a dog a cow", True, 0.0),
        ("catdogcowpig", True, 0.0),
        ("a dog", True, 0.0),
    ],
)
def test_rewards(text, ended, reward):
    assert score_answer(text, "cat", OTHERS, ended) == pytest.approx(reward)


def mean_reward(answer, variant, decoding):
    context = ScriptedContext(CharacterTokenizer(), answer)
    groups, _ = CatsEnvironment(variant).sample(context, 16, 2, decoding, 3, "eval")
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards)


def test_ignoring_the_prompt_loses_in_the_named_variant(decoding):
    def obedient(prompt, seed):
        return " a " + next(animal for animal in ("cat", *OTHERS) if animal in prompt)

    assert mean_reward(obedient, "named", decoding) == 1.0
    assert mean_reward([" a cat"], "named", decoding) <= 0.4
    assert mean_reward(["cat dog cow pig"], "named", decoding) == 0.0
    assert mean_reward([" a cat"], "cat", decoding) == 1.0


def test_held_out_prompts_are_new_combinations_of_wording_and_animal():
    environment = CatsEnvironment("named")
    train, held_out = environment.train_examples(), environment.eval_examples()
    assert len(train) == 64 and len(held_out) == 16
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert {e.answer for e in held_out} == {"cat", *OTHERS}
    assert all(e.answer in e.prompt for e in [*train, *held_out])
