import subprocess
import sys

import pytest
from pydantic import ValidationError

from penstock.learner import ControlOptimizerConfig, PpoConfig, ReferenceKlConfig, VTraceConfig


def test_defaults_are_those_of_ppo():
    config = PpoConfig()
    assert (config.discount, config.gae_lambda, config.clip, config.epochs, config.minibatches) == (
        0.99,
        0.95,
        0.2,
        4,
        4,
    )
    assert config.value_clip is None and config.dual_clip is None and config.reference_kl is None
    assert (config.optimizer.learning_rate, config.optimizer.max_grad_norm) == (3e-4, 0.5)
    assert PpoConfig.model_validate(config.model_dump()) == config


def test_one_setting_of_the_optimiser_leaves_the_others_ppos():
    config = PpoConfig.model_validate({"optimizer": {"learning_rate": 1e-3}})
    assert config.optimizer == ControlOptimizerConfig(learning_rate=1e-3)
    assert config.optimizer.max_grad_norm == 0.5 and config.optimizer.warmup_steps == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vtrace": {"c_clip": 2.0}}, "lower c_clip"),
        ({"reference_kl": {"reference": "folder", "reference_version": 3}}, "remove one"),
        ({"value_warmup_updates": 3, "value_coefficient": 0}, "raise value_coefficient"),
        ({"value_warmup_updates": 3, "value_arrays": []}, "name the value head's arrays"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"reward_scale": float("inf")}, "reward_scale"),
        ({"clip": 0}, "clip"),
        ({"entropy_bonus": 1}, "entropy_bonus"),
        ({"epochs": 1, "minibatches": 1, "clip": 0.1}, "clip is 0.1, which has no effect: an update is one optimiser"),
        ({"epochs": 1, "minibatches": 1, "dual_clip": 3}, "dual_clip is 3.0, which has no effect"),
        ({"epochs": 1, "minibatches": 1, "value_clip": 1}, "value_clip is 1.0, which has no effect"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(values, message):
    with pytest.raises(ValidationError, match=message):
        PpoConfig.model_validate(values)


def test_the_penalty_decays_and_begins_with_its_reference():
    kl = ReferenceKlConfig(coefficient=0.2, decay=0.5, reference_version=2)
    assert [kl.coefficient_at(step) for step in range(4)] == [0.0, 0.0, 0.05, 0.025]
    assert ReferenceKlConfig(coefficient=0.2, decay=0.5, reference="folder").coefficient_at(0) == 0.2


def test_vtrace_can_be_turned_off():
    assert VTraceConfig(beyond_staleness=None).beyond_staleness is None


def test_importing_the_config_loads_neither_jax_nor_optax():
    code = (
        "import sys, penstock.learner.control_config as c; c.PpoConfig();"
        "print(sorted({'jax', 'optax', 'equinox', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
