"""The compiled gradient against an implementation without packing, tiles, micro-batches or gathering."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.learner import LossConfig, step
from penstock.learner.losses import policy_token_loss
from penstock.learner.micro_batches import plan_update


def _plain_loss(decoder, examples, config: LossConfig, max_tokens: int):
    """One sequence per row, all scores at once, the formulas of ALGORITHMS written out."""
    longest = max(len(example.tokens) for example in examples)

    def rows(name):
        return jnp.stack([np.pad(getattr(e, name), (0, longest - len(e.tokens))) for e in examples])

    hidden = decoder.hidden_states(rows("tokens"), rows("position_ids"), rows("segment_ids"))
    scores = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
    logprobs = jnp.take_along_axis(scores, rows("tokens")[:, 1:, None], axis=-1)[..., 0]
    ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - rows("generator_log_probs")[:, 1:])
    losses = -jnp.minimum(ratio, 2.0) * rows("advantage")[:, 1:] * logprobs
    mask = rows("loss_mask")[:, 1:]
    numerators, lengths = jnp.where(mask, losses, 0).sum(axis=1), mask.sum(axis=1)
    if config.aggregation == "token":
        return numerators.sum() / lengths.sum()
    if config.aggregation == "sequence":
        return (numerators / lengths).mean()
    return numerators.sum() / (len(examples) * max_tokens)


def _accumulated(decoder, examples, config, rows):
    plan = plan_update(examples, config.loss, config.row_length, rows, version_step=0)
    add = jax.jit(partial(step.accumulate, partial(policy_token_loss, config.loss), config))
    so_far = step.zeros(decoder)
    for micro_batch in plan.micro_batches:
        so_far = add(decoder, so_far, micro_batch)
    return so_far, len(plan.micro_batches)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("remat", [True, False])
def test_the_gradient_equals_the_plain_one_with_unequal_lengths(decoder, config, examples, aggregation, remat):
    loss = LossConfig(aggregation=aggregation, max_tokens=30, surrogate="reinforce")
    config = config.model_copy(update={"loss": loss, "remat": remat})
    value, expected = jax.jit(jax.value_and_grad(lambda d: _plain_loss(d, examples, loss, 30)))(decoder)
    so_far, _ = _accumulated(decoder, examples, config, rows=2)
    assert float(so_far.sums.loss) == pytest.approx(float(value), abs=1e-5)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), so_far.gradients, expected)


@pytest.mark.parametrize("preset", ["rloo", "grpo", "dr_grpo", "dapo"])
def test_micro_batches_add_up_to_the_one_batch_gradient(decoder, config, examples, preset):
    config = config.model_copy(update={"loss": LossConfig(preset=preset)})
    whole, one = _accumulated(decoder, examples, config, rows=len(examples))
    parts, several = _accumulated(decoder, examples, config, rows=1)
    assert one == 1 and several >= 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts.gradients, whole.gradients)
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-5)


def test_sums_tell_same_version_from_stale(decoder, config, draw_examples):
    """Log-probabilities that are off by a constant d have KL expm1(d) − d in this estimate."""
    fresh, stale = draw_examples([(2, 6), (3, 9)])
    stale.weight_steps[stale.loss_mask] = -4
    plain, _ = _accumulated(decoder, [fresh, stale], config, rows=2)
    assert plain.sums.same_tokens == fresh.loss_mask.sum()
    assert plain.sums.stale_tokens == stale.loss_mask.sum()
    assert plain.sums.tokens == plain.sums.same_tokens + plain.sums.stale_tokens
    differences = []
    for example in (fresh, stale):
        rows = [jnp.asarray(a)[None] for a in (example.tokens, example.position_ids, example.segment_ids)]
        scores = jax.nn.log_softmax(decoder.logits(decoder.hidden_states(*rows))[0, :-1])
        logprobs = np.take_along_axis(np.asarray(scores), example.tokens[1:, None], axis=-1)[:, 0]
        differences.append((logprobs - example.generator_log_probs[1:])[example.loss_mask[1:]])
    kl = [np.sum(np.expm1(d) - d) for d in differences]
    assert float(plain.sums.same_kl) == pytest.approx(kl[0], rel=1e-4)
    assert float(plain.sums.stale_kl) == pytest.approx(kl[1], rel=1e-4)
    assert float(plain.sums.mismatch_max) == pytest.approx(np.abs(differences[0]).max(), rel=1e-4)
    assert float(plain.sums.ratio) == pytest.approx(np.exp(np.concatenate(differences)).sum(), rel=1e-4)
