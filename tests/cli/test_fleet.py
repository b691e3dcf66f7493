"""Fleets on the command line: bad input, what ships, and a whole small run with its evaluation."""

import json

import imageio.v3 as imageio
import pytest
from tests.cli.test_bad_input import expect_refusal

from penstock.rundir import read_status

SMALL = [
    "steps=2", "fleet.envs_per_worker=4", "fleet.envs_per_process=2", "fleet.fragment_length=8",
    "replay.fragments_per_batch=4", "replay.max_waiting=4", "evaluation.episodes=2", "evaluation.simulators=2",
    "model.hidden_sizes=[4]",
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "cartpole", "fleet.tasks.cartpole.id=CartPol-v1"], ["'CartPol-v1' is unknown", "CartPole-v1"]),
        (["train", "cartpole", "fleet.tasks.cartpole.kwargs={x: 1}"], ["kwargs.x", "has no such argument"]),
        (["train", "cartpole", "learner.epoch=2"], ["unknown key learner.epoch: did you mean learner.epochs?"]),
        (["train", "minecraft"], ["simulator 'minecraft' needs minestudio: pip install minestudio"]),
        (["fleet", "autotune", "cats"], ["cats has no fleet", "cartpole"]),
        (["eval", "nowhere", "--recipe", "cartpole", "--generations", "2"], ["--generations is for a language policy"]),
        (["eval", "nowhere", "--recipe", "cartpole", "--baseline", "x"], ["--baseline is for a language policy"]),
        (["eval", "nowhere", "--recipe", "cats", "--video", "x"], ["--video is for a control policy"]),
        (["eval", "nowhere", "--recipe", "cartpole"], ["nowhere holds no config.json"]),
        (["eval", "nowhere", "--recipe", "cartpole", "--lesson", "pole"], ["task 'pole' is not in the recipe"]),
    ],
)
def test_a_mistake_with_a_fleet(penstock, tmp_path, words, parts):
    expect_refusal(penstock(*words), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fleet_is_trained_looked_at_evaluated_and_resumed(penstock, penstock_process, tmp_path):
    done = penstock_process("train", "cartpole", *SMALL, "--run-dir", "mine")
    assert done.returncode == 0, done.stderr
    assert "step 2/2  return " in done.stdout and "steps/s" in done.stdout and "tok/s" not in done.stdout
    assert "Return of episodes" in done.stdout and "penstock eval mine/checkpoints/step-2" in done.stdout

    shown = penstock("status", "mine").stdout
    assert "tasks" in shown and "CartPole-v1" in shown and "steps/s" in shown
    assert "8 trained" in penstock("rollouts", "mine").stdout
    expect_refusal(penstock("serve", "mine/checkpoints/step-2"), "holds a control policy")

    report = penstock("eval", "mine/checkpoints/step-2", "--n", "3", "--video", "films", "--json")
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["tasks"]["cartpole"]["episodes"] == 3
    assert imageio.imread(tmp_path / "films" / "cartpole.mp4", plugin="pyav").ndim == 4

    for command in ("eval", "serve"):
        expect_refusal(penstock(command, "mine"), "mine is a run directory", "mine/checkpoints/step-2")
    expect_refusal(penstock("train", "--resume", "mine", "steps=1"), "steps is 1", "step-2 is at 2 already")

    again = penstock("train", "--resume", "mine", "steps=3", "-q")
    assert again.returncode == 0, again.stderr
    assert read_status(tmp_path / "mine" / "status.json")["step"] == 3


@pytest.mark.slow
def test_autotune_and_the_recipes(penstock):
    shipped = penstock("recipes").stdout
    for recipe in ("cartpole", "pendulum", "memory", "pong", "crafter", "vizdoom_basic", "minecraft"):
        assert f"\n{recipe} " in f"\n{shipped}"
    done = penstock("fleet", "autotune", "cartpole", *SMALL[1:], "--seconds", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert "fleet.envs_per_worker=" in json.loads(done.stdout)["proposal"]
