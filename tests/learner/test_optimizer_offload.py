"""AdamW's step with its state in the host's memory: the same numbers, piece by piece, and no state on the chip."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import LearnerConfig, OptimizerConfig, optimizer
from penstock.learner.control_config import ControlOptimizerConfig
from penstock.learner.learner import Learner
from penstock.learner.optimizer import apply_gradients, direction_of, from_named, initial_state, to_named
from penstock.types import ConfigError

SETTINGS = {"weight_decay": 0.1, "max_grad_norm": 0.5, "rates": {"layers.*": 0.5}, "frozen": ("still",)}
HERE, AWAY = OptimizerConfig(**SETTINGS), OptimizerConfig(offload=True, **SETTINGS)


@pytest.fixture(params=["float32", "bfloat16"])
def parameters(request):
    rng = np.random.default_rng(0)
    shapes = {"embedding": (12, 6), "layers": {"gate": (4, 6, 5), "input_norm": (4, 6)}, "still": (3,)}
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), request.param)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(optimizer, "_WHOLE", 20)


def steps(config, parameters, count=3, loss=0.0):
    state, apply = initial_state(config, parameters), jax.jit(partial(apply_gradients, config))
    for step in range(count):
        gradients = jax.tree.map(lambda leaf: jnp.cos(3.0 * leaf.astype(jnp.float32) + step), parameters)  # noqa: B023
        parameters, state, applied = apply(parameters, state, gradients, jnp.float32(0.01), jnp.float32(loss))
    return parameters, state, applied


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-7, atol=1e-9)


def test_offloaded_steps_are_those_of_a_state_on_the_chip(parameters):
    here, away = steps(HERE, parameters), steps(AWAY, parameters)
    assert_same(here[0], away[0])
    assert_same(to_named(here[1]), to_named(away[1]))
    assert_same(here[2], away[2])
    kinds = {name: leaf.sharding.memory_kind for name, leaf in optimizer._named_leaves(away[1])}
    assert {kind for name, kind in kinds.items() if not name.endswith("count")} == {"pinned_host"}


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [((20,), 1), ((21,), 21), ((4, 6, 5), 4), ((48, 6), 3), ((24, 6), 1), ((128, 1, 1), 64), ((130, 1, 1), 26)],
)
def test_pieces_divide_the_first_axis_and_are_whole_tiles_of_a_matrix(shape, pieces):
    assert optimizer._piece_count(shape) == pieces


def test_a_step_that_is_not_finite_moves_nothing(parameters):
    after, state, applied = steps(AWAY, parameters, 1, loss=float("nan"))
    assert not applied.finite and applied.changed_fraction == 0
    assert_same(after, parameters)
    assert_same(to_named(state), to_named(initial_state(AWAY, parameters)))


def test_a_state_comes_back_to_where_it_was_and_tells_the_direction(parameters):
    after, state, _ = steps(AWAY, parameters)
    again = from_named(initial_state(AWAY, parameters), to_named(state), AWAY.frozen)
    places = [{leaf.sharding for leaf in jax.tree.leaves(each)} for each in (again, state)]
    assert places[0] == places[1]
    assert_same(to_named(again), to_named(state))
    trained, _ = optimizer.split_frozen(AWAY.frozen, after)
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained)
    here = from_named(initial_state(HERE, parameters), to_named(state), HERE.frozen)
    there = jax.jit(partial(direction_of, AWAY))(after, state, gradients)
    assert_same(there, jax.jit(partial(direction_of, HERE))(after, here, gradients))


def test_where_it_cannot_act_it_is_refused(decoder):
    with pytest.raises(ConfigError, match=r"learner.optimizer.offload is true, and this runs on a CPU, whose memory"):
        Learner(decoder, LearnerConfig(optimizer={"offload": True}), 1)
    with pytest.raises(ConfigError, match="learner.remat is 'offload', and this runs on a CPU"):
        Learner(decoder, LearnerConfig(remat="offload"), 1)
    with pytest.raises(ValueError, match="offload is true and name 'muon', whose step needs whole matrices"):
        OptimizerConfig(name="muon", offload=True)
    with pytest.raises(ValueError, match="offload"):
        ControlOptimizerConfig(offload=True)
