"""Who passes; and recipes of control policies learn what they are for, which takes minutes each."""

import math
import sys
from collections.abc import Sequence

import pytest

from benchmarks import learning
from penstock.types import RolloutBatchStats

minutes = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["cartpole", "--seeds", "1", "--least", "475"], marks=minutes),
        pytest.param(["memory", "--seeds", "1", "--gain", "0.6", "--control", "model.memory=none"], marks=minutes),
    ],
    ids=lambda arguments: arguments[0],
)
def test_it_learns(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning", *arguments])
    assert learning.main() == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_recipe_that_cannot_learn_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning", "memory", "model.memory=none", "steps=20", "--seeds", "1"])
    assert learning.main() == 1 and "0 of 1 seeds pass" in capsys.readouterr().out


def stats(lesson_id: str, rewards: Sequence[float]) -> RolloutBatchStats:
    count = len(rewards)
    return RolloutBatchStats(
        lesson_id, count, count, math.fsum(rewards) / count, 0.0, 0.0, 3.0, 0.0,
        tuple(rewards), tuple(str(index) for index in range(count)),
    )  # fmt: skip


FAILING, HALF, PERFECT = [0.0] * 8, [0.0, 1.0] * 4, [1.0] * 8


def outcome(seed, lesson_id="easy", untrained=FAILING, before=FAILING, after=PERFECT, kind="trained", elapsed_s=60.0):
    stages = (stats(lesson_id, rewards) for rewards in (untrained, before, after))
    return learning.Outcome(seed, kind, lesson_id, *stages, 50.0, elapsed_s, "active")


def judged(monkeypatch, capsys, outcomes, *arguments) -> tuple[int, str]:
    """The program's answer where training gives these outcomes."""

    def run(recipe, seed, overrides, kind):
        return [each for each in outcomes if (each.seed, each.kind) == (seed, kind)]

    monkeypatch.setattr(learning, "run", run)
    monkeypatch.setattr(sys, "argv", ["learning", "toy", *arguments])
    return learning.main(), capsys.readouterr().out


def test_the_gain_is_what_came_after_the_warm_start_pair_by_pair():
    warm = outcome(0, before=HALF)
    value, (low, high) = warm.compared
    assert value == warm.gain == 0.5
    # 4 differences of 1 and 4 of 0: s² = 2/7, t(7) = 2.364624
    assert high - value == value - low == pytest.approx(2.364624 * math.sqrt(2 / 7 / 8), abs=1e-5)


def test_what_a_warm_start_taught_is_no_gain(monkeypatch, capsys):
    code, said = judged(monkeypatch, capsys, [outcome(0, before=PERFECT)], "--seeds", "1")
    assert code == 1 and "easy: learned with 0 of 1 seeds" in said and "0 of 1 seeds pass" in said


def test_the_seeds_are_those_of_the_list(monkeypatch, capsys):
    code, said = judged(
        monkeypatch, capsys, [outcome(3), outcome(8), outcome(0, after=FAILING)], "--seed-list", "3", "8"
    )
    assert code == 0 and "2 of 2 seeds pass (2 needed)" in said


def test_every_lesson_is_judged_or_those_that_are_named(monkeypatch, capsys):
    outcomes = [
        *(outcome(seed, "easy") for seed in range(5)),
        *(outcome(seed, "hard", after=HALF if seed else FAILING) for seed in range(5)),
    ]
    code, said = judged(monkeypatch, capsys, outcomes)
    assert code == 0 and "hard: learned with 4 of 5 seeds" in said and "4 of 5 seeds pass (4 needed)" in said
    code, said = judged(monkeypatch, capsys, outcomes, "--least", "0.9")
    assert code == 1 and "easy: learned with 5 of 5 seeds" in said and "0 of 5 seeds pass" in said
    code, said = judged(monkeypatch, capsys, outcomes, "--least", "0.9", "--lessons", "easy")
    assert code == 0 and "hard: learned" not in said
    with pytest.raises(SystemExit):
        judged(monkeypatch, capsys, outcomes, "--lessons", "eazy")


def test_late_seeds_do_not_pass(monkeypatch, capsys):
    code, said = judged(
        monkeypatch, capsys, [outcome(0), outcome(1, elapsed_s=700.0)], "--seeds", "2", "--within", "600"
    )
    assert code == 1 and "1 of 2 seeds took longer than 600 s" in said and "1 of 2 seeds pass" in said


def test_a_control_must_not_change_an_answer_nor_gain(monkeypatch, capsys):
    still, moved = outcome(0, before=HALF, after=HALF, kind="control"), outcome(0, before=HALF, kind="control")
    assert judged(monkeypatch, capsys, [outcome(0), still], "--seeds", "1", "--control")[0] == 0
    code, said = judged(monkeypatch, capsys, [outcome(0), moved], "--seeds", "1", "--control")
    assert code == 1 and "controls whose answers changed: 1" in said
    code, said = judged(monkeypatch, capsys, [outcome(0), moved], "--seeds", "1", "--control", "model.memory=none")
    assert code == 1 and "controls with model.memory=none that gained half as much: 1" in said
