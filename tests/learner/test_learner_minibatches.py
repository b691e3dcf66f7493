"""Updates of several optimiser steps: what is shared out, against which weights, and what is one version."""

from dataclasses import replace
from typing import get_args

import jax
import numpy as np
import pytest

from penstock.batch import DeadlineBatchMaker
from penstock.batch.examples import minibatches_of
from penstock.learner import Learner, LearnerConfig, LossConfig, OptimizerConfig
from penstock.learner.config import Preset
from penstock.model.language import Segments
from penstock.types import Rollout, RolloutMetadata, fold, generator


@pytest.fixture
def config(config) -> LearnerConfig:
    """Three minibatches, twice, at a rate that moves the ratio visibly."""
    optimizer = OptimizerConfig(learning_rate=0.03, warmup_steps=0)
    return config.model_copy(update={"minibatches": 3, "epochs": 2, "optimizer": optimizer})


@pytest.fixture
def grouped(examples, draw_examples):
    """Seven groups of two, one better than the other."""
    others = draw_examples([(2, 5), (5, 10), (3, 18), (1, 6), (4, 3), (2, 8), (6, 11)], seed=1)
    return tuple(
        replace(each, rollout_ids=(f"lesson-0-{index}/{member}",), advantage=sign * np.abs(each.advantage))
        for member, (sign, half) in enumerate([(np.float32(1), examples), (np.float32(-1), others)])
        for index, each in enumerate(half)
    )


def parameters(learner):
    return [np.array(leaf) for leaf in jax.tree.leaves(learner.decoder)]


def equal(left, right):
    return all((a == b).all() for a, b in zip(parameters(left), parameters(right), strict=True))


def test_minibatches_are_whole_groups_each_once(grouped):
    parts = minibatches_of(grouped, 3, generator(5))
    assert sorted(np.concatenate(parts)) == list(range(14))
    groups = [{grouped[index].rollout_ids[0].rpartition("/")[0] for index in part} for part in parts]
    assert [len(each) for each in groups] == [3, 2, 2] and len(set.union(*groups)) == 7
    again, others = minibatches_of(grouped, 3, generator(5)), minibatches_of(grouped, 3, generator(6))
    assert [p.tolist() for p in again] == [p.tolist() for p in parts] != [p.tolist() for p in others]
    assert len(minibatches_of(grouped[:2] + grouped[7:9], 3, generator(5))) == 2, "no more than groups"
    assert minibatches_of(grouped, 1, generator(5))[0].tolist() == list(range(14))


def test_an_update_of_several_steps_is_one_version(decoder, config, grouped, make_batch):
    learner = Learner(decoder, config, 10)
    metrics = learner.update(make_batch(grouped), 0)
    assert learner.step == 1 and metrics["train/optimizer_steps"] == 6
    assert int(learner.state_arrays()["adam.1.count"]) == 6
    assert metrics["train/tokens"] == sum(int(example.loss_mask.sum()) for example in grouped)
    assert metrics["train/sequences"] == 14
    assert {"time/proximal", "train/loss", "train/grad_norm", "train/entropy"} <= metrics.keys()
    assert 0 < metrics["throughput/row_fill"] <= 1


@pytest.mark.parametrize(
    "preset", [pytest.param(each, marks=() if each == "rloo" else pytest.mark.slow) for each in get_args(Preset)]
)
def test_the_clip_acts_from_the_second_minibatch_on(decoder, config, grouped, make_batch, preset):
    bound = {"clip_epsilon_high": 0.1} if preset == "cispo" else {}  # its own is a ratio of 5
    config = config.model_copy(update={"loss": LossConfig(preset=preset, **bound)})
    one = config.model_copy(update={"minibatches": 1, "epochs": 1, "proximal": "recompute"})
    assert Learner(decoder, one, 10).update(make_batch(grouped), 0)["train/clip_fraction"] == 0
    two = config.model_copy(update={"minibatches": 2, "epochs": 1})
    learner, seen = Learner(decoder, two, 10), []
    step = learner._optimiser_step
    learner._optimiser_step = lambda *arguments: seen.append(step(*arguments)) or seen[-1]
    metrics = learner.update(make_batch(grouped), 0)
    seen = [outcome for outcome, _ in seen]
    clipped = [float(outcome.sums.clipped) for outcome in seen]
    assert clipped[0] == 0 < clipped[1]
    assert metrics["train/clip_fraction"] == pytest.approx(sum(clipped) / metrics["train/tokens"])
    assert metrics["train/loss"] == pytest.approx(np.mean([outcome.sums.loss for outcome in seen]))
    assert metrics["train/grad_norm"] == pytest.approx(np.mean([outcome.applied.grad_norm for outcome in seen]))


