from dataclasses import replace

import jax
import numpy as np
import pytest

from penstock.batch import example_from_pair
from penstock.batch.packing import pack
from penstock.learner import Learner, LearnerConfig, OptimizerConfig, WarmStartConfig
from penstock.learner.micro_batches import scored_lengths
from penstock.learner.parity import differences_of
from penstock.model.language import Decoder, Segments
from penstock.types import ConfigError, NonFiniteError, RLExample, WeightsError


def _as_engine(learner: Learner, examples: tuple[RLExample, ...]) -> tuple[RLExample, ...]:
    """The examples with the log-probabilities that the learner's own weights give, as a perfect engine's."""
    scores = learner.score(examples)
    return tuple(
        replace(e, generator_log_probs=np.where(e.loss_mask, s, 0).astype(np.float32))
        for e, s in zip(examples, scores, strict=True)
    )


def _leaves(decoder: Decoder) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(decoder)]


def _perturbed(decoder: Decoder) -> Decoder:
    """One weight of one layer moved by a hundredth."""
    return jax.tree.map(lambda leaf: leaf.at[1, 3, 5].add(0.01) if leaf.shape == (2, 16, 24) else leaf, decoder)


def test_an_update_moves_probability_towards_what_had_an_advantage(decoder, config, examples, make_batch):
    config = config.model_copy(update={"optimizer": OptimizerConfig(learning_rate=3e-3, warmup_steps=0)})
    learner = Learner(decoder, config, 20)
    batch = _as_engine(learner, examples)
    gain = [0.0] * len(batch)
    for step in range(5):
        metrics = learner.update(make_batch(batch, step), step)
    for index, (example, score) in enumerate(zip(batch, learner.score(batch), strict=True)):
        change = (score - example.generator_log_probs)[example.loss_mask].sum()
        gain[index] = float(change * example.advantage[example.loss_mask][0])
    assert sum(gain) > 0.5
    assert learner.step == 5
    assert metrics["train/grad_norm"] > 0 and metrics["train/learning_rate"] == 3e-3


def test_a_learning_rate_of_zero_changes_nothing(decoder, config, examples, make_batch):
    learner = Learner(decoder, config.model_copy(update={"optimizer": OptimizerConfig(learning_rate=0)}), 5)
    learner.update(make_batch(examples), 0)
    assert learner.step == 1
    for before, after in zip(_leaves(decoder), _leaves(learner.decoder), strict=True):
        np.testing.assert_array_equal(before, after)


def test_metrics_name_what_happened(decoder, config, examples, make_batch):
    learner = Learner(decoder, config, 10)
    metrics = learner.update(make_batch(examples, **{"train/reward_mean": 0.25, "replay/size": 9.0}), 0)
    tokens = sum(int(example.loss_mask.sum()) for example in examples)
    assert metrics["train/tokens"] == tokens
    assert metrics["train/sequences"] == len(examples)
    assert metrics["train/reward_mean"] == 0.25 and "replay/size" not in metrics
    assert metrics["train/non_finite"] == 0.0
    assert metrics["train/clip_fraction"] == 0.0
    assert 0 < metrics["train/correction_fraction"] < 1
    assert 0 < metrics["train/entropy"] < np.log(41)
    assert "train/staleness_kl" not in metrics, "every sequence is of the learner's version"
    rows = len(pack(examples, 24))
    assert metrics["throughput/row_fill"] == sum(len(e.tokens) for e in examples) / (24 * rows)
    assert metrics["throughput/rows_used"] == rows / 4
    advantages = [e.advantage[e.loss_mask][0] for e in examples]
    assert metrics["train/advantage_mean"] == pytest.approx(np.mean(advantages), rel=1e-5)
    assert metrics["train/advantage_std"] == pytest.approx(np.std(advantages), rel=1e-5)
    assert {"train/loss", "train/ratio_mean", "time/forward_backward", "time/apply"} <= metrics.keys()


