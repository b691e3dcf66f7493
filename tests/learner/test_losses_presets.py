"""Every preset against formulas written out in float64: values, and gradients by finite differences."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import LossConfig, sequence_weights
from penstock.learner.config import PRESETS, Preset
from penstock.learner.losses import LossInputs, policy_token_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")

LENGTHS = (1, 3, 2)
SEQUENCE = np.repeat(np.arange(3), LENGTHS)
LOGPROBS = np.array([-1.0, -2.0, -0.5, -1.5, -0.7, -3.0])
MOVED = np.array([0.3, -0.4, 0.1, 0.5, -0.01, 0.0098])
"""ℓ_θ − ℓ_p."""
STALE = np.array([0.0, 1.0, -0.2, 0.1, 0.3, 0.2])
"""ℓ_p − ℓ_b."""
ADVANTAGE = np.array([1.0, -2.0, -2.0, -2.0, 0.5, 0.5])
MAX_TOKENS = 4


def weights(preset):
    return np.array(sequence_weights(LENGTHS, LossConfig(preset=preset).aggregation, MAX_TOKENS))[SEQUENCE]


def ours(preset, logprobs, **more):
    """Σ a_i Σ L_it, with two entries of padding that hold nonsense."""
    tail = np.array([7.0, -9.0])
    filled = lambda values: jnp.array(np.concatenate([values, tail]), jnp.float32)  # noqa: E731
    inputs = LossInputs(
        jnp.concatenate([logprobs, jnp.array(tail, jnp.float32)]),
        filled(LOGPROBS - MOVED - STALE),
        filled(LOGPROBS - MOVED),
        filled(ADVANTAGE),
        filled(np.zeros(6)),
        sequence=jnp.array([*SEQUENCE, 0, 2], jnp.int32),
        real=jnp.arange(8) < 6,
    )
    terms = policy_token_loss(LossConfig(preset=preset, **more), inputs)
    return (jnp.array(weights(preset), jnp.float32) * terms.loss[:6]).sum(), terms


def written_out(preset, logprobs, at):
    """The same, sequence by sequence; what is fixed (stop-gradient) is taken at `at`."""
    total = 0.0
    for sequence in range(3):
        own = np.flatnonzero(SEQUENCE == sequence)
        for t in own:
            w, a = min(math.exp(STALE[t]), 2.0), ADVANTAGE[t]
            rho = math.exp((logprobs - LOGPROBS + MOVED)[t])
            low, high = PRESETS[preset].get("clip_epsilon_low", 0.2), PRESETS[preset].get("clip_epsilon_high", 0.2)
            if preset == "gspo":
                rho = math.exp(np.mean([(at - LOGPROBS + MOVED)[u] for u in own]) + logprobs[t] - at[t])
            if preset == "cispo":
                loss = -w * min(math.exp((at - LOGPROBS + MOVED)[t]), 1 + high) * a * logprobs[t]
            else:
                loss = -w * min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
            length = {"token": 6, "sequence": 3 * len(own), "constant": 3 * MAX_TOKENS}
            total += loss / length[LossConfig(preset=preset).aggregation]
    return total


def finite_differences(function, at, step=1e-5):
    moves = np.eye(len(at)) * step
    return np.array([(function(at + move) - function(at - move)) / (2 * step) for move in moves])


GOLDEN = {
    "rloo": 1.028164, "grpo": 0.347391, "dr_grpo": 0.514082, "dapo": 1.014831, "gspo": 0.384374, "cispo": -1.344333,
    "reinforce_pp": 1.028164, "ppo": 1.028164,
}  # fmt: skip
"""By hand: rloo's tokens are −1.2 (clipped), 2 · 1.6 (clipped, truncated), .818731 · 2.210342, 1.105171 · 3.297443,
−1.349859 · .495025 and −1.221403 · .504924, 6.168983 in all, over 6; gspo's ratios e^.3, e^.066667 and e^−.0001."""


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_has_its_value_and_its_gradient(preset):
    value, _ = ours(preset, jnp.array(LOGPROBS, jnp.float32))
    assert float(value) == pytest.approx(GOLDEN[preset], rel=1e-4)
    assert float(value) == pytest.approx(written_out(preset, LOGPROBS, LOGPROBS), rel=1e-5)
    gradient = jax.grad(lambda ell: ours(preset, ell)[0])(jnp.array(LOGPROBS, jnp.float32))
    expected = finite_differences(lambda ell: written_out(preset, ell, LOGPROBS), LOGPROBS)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)
    assert np.abs(expected).max() > 0.05


@pytest.mark.parametrize(
    ("preset", "clipped"),
    [
        ("rloo", [1, 1, 0, 0, 0, 0]),
        ("dapo", [1, 1, 0, 0, 0, 0]),
        ("gspo", [1, 0, 0, 0, 0, 0]),
        ("cispo", [0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_token_that_is_clipped_has_no_gradient(preset, clipped):
    gradient, terms = jax.grad(lambda ell: ours(preset, ell), has_aux=True)(jnp.array(LOGPROBS, jnp.float32))
    assert terms.clipped[:6].tolist() == [bool(each) for each in clipped]
    assert ((np.asarray(gradient) == 0) == terms.clipped[:6]).all()


def test_every_preset_is_in_the_table_of_golden_numbers():
    assert set(GOLDEN) == set(PRESETS) == set(get_args(Preset))
