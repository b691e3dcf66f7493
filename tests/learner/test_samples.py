"""Rollouts of several samples in the learner: a sample is a sequence, a rollout what is weighed and counted."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from penstock.learner import Learner, LearnerConfig, LossConfig, OptimizerConfig
from penstock.learner.influence import influences
from penstock.types import RLExample


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def joined(*samples: RLExample) -> RLExample:
    """The example of one rollout with these samples."""
    names = "tokens loss_mask position_ids advantage generator_log_probs temperature weight_steps".split()
    whole = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in names}
    segments = np.concatenate([np.full(len(s.tokens), n, np.int32) for n, s in enumerate(samples, 1)])
    return replace(samples[0], **whole, segment_ids=segments)


def gradient(decoder, config: LearnerConfig, batch) -> np.ndarray:
    return next(flat(step.gradients) for step in Learner(decoder, config, 9).planned_steps(batch, 0))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rollouts_gradient_is_the_sum_of_those_of_its_samples(decoder, config, examples, make_batch, rows):
    """Per token the denominator is the number of tokens, so the samples' own gradients only have to be weighed."""
    config = config.model_copy(update={"loss": LossConfig(aggregation="token"), "micro_batch_rows": rows})
    samples = examples[1], examples[2], examples[6]
    tokens = [int(sample.loss_mask.sum()) for sample in samples]
    apart = [gradient(decoder, config, make_batch([sample])) for sample in samples]
    wanted = sum(part * count for part, count in zip(apart, tokens, strict=True)) / sum(tokens)
    found = gradient(decoder, config, make_batch([joined(*samples)]))
    assert np.linalg.norm(wanted) > 0.01
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_rollout_counts_once_however_many_samples_it_has(decoder, config, examples, make_batch):
    """Sequence aggregation of B = 2 rollouts with 3 samples, by hand: 1 / (2 · n_i), n_i over the rollout's samples."""
    config = config.model_copy(update={"loss": LossConfig(aggregation="sequence")})
    first, second, other = examples[1], examples[2], examples[6]
    n, m = (int(sample.loss_mask.sum()) for sample in (first, second))
    parts = [gradient(decoder, config, make_batch([sample])) for sample in (first, second, other)]
    wanted = (parts[0] * n / (n + m) + parts[1] * m / (n + m) + parts[2]) / 2
    batch = make_batch([joined(first, second), other])
    np.testing.assert_allclose(gradient(decoder, config, batch), wanted, atol=1e-6)
    metrics = Learner(decoder, config, 9).update(batch, 0)
    assert metrics["train/sequences"] == 2 and metrics["train/tokens"] == n + m + other.loss_mask.sum()


@pytest.mark.slow
def test_scores_are_those_of_each_sample_alone(decoder, config, examples):
    samples = examples[1], examples[2], examples[6]
    learner = Learner(decoder, config, 9)
    (found,) = learner.score([joined(*samples)])
    np.testing.assert_allclose(found, np.concatenate(learner.score(samples)), atol=1e-6)
    assert [found[at] for at in (0, 17, 40)] == [0, 0, 0], "nothing predicts the first token of a sample"


@pytest.mark.slow
def test_recomputed_log_probabilities_go_by_sample(decoder, config, examples, make_batch):
    """Two optimiser steps on one batch: the proximal log-probabilities of all samples find their tokens."""
    config = config.model_copy(update={"epochs": 2, "optimizer": OptimizerConfig(learning_rate=1e-3, warmup_steps=0)})
    samples = examples[1], examples[2]
    config = config.model_copy(update={"loss": LossConfig(aggregation="token")})
    together, apart = (Learner(decoder, config, 9) for _ in range(2))
    together.update(make_batch([joined(*samples)]), 0)
    apart.update(make_batch(samples), 0)
    np.testing.assert_allclose(flat(together.decoder), flat(apart.decoder), atol=1e-6)


@pytest.mark.slow
def test_a_critic_reads_the_values_of_all_samples_in_order(decoder, config, examples, make_batch):
    loss = LossConfig(advantage="gae", aggregation="token")
    learner = Learner(decoder, config.model_copy(update={"loss": loss}), 9)
    metrics = learner.update(make_batch([joined(examples[1], examples[2]), examples[6]]), 0)
    assert np.isfinite(metrics["train/value_loss"]) and metrics["train/tokens"] > 0


@pytest.mark.slow
def test_influence_names_positions_of_the_whole_rollout(decoder, config, examples, make_batch):
    whole, other = joined(examples[1], examples[3]), examples[6]
    mask = np.isin(np.arange(len(whole.tokens)), [6, 7, 8, 19, 20])
    whole = replace(whole, loss_mask=mask, advantage=np.where(mask, 0.7, 0).astype(np.float32))
    found, _ = influences(Learner(decoder, config, 9), config.optimizer, make_batch([whole, other]), 0)
    assert [(span.start, span.stop) for span in found.spans] == [(6, 9), (19, 21)]
    products = [span.inner_product for span in found.spans]
    assert sum(products) == pytest.approx(found.inner_product, rel=1e-4) and all(products)
