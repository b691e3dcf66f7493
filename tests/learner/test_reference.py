"""KL to a reference: what it is, that it holds the policy, that it survives a resume, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from penstock.learner import KlConfig, Learner, LearnerConfig, OptimizerConfig, load_checkpoint, save_checkpoint
from penstock.learner.checkpoints import restore_learner
from penstock.learner.losses import LossInputs, TokenLoss, kl_estimate, kl_token_loss
from penstock.learner.reference import ReferenceWeights, check_reference
from penstock.model.language import Decoder, named_arrays, save_decoder
from penstock.text import Tokenizer
from penstock.types import CheckpointError, ConfigError

FAST = OptimizerConfig(learning_rate=0.01, warmup_steps=0)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load("penstock")


def with_kl(config: LearnerConfig, **changes: object) -> LearnerConfig:
    return config.model_copy(update={"optimizer": FAST, "kl": KlConfig(**changes)})  # pyright: ignore[reportArgumentType]


def arrays(decoder: Decoder) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, np.float32) for name, array in named_arrays(decoder).items()}


def same(left: Decoder, right: Decoder) -> bool:
    return all((a == arrays(right)[name]).all() for name, a in arrays(left).items())


# --- the estimators ------------------------------------------------------------------------------------------------


def test_estimates_by_hand(strict_dtypes):
    logprobs = jnp.array([-0.5, -1.0, -3.0], jnp.float32)
    reference = jnp.array([-0.5 - np.log(2), -1.0, -2.0], jnp.float32)  # x = ln 2, 0, −1
    expected = {"k1": [0.693147, 0, -1], "k2": [0.240227, 0, 0.5], "k3": [0.193147, 0, 0.718282]}
    for estimator, values in expected.items():
        np.testing.assert_allclose(kl_estimate(estimator, logprobs, reference), values, atol=2e-6)
    far = kl_estimate("k3", jnp.array([-300.0]), jnp.array([-1.0]))
    np.testing.assert_allclose(far, np.expm1(20.0) - 20.0, rtol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k2", lambda ours, theirs: jnp.sum(jnp.exp(ours) * (ours - theirs))),  # the reverse KL
        ("k3", lambda ours, theirs: jnp.sum(jnp.exp(theirs) * (theirs - ours))),  # the forward one
        ("k1", lambda ours, theirs: jnp.zeros(())),
    ],
)
def test_expected_gradients_on_a_softmax_over_three_tokens(estimator, divergence, strict_dtypes):
    """Tokens are drawn from the policy, so that each one's gradient counts by its probability."""
    scores, reference = jnp.array([0.3, -1.2, 0.7]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5]))
    drawn = jax.nn.softmax(scores)

    def expected(scores: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.stop_gradient(drawn) * kl_estimate(estimator, jax.nn.log_softmax(scores), reference))

    exact = jax.grad(lambda scores: divergence(jax.nn.log_softmax(scores), reference))(scores)
    np.testing.assert_allclose(jax.grad(expected)(scores), exact, atol=2e-7)


def test_the_term_stands_beside_any_loss_and_no_weight_touches_it():
    inputs = LossInputs(
        logprobs=jnp.array([-1.0, -2.0]), behaviour_logprobs=jnp.array([-9.0, -0.1]), proximal_logprobs=jnp.zeros(2),
        advantage=jnp.zeros(2), entropy=jnp.zeros(2), sequence=jnp.zeros(2, jnp.int32), real=jnp.ones(2, bool),
        reference_logprobs=jnp.array([-2.0, -2.0]),
    )  # fmt: skip
    kl = KlConfig(coefficient=0.5, estimator="k2", reference="initial")
    terms = kl_token_loss(kl, lambda given: TokenLoss(3 * given.logprobs, clipped=given.real), inputs)
    np.testing.assert_allclose(terms.loss, [-3 + 0.25, -6], rtol=1e-6)
    assert terms.clipped is inputs.real


# --- updates -------------------------------------------------------------------------------------------------------


def drift(learner: Learner, decoder: Decoder, examples) -> float:
    """Mean of |ℓ_θ − ℓ_initial| over the sampled tokens."""
    pairs = zip(learner.score(examples), learner.score(examples, decoder), examples, strict=True)
    return float(np.concatenate([np.abs(new - old)[example.loss_mask] for new, old, example in pairs]).mean())


