"""Arrays that do not train cost neither gradients nor moments nor arithmetic, and the others train as ever."""

import jax
import numpy as np
import pytest
from tests.learner.control_batches import make_batch as batch_of_fragments
from tests.learner.control_batches import make_fragments, make_policy

from penstock.batch import RowShape, example_from_pair
from penstock.learner import ControlLearner, Learner, LearnerConfig, LossConfig, OptimizerConfig, PpoConfig
from penstock.learner.control_config import ControlOptimizerConfig
from penstock.learner.control_step import FEWEST_FINALS, BatchShape, Minibatches, blank_arrays, optimiser, preparer
from penstock.learner.micro_batches import empty_micro_batch
from penstock.learner.optimizer import from_named, initial_state, to_named
from penstock.learner.step import ForwardOptions, policy_accumulator, zeros_maker
from penstock.model.language import Decoder, InitConfig
from penstock.types import CheckpointError, ConfigError

LAYERS = ("layers.*",)


def flops(compiled) -> float:
    found = compiled.cost_analysis()
    return (found[0] if isinstance(found, list) else found)["flops"]


def sizes(tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "saved", "weights"),
    [(LAYERS, 25.8e6, 3 * 50304), (("layers.gate", "layers.up", "layers.down"), 17.3e6, 3 * 3 * 64 * 176)],
)
def test_the_gradient_of_a_language_policy_saves_the_products_of_what_is_frozen(frozen, saved, weights):
    """2 · tokens · weights of a layer: 256 · 2 · (4 · 64² + 3 · 64 · 176), or without the first term.

    XLA counts what the loop over layers does once.
    """
    shape = InitConfig(hidden_size=64, num_hidden_layers=3, intermediate_size=176, vocab_size=256)
    decoder = Decoder.initialise(shape.model(256, "float32"), jax.random.key(0))
    batch, options = empty_micro_batch(RowShape(128, 2)), ForwardOptions(remat="layer", head_tile_tokens=64)

    def cost(names: tuple[str, ...]) -> tuple[float, int]:
        so_far = jax.eval_shape(zeros_maker(names), decoder)
        program = policy_accumulator(LossConfig(), options, names).lower(decoder, so_far, batch).compile()
        return flops(program), sizes(so_far.policy)

    whole, few = cost(()), cost(frozen)
    assert whole[0] - few[0] == pytest.approx(saved, rel=0.03)
    assert whole[1] == sizes(decoder) and whole[1] - few[1] == weights


def test_the_state_holds_moments_and_masters_of_what_trains(decoder):
    every, few = sizes(decoder), decoder.embedding.size + decoder.final_norm.size
    assert sizes(initial_state(OptimizerConfig(), decoder)) == 2 * every + 1
    assert sizes(initial_state(OptimizerConfig(frozen=LAYERS), decoder)) == 2 * few + 1
    narrow = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), decoder)
    assert sizes(initial_state(OptimizerConfig(frozen=LAYERS), narrow)) == 3 * few + 1
    with pytest.raises(ConfigError, match=r"frozen is \['\*'\], all arrays: nothing would train"):
        initial_state(OptimizerConfig(frozen=("*",)), decoder)


def test_what_trains_moves_as_if_nothing_were_frozen(decoder, config, examples, make_batch):
    """Without clipping, which looks at the whole gradient, the first step of an array is its own affair."""
    moved = {}
    for frozen in ((), LAYERS):
        optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, max_grad_norm=None, frozen=frozen)
        learner = Learner(decoder, config.model_copy(update={"optimizer": optimizer}), 5)
        metrics = learner.update(make_batch(examples), 0)
        moved[frozen] = {name: np.array(array) for name, array in learner.named_arrays().items()}
    before = {name: np.array(array) for name, array in Learner(decoder, config, 5).named_arrays().items()}
    for name, array in moved[LAYERS].items():
        expected = before[name] if name.startswith("layers.") else moved[()][name]
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert (moved[LAYERS]["embedding"] != before["embedding"]).any() and metrics["train/changed_fraction"] > 0.5


