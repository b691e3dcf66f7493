"""Adafactor, Muon and learning rates by pattern: numbers of others, states by name, and layers that do not mix."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.learner.control_batches import make_policy

from penstock.learner import OptimizerConfig
from penstock.learner.control_config import ControlOptimizerConfig
from penstock.learner.optimizer import apply_gradients, direction_of, from_named, initial_state, to_named
from penstock.types import CheckpointError, ConfigError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "optimizers.json").read_text("utf-8"))
FINITE = jnp.float32(0.0)
MATRICES = ("up", "down")


def tree_of(named):
    """As a policy has them: layers stacked under one name."""
    arrays = {name: jnp.asarray(values, jnp.float32) for name, values in named.items()}
    layers = {name: arrays.pop(f"layers.{name}") for name in MATRICES if f"layers.{name}" in arrays}
    return arrays | {"layers": layers}


PARAMETERS, GRADIENTS = tree_of(GOLDEN["parameters"]), [tree_of(step) for step in GOLDEN["gradients"]]


def config_of(name, **fields):
    given = {"name": name, "max_grad_norm": None, "weight_decay": GOLDEN["weight_decay"], **fields}
    return OptimizerConfig.model_validate(given)


@cache
def stepper(config):
    return jax.jit(partial(apply_gradients, config))


def trained(config, gradients=GRADIENTS, parameters=PARAMETERS, rate=GOLDEN["rate"]):
    """Parameters after each step, and the last state."""
    state, found = initial_state(config, parameters), []
    for step in gradients:
        parameters, state, _ = stepper(config)(parameters, state, step, jnp.float32(rate), FINITE)
        found.append(parameters)
    return found, state


def assert_close(found, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)


def test_adafactor_takes_the_steps_that_transformers_takes_matrix_by_matrix():
    for found, expected in zip(trained(config_of("adafactor"))[0], GOLDEN["adafactor"], strict=True):
        assert_close(found, tree_of(expected), rtol=1e-5, atol=1e-6)


def test_muons_first_step_is_torchs_up_to_its_bfloat16():
    found = trained(config_of("muon"), GRADIENTS[:1])[0][0]
    expected = tree_of(GOLDEN["muon"])["layers"]
    for name in MATRICES:
        moved = np.asarray(expected[name] - PARAMETERS["layers"][name])
        error = np.linalg.norm(np.asarray(found["layers"][name]) - expected[name]) / np.linalg.norm(moved)
        assert error < 0.02


def newton_schulz(matrix):
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def test_muon_by_hand_in_float64_and_adamw_elsewhere():
    found, _ = trained(config_of("muon", momentum=0.9))
    rate, decay = GOLDEN["rate"], GOLDEN["weight_decay"]
    for name in MATRICES:
        after = np.asarray(PARAMETERS["layers"][name], np.float64)
        mean = np.zeros_like(after)
        for count, step in enumerate(GRADIENTS, start=1):
            gradient = np.asarray(step["layers"][name], np.float64)
            mean = 0.9 * mean + 0.1 * gradient
            momentum = 0.9 * mean / (1 - 0.9 ** (count + 1)) + 0.1 * gradient / (1 - 0.9**count)
            scale = 0.2 * np.sqrt(max(after.shape[1:]))
            direction = np.stack([scale * newton_schulz(matrix) for matrix in momentum])
            after = after - rate * (direction + decay * after)
            np.testing.assert_allclose(found[count - 1]["layers"][name], after, rtol=1e-4, atol=1e-5)
    with_adamw = trained(config_of("adamw"))[0]
    for name in ("embedding", "final_norm"):
        np.testing.assert_allclose(found[-1][name], with_adamw[-1][name], rtol=1e-5, atol=1e-7)
        assert not np.array_equal(found[-1]["layers"]["up"], with_adamw[-1]["layers"]["up"])


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_layers_do_not_mix(name):
    """What another layer's gradient is changes nothing of a layer, to the last bit."""
    others = [jax.tree.map(lambda leaf: leaf, step) for step in GRADIENTS]
    for step in others:
        for matrix in MATRICES:
            step["layers"][matrix] = step["layers"][matrix].at[1].multiply(jnp.float32(-3.0)).at[1, 0, 0].add(50.0)
    one, other = trained(config_of(name))[0][-1]["layers"], trained(config_of(name), others)[0][-1]["layers"]
    for matrix in MATRICES:
        np.testing.assert_array_equal(one[matrix][0], other[matrix][0])
        assert not np.array_equal(one[matrix][1], other[matrix][1])


