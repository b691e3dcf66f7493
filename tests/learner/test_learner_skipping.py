"""Sequences without an advantage: no arithmetic, and every denominator as if there had been some."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from penstock.batch import RowShape
from penstock.learner import Learner, LearnerConfig, LossConfig, OptimizerConfig
from penstock.learner.micro_batches import plan_update

ZERO = (0, 2, 5)


@pytest.fixture
def solved(examples):
    """Seven sequences, of which three earned what their group earned."""
    return [
        replace(example, advantage=np.zeros_like(example.advantage)) if index in ZERO else example
        for index, example in enumerate(examples)
    ]


def learners(decoder, config):
    """One as it is, and one that computes everything."""
    skipping, whole = Learner(decoder, config, 10), Learner(decoder, config, 10)
    whole._uncomputed = lambda _: set()
    return skipping, whole


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_is_that_of_all_sequences(decoder, config, solved, aggregation):
    loss, rows, learner = LossConfig(aggregation=aggregation), [RowShape(24, 2)], Learner(decoder, config, 10)
    plans = [plan_update(solved, loss, rows, 0, left_out=without) for without in (learner._uncomputed(solved), ())]
    gradients = [jax.tree.leaves(learner._gradients(learner._accumulate, plan.micro_batches)[0]) for plan in plans]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert max(float(np.abs(leaf).max()) for leaf in gradients[0]) > 1e-3
    assert [len(plan.placements) for plan in plans] == [4, 7]
    computed = sum(int(batch.count) for batch in plans[0].micro_batches)
    assert computed == sum(int(e.loss_mask.sum()) for i, e in enumerate(solved) if i not in ZERO)


@pytest.mark.parametrize("steps", [{}, {"minibatches": 2, "epochs": 2}])
def test_an_update_and_its_counts_are_those_of_all_sequences(decoder, config, solved, make_batch, steps):
    solved = [replace(e, rollout_ids=(f"t-0-{i % 3}/{i}",)) for i, e in enumerate(solved)]
    pair = learners(decoder, config.model_copy(update=steps))
    skipping, whole = (learner.update(make_batch(solved), 0) for learner in pair)
    for name in ("train/tokens", "train/sequences", "train/advantage_zero_fraction", "train/optimizer_steps"):
        assert skipping[name] == whole[name]
    assert (skipping["train/skipped_sequences"], whole["train/skipped_sequences"]) == (3, 0)
    for name in ("train/loss", "train/grad_norm"):
        assert skipping[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-7)
    for ours, theirs in zip(*(jax.tree.leaves(learner.decoder) for learner in pair), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_means_are_over_what_was_computed(decoder, config, solved, make_batch):
    solo = [example for index, example in enumerate(solved) if index not in ZERO]
    skipping, alone = (Learner(decoder, config, 10).update(make_batch(each), 0) for each in (solved, solo))
    for name in ("train/entropy", "train/ratio_mean", "train/correction_fraction", "throughput/row_fill"):
        assert skipping[name] == pytest.approx(alone[name], rel=1e-6)
    assert 0 < skipping["throughput/row_fill"] <= 1


@pytest.mark.parametrize("steps", [{}, {"proximal": "recompute"}])
def test_without_any_advantage_the_step_is_taken_with_a_gradient_of_zero(decoder, config, solved, make_batch, steps):
    none = [replace(example, advantage=np.zeros_like(example.advantage)) for example in solved]
    decays = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, warmup_steps=0)
    pair = learners(decoder, config.model_copy(update={"optimizer": decays, **steps}))
    skipping, whole = (learner.update(make_batch(none), 0) for learner in pair)
    for ours, theirs in zip(*(jax.tree.leaves(learner.decoder) for learner in pair), strict=True):
        assert (np.asarray(ours) == np.asarray(theirs)).all()
    assert skipping["train/loss"] == skipping["train/grad_norm"] == 0.0 and skipping["train/changed_fraction"] > 0.5
    assert skipping["train/tokens"] == whole["train/tokens"] > 0 and skipping["train/skipped_sequences"] == 7
    assert pair[0].step == 1 and int(pair[0].state_arrays()["adam.1.count"]) == 1
    assert not {"train/entropy", "train/ratio_mean", "throughput/row_fill"} & skipping.keys()


@pytest.mark.parametrize(
    ("loss", "needed"),
    [({}, False), ({"entropy_coefficient": 0.01}, True), ({"module": "examples/own_loss.py:TaperedReinforce"}, True)],
)
def test_what_has_a_gradient_of_its_own_needs_every_sequence(decoder, config, solved, make_batch, loss, needed):
    config = LearnerConfig.model_validate({**config.model_dump(exclude_unset=True), "loss": loss})
    assert config.needs_every_sequence is needed
    if "module" not in loss:
        metrics = Learner(decoder, config, 10).update(make_batch(solved), 0)
        assert metrics["train/skipped_sequences"] == (0 if needed else 3)