def test_a_state_from_before_fits_what_is_frozen_now(decoder):
    """Of what is frozen it may hold moments, as older versions wrote them; of what was frozen it holds none."""
    whole, few = OptimizerConfig(), OptimizerConfig(frozen=LAYERS)
    written = {name: np.full_like(array, 3) for name, array in to_named(initial_state(whole, decoder)).items()}
    taken = to_named(from_named(initial_state(few, decoder), written, LAYERS))
    assert set(taken) == {"adam.1.count"} | {
        f"adam.1.{moment}.{name}" for moment in ("mu", "nu") for name in ("embedding", "final_norm")
    }
    assert all((array == 3).all() for array in taken.values())
    again = to_named(from_named(initial_state(whole, decoder), taken))
    assert set(again) == set(written)
    assert all((array == (0 if ".layers." in name else 3)).all() for name, array in again.items())
    torn = {name: array for name, array in written.items() if name != "adam.1.nu.embedding"}
    with pytest.raises(CheckpointError, match=r"missing \['adam.1.nu.embedding'\]"):
        from_named(initial_state(whole, decoder), torn)
    wide = written | {"adam.1.nu.embedding": written["adam.1.nu.embedding"].astype(np.float64)}
    with pytest.raises(CheckpointError, match=r"adam.1.nu.embedding is float64\[41, 16\], this model needs float32"):
        from_named(initial_state(whole, decoder), wide)


ENCODER = ("encoder.*",)


def trained_control(**changes) -> tuple[ControlLearner, dict[str, float]]:
    policy = make_policy()
    settings = {"epochs": 1, "minibatches": 1, "vtrace": {"beyond_staleness": None}, **changes}
    learner = ControlLearner(policy, PpoConfig(**settings), 5)
    return learner, learner.update(batch_of_fragments(make_fragments(policy, 4, 6)), 0)


def test_a_control_policy_s_frozen_arrays_have_no_state_and_the_others_move_alike():
    plain = {"learning_rate": 1e-2, "max_grad_norm": None}
    (whole, _), (few, _) = (
        trained_control(optimizer=ControlOptimizerConfig(**plain, frozen=names)) for names in ((), ENCODER)
    )
    start = {
        name: np.array(array) for name, array in ControlLearner(make_policy(), PpoConfig(), 5).named_arrays().items()
    }
    heads = {name for name in start if not name.startswith("encoder.")}
    assert 0 < len(heads) < len(start)
    for name, array in few.named_arrays().items():
        expected = np.array(whole.named_arrays()[name]) if name in heads else start[name]
        np.testing.assert_allclose(np.array(array), expected, rtol=1e-5, atol=1e-7, err_msg=name)
    states = {name for name in few.state_arrays() if name.startswith("adam.")}
    assert states == {"adam.1.count"} | {f"adam.1.{moment}.{name}" for moment in ("mu", "nu") for name in heads}


@pytest.mark.slow
def test_the_optimiser_step_of_a_control_policy_saves_the_products_of_what_is_frozen():
    """Of T · B = 256 steps: weight gradients of a 3 × 64 and a 64 × 64 layer, and the gradient between them."""
    policy = make_policy(hidden_sizes=(64, 64))
    learner = ControlLearner(policy, PpoConfig(), 5)
    arrays = blank_arrays(BatchShape(16, 16, FEWEST_FINALS), learner._reading())

    def cost(frozen: tuple[str, ...]) -> float:
        config = PpoConfig(optimizer=ControlOptimizerConfig(frozen=frozen))
        steps, _ = jax.eval_shape(preparer(config), policy, arrays, np.ones(16, np.float32))
        chosen, scalar = np.arange(256, dtype=np.int32), np.float32(0)
        state = initial_state(config.optimizer, policy)
        lowered = optimiser(config, False).lower(
            policy, state, None, Minibatches(arrays, steps), chosen, scalar, scalar
        )
        return flops(lowered.compile())

    saved = 2 * 256 * (3 * 64 + 64 * 64 + 64 * 64 + 5 * 64)
    assert cost(()) - cost(ENCODER) == pytest.approx(saved, rel=0.1)


def test_learners_of_language_policies_take_the_frozen_names_of_their_warm_start(decoder, config):
    frozen = LearnerConfig(**{**config.model_dump(), "optimizer": {"frozen": ["layers.*"]}, "warm_start": {"steps": 2}})
    learner = Learner(decoder, frozen, 5)
    before = np.array(decoder.layers.query)
    learner.supervised_update([example_from_pair(np.arange(1, 4), np.arange(4, 8))])
    np.testing.assert_array_equal(np.array(learner.decoder.layers.query), before)
    assert (np.array(learner.decoder.embedding) != np.array(decoder.embedding)).any()
