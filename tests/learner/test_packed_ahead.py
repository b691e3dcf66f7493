"""While an update is computed, what comes after it is packed and handed to the device; results stay the same."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from penstock.learner import CriticConfig, KlConfig, Learner, LossConfig
from penstock.learner.micro_batches import plan_update
from penstock.types import TrainingBatch

WAYS = {
    "one step": {},
    "several steps": {"minibatches": 3, "epochs": 2},
    "several steps against the behaviour": {"minibatches": 2, "proximal": "behaviour"},
    "a value head": {"loss": LossConfig(preset="ppo"), "critic": CriticConfig()},
    "a value head and several steps": {"loss": LossConfig(preset="ppo"), "critic": CriticConfig(), "minibatches": 2},
    "a batch without scores of its reference": {"kl": KlConfig(reference="initial", coefficient=0.1)},
}


@pytest.fixture
def batches(draw_examples) -> list[TrainingBatch]:
    """Of three updates, each of seven groups of one; some sequences are of the version that trains on them."""
    made = []
    for step in range(3):
        drawn = draw_examples([(2, 3), (5, 12), (3, 20), (1, 7), (4, 1), (2, 9), (6, 14)], seed=step, weight_step=step)
        drawn = tuple(replace(each, rollout_ids=(f"t-{step}-{index}/0",)) for index, each in enumerate(drawn))
        made.append(TrainingBatch(f"batch {step}", step, drawn, (), {}))
    return made


def told(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("train/")}


DEFAULT = "several steps"
"""Of the ways, the one that takes all there is: recomputed weights, rows of the next step and of the next update."""


@pytest.mark.parametrize("way", [way if way == DEFAULT else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_updates_are_the_same_to_the_bit_whether_packed_ahead_or_not(decoder, config, batches, compilations, way):
    changed = config.model_copy(update=WAYS[way])
    plain, ahead = Learner(decoder, changed, 10, 3), Learner(decoder, changed, 10, 3)
    ahead.coming = dict(enumerate(batches)).get
    ahead.compile()
    compilations.clear()
    seen = []
    for step, batch in enumerate(batches):
        metrics = ahead.update(batch, step)
        seen.append(metrics["throughput/packed_ahead"])
        assert told(metrics) == told(plain.update(batch, step))
    scored_late = way == "a batch without scores of its reference"
    assert seen == ([0, 0, 0] if scored_late else [0, 1, 1])
    arrays = plain.state_arrays()
    for name, value in ahead.state_arrays().items():
        np.testing.assert_array_equal(value, arrays[name], err_msg=name)
    for a, b in zip(jax.tree.leaves(plain.decoder), jax.tree.leaves(ahead.decoder), strict=True):
        np.testing.assert_array_equal(a, b)
    assert compilations == [], "rows that lie on the device already take the compiled programs"


def test_rows_are_packed_while_the_device_computes_and_one_step_ahead(decoder, config, batches, monkeypatch):
    order = []
    plan, apply = plan_update, Learner._applied
    monkeypatch.setattr("penstock.learner.learner.plan_update", lambda *a, **k: order.append("pack") or plan(*a, **k))
    monkeypatch.setattr(Learner, "_applied", lambda *arguments: order.append("apply") or apply(*arguments))
    learner = Learner(decoder, config, 10)
    learner.coming = dict(enumerate(batches)).get
    for step, batch in enumerate(batches):
        learner.update(batch, step)
    assert order == ["pack", "pack", "apply", "pack", "apply", "apply"], "the next before each step is applied"


def test_a_batch_that_becomes_known_late_is_packed_then(decoder, config, batches):
    """Asked at every micro-batch, until there is one."""
    learner, asked = Learner(decoder, config, 10), []
    learner.coming = lambda step: asked.append(step) or (batches[step] if len(asked) == 2 else None)
    learner.update(batches[0], 0)
    assert asked == [1, 1] and learner.update(batches[1], 1)["throughput/packed_ahead"] == 1


def test_what_was_packed_of_another_batch_is_let_go(decoder, config, batches):
    learner, plain = Learner(decoder, config, 10), Learner(decoder, config, 10)
    learner.coming = lambda step: replace(batches[2], step=step)
    for step in (0, 1):
        metrics = learner.update(batches[step], step)
        assert metrics["throughput/packed_ahead"] == 0
        assert told(metrics) == told(plain.update(batches[step], step))