NAMES = {
    "adamw": {f"adam.1.{m}.{n}" for m in ("mu", "nu") for n in GOLDEN["parameters"]} | {"adam.1.count"},
    "adafactor": {f"adam.1.{v}.{n}" for v in ("v_row", "v_col", "v") for n in GOLDEN["parameters"]} | {"adam.1.count"},
    "muon": {f"adam.1.muon.mu.layers.{n}" for n in MATRICES}
    | {f"adam.1.adam.{m}.{n}" for m in ("mu", "nu") for n in ("embedding", "final_norm")}
    | {"adam.1.muon.count", "adam.1.muon.ns_coeffs", "adam.1.adam.count"},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_state_by_name_goes_on_bit_for_bit(name):
    config = config_of(name, rates={"layers.*": 0.5})
    whole, state = trained(config)
    half, kept = trained(config, GRADIENTS[:2])
    written = to_named(kept)
    assert written.keys() == NAMES[name]
    restored, parameters = from_named(initial_state(config, PARAMETERS), written), half[-1]
    for step in GRADIENTS[2:]:
        rate = jnp.float32(GOLDEN["rate"])
        parameters, restored, _ = stepper(config)(parameters, restored, step, rate, FINITE)
    jax.tree.map(np.testing.assert_array_equal, (parameters, restored), (whole[-1], state))


@pytest.mark.parametrize(("one", "other"), [("adamw", "muon"), ("muon", "adamw"), ("adamw", "adafactor")])
def test_the_state_of_another_optimiser_is_refused(one, other):
    written = to_named(initial_state(config_of(one), PARAMETERS))
    with pytest.raises(CheckpointError, match="learner.optimizer.name was another"):
        from_named(initial_state(config_of(other), PARAMETERS), written)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_has_no_state_and_what_thaws_begins_anew(name):
    frozen = ("layers.up", "final_norm")
    config = config_of(name, frozen=frozen)
    found, state = trained(config)
    assert not any(written.endswith(frozen) for written in to_named(state))
    np.testing.assert_array_equal(found[-1]["layers"]["up"], PARAMETERS["layers"]["up"])
    thawed = from_named(fresh := initial_state(config_of(name), PARAMETERS), to_named(state))
    for array, values in to_named(thawed).items():
        begun = array.endswith(frozen)
        np.testing.assert_array_equal(values, to_named(fresh if begun else state)[array])


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_has_a_float32_master_and_what_is_not_finite_changes_nothing(name):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMETERS)
    config = config_of(name)
    after, state = trained(config, GRADIENTS[:1], narrow)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.master))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(after))
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, GRADIENTS[1])
    same = stepper(config)(after[0], state, bad, jnp.float32(0.1), FINITE)
    assert not same[2].finite
    jax.tree.map(np.testing.assert_array_equal, same[:2], (after[0], state))


@pytest.mark.parametrize("name", NAMES)
def test_rates_multiply_the_step_of_what_they_match_decay_included(name):
    rates = {"embedding": 0.1, "layers.*": 2.0, "*.down": 0.25}
    start = initial_state(config_of(name), PARAMETERS)
    plain, rated = (
        jax.jit(partial(direction_of, config))(PARAMETERS, start, GRADIENTS[0])
        for config in (config_of(name), config_of(name, rates=rates))
    )
    expected = {
        "embedding": 0.1 * plain["embedding"],
        "final_norm": plain["final_norm"],
        "layers": {"up": 2 * plain["layers"]["up"], "down": 0.5 * plain["layers"]["down"]},
    }
    assert_close(rated, expected, rtol=1e-6)
    moved = trained(config_of(name, rates=rates), GRADIENTS[:1])[0][0]
    assert_close(moved, jax.tree.map(lambda a, b: a - GOLDEN["rate"] * b, PARAMETERS, expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "moment", "decay"),
    [("adamw", "mu", 0.9), ("muon", "adam.mu", 0.9), ("adafactor", "v_row", 1 - 2**-0.8)],
)
def test_an_array_without_a_gradient_stays_and_its_moments_decay(name, moment, decay):
    (before,), state = trained(config_of(name), GRADIENTS[:1])
    gradients, rate = GRADIENTS[1] | {"embedding": None}, jnp.float32(GOLDEN["rate"])
    after, kept, applied = stepper(config_of(name))(before, state, gradients, rate, FINITE)
    np.testing.assert_array_equal(after["embedding"], before["embedding"])
    assert applied.changed_fraction == 1.0, "of what moves"
    old, new = (to_named(each)[f"adam.1.{moment}.embedding"] for each in (state, kept))
    np.testing.assert_allclose(new, decay * old, rtol=1e-6)


def test_rates_that_match_nothing_that_trains_are_bad_input():
    with pytest.raises(ConfigError, match=r"rates has \['layers.\*norm'\], which match no array that trains"):
        initial_state(config_of("adamw", rates={"layers.*norm": 2.0}), PARAMETERS)
    with pytest.raises(ConfigError, match=r"rates has \['embedding'\]"):
        initial_state(config_of("adamw", rates={"embedding": 2.0}, frozen=("embedding",)), PARAMETERS)


def test_muon_without_a_matrix_is_bad_input():
    with pytest.raises(ConfigError, match="is 'muon', but no matrix of a layer trains"):
        initial_state(config_of("muon", frozen=("layers.*",)), PARAMETERS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "adafactor", "beta2": 0.9}, "beta2 is 0.9, which has no effect: name is 'adafactor'"),
        ({"momentum": 0.5}, "momentum is 0.5, which has no effect: name is 'adamw', and it is of 'muon'"),
        ({"rates": {"embedding": 0}}, "rates has 0.0 for 'embedding'.*belong into frozen"),
        ({"rates": {"embedding": -1}}, "must be above 0"),
    ],
)
def test_keys_that_cannot_act_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig.model_validate(given)


def test_muon_takes_the_matrices_inside_a_control_policy():
    config = ControlOptimizerConfig(name="muon")
    state = to_named(initial_state(config, make_policy()))
    own = {name.removeprefix("adam.1.muon.mu.") for name in state if ".muon.mu." in name}
    assert own and not any(name.startswith(("heads", "value_head")) or name.endswith("bias") for name in own)
    assert {name for name in state if ".adam.mu.heads" in name}


def test_a_decoders_arrays_and_what_muon_takes_of_them(decoder):
    state = to_named(initial_state(config_of("muon"), decoder))
    own = {name.removeprefix("adam.1.muon.mu.layers.") for name in state if ".muon.mu." in name}
    assert own == {"query", "key", "value", "output", "gate", "up", "down"}
