"""Recipes of control policies learn what they are for, and the control without memory does not. Minutes each."""

import sys

import pytest

from benchmarks import learning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["cartpole", "--seeds", "1", "--least", "475"],
        ["memory", "--seeds", "1", "--gain", "0.6", "--control", "model.memory=none"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_it_learns(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning", *arguments])
    assert learning.main() == 0, capsys.readouterr().out


def test_a_recipe_that_cannot_learn_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learning", "memory", "model.memory=none", "steps=20", "--seeds", "1"])
    assert learning.main() == 1 and "0 of 1 seeds pass" in capsys.readouterr().out