def test_nothing_is_compiled_after_compile(decoder, config, draw_examples, make_batch, compilations):
    learner = Learner(decoder, config, 10)
    learner.compile()
    compilations.clear()
    learner.update(make_batch(draw_examples([(2, 5)])), 0)
    learner.score(draw_examples([(2, 5)]))
    assert compilations == [], "compile() had compiled all that updates and scores need"
    for step, count in enumerate((3, 17, 1, 9), start=1):
        batch = draw_examples([(1 + i % 4, 3 + (7 * i) % 18) for i in range(count)], seed=step)
        learner.update(make_batch(batch, step), step)
        learner.score(batch)
    assert compilations == []


def test_parameters_that_were_handed_out_stay_valid(decoder, config, examples, make_batch):
    learner = Learner(decoder, config, 10)
    published = []
    for step in range(3):
        published.append((learner.decoder, _leaves(learner.decoder)))
        learner.update(make_batch(examples, step), step)
    for kept, values in published:
        for leaf, value in zip(jax.tree.leaves(kept), values, strict=True):
            np.testing.assert_array_equal(leaf, value)


def test_optimiser_state_is_donated(decoder, config, examples, make_batch):
    learner = Learner(decoder, config, 10)
    before = [leaf for leaf in jax.tree.leaves(learner._state) if leaf.ndim]
    learner.update(make_batch(examples), 0)
    assert all(leaf.is_deleted() for leaf in before)


def test_the_drift_of_older_rollouts_is_reported_and_stops_nothing(decoder, config, examples, make_batch):
    older = tuple(replace(e, weight_steps=np.where(e.loss_mask, -1, e.weight_steps).astype(np.int32)) for e in examples)
    metrics = Learner(decoder, config, 10).update(make_batch(older), 0)
    assert metrics["train/staleness_kl"] > 0
    own = Learner(decoder, config, 10).update(make_batch(examples), 0)
    assert "train/staleness_kl" not in own


def test_temperature_is_the_rollouts_own(decoder, config, draw_examples):
    """Log-probabilities recorded at one temperature and recomputed at another differ."""
    learner = Learner(decoder, config, 10)
    warm = draw_examples([(2, 8), (3, 15)], temperature=1.0)
    cold = draw_examples([(2, 8), (3, 15)], temperature=0.5)
    mixed = (_as_engine(learner, warm)[0], _as_engine(learner, cold)[1])
    assert np.abs(differences_of(mixed, learner.score(mixed), 0)).max() < 1e-5
    wrong = tuple(replace(e, temperature=np.full(len(e.tokens), 1.0, np.float32)) for e in mixed)
    assert np.abs(differences_of(wrong, learner.score(wrong), 0)).max() > 0.1


def test_other_parameters_are_scored_as_well_as_the_current(decoder, config, examples):
    learner, other = Learner(decoder, config, 10), Learner(_perturbed(decoder), config, 10)
    for mine, others in zip(learner.score(examples, other.decoder), other.score(examples), strict=True):
        np.testing.assert_array_equal(mine, others)
    assert scored_lengths(80) == (80,) and scored_lengths(900) == (64, 256, 900) and scored_lengths(128) == (64, 128)


def test_scores_are_aligned_and_equal_the_plain_forward_pass(decoder, config, examples):
    plain_logprobs = jax.jit(lambda d, *row: jax.nn.log_softmax(d.logits(d.hidden_states(*row))[0]))
    for example, score in zip(examples, Learner(decoder, config, 1).score(examples), strict=True):
        # Alone in a row of the same length: what follows a sequence never changes it.
        row = np.zeros((3, 1, 24), np.int32)
        row[:, 0, : len(score)] = example.tokens, example.position_ids, example.segment_ids
        plain = plain_logprobs(decoder, *row[:2], Segments.of(row[2]))[: len(score) - 1]
        expected = np.take_along_axis(np.asarray(plain), example.tokens[1:, None], axis=-1)[:, 0]
        assert score.dtype == np.float32 and score[0] == 0
        np.testing.assert_allclose(score[1:], expected, atol=1e-5)


def test_scoring_nothing_gives_nothing(decoder, config):
    assert Learner(decoder, config, 1).score([]) == []


