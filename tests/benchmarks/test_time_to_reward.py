"""What counts as reached, the ratio with its interval, and that TRL's side scores as the recipe does."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.marks import Marks

import penstock
from benchmarks import time_to_reward
from penstock.environments.cats import CatsEnvironment

EVALUATIONS = [(10, 0.1, 5.0), (20, 0.79, 9.0), (30, 0.8, 13.0), (40, 0.7, 17.0)]


def test_the_first_evaluation_at_the_bar_counts():
    assert time_to_reward.first_at(0.8, EVALUATIONS) == {"step": 30, "reward": 0.8, "seconds": 13.0}
    with pytest.raises(RuntimeError, match=r"no evaluation reached 0\.9; the best is 0\.800: lower --bar"):
        time_to_reward.first_at(0.9, EVALUATIONS)


def timed(*seconds: float) -> list[dict]:
    return [{"seconds": each, "step": 30} for each in seconds]


def test_the_ratio_is_of_pairs_with_an_interval_of_its_logarithm():
    marks = Marks()
    lines = time_to_reward.compare({"Penstock": timed(10, 20, 40), "rloo": timed(20, 40, 80)}, "rloo", marks)
    assert lines[-1].endswith("2.00 [2.00, 2.00]") and marks.missed == 0
    marks = Marks()
    lines = time_to_reward.compare({"Penstock": timed(10, 10, 10), "rloo": timed(5, 10, 40)}, "rloo", marks)
    # logs −.6931, 0, 1.3863: mean .2310, s 1.0588, t(2) = 4.3027, half 2.6303
    assert lines[-1].endswith("1.26 [0.09, 17.48]") and marks.missed == 2


def test_the_peer_is_told_the_recipe_s_own_reward_and_problems():
    tokenizer = Path(penstock.__file__).parent / "recipes" / "tokenizer"
    task, environment = time_to_reward.task_of(tokenizer, 0.8), CatsEnvironment(variant="named")
    names: dict = {}
    exec(task["source"], names)
    questions = {example.prompt: example for example in environment.train_examples()}
    assert len(task["train"]) == 64 and len(task["held_out"]) == 8
    assert not {question for question, _ in task["held_out"]} & questions.keys()
    for question, animal in task["train"][:8]:
        for text in (f" a {animal}.", " a cat and a dog.", animal, "", f"{animal}fish a b"):
            for ended in (True, False):
                completion = SimpleNamespace(finish_reason="stop" if ended else "length")  # all that it reads
                expected = environment.score(questions[question], text, completion)
                assert names["score"](text, animal, ended) == expected
    assert all(len(tokens) > 1 for tokens in task["prompts"].values()) and len(task["prompts"]) == 72