def test_the_first_step_is_that_of_a_learner_whose_batch_is_the_first_minibatch(decoder, config, grouped, make_batch):
    """Each step has denominators of its own: over the sequences of its minibatch alone."""
    learner, seen = Learner(decoder, config, 10, seed=3), []
    step = learner._optimiser_step
    learner._optimiser_step = lambda *arguments: seen.append(step(*arguments)) or seen[-1]
    first = generator(fold(3, "minibatches", 0))
    part = [grouped[index] for index in minibatches_of(grouped, config.minibatches, first)[0]]
    learner.update(make_batch(grouped), 0)
    outcome, _ = seen[0]
    assert 0 < len(part) < len(grouped)
    alone = Learner(decoder, config.model_copy(update={"minibatches": 1, "epochs": 1}), 10)
    metrics = alone.update(make_batch(part), 0)
    assert float(outcome.sums.loss) == pytest.approx(metrics["train/loss"], abs=1e-6)
    assert float(outcome.applied.grad_norm) == pytest.approx(metrics["train/grad_norm"], rel=1e-5)


def test_what_is_drawn_follows_from_the_seed_and_the_step(decoder, config, grouped, make_batch):
    learners = [Learner(decoder, config, 10, seed) for seed in (1, 1, 2)]
    for learner in learners:
        learner.update(make_batch(grouped), 0)
    assert equal(learners[0], learners[1]) and not equal(learners[0], learners[2])
    resumed = Learner(learners[0].decoder, config, 10, 1)
    resumed.restore_arrays(learners[0].state_arrays())
    for learner in (learners[0], resumed):
        learner.update(make_batch(grouped, 1), 1)
    assert equal(learners[0], resumed)


def test_one_step_against_recomputed_weights_is_the_step_of_before(decoder, config, grouped, make_batch):
    losses = []
    for proximal in ("auto", "recompute"):
        one = config.model_copy(update={"minibatches": 1, "epochs": 1, "proximal": proximal})
        losses.append(Learner(decoder, one, 10).update(make_batch(grouped), 0))
    for name in ("train/loss", "train/grad_norm", "train/correction_fraction"):
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-5)


def test_against_the_behaviour_the_clip_acts_on_what_is_stale_and_nothing_is_corrected(
    decoder, config, grouped, make_batch
):
    behaviour = config.model_copy(update={"minibatches": 1, "epochs": 1, "proximal": "behaviour"})
    metrics = Learner(decoder, behaviour, 10).update(make_batch(grouped), 0)
    assert metrics["train/clip_fraction"] > 0.2 and metrics["train/correction_fraction"] == 0
    assert "time/proximal" not in metrics


