"""A loss of one's own, by its path: the example that ships, and what is said of a wrong one."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from penstock.batch import BatchMakerConfig, compute_advantages, make_batch_maker
from penstock.learner import Learner, LearnerConfig, LossConfig, LossInputs, OptimizerConfig, TokenLoss
from penstock.learner.losses import check_own_loss
from penstock.overseer.config_loading import load_config
from penstock.overseer.config_loading.recorded import named_code
from penstock.types import ConfigError, RLLossModule, Rollout, RolloutGroup

EXAMPLE = f"{Path(__file__).parents[2]}/examples/own_loss.py:TaperedReinforce"


class Plain:
    """REINFORCE of the rewards themselves."""

    def compute_advantages(self, group):
        return group.rewards

    def loss(self, inputs):
        return TokenLoss(-inputs.advantage * inputs.logprobs - 0.1 * inputs.entropy, clipped=inputs.advantage > 0)


class OneNumber(Plain):
    def loss(self, inputs):
        return inputs.logprobs.sum()


class NeedsMore(Plain):
    def __init__(self, coefficient):
        self.coefficient = coefficient


class NoAdvantages:
    def loss(self, inputs):
        return inputs.logprobs


class Raises(Plain):
    def compute_advantages(self, group):
        raise KeyError("no such reward")

    def loss(self, inputs):
        return inputs.logprobs - inputs.reference_logprobs  # None: no reference is named


class NoBools(Plain):
    def loss(self, inputs):
        return TokenLoss(inputs.logprobs, clipped=inputs.logprobs)


class Quits(Plain):
    def __init__(self):
        raise SystemExit(3)


class QuitsLater(Plain):
    def loss(self, inputs):
        raise SystemExit(3)


class Later(Plain):
    async def loss(self, inputs):
        return inputs.logprobs


made = Plain()

HERE = f"{__name__}:"


def group(*rewards):
    one, zero = np.ones(1, np.int32), np.zeros(1, np.float32)
    return RolloutGroup("k", tuple(Rollout("e", "x", one, one, zero, np.float32([r]), r) for r in rewards), "g-0-0")


def test_the_example_tapers_what_turned_out_badly():
    loss = LossConfig(module=EXAMPLE).load_module()
    assert isinstance(loss, RLLossModule)
    np.testing.assert_allclose(loss.compute_advantages(group(0.0, 1.0, 0.0)), [-0.5, 1, -0.5])
    # Two sequences of two tokens, half and twice as probable as when they were sampled.
    behaviour = jnp.array([-1, -1, -1, -1], jnp.float32) - jnp.log(jnp.array([0.5, 1, 2, 1], jnp.float32))
    rest = {
        "behaviour_logprobs": behaviour, "proximal_logprobs": behaviour, "entropy": jnp.zeros(4),
        "sequence": jnp.array([0, 0, 1, 1], jnp.int32), "real": jnp.ones(4, bool),
    }  # fmt: skip
    for advantage, expected in ((1.0, [-1, -1, -1, -1]), (-1.0, [0.5, 0.5, 1, 1])):
        given = lambda ell, a=advantage: LossInputs(logprobs=ell, advantage=jnp.full(4, a), **rest)  # noqa: E731
        gradient = jax.grad(lambda ell, given=given: loss.loss(given(ell)).sum())(jnp.full(4, -1.0))
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_a_run_s_advantages_are_the_module_s():
    advantage = LossConfig(module=HERE + "Plain").load_module().compute_advantages
    (values,) = compute_advantages(advantage, [group(0.5, 3.0)])
    assert values.tolist() == [0.5, 3.0] and values.dtype == np.float32
    offered = {"max_tokens": 9, "max_samples": 1, "ordered": False, "allow_truncated_sampling": False, "seed": 0}
    assert len(make_batch_maker(BatchMakerConfig(), advantage=advantage, **offered)) == 0
    with pytest.raises(ConfigError, match=r"those of learner\.loss\.module are asked for"):
        make_batch_maker(BatchMakerConfig(name="grpo"), advantage=advantage, **offered)
    for wrong in (lambda g: g.rewards[:1], lambda g: g.rewards * np.nan, lambda g: np.ones((2, 1000))):
        with pytest.raises(ConfigError, match="one finite number for each of its 2 rollouts") as refused:
            compute_advantages(wrong, [group(0.5, 3.0)])
        assert len(str(refused.value)) < 400


def test_the_learner_minimises_it_and_follows_its_entropy(decoder, config, examples, make_batch):
    base = {"optimizer": OptimizerConfig(learning_rate=0.0), "row_length": 24}
    learners = {
        name: Learner(decoder, config.model_copy(update=base | {"loss": loss}), 5)
        for name, loss in {
            "own": LossConfig(module=HERE + "Plain"),
            "built in": LossConfig(surrogate="reinforce", correction={"kind": "none"}, entropy_coefficient=0.1),
        }.items()
    }
    metrics = {name: learner.update(make_batch(examples), 0) for name, learner in learners.items()}
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert metrics["own"][name] == pytest.approx(metrics["built in"][name], rel=1e-5)
    assert 0 < metrics["own"]["train/clip_fraction"] < 1 and metrics["own"]["train/correction_fraction"] == 0


def test_a_wrong_loss_is_told_by_its_key(decoder, config, examples, make_batch):
    learner = Learner(decoder, config.model_copy(update={"loss": LossConfig(module=HERE + "OneNumber")}), 5)
    with pytest.raises(ConfigError, match=r"OneNumber.loss gave float32 \[\]: it must be float32 \[48\]"):
        learner.update(make_batch(examples), 0)
    for name, message in {
        "Raises": r"Raises\.loss raised TypeError: unsupported .*; reference_logprobs is None unless learner\.kl",
        "NoBools": r"NoBools\.loss gave clipped of shape \(48,\) and dtype float32: it must be bool \[48\]",
    }.items():
        learner = Learner(decoder, config.model_copy(update={"loss": LossConfig(module=HERE + name)}), 5)
        with pytest.raises(ConfigError, match=message):
            learner.update(make_batch(examples), 0)
    for wrong, found in {
        "None": lambda group: None, "'aa'": lambda group: "aa", "coroutine": Later().loss,
        "j": lambda group: group.rewards * 1j, "generator": lambda group: (one for one in group.rewards),
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"compute_advantages gave .*{wrong.strip(chr(39))}.* for group g-0-0"):
            compute_advantages(found, [group(0.5, 3.0)])
    with pytest.raises(ConfigError, match="compute_advantages raised SystemExit: 3 for group g-0-0"):
        compute_advantages(lambda group: exit(3), [group(0.5, 3.0)])
    with pytest.raises(ConfigError, match="compute_advantages raised KeyError: 'no such reward' for group g-0-0"):
        compute_advantages(Raises().compute_advantages, [group(0.5, 3.0)])
    for name, message in {
        "NeedsMore": "missing 1 required positional argument: 'coefficient'; it takes no arguments",
        "NoAdvantages": "gives a NoAdvantages, which has no compute_advantages;",
        "made": "is a Plain: name its class",
        "Quits": "making one raised SystemExit: 3",
        "Plane": "did you mean 'Plain'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            LossConfig(module=HERE + name).load_module()


def test_a_wrong_loss_is_told_before_anything_is_made():
    for name, message in {
        "OneNumber": r"OneNumber\.loss gave float32 \[\]: it must be float32 \[2048\]",
        "Raises": r"Raises\.loss raised TypeError: .*reference_logprobs is None unless learner\.kl\.reference",
        "NoBools": r"NoBools\.loss gave clipped of shape \(2048,\)",
        "QuitsLater": r"QuitsLater\.loss raised SystemExit: 3",
        "Later": r"Later\.loss gave coroutine",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_own_loss(LearnerConfig(row_length=512, micro_batch_rows=4, loss={"module": HERE + name}))
    own = {"module": HERE + "Raises"}  # which may read what the run has
    check_own_loss(LearnerConfig(loss=own, kl={"reference": "initial"}))
    check_own_loss(LearnerConfig())


def test_what_it_replaces_is_refused_and_what_it_names_is_shown():
    for key, value in {"preset": "grpo", "advantage": "grpo", "entropy_coefficient": 0.1, "dual_clip": 3.0}.items():
        with pytest.raises(ValidationError, match=f"{key} is .*, which has no effect: module .* has a loss of its own"):
            LossConfig(module=EXAMPLE, **{key: value})
    loss = LossConfig(module=EXAMPLE, aggregation="constant", max_tokens=7)
    assert LearnerConfig(loss=loss, minibatches=2).loss == loss
    config = load_config("cats", [f"learner.loss.module={EXAMPLE}"])
    assert [code.key for code in named_code(config.dump())] == ["learner.loss.module"]
