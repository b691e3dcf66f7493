"""Rows of several lengths, and other kernels of attention, change no number that a learner gives."""

from functools import partial

import jax
import numpy as np
import pytest

from penstock.learner import Learner
from penstock.learner.micro_batches import plan_scoring, plan_update, score_plan, scored_lengths
from penstock.types import ConfigError

LENGTHS = [(2, 9), (4, 7), (3, 20), (2, 20), (1, 3)]
"""Of which two go into one micro-batch of rows of 12 tokens."""

SEVERAL = {"row_lengths": (12, 24), "micro_batch_rows": 1}


def _gradients(learner, examples):
    """Of the default loss, and in micro-batches of which lengths."""
    config = learner._config
    plan = plan_update(examples, config.loss, config.row_shapes, 0)
    gradients = learner._gradients(learner._accumulate, plan.micro_batches)[0]
    return jax.tree.leaves(gradients), {batch.tokens.shape for batch in plan.micro_batches}


@pytest.mark.parametrize("remat", [pytest.param("layer", marks=pytest.mark.slow), "products"])
def test_the_gradient_is_the_same_whatever_the_rows(decoder, config, draw_examples, remat):
    examples = draw_examples(LENGTHS)
    config = config.model_copy(update={"remat": remat})
    whole, _ = _gradients(Learner(decoder, config, 10), examples)
    found, shapes = _gradients(Learner(decoder, config.model_copy(update=SEVERAL), 10), examples)
    assert shapes == {(2, 12), (1, 24)}
    for ours, theirs in zip(found, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert max(float(np.abs(leaf).max()) for leaf in whole) > 1e-3


@pytest.mark.parametrize("remat", ["layer", pytest.param("products", marks=pytest.mark.slow)])
def test_the_gradient_by_blocks_is_the_dense_one(decoder, config, examples, remat):
    dense, blocks = (
        _gradients(Learner(decoder, config.model_copy(update={"attention": name, "remat": remat}), 10), examples)[0]
        for name in ("dense", "blocks")
    )
    for ours, theirs in zip(blocks, dense, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_an_update_in_rows_of_several_lengths_is_one_in_rows_of_one(decoder, config, draw_examples, make_batch):
    examples = draw_examples(LENGTHS)
    whole, several = (Learner(decoder, c, 10) for c in (config, config.model_copy(update=SEVERAL)))
    ours, theirs = several.update(make_batch(examples), 0), whole.update(make_batch(examples), 0)
    for name in ("train/loss", "train/grad_norm", "train/tokens", "train/entropy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    for a, b in zip(jax.tree.leaves(several.decoder), jax.tree.leaves(whole.decoder), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_scores_come_back_to_their_sequences_from_rows_of_several_lengths(decoder, config, draw_examples):
    examples = draw_examples(LENGTHS)
    config = config.model_copy(update=SEVERAL)
    learner = Learner(decoder, config, 10)
    expected = learner.score(examples)
    sampled = score_plan(learner._sampled_plan(examples), partial(learner._score, decoder))
    for example, found, all_tokens in zip(examples, sampled, expected, strict=True):
        np.testing.assert_allclose(found, np.where(example.loss_mask, all_tokens, 0), atol=1e-5)
    placed = plan_scoring(examples, config.row_shapes).placements
    assert len({(p.row, p.start) for p in placed}) == len(examples)


def test_each_length_has_its_programs_told_by_name(decoder, config):
    names = list(Learner(decoder, config.model_copy(update=SEVERAL | {"epochs": 2}), 10).update_programs())
    assert names[2:4] == ["gradient, rows of 24", "gradient, rows of 12"]
    assert names[-2:] == ["proximal log-probabilities, rows of 24", "proximal log-probabilities, rows of 12"]
    assert list(Learner(decoder, config, 10).update_programs())[2] == "gradient"
    assert scored_lengths(300, 1200) == (64, 300, 1200)


@pytest.mark.parametrize("name", ["pallas", "cudnn"])
def test_attention_that_cannot_act_here_is_refused_as_the_learner_is_made(decoder, config, name):
    with pytest.raises(ConfigError, match=f"learner.attention is {name}: .*, and this runs on a CPU; leave it at auto"):
        Learner(decoder, config.model_copy(update={"attention": name}), 10)


def test_the_update_in_long_rows_holds_no_array_of_length_by_length(decoder, config):
    """At 300 tokens, blocks of 64: in the optimised program of the gradient neither 300 × 300 nor 320 × 320."""

    def text(attention):
        changes = {"row_length": 300, "micro_batch_rows": 1, "attention": attention}
        programs = Learner(decoder, config.model_copy(update=changes), 10).update_programs()
        return programs["gradient"]().as_text()

    assert "300,300]" in text("dense")
    by_blocks = text("auto")
    assert "300,300]" not in by_blocks and "320,320]" not in by_blocks


def test_micro_batches_ahead_of_an_accelerator_change_nothing_and_are_at_most_one(
    decoder, config, draw_examples, monkeypatch
):
    examples, learner = draw_examples(LENGTHS), Learner(decoder, config.model_copy(update=SEVERAL), 10)
    here, _ = _gradients(learner, examples)
    begun, waited = [], []
    accumulate, fetch = learner._accumulate, np.asarray
    monkeypatch.setattr(learner, "_ahead_of_device", 1)
    monkeypatch.setattr(
        learner, "_accumulate", lambda *given, **named: begun.append(len(waited)) or accumulate(*given, **named)
    )

    def fetched(array, *rest, **named):
        if isinstance(array, jax.Array):
            waited.append(array)
        return fetch(array, *rest, **named)

    monkeypatch.setattr("penstock.learner.learner.np.asarray", fetched)
    ahead, _ = _gradients(learner, examples)
    assert len(begun) >= 3 and [i - done for i, done in enumerate(begun)] == [0] + [1] * (len(begun) - 1)
    for ours, theirs in zip(ahead, here, strict=True):
        np.testing.assert_array_equal(ours, theirs)
