"""The losses against numbers that TRL and verl computed with their own functions (scripts/make_golden_losses.py)."""

import json
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.batch import RowShape
from penstock.learner import LossConfig, sequence_weights, step
from penstock.learner.config import KlConfig, Preset
from penstock.learner.head import HeadOutputs
from penstock.learner.losses import LossInputs, kl_token_loss, policy_token_loss
from penstock.learner.micro_batches import UpdatePlan, plan_update
from penstock.types import RLExample

pytestmark = pytest.mark.usefixtures("strict_dtypes")

GOLDEN = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text("utf-8"))
BATCH = {name: np.array(rows, np.float32) for name, rows in GOLDEN["batch"].items()}
SAMPLED = BATCH["mask"] > 0
SEQUENCE = np.nonzero(SAMPLED)[0]


def token_loss(config: LossConfig, kl: KlConfig):
    """Of each token."""
    of_tokens = partial(policy_token_loss, config)
    return partial(kl_token_loss, kl, of_tokens) if kl.coefficient else of_tokens


def settings_of(case: dict) -> tuple[LossConfig, KlConfig]:
    """What means the same here."""
    kl = KlConfig.model_validate({"reference": "initial", **case["kl"]} if case["kl"] else {})
    return LossConfig.model_validate(case["settings"]), kl


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
    return (jnp.array(weights[SEQUENCE]) * token_loss(config, kl)(inputs).loss).sum()


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: f"{case['by']}, {case['settings']}, {case['kl']}")
def test_loss_and_gradient_are_those_of_others(case: dict):
    value, gradient = jax.value_and_grad(partial(loss, *settings_of(case)))(jnp.array(BATCH["current"][SAMPLED]))
    expected = np.array(case["gradient"])
    assert float(value) == pytest.approx(case["value"], rel=2e-6, abs=1e-7)
    np.testing.assert_allclose(gradient, expected[SAMPLED], rtol=2e-5, atol=1e-7)
    assert np.all(expected[~SAMPLED] == 0) and np.abs(expected).max() > 0.01


def packed_example(index: int) -> RLExample:
    """A sequence of the batch after a prompt of two tokens; what follows its last sampled token is left off."""
    length = 2 + int(np.flatnonzero(SAMPLED[index]).max()) + 1
    filled = {name: np.concatenate([np.full(2, 7, np.float32), BATCH[name][index]])[:length] for name in BATCH}
    mask = np.concatenate([[False, False], SAMPLED[index]])[:length]
    return RLExample(
        np.full(length, index, np.int32), mask, np.ones(length, np.int32), np.arange(length, dtype=np.int32),
        filled["advantages"], filled["behaviour"], filled["reference"], np.ones(length, np.float32),
        np.where(mask, -3, -1).astype(np.int32), (f"golden-0-0/{index}",),
    )  # fmt: skip


def sources(plan: UpdatePlan, examples: list[RLExample], rows: int) -> np.ndarray:
    """[rows, 24]: of each position of the update's rows, end to end, its place in the batch's 8 · 10; else 0."""
    found = np.zeros((rows, 24), np.int32)
    for index, place in enumerate(plan.placements):
        found[place.row, place.start + 2 : place.stop] = 10 * index + np.arange(len(examples[index].tokens) - 2)
    return found


@pytest.mark.parametrize("case", GOLDEN["losses"], ids=lambda case: f"{case['by']}, {case['settings']}, {case['kl']}")
def test_packed_into_rows_and_micro_batches_they_are_the_same(case: dict):
    """By the plan of a real update, several sequences to a row; all but the forward pass, whose ℓ_θ are given."""
    (config, kl), micro_rows = settings_of(case), 2
    examples = [packed_example(index) for index in range(8)]
    before = [np.pad(BATCH["proximal"][index], (2, 0))[: len(each.tokens)] for index, each in enumerate(examples)]
    limits = [GOLDEN["max_tokens"]] * 8
    shapes = [RowShape(24, micro_rows)]
    plan = plan_update(examples, config, shapes, 0, max_tokens=limits, proximal_logprobs=before)
    assert {place.row for place in plan.placements} == {0, 1, 2} and len(plan.micro_batches) == 2
    where = sources(plan, examples, 4).reshape(2, -1)
    options = step.LossOptions(token_loss(config, kl), "stored", reads_reference=kl.in_loss)

    def total(logprobs: jax.Array) -> jax.Array:
        sums = jnp.zeros(())
        for batch, source in zip(jax.tree.map(jnp.asarray, plan.micro_batches), where, strict=True):
            own = logprobs.reshape(-1)[source[np.asarray(batch.positions)]]
            whole = HeadOutputs(own, jnp.zeros_like(own)), (step._given(options, batch), batch.loss_weight)
            tile = 5 if config.each_alone("stored") else len(own)
            for start in range(0, len(own), tile):
                part = jax.tree.map(lambda each: each[start : start + tile], whole)  # noqa: B023
                sums += step._weighted(options, *part).sum()
        return sums

    value, gradient = jax.value_and_grad(total)(jnp.array(BATCH["current"]))
    assert float(value) == pytest.approx(case["value"], rel=2e-6, abs=1e-7)
    np.testing.assert_allclose(gradient, np.array(case["gradient"]), rtol=2e-5, atol=1e-7)


def test_every_preset_is_among_them():
    assert {case["settings"].get("preset", "rloo") for case in GOLDEN["losses"]} == set(get_args(Preset))


def test_the_cases_tell_settings_apart():
    values = [case["value"] for case in GOLDEN["losses"]]
    kinds = {
        json.dumps([{**case["settings"], "preset": None}, case["kl"]], sort_keys=True) for case in GOLDEN["losses"]
    }
    assert len({round(value, 6) for value in values}) >= len(kinds)
