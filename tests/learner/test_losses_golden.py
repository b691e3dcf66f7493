"""The losses against numbers that TRL and verl computed with their own functions (scripts/make_golden_losses.py)."""

import json
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import LossConfig, sequence_weights
from penstock.learner.config import KlConfig, Preset
from penstock.learner.losses import LossInputs, kl_token_loss, policy_token_loss

pytestmark = pytest.mark.usefixtures("strict_dtypes")

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text("utf-8"))
BATCH = {name: np.array(rows, np.float32) for name, rows in GOLDEN["batch"].items()}
SAMPLED = BATCH["mask"] > 0
SEQUENCE = np.nonzero(SAMPLED)[0]


def loss(config: LossConfig, kl: KlConfig, logprobs: jax.Array) -> jax.Array:
    """Of ℓ_θ of the sampled tokens, sequence after sequence."""
    names = ("behaviour", "proximal", "advantages", "reference")
    entries = {name: jnp.array(BATCH[name][SAMPLED]) for name in names}
    inputs = LossInputs(
        logprobs, entries["behaviour"], entries["proximal"], entries["advantages"], jnp.zeros_like(logprobs),
        sequence=jnp.array(SEQUENCE, jnp.int32), real=jnp.ones(len(SEQUENCE), bool),
        reference_logprobs=entries["reference"],
    )  # fmt: skip
    weights = sequence_weights(SAMPLED.sum(1).tolist(), config.aggregation, GOLDEN["max_tokens"])
    of_tokens = partial(policy_token_loss, config)
    terms = kl_token_loss(kl, of_tokens, inputs) if kl.coefficient else of_tokens(inputs)
    return (jnp.array(weights[SEQUENCE]) * terms.loss).sum()


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: f"{case['by']}, {case['settings']}, {case['kl']}")
def test_loss_and_gradient_are_those_of_others(case: dict):
    config = LossConfig.model_validate(case["settings"])
    kl = KlConfig.model_validate({"reference": "initial", **case["kl"]} if case["kl"] else {})
    value, gradient = jax.value_and_grad(partial(loss, config, kl))(jnp.array(BATCH["current"][SAMPLED]))
    expected = np.array(case["gradient"])
    assert float(value) == pytest.approx(case["value"], rel=2e-6, abs=1e-7)
    np.testing.assert_allclose(gradient, expected[SAMPLED], rtol=2e-5, atol=1e-7)
    assert np.all(expected[~SAMPLED] == 0) and np.abs(expected).max() > 0.01


def test_every_preset_is_among_them():
    assert {case["settings"].get("preset", "rloo") for case in GOLDEN["losses"]} == set(get_args(Preset))


def test_the_cases_tell_settings_apart():
    values = [case["value"] for case in GOLDEN["losses"]]
    kinds = {
        json.dumps([{**case["settings"], "preset": None}, case["kl"]], sort_keys=True) for case in GOLDEN["losses"]
    }
    assert len({round(value, 6) for value in values}) >= len(kinds)
