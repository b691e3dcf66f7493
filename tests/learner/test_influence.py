"""Gradients of single rollouts and spans: they add up to the step's, and an outlier stands out."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import Learner, LossConfig, OptimizerConfig
from penstock.learner.influence import influences
from penstock.learner.optimizer import direction_of

ADAM = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, epsilon=1e-2, max_grad_norm=None)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 3)])
def test_gradients_of_rollouts_add_up_to_those_of_each_step(
    decoder, config, examples, make_batch, aggregation, epochs, minibatches
):
    update = {"loss": LossConfig(aggregation=aggregation), "epochs": epochs, "minibatches": minibatches}
    learner, other = (Learner(decoder, config.model_copy(update=update), 9) for _ in range(2))
    batch, steps = make_batch(examples), 0
    for step in learner.planned_steps(batch, 0):
        parts = [step.gradient_of(example.rollout_ids[0], 0, 99) for example in step.examples]
        np.testing.assert_allclose(sum(map(flat, parts)), flat(step.gradients), atol=1e-6)
        steps += 1
    assert steps == other.update(batch, 0)["train/optimizer_steps"] and learner.step == 1
    np.testing.assert_array_equal(flat(learner.decoder), flat(other.decoder))


def test_what_is_left_out_lacks_its_gradient_alone(decoder, config, examples, make_batch):
    batch, name = make_batch(examples), examples[1].rollout_ids[0]
    (whole,) = [
        (flat(step.gradients), flat(step.gradient_of(name, 0, 99)))
        for step in Learner(decoder, config, 9).planned_steps(batch, 0)
    ]
    learner = Learner(decoder, config, 9)
    metrics = learner.update(batch, 0, [name])
    assert metrics["train/grad_norm"] == pytest.approx(np.linalg.norm(whole[0] - whole[1]), rel=1e-5)
    assert metrics["train/sequences"] == len(examples)


def test_what_a_rollout_did_is_the_update_less_that_without_it(decoder, config, examples, make_batch):
    config = config.model_copy(update={"optimizer": ADAM})
    batch = make_batch(examples)
    found = influences(Learner(decoder, config, 9), ADAM, batch, 0)
    assert [one.rollout_id for one in found] == [example.rollout_ids[0] for example in examples]
    learner = Learner(decoder, config, 9)
    learner.update(batch, 0)
    taken = flat(learner.decoder) - flat(decoder)
    for one in found[:3]:
        without = Learner(decoder, config, 9)
        without.update(batch, 0, [one.rollout_id])
        missing = flat(learner.decoder) - flat(without.decoder)
        assert one.moved == pytest.approx(np.linalg.norm(missing) / np.linalg.norm(taken), rel=1e-3)
        assert one.along == pytest.approx(missing @ taken / (taken @ taken), rel=1e-3, abs=1e-5)
    gradient = next(flat(step.gradients) for step in Learner(decoder, config, 9).planned_steps(batch, 0))
    assert sum(one.inner_product for one in found) == pytest.approx(-gradient @ taken, rel=1e-4)


def test_over_several_steps_each_is_summed(decoder, config, examples, make_batch):
    config, direction = config.model_copy(update={"optimizer": ADAM, "epochs": 2}), jax.jit(partial(direction_of, ADAM))
    batch, name, steps = make_batch(examples[:3]), examples[1].rollout_ids[0], 0
    one = influences(Learner(decoder, config, 9), ADAM, batch, 0)[1]
    squares = inner = moved = along = length = square = 0.0
    for step in Learner(decoder, config, 9).planned_steps(batch, 0):
        own = step.gradient_of(name, 0, 99)
        rest = jax.tree.map(jnp.subtract, step.gradients, own)
        taken, without = (flat(direction(step.decoder, step.state, each)) for each in (step.gradients, rest))
        squares, inner = squares + flat(own) @ flat(own), inner + step.rate * (flat(own) @ taken)
        moved, along = moved + np.linalg.norm(taken - without), along + (taken - without) @ taken
        length, square, steps = length + np.linalg.norm(taken), square + taken @ taken, steps + 1
    assert steps == 2
    expected = np.sqrt(squares), inner, moved / length, along / square
    assert (one.gradient_norm, one.inner_product, one.moved, one.along) == pytest.approx(expected, rel=1e-3)
    assert one.advantage == pytest.approx(float(examples[1].advantage[examples[1].loss_mask].mean()))


def test_spans_add_up_to_their_rollout(decoder, config, examples, make_batch):
    mask = np.isin(np.arange(17), [5, 6, 7, 8, 11, 12, 13, 14, 15, 16])  # between two turns, what a tool said
    spoken = replace(examples[1], loss_mask=mask, advantage=np.where(mask, 0.7, 0).astype(np.float32))
    whole = replace(examples[3], loss_mask=np.arange(8) >= 1)
    found = influences(Learner(decoder, config, 9), config.optimizer, make_batch([spoken, whole]), 0)
    assert [(span.start, span.stop) for span in found[0].spans] == [(5, 9), (11, 17)] and found[1].spans == ()
    products = [span.inner_product for span in found[0].spans]
    assert sum(products) == pytest.approx(found[0].inner_product, rel=1e-4) and all(products)
    step, name = next(Learner(decoder, config, 9).planned_steps(make_batch([spoken, whole]), 0)), spoken.rollout_ids[0]
    norms = [np.linalg.norm(flat(step.gradient_of(name, span.start, span.stop))) for span in found[0].spans]
    assert [span.gradient_norm for span in found[0].spans] == pytest.approx(norms, rel=1e-4)


def test_a_gradient_that_is_not_finite_is_its_rollout_s_alone_and_nothing_moved(decoder, config, examples, make_batch):
    bad = replace(examples[1], advantage=np.where(examples[1].loss_mask, np.inf, 0).astype(np.float32))
    batch = make_batch([examples[0], bad, *examples[2:]])
    learner = Learner(decoder, config, 9)
    found = influences(learner, config.optimizer, batch, 0)
    np.testing.assert_array_equal(learner.decoder.embedding, decoder.embedding)
    assert [one.rollout_id for one in found if not np.isfinite(one.gradient_norm)] == [bad.rollout_ids[0]]
    assert {(one.inner_product, one.moved, one.along) for one in found} == {(0.0, 0.0, 0.0)}
    assert {span.inner_product for one in found for span in one.spans} == {0.0}


def test_a_planted_outlier_moves_the_update_most(decoder, config, draw_examples, make_batch):
    examples = list(draw_examples([(3, 9)] * 16, seed=5))
    learner = Learner(decoder, config, 9)
    scores = learner.score(examples)
    examples = [
        replace(e, generator_log_probs=np.where(e.loss_mask, s, 0).astype(np.float32))
        for e, s in zip(examples, scores, strict=True)
    ]
    planted = replace(examples[11], advantage=examples[11].advantage * 8)
    found = influences(learner, config.optimizer, make_batch([*examples[:11], planted, *examples[12:]]), 0)
    assert max(found, key=lambda one: one.moved).rollout_id == planted.rollout_ids[0]
    assert max(found, key=lambda one: one.gradient_norm).rollout_id == planted.rollout_ids[0]
