"""The config of a fleet run: which kind a file is, and what contradicts what, told with key, value and remedy."""

from typing import Any

import pytest

from penstock.overseer import FleetRunConfig, RunConfig, load_config
from penstock.overseer.config_loading import build_config, recipe_summaries
from penstock.overseer.control.simulators import evaluation_fleet
from penstock.types import ConfigError
from tests.overseer.conftest import merged

SMALLEST: dict[str, Any] = {
    "steps": 3,
    "fleet": {"tasks": {"pole": {"id": "CartPole-v1"}}, "envs_per_worker": 4, "fragment_length": 8},
    "replay": {"fragments_per_batch": 4},
    "learner": {"minibatches": 2},
}


def build(changes: dict[str, Any] | None = None) -> FleetRunConfig:
    return build_config(FleetRunConfig, merged(SMALLEST, changes or {}))


@pytest.mark.parametrize("recipe", sorted(recipe_summaries()))
def test_every_shipped_recipe_is_valid_and_says_what_it_is(recipe):
    config = load_config(recipe)
    assert isinstance(config, FleetRunConfig) == hasattr(config, "fleet")
    assert recipe_summaries()[recipe].endswith(".") and len(recipe_summaries()[recipe]) > 20
    assert build_config(type(config), config.dump()) == config


def test_a_file_with_a_fleet_is_a_fleet_run():
    assert isinstance(load_config("cartpole"), FleetRunConfig)
    assert isinstance(load_config("cats"), RunConfig)
    with pytest.raises(ConfigError, match="fleet and curriculum are both there: .*; remove one"):
        load_config("cartpole", ["curriculum.lessons={}"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"replay": {"max_waiting": 3}},
            "replay: max_waiting is 3, below fragments_per_batch = 4: no batch would ever be full; raise it, or leave "
            "it out for twice as many",
        ),
        (
            {"replay": {"tolerances": {"cart": {"max_rollout_step_delay": 1}}}},
            "replay.tolerances names cart: no such task; fleet.tasks are pole",
        ),
        (
            {"replay": {"store": {"url": "memory://x"}}},
            "replay.store.url is memory://x: this process's memory ends with the run, and its fragments with it; give "
            "a path or another URL",
        ),
        (
            {"fleet": {"max_staleness": 9}},
            "fleet.max_staleness is 9, above replay.max_staleness = 8: older steps would be sent only to be dropped; "
            "lower the one or raise the other",
        ),
        (
            {"fleet": {"envs_per_process": 4, "parts_per_process": 3}},
            "fleet: parts_per_process is 3, which does not divide envs_per_process = 4: choose a divisor",
        ),
        (
            {"fleet": {"envs_per_process": 4, "parts_per_process": 2, "limits": {"restart_interval_s": 60.0}}},
            "fleet: parts_per_process is 2, but with limits.restart_interval_s a process acts as a whole: set "
            "parts_per_process to 1",
        ),
        (
            {"fleet": {"envs_per_process": 4, "parts_per_process": 2, "video": {"every_episodes": 9}}},
            "fleet: parts_per_process is 2, but with video.every_episodes a process acts as a whole: set "
            "parts_per_process to 1",
        ),
        (
            {"fleet": {"tasks": {"two": {"id": "CartPole-v1"}}}, "evaluation": {"simulators": 1}},
            "evaluation.simulators is 1, and fleet.tasks are 2: every task needs one; set at least 2",
        ),
        (
            {"model": {"memory": "gru"}, "learner": {"minibatches": 5}},
            "learner.minibatches is 5, and replay.fragments_per_batch is 4: minibatches of a policy with memory hold "
            "whole fragments; lower the one or raise the other",
        ),
        (
            {"learner": {"minibatches": 33}},
            "learner.minibatches is 33, and a batch has 32 steps (replay.fragments_per_batch · fleet.fragment_length): "
            "some would have none; lower it",
        ),
        (
            {"learner": {"burn_in": 2}},
            "learner.burn_in is 2 and model.memory is none: there is no state to bring up to date; set burn_in to 0, "
            "or choose a memory",
        ),
        (
            {"learner": {"burn_in": 8}, "model": {"memory": "gru"}},
            "learner.burn_in is 8, and fleet.fragment_length is 8: no step would be trained; lower the one or raise "
            "the other",
        ),
        (
            {"roles": {"inference": {}}},
            "roles names inference: no such role; there are learner, replay, rollout, evaluator",
        ),
        ({"fleet": {"worker": 2}}, "unknown key fleet.worker: did you mean fleet.workers?"),
    ],
)
def test_stages_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError) as caught:
        build(changes)
    assert str(caught.value) == message


def test_an_update_takes_so_many_steps():
    assert build().steps_per_update == 32


def test_an_evaluation_replaces_no_process_since_that_would_cut_its_neighbours_episodes():
    config = build({"fleet": {"limits": {"restart_interval_s": 5.0, "backoff_s": 0.5}}})
    limits = evaluation_fleet(config).limits
    assert (limits.restart_interval_s, limits.backoff_s) == (None, 0.5)


def test_an_evaluation_acts_in_whole_processes_since_it_may_have_fewer_simulators():
    config = build({"fleet": {"envs_per_process": 4, "parts_per_process": 4}, "evaluation": {"simulators": 2}})
    fleet = evaluation_fleet(config)
    assert (fleet.envs_per_worker, fleet.envs_per_process, fleet.parts_per_process) == (2, 2, 1)
