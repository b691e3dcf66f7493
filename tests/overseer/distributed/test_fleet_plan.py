from pathlib import Path
from typing import Any

from penstock.overseer import FleetRunConfig
from penstock.overseer.config_loading import build_config
from penstock.overseer.distributed.fleet_plan import FleetPlan
from penstock.overseer.distributed.roles.settings import Settings
from penstock.rundir import RunDirectory
from penstock.types import LeafSpace, Spaces

SPACES = Spaces((LeafSpace("", "box", (4,), "float32"),), (LeafSpace("", "discrete", (), "int64", (2,)),))


def plan(**changes: Any) -> FleetPlan:
    fleet = {"tasks": {"cart": {"id": "CartPole-v1"}}, "workers": 3}
    config = build_config(FleetRunConfig, {"steps": 1, "runtime": "ray", "fleet": fleet, **changes})
    return FleetPlan(Settings(config, RunDirectory("runs/x"), "a secret"), SPACES)


def test_a_fleet_run_has_one_of_each_and_as_many_workers_as_asked_for():
    specs = plan().components()
    assert [spec.name for spec in specs] == [
        "replay-0", "learner-0", "rollout-0", "rollout-1", "rollout-2", "evaluator-0",
    ]  # fmt: skip
    assert {spec.name for spec in specs if spec.essential} == {"learner-0", "replay-0"}
    assert [(role, make(7).name, least) for role, make, least in plan().scalable()] == [("rollout", "rollout-7", 1)]


def test_every_component_is_told_the_run_and_what_the_policy_sees_as_plain_values():
    for spec in plan().components():
        assert Spaces.from_values(spec.settings["spaces"]) == SPACES
        told = Settings.of_fleet(spec.settings)
        assert told.config == plan().settings.config and told.token == "a secret" and told.lineage == 0
        assert "a secret" not in repr(spec)


def test_only_the_learner_sees_an_accelerator_unless_its_role_says_otherwise():
    specs = {spec.name: spec for spec in plan(roles={"evaluator": {"env": {"JAX_PLATFORMS": "cuda"}}}).components()}
    assert specs["learner-0"].resources.env == {}
    assert specs["rollout-0"].resources.env["JAX_PLATFORMS"] == "cpu"
    assert specs["evaluator-0"].resources.env["JAX_PLATFORMS"] == "cuda"


def test_going_back_gives_learner_replay_and_evaluator_the_checkpoint():
    made = plan()
    settings = Settings(made.settings.config, made.settings.directory, "a secret", 2, Path("checkpoints/step-4"))
    anew = made.go_back(settings, {"evaluator": {"evaluated_step": 3}, "run": {}})
    assert sorted(anew) == ["evaluator-0", "learner-0", "replay-0"]
    assert all(values["lineage"] == 2 and "spaces" in values for values in anew.values())
    assert anew["learner-0"]["checkpoint"].endswith("checkpoints/step-4")
    assert anew["evaluator-0"]["state"] == {"evaluated_step": 3}
