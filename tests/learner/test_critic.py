"""The value head of a language policy: GAE over sampled tokens, its loss, and that it learns and survives a resume."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.batch import compute_advantages, example_from_rollout
from penstock.learner import (
    CriticConfig,
    Learner,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    gae,
    load_checkpoint,
    restore_learner,
    save_checkpoint,
)
from penstock.learner.control_losses import StepChain
from penstock.learner.critic import Critic, ValueHead, token_gae, value_token_loss
from penstock.model.language import named_arrays
from penstock.text import Tokenizer
from penstock.types import CheckpointError, Rollout, RolloutGroup, RolloutMetadata, TrainingBatch


def ppo(config: LearnerConfig, **changes) -> LearnerConfig:
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=0)
    critic = {"learning_rate": 0.03, "gae_lambda": 0.9} | changes.pop("critic", {})
    return config.model_copy(
        update={"loss": LossConfig(preset="ppo"), "optimizer": optimizer, "critic": CriticConfig(**critic)} | changes
    )


@pytest.fixture
def earning(examples):
    """Examples whose advantages are rewards to go: 1 for every other one, at its end, and .5 in its midst."""
    made = []
    for index, example in enumerate(examples):
        places = np.flatnonzero(example.loss_mask)
        rewards = np.zeros(len(example.tokens), np.float32)
        rewards[places[-1]] += index % 2
        rewards[places[len(places) // 2]] += 0.5 * (index % 3 == 0)
        to_go = np.cumsum(rewards[::-1])[::-1] * example.loss_mask
        made.append(replace(example, advantage=to_go.astype(np.float32)))
    return tuple(made)


# --- formulas --------------------------------------------------------------------------------------------------------


def test_gae_by_hand():
    to_go, values = np.float32([1, 1, 1]), np.float32([0.5, 0.25, 0.75])
    # δ = .25 − .5, .75 − .25, 1 − .75
    np.testing.assert_allclose(token_gae(to_go, values, 1.0, 0.5), [0.0625, 0.625, 0.25])
    np.testing.assert_allclose(token_gae(to_go, values, 1.0, 1.0), [0.5, 0.75, 0.25], atol=1e-7)
    np.testing.assert_allclose(token_gae(to_go, values, 1.0, 0.0), [-0.25, 0.5, 0.25])
    # rewards 2, 0, 1; γ = .5: δ = 2 + .5·.25 − .5, .5·.75 − .25, .25
    np.testing.assert_allclose(token_gae(np.float32([3, 1, 1]), values, 0.5, 0.0), [1.625, 0.125, 0.25])
    np.testing.assert_allclose(token_gae(np.float32([3, 1, 1]), values, 0.5, 1.0), [1.75, 0.25, 0.25])


def test_it_is_the_gae_of_simulators_on_one_terminated_episode():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=9).astype(np.float32), rng.normal(size=9).astype(np.float32)
    following, ended, real = np.append(values[1:], 0).astype(np.float32), np.arange(9) == 8, np.ones(9, bool)
    chain = StepChain(*map(jnp.asarray, (rewards, values, following, ended, ~real, real)))
    to_go = np.cumsum(rewards[::-1])[::-1].astype(np.float32)
    np.testing.assert_allclose(token_gae(to_go, values, 0.97, 0.9), gae(chain, 0.97, 0.9).advantages, atol=2e-5)


def test_the_value_loss_by_hand(strict_dtypes):
    values, before = jnp.array([1.0, 1.0, 0.1]), jnp.zeros(3)
    loss, clipped = value_token_loss(values, before, jnp.array([2.0, 0.5, 1.0]), 0.2)
    np.testing.assert_allclose(loss, [0.5 * 1.8**2, 0.5 * 0.5**2, 0.5 * 0.9**2], rtol=1e-6)
    assert clipped.tolist() == [True, False, False]
    gradient = jax.grad(lambda v: value_token_loss(v, before, jnp.array([2.0, 0.5, 1.0]), 0.2)[0].sum())(values)
    np.testing.assert_allclose(gradient, [0, 0.5, -0.9], atol=1e-6)
    plain, none = value_token_loss(values, before, jnp.array([2.0, 0.5, 1.0]), None)
    np.testing.assert_allclose(plain, [0.5, 0.125, 0.405], rtol=1e-6)
    assert not none.any()


def test_advantages_returns_and_value_loss_are_those_of_verl(draw_examples):
    """Of ragged sequences, two with holes (scripts/make_golden_losses.py)."""
    golden = json.loads((Path(__file__).parent / "golden" / "losses.json").read_text("utf-8"))
    batch = {name: np.float32(rows) for name, rows in golden["batch"].items()}
    wanted = {n: np.float32(each) if isinstance(each, list) else each for n, each in golden["values"].items()}
    masks = batch["mask"] > 0
    to_go = np.cumsum(wanted["rewards"][:, ::-1], 1)[:, ::-1] * masks
    settings = {name: wanted[name] for name in ("discount", "gae_lambda", "clip")}
    critic = Critic(LearnerConfig(loss=LossConfig(preset="ppo"), critic=CriticConfig(**settings)), 4)
    (shape,) = draw_examples([(1, 9)])
    examples = [
        replace(shape, loss_mask=mask, advantage=row.astype(np.float32)) for mask, row in zip(masks, to_go, strict=True)
    ]
    made, targets, _ = critic.advantages(examples, list(batch["values"]))
    for index, mask in enumerate(masks):
        np.testing.assert_allclose(made[index].advantage[mask], wanted["advantages"][index][mask], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(targets[index].returns[mask], wanted["returns"][index][mask], rtol=1e-5, atol=1e-6)

    def loss(values):
        terms, _ = value_token_loss(values, jnp.array(batch["values"][masks]), jnp.array(wanted["returns"][masks]), 0.2)
        return terms.mean()

    value, gradient = jax.value_and_grad(loss)(jnp.array(batch["new_values"][masks]))
    assert float(value) == pytest.approx(wanted["loss"]["value"], rel=1e-5)
    expected = np.float32(wanted["loss"]["gradient"])[masks]
    np.testing.assert_allclose(gradient, expected, rtol=2e-4, atol=1e-7)
    assert (expected == 0).any() and np.abs(expected).max() > 0.01


def test_rewards_count_to_the_token_before_them_and_the_first_gets_what_came_earlier():
    mask = np.array([False, True, False, True, False])
    rewards = np.float32([1, 0, 2, 0, 4])
    rollout = Rollout(
        "env", "x", np.ones(2, np.int32), np.ones(5, np.int32), np.where(mask, -1, 0).astype(np.float32), rewards, 7.0,
        response_mask=mask,
    ).with_metadata(RolloutMetadata("worker", 1.0, 0), "t-0-0/0", "t")  # fmt: skip
    ((to_go,),) = compute_advantages("gae", [RolloutGroup("k", (rollout,), "t-0-0")])
    assert to_go.tolist() == [0, 7, 0, 4, 0]
    example = example_from_rollout(rollout, to_go, 20)
    critic = Critic(LearnerConfig(loss=LossConfig(preset="ppo"), critic={"normalize_advantages": False}), 4)  # pyright: ignore[reportArgumentType]
    values = np.float32([9, 9, 9, 2, 9, 3, 9])
    (made,), (target,), metrics = critic.advantages([example], [values])
    # rewards 3 and 4: δ = 3 + 3 − 2 = 4, 4 − 3 = 1; λ = .95
    np.testing.assert_allclose(made.advantage, [0, 0, 0, 4.95, 0, 1, 0], atol=1e-6)
    np.testing.assert_allclose(target.returns, [0, 0, 0, 6.95, 0, 4, 0], atol=1e-6)
    np.testing.assert_allclose(target.values, [0, 0, 0, 2, 0, 3, 0])
    assert metrics["train/value_mean"] == 2.5
    assert metrics["train/explained_variance"] == pytest.approx(1 - np.var([4.95, 1]) / np.var([6.95, 4]))


def test_normalised_advantages_have_mean_zero_and_deviation_one_over_all_tokens(earning, config):
    critic = Critic(ppo(config), 16)
    made, _, _ = critic.advantages(earning, [np.zeros(len(each.tokens), np.float32) for each in earning])
    every = np.concatenate([each.advantage[each.loss_mask] for each in made])
    assert every.mean() == pytest.approx(0, abs=1e-6) and every.std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_a_single_token_has_no_advantage_once_normalised(earning, config):
    example = earning[0]
    alone = replace(example, loss_mask=np.arange(len(example.tokens)) == example.loss_mask.argmax())
    (made,), _, _ = Critic(ppo(config), 16).advantages([alone], [np.zeros(len(example.tokens), np.float32)])
    assert not made.advantage.any()


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_values_come_to_explain_the_rewards(decoder, config, earning, make_batch):
    learner = Learner(decoder, ppo(config, optimizer=OptimizerConfig(learning_rate=0.003, warmup_steps=0)), 60)
    seen = [learner.update(make_batch(earning, step), step) for step in range(40)]
    assert seen[0]["train/explained_variance"] == pytest.approx(0) and seen[0]["train/value_mean"] == 0
    assert seen[-1]["train/explained_variance"] > 0.7
    assert seen[-1]["train/value_loss"] < 0.3 * seen[0]["train/value_loss"]
    assert seen[0]["time/values"] > 0 and seen[0]["train/advantage_zero_fraction"] == 0


def test_the_head_has_its_own_rate_and_zero_leaves_it_alone(decoder, config, earning, make_batch):
    still = Learner(decoder, ppo(config, critic={"learning_rate": 0.0}), 10)
    still.update(make_batch(earning), 0)
    assert not still._critic.head.weight.any() and still._critic.head.bias == 0
    moved = Learner(decoder, ppo(config, critic={"learning_rate": 0.5}), 10)
    moved.update(make_batch(earning), 0)
    # the first step of Adam is the rate, whatever the gradient
    np.testing.assert_allclose(np.abs(moved._critic.head.weight), 0.5, rtol=1e-3)
    for name, array in named_arrays(still.decoder).items():
        np.testing.assert_array_equal(array, named_arrays(moved.decoder)[name])


def gradients(decoder, config, examples, head, rows=2):
    learner = Learner(decoder, config.model_copy(update={"micro_batch_rows": rows}), 10)
    learner._critic.head = head
    seen = []
    take = learner._gradients
    learner._gradients = lambda *arguments: seen.append(take(*arguments)) or seen[-1]
    apply = learner._apply
    kept = []
    learner._apply = lambda d, s, g, *rest: kept.append(jax.tree.map(np.array, g)) or apply(d, s, g, *rest)
    step = learner._critic.step
    learner._critic.step = lambda g, *rest: kept.append(jax.tree.map(np.array, g)) or step(g, *rest)
    metrics = learner.update(_batch(examples), 0)
    return metrics, kept


def _batch(examples):
    return TrainingBatch("batch", 0, tuple(examples), ("t-0-0",), {})


@pytest.fixture
def head():
    rng = np.random.default_rng(1)
    return ValueHead(jnp.asarray(rng.normal(size=16) * 0.1, jnp.float32), jnp.asarray(0.2, jnp.float32))


@pytest.mark.slow
def test_micro_batches_change_nothing(decoder, config, earning, head):
    whole, one = gradients(decoder, ppo(config), earning, head, rows=8)
    parts, several = gradients(decoder, ppo(config), earning, head, rows=1)
    for name in ("train/loss", "train/value_loss", "train/explained_variance", "train/value_mean"):
        assert whole[name] == pytest.approx(parts[name], rel=1e-6, abs=1e-6)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
        assert np.abs(left - right).max() <= 1e-6 * max(1.0, np.abs(left).max())


def test_the_value_loss_of_an_update_is_the_mean_over_its_tokens(decoder, config, earning):
    constant = ValueHead(jnp.zeros(16), jnp.asarray(0.2, jnp.float32))
    given = ppo(config, critic={"gae_lambda": 1.0, "clip": None})  # the target is what is still to be earned
    metrics, (_, of_head) = gradients(decoder, given, earning, constant)
    beyond = 0.2 - np.concatenate([example.advantage[example.loss_mask] for example in earning])
    assert metrics["train/value_loss"] == pytest.approx(np.square(beyond).mean() / 2, rel=1e-5)
    assert float(of_head.bias) == pytest.approx(given.critic.coefficient * beyond.mean(), rel=1e-5)


def test_the_gradient_of_values_is_that_of_finite_differences(decoder, config, earning, head):
    """With a learning target that is fixed (λ = 1, γ = 1 does not depend on V), and advantages that do not count."""
    given = ppo(config, critic={"gae_lambda": 1.0, "clip": None, "coefficient": 1.0})
    _, (_, of_head) = gradients(decoder, given, earning, head)

    def value_loss(changed):
        return gradients(decoder, given, earning, changed)[0]["train/value_loss"]

    def finite(direction):
        up, down = (jax.tree.map(lambda a, b, s=s: a + s * b, head, direction) for s in (0.02, -0.02))
        return (value_loss(up) - value_loss(down)) / 0.04

    along = ValueHead(jnp.ones(16), jnp.zeros(()))
    assert finite(along) == pytest.approx(float(of_head.weight.sum()), rel=2e-3)
    assert finite(ValueHead(jnp.zeros(16), jnp.ones(()))) == pytest.approx(float(of_head.bias), rel=2e-3)


@pytest.mark.slow
def test_the_value_loss_reaches_the_layers_in_proportion_to_its_coefficient(decoder, config, earning, head):
    found = {}
    for coefficient in (0.5, 1.0, 1.5):
        _, (of_policy, _) = gradients(decoder, ppo(config, critic={"coefficient": coefficient}), earning, head)
        found[coefficient] = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(of_policy)])
    first, second = found[1.0] - found[0.5], found[1.5] - found[1.0]
    assert np.abs(first).max() > 1e-3
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_several_steps_and_minibatches_clip_values_too(decoder, config, earning, make_batch):
    learner = Learner(decoder, ppo(config, epochs=4, critic={"clip": 0.05}), 10)
    metrics = learner.update(make_batch(earning), 0)
    assert metrics["train/optimizer_steps"] == 4
    assert metrics["train/value_clip_fraction"] > 0 and metrics["train/clip_fraction"] > 0


def test_a_resumed_learner_goes_on_bit_for_bit(decoder, config, earning, make_batch, tmp_path):
    given, tokenizer = ppo(config, epochs=2), Tokenizer.load("penstock")
    straight = Learner(decoder, given, 10)
    for step in range(2):
        straight.update(make_batch(earning, step), step)
    save_checkpoint(tmp_path, 2, straight, tokenizer, states={})
    resumed = restore_learner(load_checkpoint(tmp_path / "step-2"), given, 10)
    for learner in (straight, resumed):
        learner.found = learner.update(make_batch(earning, 2), 2)
    for name in ("train/loss", "train/value_loss", "train/explained_variance", "train/grad_norm"):
        assert straight.found[name] == resumed.found[name]
    for left, right in zip(
        *(jax.tree.leaves((each.decoder, each._critic.head)) for each in (straight, resumed)), strict=True
    ):
        np.testing.assert_array_equal(left, right)
    other = Learner(straight.decoder, config, 10)
    other.restore_arrays(straight.state_arrays())  # without a value head it is left out
    broken = straight.state_arrays()
    del broken["critic.weight"]
    with pytest.raises(CheckpointError, match="value head does not fit"):
        Learner(straight.decoder, given, 10).restore_arrays(broken)


def test_all_programs_are_known_ahead(decoder, config, earning, make_batch):
    learner = Learner(decoder, ppo(config), 10)
    assert {"values", "optimiser step of values"} <= learner.update_programs().keys()
    learner.compile()
    sizes = learner._accumulate._cache_size(), learner._value._cache_size()
    learner.update(make_batch(earning), 0)
    learner.update(make_batch(earning, 1), 1)
    assert learner._accumulate._cache_size() <= sizes[0] + 1 and learner._value._cache_size() <= sizes[1] + 1
