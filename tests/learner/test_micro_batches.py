from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import RowShape, example_from_pair
from penstock.learner import LossConfig
from penstock.learner.micro_batches import (
    MicroBatch,
    empty_micro_batch,
    has_advantage,
    plan_scoring,
    plan_update,
)

ROW, ROWS = 12, 2
SHAPE = [RowShape(ROW, ROWS)]


def _examples(lengths):
    first, examples = 0, []
    for prompt, response in lengths:
        tokens = np.arange(first, first + prompt + response, dtype=np.int32)
        examples.append(example_from_pair(tokens[:prompt], tokens[prompt:]))
        first += prompt + response
    return examples


def _real(micro_batches: list[MicroBatch], name: str) -> np.ndarray:
    return np.concatenate([np.asarray(getattr(m, name))[: int(m.count)] for m in micro_batches])


lengths_of = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=14)


@given(lengths_of)
def test_every_loss_token_has_one_entry_and_its_predecessor_is_its_own_sequences(lengths):
    examples = _examples(lengths)
    plan = plan_update(examples, LossConfig(), SHAPE, version_step=0)
    wanted = np.concatenate([example.tokens[example.loss_mask] for example in examples])
    assert sorted(_real(plan.micro_batches, "labels")) == sorted(wanted)
    for micro_batch in plan.micro_batches:
        tokens, segments = np.ravel(micro_batch.tokens), np.ravel(micro_batch.segments.ids)
        at = np.asarray(micro_batch.positions)[: int(micro_batch.count)]
        assert (tokens[at] == np.asarray(micro_batch.labels)[: len(at)]).all()
        assert (tokens[at - 1] == tokens[at] - 1).all(), "tokens count upwards within a sequence"
        assert (segments[at - 1] == segments[at]).all()
        assert not np.asarray(micro_batch.loss_weight)[len(at) :].any()
        assert not np.asarray(micro_batch.positions)[len(at) :].any()
        assert (np.asarray(micro_batch.temperature)[len(at) :] == 1).all(), "nothing is divided by 0"


@given(lengths_of)
def test_shapes_never_depend_on_the_batch(lengths):
    expected = [(np.shape(a), a.dtype) for a in jax.tree.leaves(empty_micro_batch(*SHAPE))]
    assert len(expected) == 3, "each costs a transfer"
    for plan in (
        plan_update(_examples(lengths), LossConfig(), SHAPE, 0),
        plan_scoring(_examples(lengths), SHAPE),
    ):
        for micro_batch in plan.micro_batches:
            assert [(np.shape(a), a.dtype) for a in jax.tree.leaves(micro_batch)] == expected


@given(lengths_of, st.sampled_from(["token", "sequence", "constant"]))
def test_weights_are_over_all_sequences_of_the_step_however_it_is_cut(lengths, aggregation):
    loss = LossConfig(aggregation=aggregation, max_tokens=9 if aggregation == "constant" else None)
    for rows in (1, ROWS, 64):
        plan = plan_update(_examples(lengths), loss, [RowShape(ROW, rows)], 0)
        responses = [response for _, response in lengths]
        expected = {
            "token": 1.0,
            "sequence": 1.0,
            "constant": sum(responses) / (len(lengths) * 9),
        }[aggregation]
        assert _real(plan.micro_batches, "loss_weight").sum() == pytest.approx(expected, rel=1e-5)


def test_a_sequence_counts_as_same_version_only_as_a_whole(draw_examples):
    current, older, mixed = draw_examples([(2, 5)] * 3, weight_step=3)
    older.weight_steps[older.loss_mask] = 2
    mixed.weight_steps[np.flatnonzero(mixed.loss_mask)[0]] = 2
    plan = plan_update([current, older, mixed], LossConfig(), [RowShape(ROW, 3)], version_step=3)
    assert _real(plan.micro_batches, "same_version").sum() == current.loss_mask.sum()
    assert _real(plan.micro_batches, "same_version").sum() < len(_real(plan.micro_batches, "labels"))


def test_constant_aggregation_divides_by_the_longest_row_unless_a_limit_is_given():
    loss, shapes = LossConfig(aggregation="constant"), [RowShape(6, 1), RowShape(ROW, 1)]
    for limits, weight in ((None, 1 / (2 * ROW)), ([4, 4], 1 / (2 * 4))):
        plan = plan_update(_examples([(1, 2), (3, 5)]), loss, shapes, 0, max_tokens=limits)
        np.testing.assert_allclose(_real(plan.micro_batches, "loss_weight"), weight, rtol=1e-6)


def test_what_is_left_out_counts_and_what_is_outside_the_span_weighs_nothing(draw_examples):
    examples = draw_examples([(2, 3), (2, 4)])
    plan = plan_update(examples, LossConfig(), SHAPE, 0, left_out=["t-0-0/0"], span=(2, 4))
    weights = _real(plan.micro_batches, "loss_weight")
    tokens = examples[0].loss_mask.sum() + examples[1].loss_mask.sum()
    inside = examples[1].loss_mask[2:4].sum()
    assert len(plan.placements) == 1 and len(weights) == examples[1].loss_mask.sum() > inside
    np.testing.assert_allclose(weights, [1 / tokens] * inside + [0] * (len(weights) - inside), rtol=1e-6)


def test_an_advantage_is_one_of_any_token_under_the_loss(draw_examples):
    (example,) = draw_examples([(2, 5)])
    first = np.arange(7) == 2
    assert has_advantage(replace(example, advantage=first.astype(np.float32)))
    assert not has_advantage(replace(example, advantage=(~example.loss_mask).astype(np.float32)))


def test_scoring_asks_for_every_token_but_the_first():
    plan = plan_scoring(_examples([(3, 4), (1, 2)]), SHAPE)
    assert sorted(_real(plan.micro_batches, "labels")) == [1, 2, 3, 4, 5, 6, 8, 9]