@pytest.mark.slow
def test_a_large_coefficient_keeps_the_policy(decoder, config, examples, make_batch):
    moved = {}
    for coefficient in (0.0, 1000.0):
        changes = {"coefficient": coefficient, "estimator": "k2", "reference": "initial"} if coefficient else {}
        learner = Learner(decoder, with_kl(config, **changes), 30)
        for step in range(12):
            metrics = learner.update(make_batch(examples, step), step)
        moved[coefficient] = drift(learner, decoder, examples)
    assert 0 < metrics["train/kl_reference"] < 0.01
    assert moved[0.0] > 1.0 and moved[1000.0] < moved[0.0] / 20


def test_the_first_update_is_as_without_it_and_the_metric_is_k3(decoder, config, examples, make_batch):
    plain = Learner(decoder, with_kl(config), 10)
    held = Learner(decoder, with_kl(config, coefficient=0.7, reference="initial"), 10)
    first, second = plain.update(make_batch(examples), 0), held.update(make_batch(examples), 0)
    assert second["train/kl_reference"] == pytest.approx(0, abs=1e-12) and "train/kl_reference" not in first
    assert second["train/loss"] == pytest.approx(first["train/loss"], abs=1e-6)
    assert second["time/reference"] > 0
    version, scores = held.reference_logprobs(examples)
    assert version == 0 and all((score[~e.loss_mask] == 0).all() for score, e in zip(scores, examples, strict=True))
    difference = np.concatenate(
        [(new - old)[e.loss_mask] for new, old, e in zip(held.score(examples), scores, examples, strict=True)]
    )
    metrics = held.update(make_batch(examples, 1), 1)
    expected = (np.expm1(-difference) + difference).mean()
    assert metrics["train/kl_reference"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_micro_batches_change_nothing(decoder, config, examples, make_batch):
    scored = tuple(replace(e, reference_log_probs=(e.generator_log_probs * 0.9).astype(np.float32)) for e in examples)
    found = []
    for rows in (1, 2, 8):
        changed = with_kl(config, coefficient=0.3, reference="initial").model_copy(update={"micro_batch_rows": rows})
        learner = Learner(decoder, changed, 10)
        metrics = learner.update(make_batch(scored), 0)
        found.append((metrics, arrays(learner.decoder)))
    for metrics, parameters in found[1:]:
        assert metrics["train/loss"] == pytest.approx(found[0][0]["train/loss"], rel=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(found[0][0]["train/grad_norm"], rel=1e-6)
        assert metrics["train/kl_reference"] == pytest.approx(found[0][0]["train/kl_reference"], rel=1e-6)
        for name, array in parameters.items():
            np.testing.assert_allclose(array, found[0][1][name], atol=1e-5)


def test_the_loss_is_the_sum_of_both(decoder, config, examples, make_batch):
    scored = tuple(replace(e, reference_log_probs=(e.generator_log_probs * 0.9).astype(np.float32)) for e in examples)
    losses = {}
    for coefficient in (0.0, 0.3):
        kl = {"coefficient": coefficient, "estimator": "k2", "reference": "initial"} if coefficient else {}
        losses[coefficient] = Learner(decoder, with_kl(config, **kl), 10).update(make_batch(scored), 0)["train/loss"]
    pairs = zip(Learner(decoder, config, 10).score(examples), scored, strict=True)
    differences = np.concatenate([(ours - e.reference_log_probs)[e.loss_mask] for ours, e in pairs])
    assert losses[0.3] - losses[0.0] == pytest.approx(0.3 * (differences**2 / 2).mean(), rel=1e-4)


def test_scores_of_the_batch_are_taken_as_they_are(decoder, config, examples, make_batch):
    learner = Learner(decoder, with_kl(config, coefficient=0.3, reference="initial"), 10)
    zero = tuple(replace(e, reference_log_probs=np.zeros_like(e.generator_log_probs)) for e in examples)
    metrics = learner.update(make_batch(zero), 0)
    assert metrics["train/kl_reference"] > 1 and "time/reference" not in metrics


class Anchored:
    """A loss of one's own that reads the reference itself."""

    def compute_advantages(self, group):
        return group.rewards

    def loss(self, inputs):
        assert inputs.reference_logprobs is not None
        return jnp.square(inputs.logprobs - inputs.reference_logprobs) - inputs.advantage * inputs.logprobs


def test_a_loss_of_one_s_own_reads_the_reference(decoder, config, examples, make_batch):
    own = LearnerConfig.model_validate(
        config.model_dump(exclude={"loss"})
        | {"loss": {"module": f"{__name__}:Anchored"}, "kl": {"reference": "initial"}}
    )
    assert own.reads_reference and own.needs_every_sequence and not own.kl.in_loss
    metrics = Learner(decoder, own, 10).update(make_batch(examples), 0)
    assert metrics["train/kl_reference"] == pytest.approx(0, abs=1e-12)


# --- which weights -------------------------------------------------------------------------------------------------


def test_the_initial_weights_are_those_after_the_warm_start(decoder, config, examples, make_batch):
    warm = LearnerConfig.model_validate(
        config.model_dump() | {"warm_start": {"steps": 2}, "kl": {"coefficient": 0.1, "reference": "initial"}}
    )
    learner = Learner(decoder, warm, 10)
    learner.supervised_update(examples)
    begun = learner.decoder
    learner.update(make_batch(examples), 0)
    assert not same(begun, decoder) and not same(learner.decoder, begun)
    of_begun = Learner(begun, warm, 1).reference_logprobs(examples)[1]  # in the same rows, which round alike
    np.testing.assert_array_equal(learner.reference_logprobs(examples)[1][0], of_begun[0])


def test_every_so_many_updates_the_policy_becomes_the_reference(decoder, config, examples, make_batch):
    learner = Learner(decoder, with_kl(config, coefficient=0.1, reference="initial", sync_every=2), 10)
    seen = []
    for step in range(5):
        learner.update(make_batch(examples, step), step)
        reference = learner._reference.current(learner.decoder)
        seen.append((reference.version, same(reference.decoder, learner.decoder)))
    assert seen == [(0, False), (1, True), (1, False), (2, True), (2, False)]


def test_an_average_of_the_policy_by_hand(decoder, config, examples, make_batch):
    learner = Learner(decoder, with_kl(config, coefficient=0.1, reference="ema", ema_decay=0.75), 10)
    expected = arrays(decoder)
    for step in range(3):
        learner.update(make_batch(examples, step), step)
        expected = {name: 0.75 * expected[name] + 0.25 * new for name, new in arrays(learner.decoder).items()}
    reference = learner._reference.current(learner.decoder)
    assert reference.version == 3
    for name, array in arrays(reference.decoder).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


def test_the_average_of_a_bfloat16_policy_moves_by_less_than_its_last_bit(decoder):
    kl = KlConfig(coefficient=0.1, reference="ema", ema_decay=0.99)
    begun = jax.tree.map(jnp.ones_like, halved(decoder))
    policy = jax.tree.map(lambda leaf: 1.25 * leaf, begun)  # exact in bfloat16; one step is a third of its last bit
    reference = ReferenceWeights(kl, begun)
    reference.keep(begun)
    for step in range(1, 101):
        reference.follow(step, policy)
    expected = 1.25 - 0.25 * 0.99**100  # 1.1585
    for name, array in reference.state_arrays().items():
        assert name.startswith("reference_average.") and array.dtype == np.float32
        np.testing.assert_allclose(array, expected, rtol=1e-5)
    current = reference.current(policy).decoder
    assert {str(array.dtype) for array in named_arrays(current).values()} == {"bfloat16"}
    for array in arrays(current).values():
        np.testing.assert_array_equal(array, np.float32(jnp.bfloat16(expected)))


def test_a_reference_that_comes_back_is_kept_under_the_name_it_had_and_a_directory_s_goes_before_it(
    decoder, tokenizer, tmp_path
):
    initial = ReferenceWeights(KlConfig(coefficient=0.1, reference="initial"), decoder)
    initial.keep(decoder)
    state, moved = initial.state_arrays(), jax.tree.map(lambda leaf: 2 * leaf, decoder)
    again = ReferenceWeights(KlConfig(coefficient=0.1, reference="initial"), decoder)
    other = {"other": np.zeros(1, np.float32)}
    assert again.restore(state | other, 1, moved) == other
    assert again.state_arrays().keys() == state.keys() and same(again.current(moved).decoder, decoder)
    save_decoder(moved, tmp_path / "named", tokenizer)
    named = ReferenceWeights(KlConfig(coefficient=0.1, reference=str(tmp_path / "named")), decoder)
    named.restore(state, 1, decoder)
    assert named.state_arrays() == {} and same(named.current(decoder).decoder, moved)
    for reference in ("initial", str(tmp_path / "named")):
        synced = ReferenceWeights(KlConfig(coefficient=0.1, reference=reference, sync_every=2), decoder)
        synced.restore(state, 5, moved)
        assert synced.current(moved).version == 2 and same(synced.current(moved).decoder, decoder)


def halved(decoder: Decoder) -> Decoder:
    shape = decoder.config.model_copy(update={"dtype": "bfloat16"})
    return Decoder.from_arrays(shape, {name: array.astype("bfloat16") for name, array in named_arrays(decoder).items()})


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kl",
    [
        {"reference": "initial"},
        {"reference": "initial", "sync_every": 2},
        {"reference": "ema", "ema_decay": 0.9},
        {"reference": "DIRECTORY"},
        {"reference": "DIRECTORY", "sync_every": 2},
    ],
)
def test_a_resumed_learner_goes_on_bit_for_bit(
    decoder, config, draw_examples, make_batch, tokenizer, tmp_path, kl, dtype
):
    decoder = decoder if dtype == "float32" else halved(decoder)
    if kl["reference"] == "DIRECTORY":
        other = jax.tree.map(lambda leaf: leaf * jnp.asarray(0.9, leaf.dtype), decoder)
        save_decoder(other, tmp_path / "reference", tokenizer)
        kl = kl | {"reference": str(tmp_path / "reference")}
    config = with_kl(config, coefficient=0.5, **kl)
    batches = [make_batch(draw_examples([(2, 5), (3, 9), (4, 12)], seed), seed) for seed in range(5)]
    straight, whole = Learner(decoder, config, 10), []
    for step, batch in enumerate(batches):
        if step == 3:
            save_checkpoint(tmp_path, 3, straight, tokenizer, states={})
        whole.append(straight.update(batch, step))
    resumed = restore_learner(load_checkpoint(tmp_path / "step-3"), config, 10)
    for step in (3, 4):
        metrics = resumed.update(batches[step], step)
        for name in ("train/loss", "train/grad_norm", "train/kl_reference"):
            assert metrics[name] == whole[step][name]
    assert same(resumed.decoder, straight.decoder)
    references = [learner._reference.current(learner.decoder) for learner in (resumed, straight)]
    assert references[0].version == references[1].version and same(references[0].decoder, references[1].decoder)
    assert whole[3]["train/kl_reference"] > 0


def test_a_directory_s_weights_are_in_no_checkpoint_and_the_run_s_own_are(decoder, config, examples, make_batch):
    learner = Learner(decoder, with_kl(config, coefficient=0.5, reference="initial"), 10)
    assert not any(name.startswith("reference.") for name in learner.state_arrays()), (
        "the policy itself, before it moved"
    )
    begun = Learner(decoder, with_kl(config, coefficient=0.5, reference="initial"), 10)
    begun.restore_arrays(learner.state_arrays())
    assert begun._reference.current(decoder).version == 0, "a checkpoint of before the first update needs none"
    learner.update(make_batch(examples), 0)
    state = learner.state_arrays()
    np.testing.assert_array_equal(state["reference.embedding"], named_arrays(decoder)["embedding"])
    plain = Learner(learner.decoder, with_kl(config), 10)
    plain.restore_arrays(state)
    assert not any(name.startswith("reference") for name in plain.state_arrays())
    late = Learner(learner.decoder, with_kl(config, coefficient=0.5, reference="initial"), 10)
    with pytest.raises(CheckpointError, match=r"version 1 has no reference.*learner\.kl\.reference"):
        late.restore_arrays(plain.state_arrays())
    with pytest.raises(CheckpointError, match="the checkpoint's reference does not fit: .*embedding"):
        late.restore_arrays(state | {"reference.embedding": state["reference.embedding"][:-1]})


def test_an_average_is_never_taken_for_the_weights_of_the_beginning(decoder, config, examples, make_batch):
    averaging = Learner(decoder, with_kl(config, coefficient=0.5, reference="ema", ema_decay=0.9), 10)
    averaging.update(make_batch(examples), 0)
    state = averaging.state_arrays()
    held = Learner(averaging.decoder, with_kl(config, coefficient=0.5, reference="initial"), 10)
    with pytest.raises(CheckpointError, match=r"reference is initial, and .* version 1 is a moving average.*leave it"):
        held.restore_arrays(state)
    earlier = {name.replace("reference_average.", "reference."): array for name, array in state.items()}
    for kept in (state, earlier):
        resumed = Learner(averaging.decoder, with_kl(config, coefficient=0.5, reference="ema", ema_decay=0.9), 10)
        resumed.restore_arrays(kept)
        for name, array in resumed.state_arrays().items():
            np.testing.assert_array_equal(array, state[name])


def test_a_reference_of_another_shape_is_refused_and_none_cannot_score(decoder, config, examples, tokenizer, tmp_path):
    shape = decoder.config.model_copy(update={"num_hidden_layers": 1, "rope_theta": 5.0})
    save_decoder(Decoder.initialise(shape, jax.random.key(0)), tmp_path / "other", tokenizer)
    path = str(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"num_hidden_layers is 1, the policy's 2; rope_theta is 5\.0, the policy's 1"
    ):
        Learner(decoder, with_kl(config, coefficient=0.5, reference=path), 10)
    longer = decoder.config.model_copy(update={"max_position_embeddings": 99, "dtype": "bfloat16"})
    check_reference(path, longer, decoder.config)  # neither makes it another model
    with pytest.raises(ConfigError, match=r"learner\.kl\.reference is null"):
        Learner(decoder, config, 10).reference_logprobs(examples)


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"coefficient": 0.1}, "coefficient is 0.1 and reference is null: name one"),
        ({"coefficient": 0.1, "reference": "initial", "estimator": "k1"}, "estimator is 'k1' and place is 'loss'"),
        ({"coefficient": 0.1, "reference": "initial", "estimator": "k3", "place": "reward"}, "only k1 is the reward"),
        ({"coefficient": 0.1, "reference": "initial", "estimator": "k2", "place": "reward"}, "only k1 is the reward"),
        ({"reference": "initial"}, 'kl.reference is "initial", which has no effect: coefficient is 0'),
        ({"estimator": "k2"}, 'estimator is "k2", which has no effect: coefficient is 0'),
        ({"place": "reward"}, "which has no effect: coefficient is 0"),
        ({"sync_every": 3}, "sync_every is 3, which has no effect: there is no reference"),
        ({"coefficient": 0.1, "reference": "ema", "sync_every": 3}, "sync_every is 3, which has no effect"),
        ({"coefficient": 0.1, "reference": "initial", "ema_decay": 0.5}, "ema_decay is 0.5, which has no effect"),
        ({"coefficient": 0.1, "reference": "ema", "ema_decay": 1.0}, "less than 1"),
    ],
)
def test_what_is_unsound_or_cannot_act_is_refused(given, message):
    with pytest.raises((ValidationError, ConfigError)) as caught:
        LearnerConfig.model_validate({"kl": given})
    assert message in str(caught.value)


def test_what_is_left_out_is_filled_in_and_a_dump_loads_as_itself():
    assert KlConfig().reference is None and not LearnerConfig().needs_every_sequence
    in_loss = LearnerConfig(kl=KlConfig(coefficient=0.1, reference="initial"))
    assert in_loss.kl.estimator == "k3" and in_loss.reads_reference and in_loss.needs_every_sequence
    in_reward = LearnerConfig(kl=KlConfig(coefficient=0.1, reference="ema", place="reward"))
    assert in_reward.kl.estimator == "k1" and not in_reward.reads_reference and not in_reward.needs_every_sequence
    assert LearnerConfig(loss={"entropy_coefficient": 0.1}).needs_every_sequence  # pyright: ignore[reportArgumentType]
    for config in (LearnerConfig(), in_loss, in_reward):
        assert LearnerConfig.model_validate(config.model_dump(mode="json")) == config
    assert KlConfig(coefficient=0.1, reference="/a/b").directory == "/a/b" and in_loss.kl.directory is None
