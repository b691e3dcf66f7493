"""The compiled gradient against an implementation without packing, tiles, micro-batches or gathering."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.batch import DeadlineBatchMaker, RowShape
from penstock.learner import LossConfig, step
from penstock.learner.config import Preset, ProximalSource
from penstock.learner.losses import TokenLoss, policy_token_loss
from penstock.learner.micro_batches import plan_update
from penstock.model.language import Segments
from penstock.types import Rollout, RolloutMetadata

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def _rows(examples, name):
    """One sequence per row."""
    longest = max(len(example.tokens) for example in examples)
    return np.stack([np.pad(getattr(e, name), (0, longest - len(e.tokens))) for e in examples])


def _plain_loss(decoder, examples, sequence_weights):
    """All scores at once, the formulas of ALGORITHMS written out; Σ_i a_i Σ_t m_it L_it."""
    tokens, positions = (jnp.asarray(_rows(examples, name)) for name in ("tokens", "position_ids"))
    segments = Segments.of(_rows(examples, "segment_ids"))
    hidden = decoder.hidden_states(tokens, positions, segments)
    scores = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
    logprobs = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - _rows(examples, "generator_log_probs")[:, 1:])
    losses = -jnp.minimum(ratio, 2.0) * _rows(examples, "advantage")[:, 1:] * logprobs
    return (jnp.where(_rows(examples, "loss_mask")[:, 1:], losses, 0).sum(axis=1) * sequence_weights).sum()


def _accumulated(decoder, examples, loss, config, rows, surrogate=LossConfig(surrogate="reinforce")):  # noqa: B008
    """Gradients, sums and how many micro-batches, under `loss`'s aggregation; ℓ_p of a surrogate of its own is off."""
    stored = None if surrogate.surrogate == "reinforce" else [e.generator_log_probs * 1.1 for e in examples]
    plan = plan_update(examples, loss, [RowShape(config.row_length, rows)], version_step=0, proximal_logprobs=stored)
    source = "current" if stored is None else "stored"
    add = step.policy_accumulator(surrogate, step.ForwardOptions(config.remat, 7), proximal=source)
    so_far, sums = step.zeros_maker()(decoder), 0
    for micro_batch in plan.micro_batches:
        so_far, of_micro_batch = add(decoder, so_far, micro_batch)
        sums += np.asarray(of_micro_batch)
    return so_far.policy, step.LossSums(*sums), len(plan.micro_batches)


@pytest.mark.parametrize("remat", ["layer", pytest.param("products", marks=pytest.mark.slow)])
def test_the_gradient_equals_the_plain_one_with_unequal_lengths(decoder, config, examples, remat):
    config = config.model_copy(update={"remat": remat})
    plain = jax.jit(jax.value_and_grad(lambda d, weights: _plain_loss(d, examples, weights)))
    lengths = np.array([example.loss_mask.sum() for example in examples], np.float32)
    assert len(set(lengths)) > 3
    for aggregation, weights in {
        "token": np.ones(7, np.float32) / lengths.sum(),
        "sequence": 1 / lengths / 7,
        "constant": np.ones(7, np.float32) / (7 * 30),
    }.items():
        value, expected = plain(decoder, weights)
        loss = LossConfig(aggregation=aggregation, max_tokens=30 if aggregation == "constant" else None)
        gradients, sums, _ = _accumulated(decoder, examples, loss, config, rows=2)
        assert float(sums.loss) == pytest.approx(float(value), abs=1e-5)
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.05
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, expected)


def test_the_gradient_of_an_entropy_bonus_is_that_of_the_mean_entropy(decoder, config, examples):
    chosen, mask = examples[:3], _rows(examples[:3], "loss_mask")[:, 1:]
    count = np.float32(mask.sum())
    tokens, positions = (jnp.asarray(_rows(chosen, name)) for name in ("tokens", "position_ids"))
    segments = Segments.of(_rows(chosen, "segment_ids"))

    def mean_entropy(decoder):
        scores = jax.nn.log_softmax(decoder.logits(decoder.hidden_states(tokens, positions, segments))[:, :-1])
        return jnp.where(mask, -(jnp.exp(scores) * scores).sum(axis=-1), 0).sum() / count

    value, expected = jax.jit(jax.value_and_grad(mean_entropy))(decoder)
    plain, with_bonus = (
        _accumulated(decoder, chosen, LossConfig(), config, 2, LossConfig(surrogate="reinforce", entropy_coefficient=c))
        for c in (0.0, 0.5)
    )
    assert float(plain[1].loss - with_bonus[1].loss) == pytest.approx(0.5 * float(value), abs=1e-5)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.05
    jax.tree.map(
        lambda less, more, entropy: np.testing.assert_allclose(less - more, 0.5 * entropy, atol=1e-5),
        plain[0], with_bonus[0], expected,
    )  # fmt: skip


@pytest.mark.parametrize("source", get_args(ProximalSource))
@pytest.mark.parametrize("preset", ["rloo", "gspo", "cispo"])
def test_a_gradient_made_in_the_forward_pass_is_the_other_one(decoder, config, examples, preset, source):
    loss = LossConfig(preset=preset, entropy_coefficient=0.1)
    if not loss.each_alone(source):
        return
    stored = [e.generator_log_probs * 1.1 for e in examples]
    plan = plan_update(examples, loss, [RowShape(config.row_length, 7)], version_step=0, proximal_logprobs=stored)
    (batch,), made = plan.micro_batches, []
    for alone in (True, False):
        options = step.LossOptions(partial(policy_token_loss, loss), source, True, each_alone=alone)
        add = jax.jit(partial(step.accumulate, options, step.ForwardOptions(config.remat, 7)))
        made.append(add(decoder, step.zeros_maker()(decoder), batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), made[0][0], made[1][0])
    np.testing.assert_allclose(made[0][1], made[1][1], rtol=1e-5)