def test_updates_that_are_not_finite_are_skipped_counted_and_end_the_run(decoder, config, examples, make_batch):
    config = config.model_copy(update={"max_non_finite_updates": 2})
    learner = Learner(decoder, config, 10)
    bad = (replace(examples[0], generator_log_probs=np.full_like(examples[0].advantage, np.nan)),)
    metrics = learner.update(make_batch(bad), 0)
    assert metrics["train/non_finite"] == 1.0
    assert "train/loss" not in metrics and "train/grad_norm" not in metrics, "JSON has no NaN"
    for before, after in zip(_leaves(decoder), _leaves(learner.decoder), strict=True):
        np.testing.assert_array_equal(before, after)
    assert learner.update(make_batch(examples, 1), 1)["train/non_finite"] == 0.0
    learner.update(make_batch(bad, 2), 2)
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        learner.update(make_batch(bad, 3), 3)


def test_a_batch_for_another_version_or_without_examples_is_refused(decoder, config, examples, make_batch):
    learner = Learner(decoder, config, 10)
    with pytest.raises(WeightsError, match="for version 1, the learner holds 0"):
        learner.update(make_batch(examples), 1)
    with pytest.raises(ConfigError, match="no examples"):
        learner.update(make_batch([]), 0)


def test_a_sequence_longer_than_a_row_is_a_clear_error(decoder, config, draw_examples, make_batch):
    with pytest.raises(ConfigError, match="row_length is 24 but a sequence has 25"):
        Learner(decoder, config, 1).update(make_batch(draw_examples([(5, 20)])), 0)


@pytest.fixture
def warm(config) -> LearnerConfig:
    """With a warm start of thirty steps."""
    return config.model_copy(update={"warm_start": WarmStartConfig(steps=30, learning_rate=0.02)})


def test_rounding_is_what_the_dtype_alone_changes(decoder, config):
    pairs = _pairs()
    assert Learner(decoder, config, 1).rounding(pairs) is None
    arrays = {name: array.astype("bfloat16") for name, array in Learner(decoder, config, 1).named_arrays().items()}
    half = Decoder.from_arrays(decoder.config.model_copy(update={"dtype": "bfloat16"}), arrays)
    rounding = Learner(half, config, 1).rounding(pairs)
    assert rounding.shape == (sum(int(pair.loss_mask.sum()) for pair in pairs),) and rounding.dtype == np.float32
    assert 1e-5 < np.abs(rounding).mean() < 0.05  # 8 bits of each factor, and not the rounding of the parameters


def _pairs() -> list[RLExample]:
    rng = np.random.default_rng(3)
    return [
        example_from_pair(rng.integers(0, 41, 4).astype(np.int32), rng.integers(0, 41, length).astype(np.int32))
        for length in (3, 9, 5, 14)
    ]


def test_the_warm_start_learns_reference_solutions(decoder, warm):
    learner, pairs = Learner(decoder, warm, 10), _pairs()
    targets = sum(int(pair.loss_mask.sum()) for pair in pairs)
    mean = -sum(s[p.loss_mask].sum() for s, p in zip(learner.score(pairs), pairs, strict=True)) / targets
    losses = []
    for _ in range(30):
        losses.append(learner.supervised_update(pairs)["train/loss"])
    assert losses[0] == pytest.approx(mean, rel=1e-5)
    assert losses[-1] < 0.3 * losses[0]
    assert learner.step == 0


def test_the_warm_starts_optimiser_state_is_its_own_and_discarded(decoder, warm, examples, make_batch):
    learner = Learner(decoder, warm, 10)
    fresh = learner.state_arrays()
    learner.supervised_update(_pairs())
    for name, value in learner.state_arrays().items():
        np.testing.assert_array_equal(value, fresh[name])
    learner.update(make_batch(examples), 0)
    assert learner._warm_start.state is None


def test_a_warm_start_that_is_not_configured_is_refused(decoder, config):
    with pytest.raises(ConfigError, match="learner.warm_start"):
        Learner(decoder, config, 10).supervised_update(_pairs())