@pytest.mark.parametrize("minibatches", [1, 3])
def test_all_programs_are_compiled_ahead(decoder, config, grouped, make_batch, minibatches):
    learner = Learner(decoder, config.model_copy(update={"minibatches": minibatches, "epochs": 1}), 10)
    names = list(learner.update_programs())
    assert names == ["optimiser step", "empty gradient", "gradient", *["proximal log-probabilities"][: minibatches - 1]]
    learner.compile()
    seen = []

    def listen(event: str, duration: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        learner.update(make_batch(grouped), 0)
        learner.update(make_batch(grouped[:3], 1), 1)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert seen == []


def test_a_step_that_is_not_finite_is_skipped_and_the_others_count(decoder, config, grouped, make_batch):
    bad = replace(grouped[0], generator_log_probs=np.full_like(grouped[0].advantage, np.nan))
    learner = Learner(decoder, config, 10)
    metrics = learner.update(make_batch((bad, *grouped[1:])), 0)
    assert metrics["train/non_finite"] == pytest.approx(2 / 6), "one in each epoch"
    assert int(learner.state_arrays()["adam.1.count"]) == 4
    assert int(learner.state_arrays()["skipped_in_a_row"]) == 1
    assert all(np.isfinite(leaf).all() for leaf in parameters(learner))


def test_constant_aggregation_divides_by_the_limit_of_each_lesson(decoder, config, grouped, make_batch):
    constant = {"minibatches": 1, "epochs": 1, "loss": LossConfig(preset="dr_grpo")}
    config = config.model_copy(update=constant)
    other = replace(grouped[0], rollout_ids=("a-b-0-7/0",))

    def losses(limits):
        learners = [Learner(decoder, config, 1, 0, limits) for _ in range(2)]
        pairs = zip(learners, (grouped[0], other), strict=True)
        return [learner.update(make_batch([example]), 0)["train/loss"] for learner, example in pairs]

    by_row = losses({})  # of 24 tokens
    assert losses({"lesson": 12, "a-b": 6}) == pytest.approx([2 * by_row[0], 4 * by_row[1]], rel=1e-5)
    assert losses({"lesson": 12, "third": 48}) == pytest.approx([2 * by_row[0], by_row[1] / 2], rel=1e-5)
    fixed = config.model_copy(update={"loss": LossConfig(preset="dr_grpo", max_tokens=5)})
    assert Learner(decoder, fixed, 1, 0, {"lesson": 12})._denominator(other) == 5


def bandit_batch(preset, learner, scorer, rng, step):
    """Eight groups of eight answers, of one token or two, to one prompt; the second token earns nothing."""
    maker = DeadlineBatchMaker(LossConfig(preset=preset).advantage, max_tokens=24)
    logprobs = np.asarray(scorer(learner.decoder))
    for member in range(64):
        arm = int(rng.choice(41, p=np.exp(logprobs) / np.exp(logprobs).sum()))
        earned = -abs(arm - 20) / 20
        length = 1 + member % 2
        tokens, mask = np.array([arm, 3][:length], np.int32), np.array([True, False][:length])
        rollout = Rollout(
            "bandit", "x", np.array([1], np.int32), tokens, np.float32([logprobs[arm], 0][:length]),
            np.float32([earned, 0][:length]), earned, response_mask=mask,
        )  # fmt: skip
        metadata = RolloutMetadata("w", 0.0, step)
        maker.add_rollout(rollout.with_metadata(metadata, f"b-0-{member // 8}/{member % 8}", "b"))
    return maker.create_batch(8)


@pytest.mark.slow
@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_finds_the_best_arm_in_several_steps_per_update(decoder, config, make_batch, preset):
    rows = np.zeros((3, 1, 24), np.int32)
    rows[0, 0, 0], rows[2, 0, 0] = 1, 1
    inputs = *jax.numpy.asarray(rows[:2]), Segments.of(rows[2])
    scorer = jax.jit(lambda d: jax.nn.log_softmax(d.logits(d.hidden_states(*inputs))[0, 0]))
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=0)
    loss = LossConfig(preset=preset, max_tokens=2 if preset == "dr_grpo" else None)
    learner = Learner(decoder, config.model_copy(update={"optimizer": optimizer, "loss": loss}), 10)
    rng, before = np.random.default_rng(0), float(np.exp(scorer(decoder))[20])
    for step in range(25):
        metrics = learner.update(make_batch(bandit_batch(preset, learner, scorer, rng, step), step), step)
    chances = np.exp(np.asarray(scorer(learner.decoder)))
    assert before < 0.2 and chances[18:23].sum() > 0.8 and chances.argmax() in range(19, 22)
    assert np.isfinite(metrics["train/loss"])