@pytest.mark.parametrize("alone", [True, False])
def test_a_loss_that_is_no_number_for_padding_is_one_for_the_step(decoder, config, examples, alone):
    """Padding has a behaviour log-probability of 0."""

    def token_loss(given):
        return TokenLoss(-given.logprobs + jnp.log(-given.behaviour_logprobs))

    (batch,) = plan_update(examples[:2], LossConfig(), [RowShape(config.row_length, 2)], version_step=0).micro_batches
    assert int(batch.count) < len(batch.labels)
    options = step.LossOptions(token_loss, each_alone=alone)
    add = jax.jit(partial(step.accumulate, options, step.ForwardOptions(config.remat, 7)))
    found = add(decoder, step.zeros_maker()(decoder), batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize(
    "preset",
    [pytest.param(each, marks=() if each == "gspo" else pytest.mark.slow) for each in get_args(Preset)],
)
def test_micro_batches_add_up_to_the_one_batch_gradient(decoder, config, examples, preset):
    correction = {"scope": "sequence_mean", "veto": 1e-3}
    loss = LossConfig(preset=preset, entropy_coefficient=0.1, correction=correction)
    whole, whole_sums, one = _accumulated(decoder, examples, loss, config, rows=len(examples), surrogate=loss)
    parts, sums, several = _accumulated(decoder, examples, loss, config, rows=1, surrogate=loss)
    assert one == 1 and several >= 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), parts, whole)
    np.testing.assert_allclose(sums, whole_sums, rtol=1e-5)


def test_the_drift_is_of_stale_sequences_alone(decoder, config, draw_examples):
    """Each token that is off by d adds expm1(d) − d."""
    fresh, stale = draw_examples([(2, 6), (3, 9)])
    stale.weight_steps[stale.loss_mask] = -4
    _, sums, _ = _accumulated(decoder, [fresh, stale], LossConfig(), config, rows=2)
    assert float(sums.stale_tokens) == stale.loss_mask.sum()
    assert float(sums.tokens) == fresh.loss_mask.sum() + stale.loss_mask.sum()
    rows = [jnp.asarray(_rows([fresh, stale], name)) for name in ("tokens", "position_ids")]
    segments = Segments.of(_rows([fresh, stale], "segment_ids"))
    scores = np.asarray(jax.nn.log_softmax(decoder.logits(decoder.hidden_states(*rows, segments))))
    differences = []
    for example, row in zip((fresh, stale), scores, strict=True):
        at = np.flatnonzero(example.loss_mask)
        differences.append(row[at - 1, example.tokens[at]] - example.generator_log_probs[at])
    kl = [np.sum(np.expm1(d) - d) for d in differences]
    assert float(sums.stale_kl) == pytest.approx(kl[1], rel=1e-4)
    assert float(sums.ratio) == pytest.approx(np.exp(np.concatenate(differences)).sum(), rel=1e-4)


def _conversations(advantage, *rewards):
    """The batch of a group in which each member speaks twice, two tokens each time, and earns so much for it."""
    mask = np.array([True, True, False, True, True])
    maker = DeadlineBatchMaker(advantage, max_tokens=24)
    for index, (first, second) in enumerate(rewards):
        rng = np.random.default_rng(index)
        earned = np.float32([0, first, 0, 0, second])
        drawn = rng.integers(0, 41, 7).astype(np.int32), np.where(mask, -rng.random(5) - 2, 0).astype(np.float32)
        rollout = Rollout("toy", "x", drawn[0][:2], drawn[0][2:], drawn[1], earned, first + second, response_mask=mask)
        maker.add_rollout(rollout.with_metadata(RolloutMetadata("w", 0.0, 0), f"a-0-0/{index}", "toy"))
    return maker.create_batch(1)


def test_rewards_per_turn_have_another_gradient_than_their_sum(decoder, config):
    def gradient(advantage, *rewards):
        examples = _conversations(advantage, *rewards)
        gradients, _, _ = _accumulated(decoder, examples, LossConfig(), config, rows=2)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])

    # Both episodes earn 1: nothing to learn from their sums, but one's second turn was better than the other's.
    assert not gradient("rloo", (0, 1), (1, 0)).any()
    assert np.abs(gradient("turn", (0, 1), (1, 0))).max() > 1e-3
    # All that differs was earned by the first turn: the second learns nothing from it, and did under the sum.
    summed, by_turn = gradient("rloo", (1, 0), (0, 0)), gradient("turn", (1, 0), (0, 0))
    assert np.abs(by_turn).max() > 1e-3 and np.abs(summed - by_turn).max() > 1e-3
    for example in _conversations("turn", (1, 0), (0, 0)):
        assert not example.advantage[-2:].any() and example.advantage[2:4].all()
    # What is earned at the end alone is everybody's.
    np.testing.assert_array_equal(gradient("turn", (0, 1), (0, 0)), gradient("rloo", (0, 1), (0, 0)))
