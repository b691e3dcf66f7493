from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.learner.control_batches import make_batch, make_fragment, make_fragments, make_policy, with_fault

from penstock.learner import (
    ControlLearner,
    ControlOptimizerConfig,
    PpoConfig,
    ReferenceKlConfig,
    VTraceConfig,
    load_checkpoint,
    restore_control_learner,
    save_checkpoint,
)
from penstock.learner.config import CorrectionConfig
from penstock.learner.control_learner import ReferencePolicy
from penstock.learner.control_losses import StepChain, VTraceClips, gae, vtrace
from penstock.learner.control_step import preparer
from penstock.model.control import (
    ControlPolicy,
    load_control_policy,
    make_control_policy,
    named_arrays,
    save_control_policy,
)
from penstock.types import (
    CheckpointError,
    ConfigError,
    MismatchError,
    NonFiniteError,
    SampleFragment,
    Spaces,
    WeightsError,
)

FAST = ControlOptimizerConfig(learning_rate=1e-2)
SMALL = PpoConfig(reward_scale=1.0, epochs=2, minibatches=2, optimizer=FAST)


@pytest.fixture(scope="module")
def policy() -> ControlPolicy:
    return make_policy()


def changed(before: ControlPolicy, after: ControlPolicy) -> set[str]:
    """Names of the arrays that differ."""
    old, new = named_arrays(before), named_arrays(after)
    return {name for name in old if not np.array_equal(old[name], new[name])}


@pytest.mark.slow
def test_actions_that_paid_become_more_probable():
    """A bandit: action 2 pays 1, others nothing; the policy is asked anew before every update."""
    learner = ControlLearner(make_policy(policy_gain=0.01), SMALL, 30)
    for step in range(30):
        fragments = []
        for slot in range(4):
            fragment = make_fragment(
                learner.policy, 6, 50 * step + slot, step, ends=dict.fromkeys(range(6), "terminated")
            )
            fragments.append(replace(fragment, rewards=(fragment.actions[""] == 2).astype(np.float32)))
        metrics = learner.update(make_batch(fragments, step), step)
    observations = {"": jnp.asarray(np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32))}
    distribution, values, _ = learner.policy.step(observations, {}, jnp.zeros(64, bool))
    chosen = np.exp(distribution.log_prob({"": jnp.full(64, 2)}))
    assert chosen.mean() > 0.8, "a quarter before"
    assert abs(float(values.mean()) - float(chosen.mean())) < 0.2, "values follow what is earned"
    assert metrics["train/mismatch_max"] < 1e-4 and learner.step == 30


def test_metrics_name_what_happened(policy):
    fragments = make_fragments(policy, 4, 6, version=0)
    fragments[0] = with_fault(fragments[0], 4)
    metrics = ControlLearner(policy, SMALL, 5).update(make_batch(fragments), 0)
    assert metrics["train/trained_steps"] == 23 and metrics["train/fragments"] == 4
    assert metrics["train/optimizer_steps"] == 4 and metrics["train/non_finite"] == 0
    assert metrics["train/learning_rate"] == 1e-2
    assert 0 < metrics["train/entropy"] < np.log(4)
    assert 0 <= metrics["train/mismatch_max"] < 1e-5
    assert metrics["train/vtrace_fraction"] == metrics["train/correction_fraction"] == 0
    assert {"train/staleness_kl", "train/reference_kl"}.isdisjoint(metrics), "nothing stale, no reference"
    assert {
        "train/loss", "train/policy_loss", "train/value_loss", "train/approx_kl", "train/clip_fraction",
        "train/explained_variance", "train/grad_norm", "train/ratio_mean", "train/value_mean", "time/optimise",
        "throughput/steps_per_s",
    } <= metrics.keys()  # fmt: skip
    assert all(np.isfinite(value) for value in metrics.values())


def test_what_a_faulty_step_holds_and_what_pads_changes_nothing(policy):
    """Rewards, actions and observations at a fault, and one longer blank tail, are of no consequence."""
    fragments = [with_fault(fragment, 2) for fragment in make_fragments(policy, 4, 6)]
    learner = ControlLearner(policy, SMALL, 5)
    metrics = learner.update(make_batch(fragments), 0)
    assert metrics["train/non_finite"] == 0
    other = []
    for fragment in fragments:
        rewards, actions = fragment.rewards.copy(), fragment.actions[""].copy()
        rewards[2], actions[2] = 1e9, 3 - actions[2]
        other.append(replace(fragment, rewards=rewards, actions={"": actions}))
    same = ControlLearner(policy, SMALL, 5)
    same.update(make_batch(other), 0)
    assert changed(learner.policy, same.policy) == set()
    padded = ControlLearner(policy, SMALL, 5)
    padded.compile(4, 9)
    padded.update(make_batch(fragments), 0)
    for name, array in named_arrays(padded.policy).items():
        np.testing.assert_allclose(array, named_arrays(learner.policy)[name], atol=2e-6, err_msg=name)


def test_the_same_seed_and_batches_give_the_same_bits_and_another_seed_does_not(policy):
    def trained(seed: int) -> ControlPolicy:
        learner = ControlLearner(policy, SMALL, 5, seed)
        for step in range(2):
            learner.update(make_batch(make_fragments(policy, 4, 6, seed=step, version=9), step), step)
        return learner.policy

    first, again, other = trained(0), trained(0), trained(1)
    assert changed(first, again) == set()
    assert changed(first, other), "minibatches are drawn from the seed"


def test_parameters_that_were_handed_out_stay_valid(policy):
    before = {name: np.array(array) for name, array in named_arrays(policy).items()}
    learner = ControlLearner(policy, SMALL, 5)
    held = learner.named_arrays()
    learner.update(make_batch(make_fragments(policy, 4, 6)), 0)
    middle = {name: np.array(array) for name, array in learner.named_arrays().items()}
    second = learner.named_arrays()
    learner.update(make_batch(make_fragments(policy, 4, 6, version=9), 1), 1)
    for name in before:
        np.testing.assert_array_equal(held[name], before[name])
        np.testing.assert_array_equal(second[name], middle[name])


def test_nothing_is_compiled_after_compile(policy, compilations):
    config = SMALL.model_copy(update={"minibatches": 3})
    learner = ControlLearner(policy, config, 5)
    fragments = [make_fragments(policy, 4, 7, seed, version=9) for seed in range(2)]
    fragments[1][2] = make_fragment(policy, 5, 77)
    learner.compile(4, 7)
    compilations.clear()
    for step in range(2):
        learner.update(make_batch(fragments[step], step), step)
    assert compilations == []


def test_observations_are_normalised_by_all_that_was_trained_on_and_no_gradient_moves_that(compilations, tmp_path):
    policy = make_policy(normalize_observations=True, value_network="separate")
    config = SMALL.model_copy(update={"optimizer": FAST.model_copy(update={"weight_decay": 0.1})})
    learner = ControlLearner(policy, config, 5)
    batches = [
        [
            replace(each, observations={"": 100 * step + 5 * each.observations[""]})
            for each in make_fragments(policy, 4, 6, seed=step, version=9)
        ]
        for step in range(3)
    ]
    learner.compile(4, 6)
    compilations.clear()
    for step, fragments in enumerate(batches):
        learner.update(make_batch(fragments, step), step)
    assert compilations == []
    found, steps = learner.policy.statistics, np.concatenate([f.observations[""][:-1] for f in sum(batches, [])])
    assert float(found.count) == len(steps) == 72
    np.testing.assert_allclose(found.mean[0], steps.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.variance[0], steps.var(0), rtol=1e-5)
    assert "statistics.mean.0" in learner.named_arrays(), "they travel with the weights"
    assert not [name for name in learner.state_arrays() if "statistics" in name], "they have no moments"
    save_control_policy(tmp_path / "model", learner.policy, learner.policy.config, learner.policy.spaces)
    assert changed(load_control_policy(tmp_path / "model"), learner.policy) == set()


@pytest.mark.parametrize("memory", ["gru", pytest.param("transformer", marks=pytest.mark.slow)])
def test_a_recurrent_policy_is_unrolled_from_the_fragments_own_state(memory):
    policy = make_policy(memory)
    rng = np.random.default_rng(0)
    start = make_fragment(policy, 9, 1)
    observations = {"": jnp.asarray(start.observations[""])[:, None]}
    unroll = jax.jit(ControlPolicy.unroll)
    states = unroll(policy, observations, jnp.zeros((10, 1), bool), policy.initial_state(1))[2]
    state = {name: np.asarray(array[-1, 0]) for name, array in states.items()}
    fragments = [make_fragment(policy, 6, 2, state=state, ends={2: "truncated"}), make_fragment(policy, 6, 3)]
    metrics = ControlLearner(policy, SMALL, 5).update(make_batch(fragments), 0)
    assert metrics["train/mismatch_max"] < 1e-5
    moved = {name: (array + rng.normal(size=array.shape)).astype(array.dtype) for name, array in state.items()}
    if memory != "transformer":
        with pytest.raises(MismatchError, match="recurrent state"):
            ControlLearner(policy, SMALL, 5).update(
                make_batch([replace(fragments[0], initial_state=moved), fragments[1]]), 0
            )


def test_mismatch_stops_before_anything_is_applied_and_only_for_the_own_version(policy):
    fragment = make_fragment(policy, 6, 0, version=3)
    wrong = replace(fragment, logprobs=fragment.logprobs - np.float32(0.01))
    learner = ControlLearner(policy, SMALL, 5)
    metrics = learner.update(make_batch([replace(wrong, weight_steps=np.full(6, -1, np.int32))] * 4), 0)
    assert "train/mismatch_max" not in metrics
    assert metrics["train/staleness_kl"] == pytest.approx(np.expm1(0.01) - 0.01, rel=1e-2)
    learner = ControlLearner(policy, SMALL, 5)
    with pytest.raises(MismatchError, match="by up to 0.01 .learner.mismatch_limit is 0.001"):
        learner.update(make_batch([replace(wrong, weight_steps=np.zeros(6, np.int32))] * 4), 0)
    assert learner.step == 0 and changed(policy, learner.policy) == set()


def test_what_is_prepared_is_gae_for_the_young_and_vtrace_for_the_old(policy):
    """Against the pure functions, with values of the true last observations; both fragments were drawn off-policy."""
    behaviour = make_policy(seed=4)
    fragments = [make_fragment(behaviour, 5, seed, 7, ends={1: "terminated", 3: "truncated"}) for seed in (0, 1)]
    fragments[1] = replace(
        fragments[1], weight_steps=np.full(5, 5, np.int32), logprobs=fragments[1].logprobs - np.float32(0.2)
    )
    config = PpoConfig(
        vtrace=VTraceConfig(beyond_staleness=1),
        normalize_advantages="none",
        reward_scale=0.5,
        correction=CorrectionConfig(cap=1.0),
    )
    learner = ControlLearner(policy, config, 9)
    learner._step = 7  # noqa: SLF001 - so that versions differ
    arrays, scales = learner._arrays(fragments), np.full(2, np.float32(0.5))  # noqa: SLF001
    steps, summary = preparer(config)(policy, arrays, scales)
    seen = list[np.ndarray]()
    for column, fragment in enumerate(fragments):
        observations = {"": jnp.asarray(fragment.observations[""])}
        distribution, values, _ = policy.step(observations, {}, jnp.zeros(6, bool))
        logprobs = np.asarray(distribution.log_prob({"": jnp.asarray([*fragment.actions[""], 0])}))[:5]
        finals = policy.step({"": jnp.asarray(fragment.final_observations[""])}, {}, jnp.zeros(2, bool))[1]
        following = np.array(values[1:])
        following[[1, 3]] = finals
        flags = [jnp.asarray(flag) for flag in (fragment.terminated, fragment.truncated, np.ones(5, bool))]
        chain = StepChain(0.5 * jnp.asarray(fragment.rewards), values[:-1], jnp.asarray(following), *flags)
        ratios = jnp.exp(logprobs - fragment.logprobs)
        expected = gae(chain, 0.99, 0.95) if column == 0 else vtrace(chain, ratios, 0.99, 0.95, VTraceClips())
        np.testing.assert_allclose(steps.advantages[:, column], expected.advantages, atol=1e-5)
        np.testing.assert_allclose(steps.targets[:, column], expected.targets, atol=1e-5)
        weights = np.minimum(ratios, 1.0) if column == 0 else np.ones(5)
        np.testing.assert_allclose(steps.weights[:, column], weights, rtol=1e-5)
        np.testing.assert_allclose(steps.logprobs[:, column], logprobs, atol=1e-6)
        seen.append(np.stack([values[:-1], expected.advantages, logprobs - fragment.logprobs]))
    assert summary.old_steps == 5 and summary.own_steps == 5
    (value, advantage, _), (*_, own), (*_, other) = np.concatenate(seen, axis=1), *seen
    assert summary.bounded == np.sum(own > 0) == 1 and np.sum(other > 0) > 0, "of the young alone"
    told = {
        "own_kl": np.sum(np.expm1(own) - own), "other_kl": np.sum(np.expm1(other) - other),
        "mismatch_max": np.abs(own).max(), "value_mean": value.mean(),
        "advantage_mean": advantage.mean(), "advantage_std": advantage.std(),
    }  # fmt: skip
    for name, expected in told.items():
        assert float(getattr(summary, name)) == pytest.approx(expected, rel=1e-4), name
    burning = {"burn_in": 2, "normalize_advantages": "batch", "correction": CorrectionConfig(kind="mask")}
    late, of_late = preparer(config.model_copy(update=burning))(policy, arrays, scales)
    normalised = np.asarray(late.advantages)[2:]
    assert abs(normalised.mean()) < 1e-5 and normalised.std() == pytest.approx(1, abs=1e-4)
    assert own[1] < np.log(0.5) < own[2:].min() and of_late.bounded == 0, "the one that is masked is burnt in"
    assert of_late.old_steps == 3
    unweighted = config.model_copy(update={"correction": CorrectionConfig(kind="none")})
    assert preparer(unweighted)(policy, arrays, scales)[1].bounded == 0


@pytest.mark.parametrize("memory", ["lstm", "transformer"])
def test_what_is_prepared_of_a_policy_with_memory_is_what_stepping_gives(memory):
    """Step by step in NumPy: states across both ends, the value of each last observation, a scale for each fragment."""
    layers = {"memory_layers": 2, "memory_heads": 2} if memory == "transformer" else {}
    policy, length, scales = make_policy(memory, **layers), 9, np.array([0.5, 3.0], np.float32)
    ends = ({2: "truncated", 6: "terminated"}, {0: "terminated", 7: "truncated"})
    fragments = [make_fragment(policy, length, seed, ends=end) for seed, end in enumerate(ends)]
    fragments[1] = with_fault(fragments[1], 4)
    config = PpoConfig(normalize_advantages="none", discount=0.9, gae_lambda=0.8, burn_in=2, minibatches=1)
    arrays = ControlLearner(policy, config, 1)._arrays(fragments)  # noqa: SLF001
    steps, summary = preparer(config)(policy, arrays, scales)
    assert summary.own_steps + summary.other_steps == 2 * length - 1
    step = jax.jit(lambda seen, state, first: policy.step({"": seen[None]}, state, first[None])[1:])
    for column, (fragment, scale) in enumerate(zip(fragments, scales, strict=True)):
        state, values, finals = policy.initial_state(1), np.zeros(length + 1), {}
        for t in range(length + 1):
            value, state = step(fragment.observations[""][t], state, fragment.first[t])
            values[t] = value[0]
            if t in fragment.final_steps:
                last = fragment.final_observations[""][fragment.final_steps.tolist().index(t)]
                finals[t] = float(step(last, state, np.bool_(False))[0][0])
        expected, following = np.zeros(length), 0.0
        for t in reversed(range(length)):
            ended = fragment.terminated[t] or fragment.truncated[t]
            after = 0.0 if fragment.terminated[t] else finals[t] if ended else values[t + 1]
            error = scale * fragment.rewards[t] + 0.9 * after - values[t]
            following = 0.0 if fragment.faults[t] else error + (0.0 if ended else 0.72 * following)
            expected[t] = following
        counted = ~fragment.faults
        np.testing.assert_allclose(steps.advantages[:, column], expected, atol=1e-5)
        np.testing.assert_allclose(steps.targets[:, column], np.where(counted, expected + values[:-1], 0), atol=1e-5)
        np.testing.assert_array_equal(steps.trained[:, column], counted & (np.arange(length) >= 2))
        assert (steps.logprobs[~counted, column] == 0).all() and (steps.weights[~counted, column] == 1).all()


def test_burn_in_has_no_gradient_and_is_not_trained():
    """With a burn-in of 3, the first three rewards cannot move anything, and neither gradient nor mean sees them."""
    policy = make_policy("gru")
    config = SMALL.model_copy(update={"burn_in": 3, "gae_lambda": 0.0})
    fragments = [make_fragment(policy, 7, seed) for seed in range(2)]
    learner, other = ControlLearner(policy, config, 5), ControlLearner(policy, config, 5)
    metrics = learner.update(make_batch(fragments), 0)
    assert metrics["train/trained_steps"] == 8
    for index, fragment in enumerate(fragments):
        rewards = fragment.rewards.copy()
        rewards[:3] = 100
        fragments[index] = replace(fragment, rewards=rewards)
    other.update(make_batch(fragments), 0)
    assert changed(learner.policy, other.policy) == set()
    for index, fragment in enumerate(fragments):  # the first layer's gradient is a product with what is seen
        seen = np.where(np.arange(8)[:, None] < 3, fragment.observations[""], np.float32(0))
        stale = np.full(7, -1, np.int32)
        fragments[index] = replace(fragment, observations={"": seen}, weight_steps=stale)
    blind = ControlLearner(policy, config, 5)
    blind.update(make_batch(fragments), 0)
    first_layer = {name for name, array in named_arrays(policy).items() if array.shape == (3, 8)}
    assert len(first_layer) == 1 and first_layer.isdisjoint(changed(policy, blind.policy))
    with pytest.raises(ConfigError, match="learner.burn_in is 3, but fragments have 3 steps"):
        ControlLearner(policy, config, 5).update(make_batch([make_fragment(policy, 3, 0)]), 0)
    with pytest.raises(ConfigError, match="no memory: set it to 0"):
        ControlLearner(make_policy(), config, 5)


def test_an_epoch_too_far_is_the_last(policy):
    config = SMALL.model_copy(update={"epochs": 5, "target_kl": 1e-9})
    metrics = ControlLearner(policy, config, 5).update(make_batch(make_fragments(policy, 4, 6)), 0)
    assert metrics["train/optimizer_steps"] == 2, "one epoch of two"


def test_the_value_warm_up_trains_the_value_head_alone():
    policy = make_policy(value_network="separate")
    config = SMALL.model_copy(update={"value_warmup_updates": 1})
    learner = ControlLearner(policy, config, 5)
    metrics = learner.update(make_batch(make_fragments(policy, 4, 6)), 0)
    assert metrics["train/loss"] == pytest.approx(config.value_coefficient * metrics["train/value_loss"], rel=1e-5)
    names = changed(policy, learner.policy)
    assert names and all(name.startswith(("value_head.", "value_encoder.")) for name in names)
    warm = learner.policy
    learner.update(make_batch(make_fragments(policy, 4, 6), 1), 1)
    assert changed(warm, learner.policy) == set(named_arrays(policy))


def test_the_penalty_holds_the_policy_to_its_reference(policy):
    fragments = [make_fragments(policy, 4, 6, seed, version=9) for seed in range(3)]

    def distance(penalty: ReferenceKlConfig | None) -> float:
        learner = ControlLearner(policy, SMALL.model_copy(update={"reference_kl": penalty}), 5)
        for step, each in enumerate(fragments):
            metrics = learner.update(make_batch(each, step), step)
        if penalty is not None:
            assert metrics["train/reference_kl"] > 0
            assert metrics["train/reference_kl_coefficient"] == pytest.approx(penalty.coefficient * 0.9**2)
        observations = {"": jnp.asarray(fragments[0][0].observations[""])}
        ours, theirs = (each.step(observations, {}, jnp.zeros(7, bool))[0] for each in (policy, learner.policy))
        return float(ours.kl(theirs).mean())

    free, held = distance(None), distance(ReferenceKlConfig(coefficient=20.0, decay=0.9))
    assert held < free / 3


def test_the_penalty_is_the_divergence_of_the_policy_from_its_reference(policy, tmp_path):
    other, fragment = make_policy(seed=5), make_fragment(policy, 6, 0)
    save_control_policy(tmp_path, other, other.config, other.spaces)
    kl = ReferenceKlConfig(reference=str(tmp_path))
    config = SMALL.model_copy(update={"epochs": 1, "minibatches": 1, "reference_kl": kl})
    metrics = ControlLearner(policy, config, 5).update(make_batch([fragment]), 0)
    seen = {"": jnp.asarray(fragment.observations[""][:-1])}
    theirs, ours = (each.step(seen, {}, jnp.zeros(6, bool))[0] for each in (other, policy))
    forward, backward = float(theirs.kl(ours).mean()), float(ours.kl(theirs).mean())
    assert metrics["train/reference_kl"] == pytest.approx(forward, rel=1e-4) != pytest.approx(backward, rel=0.1)


def test_a_reference_is_read_from_a_folder_and_does_not_travel_in_checkpoints(policy, tmp_path):
    other = make_policy(seed=5)
    save_control_policy(tmp_path, other, other.config, other.spaces)
    reference = ReferencePolicy(ReferenceKlConfig(reference=str(tmp_path)), policy)
    assert reference.policy is not None and changed(reference.policy, other) == set()
    assert reference.state_arrays() == {} and reference.coefficient(0) == 0.2


def test_a_reference_with_another_memory_is_refused(policy, tmp_path):
    other = make_policy("gru")
    save_control_policy(tmp_path, other, other.config, other.spaces)
    config = SMALL.model_copy(update={"reference_kl": ReferenceKlConfig(reference=str(tmp_path))})
    with pytest.raises(ConfigError, match="recurrent state .*hidden"):
        ControlLearner(policy, config, 5)


def test_a_reference_may_have_other_bounds_and_no_other_arrays(policy, tmp_path):
    config = ReferenceKlConfig(reference=str(tmp_path))

    def changed_leaf(**fields):
        (seen,) = policy.spaces.observations
        return Spaces((replace(seen, **fields),), policy.spaces.actions)

    bounded = make_control_policy(policy.config, changed_leaf(low=-9.0, high=9.0), 5)
    save_control_policy(tmp_path, bounded, bounded.config, bounded.spaces)
    assert ReferencePolicy(config, policy).policy is not None
    wider = make_control_policy(policy.config, changed_leaf(shape=(4,)), 5)
    save_control_policy(tmp_path, wider, wider.config, wider.spaces)
    with pytest.raises(
        ConfigError, match=r"other spaces than the learner's \(observations '': .*\[3\].*policy's.*\[4\]"
    ):
        ReferencePolicy(config, policy)


def test_what_is_not_finite_is_skipped_and_ends_the_run_when_it_stays(policy):
    fragment = make_fragment(policy, 6, 0, version=9)
    broken = [replace(fragment, observations={"": np.full((7, 3), np.nan, np.float32)})] * 4
    learner = ControlLearner(policy, SMALL, 5)
    for step in range(4):
        metrics = learner.update(make_batch(broken, step), step)
        assert metrics["train/non_finite"] == 1 and "train/loss" not in metrics
    assert changed(policy, learner.policy) == set() and learner.step == 4
    with pytest.raises(NonFiniteError, match="5 updates in a row"):
        learner.update(make_batch(broken, 4), 4)


RESTLESS = ControlOptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


def arrays_of(learner: ControlLearner) -> dict[str, np.ndarray]:
    """Parameters and optimiser state, without the counters, by name."""
    state = {name: array for name, array in learner.state_arrays().items() if name not in ("step", "fragment_steps")}
    return {name: np.array(array) for name, array in learner.named_arrays().items()} | state


def faulty(fragment: SampleFragment) -> SampleFragment:
    return replace(fragment, faults=np.ones(fragment.length, bool))


@pytest.mark.parametrize("values_only", [False, True])
def test_a_batch_without_a_trainable_step_changes_nothing(policy, values_only):
    """Momentum and weight decay would move the weights, and the moments decay."""
    changes = {"optimizer": RESTLESS, "value_warmup_updates": 9 if values_only else 0, "target_kl": 1e9}
    learner = ControlLearner(policy, SMALL.model_copy(update=changes), 5)
    first = learner.update(make_batch(make_fragments(policy, 4, 6)), 0)
    assert (first["train/empty_minibatches"], first["train/optimizer_steps"]) == (0, 4)
    before = arrays_of(learner)
    metrics = learner.update(make_batch([faulty(each) for each in make_fragments(policy, 4, 6, version=9)], 1), 1)
    assert learner.step == 2, "the version goes on, as the batch was used"
    np.testing.assert_equal(arrays_of(learner), before)
    assert (metrics["train/empty_minibatches"], metrics["train/optimizer_steps"]) == (4, 0)
    assert metrics["train/trained_steps"] == 0
    undefined = {"train/loss", "train/grad_norm", "train/non_finite", "train/approx_kl", "train/advantage_mean"}
    assert undefined.isdisjoint(metrics)


def test_a_minibatch_without_a_trainable_step_is_as_if_it_were_not_there():
    """Of two fragments in two minibatches one is faulty: each epoch is one optimiser step, on the other."""
    policy = make_policy("gru")
    good, bad = make_fragments(policy, 2, 6)
    config = SMALL.model_copy(update={"optimizer": RESTLESS, "minibatches": 1})
    alone, beside = (
        ControlLearner(policy, config, 5),
        ControlLearner(policy, config.model_copy(update={"minibatches": 2}), 5),
    )
    expected = alone.update(make_batch([good]), 0)
    metrics = beside.update(make_batch([good, faulty(bad)]), 0)
    for name, array in arrays_of(beside).items():
        np.testing.assert_allclose(array, arrays_of(alone)[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert (metrics["train/empty_minibatches"], metrics["train/optimizer_steps"]) == (2, 2)
    for name in ("train/loss", "train/entropy", "train/grad_norm", "train/ratio_mean", "train/approx_kl"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_an_empty_batch_does_not_end_a_row_of_updates_that_were_not_finite(policy):
    fragment = make_fragment(policy, 6, 0, version=9)
    broken = [replace(fragment, observations={"": np.full((7, 3), np.nan, np.float32)})] * 4
    learner = ControlLearner(policy, SMALL.model_copy(update={"max_non_finite_updates": 2}), 5)
    learner.update(make_batch(broken), 0)
    learner.update(make_batch([faulty(fragment)] * 4, 1), 1)
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        learner.update(make_batch(broken, 2), 2)


def test_a_batch_for_another_version_and_an_empty_one_are_refused(policy):
    learner = ControlLearner(policy, SMALL, 5)
    with pytest.raises(WeightsError, match="for version 2, the learner holds 0"):
        learner.update(make_batch([make_fragment(policy, 3, 0)], 2), 2)
    with pytest.raises(ConfigError, match="no fragments"):
        learner.update(make_batch([]), 0)


def test_resuming_equals_going_straight_on_bit_for_bit(policy, tmp_path):
    config = SMALL.model_copy(update={"reference_kl": ReferenceKlConfig(reference_version=1)})
    learner = ControlLearner(policy, config, 9, seed=3)
    batches = [make_batch(make_fragments(policy, 4, 6, seed, version=9), seed) for seed in range(4)]
    learner.update(batches[0], 0)
    reference = learner.named_arrays()
    learner.update(batches[1], 1)
    for name, array in reference.items():
        np.testing.assert_array_equal(learner.state_arrays()[f"reference.{name}"], array)
    path = save_checkpoint(tmp_path, 2, learner, None, {"replay": {"waiting": []}})
    checkpoint = load_checkpoint(path)
    resumed = restore_control_learner(checkpoint, config, 9, seed=3)
    assert (checkpoint.step, resumed.step, checkpoint.states) == (2, 2, {"replay": {"waiting": []}})
    assert changed(learner.policy, checkpoint.policy) == set()
    for step in (2, 3):
        straight, again = (each.update(batches[step], step) for each in (learner, resumed))
        train = {name for name in straight if name.startswith("train/")}
        assert {name: straight[name] for name in train} == {name: again[name] for name in train}
    assert changed(learner.policy, resumed.policy) == set()
    for name, value in learner.state_arrays().items():
        np.testing.assert_array_equal(value, resumed.state_arrays()[name], err_msg=name)
    with pytest.raises(CheckpointError, match="control policy, no language policy"):
        _ = checkpoint.decoder


def test_a_checkpoint_without_the_reference_is_refused(policy, tmp_path):
    learner = ControlLearner(policy, SMALL, 9)
    learner.update(make_batch(make_fragments(policy, 4, 6)), 0)
    checkpoint = load_checkpoint(save_checkpoint(tmp_path, 1, learner, None, {}))
    config = SMALL.model_copy(update={"reference_kl": ReferenceKlConfig()})
    with pytest.raises(CheckpointError, match="has no reference policy"):
        restore_control_learner(checkpoint, config, 9)


def test_rewards_are_scaled_by_the_returns_seen_so_far(policy):
    """Rewards of 100 a step: returns inside fragments of six steps without an end, γ = 0.5."""
    config = SMALL.model_copy(update={"reward_scale": "auto", "discount": 0.5})
    fragments = [replace(make_fragment(policy, 6, seed, 0), rewards=np.full(6, 100, np.float32)) for seed in (0, 1)]
    learner = ControlLearner(policy, config, 9)
    metrics = learner.update(make_batch(fragments, 0), 0)
    returns = np.array([200 * (1 - 0.5**left) for left in range(1, 7)])
    assert metrics["train/reward_scale/toy"] == pytest.approx(1 / np.sqrt(np.mean(returns**2)), rel=1e-6)
    again = ControlLearner(learner.policy, config, 9)
    again.restore_arrays(learner.state_arrays())
    ended = [replace(make_fragment(learner.policy, 6, 2, 1), rewards=np.full(6, 10, np.float32))]
    for each in (learner, again):
        metrics = each.update(make_batch(ended, 1), 1)
        scale = 1 / np.sqrt(2.01 * np.sum(returns**2) / 18)
        assert metrics["train/reward_scale/toy"] == pytest.approx(scale, rel=1e-6), "those of before count on"
    assert changed(learner.policy, again.policy) == set()


def test_a_return_ends_with_its_episode_and_nothing_is_scaled_before_there_is_any(policy):
    config = SMALL.model_copy(update={"reward_scale": "auto", "discount": 1.0})
    fragment = make_fragment(policy, 4, 0, 0, ends={1: "terminated"})
    none = ControlLearner(policy, config, 9)
    silent = replace(fragment, rewards=np.zeros(4, np.float32))
    assert none.update(make_batch([silent], 0), 0)["train/reward_scale/toy"] == 1.0
    paid = replace(fragment, rewards=np.float32([1, 2, 3, 4]))
    metrics = ControlLearner(policy, config, 9).update(make_batch([paid], 0), 0)
    assert metrics["train/reward_scale/toy"] == pytest.approx(1 / np.sqrt((3**2 + 2**2 + 7**2 + 4**2) / 4), rel=1e-6)
    faulty = with_fault(paid, 3)
    metrics = ControlLearner(policy, config, 9).update(make_batch([faulty], 0), 0)
    assert metrics["train/reward_scale/toy"] == pytest.approx(1 / np.sqrt((3**2 + 2**2 + 3**2) / 3), rel=1e-6)
    assert "train/reward_scale/toy" not in ControlLearner(policy, SMALL, 9).update(make_batch([paid], 0), 0)


def test_a_scale_by_returns_gives_what_that_number_gives(policy):
    config = SMALL.model_copy(update={"reward_scale": "auto"})
    fragments = make_fragments(policy, 4, 6)
    learner = ControlLearner(policy, config, 9)
    scale = learner.update(make_batch(fragments, 0), 0)["train/reward_scale/toy"]
    fixed = ControlLearner(policy, SMALL.model_copy(update={"reward_scale": scale}), 9)
    fixed.update(make_batch(fragments, 0), 0)
    assert changed(learner.policy, fixed.policy) == set() and "squared_returns.toy" not in fixed.state_arrays()


def test_rare_rewards_are_not_blown_up(policy):
    config = SMALL.model_copy(update={"reward_scale": "auto"})
    fragment = replace(make_fragment(policy, 6, 0), rewards=np.float32([0, 2, 0, 0, 0, 0]))
    often, seldom = ControlLearner(policy, config, 9), ControlLearner(policy, config, 9)
    nothing = [replace(make_fragment(policy, 6, seed), rewards=np.zeros(6, np.float32)) for seed in range(1, 20)]
    scale = often.update(make_batch([fragment]), 0)["train/reward_scale/toy"]
    assert scale == pytest.approx(1 / np.sqrt((2**2 + (2 * 0.99) ** 2) / 2), rel=1e-6)
    assert seldom.update(make_batch([fragment, *nothing]), 0)["train/reward_scale/toy"] == scale


def test_each_task_has_a_scale_of_its_own(policy):
    """What a task pays does not decide how much another is learned."""
    config = SMALL.model_copy(update={"reward_scale": "auto", "normalize_advantages": "none", "value_coefficient": 0.0})
    cents, euros = ControlLearner(policy, config, 9), ControlLearner(policy, config, 9)
    one, other = make_fragments(policy, 2, 6)
    metrics = cents.update(make_batch([one, replace(other, task="other", rewards=other.rewards * 128)]), 0)
    same = euros.update(make_batch([one, replace(other, task="other")]), 0)
    assert changed(cents.policy, euros.policy) == set() and len(changed(cents.policy, policy)) > 1
    assert metrics["train/reward_scale/toy"] == same["train/reward_scale/toy"]
    assert metrics["train/reward_scale/other"] == pytest.approx(same["train/reward_scale/other"] / 128, rel=1e-6)
    again = ControlLearner(cents.policy, config, 9)
    again.restore_arrays(cents.state_arrays())
    batch = make_batch(make_fragments(cents.policy, 2, 6, version=1), 1)
    assert again.update(batch, 1)["train/reward_scale/toy"] == cents.update(batch, 1)["train/reward_scale/toy"]


def test_steps_of_one_minibatch_are_what_whole_fragments_are(policy):
    """One minibatch holds every step that counts, in whatever order; faults and padding take no part."""
    fragments = [*make_fragments(policy, 3, 6), with_fault(make_fragment(policy, 4, 9), 2)]
    config = SMALL.model_copy(update={"epochs": 1, "minibatches": 1, "normalize_advantages": "none"})
    one, other = (ControlLearner(policy, config, 9, seed=seed) for seed in (1, 2))
    metrics = [learner.update(make_batch(fragments), 0) for learner in (one, other)]
    for name, array in arrays_of(one).items():
        np.testing.assert_allclose(array, arrays_of(other)[name], rtol=1e-4, atol=1e-6, err_msg=name)
    arrays = one._arrays(fragments)  # noqa: SLF001
    steps, _ = preparer(config)(policy, arrays, np.ones(4, np.float32))
    counted = arrays.counted
    assert counted.sum() == 3 * 6 + 3
    observations = {"": jnp.asarray(arrays.observations[""][:-1][counted])}
    entropy = policy.step(observations, {}, jnp.zeros(21, bool))[0].entropy().mean()
    assert metrics[0]["train/entropy"] == pytest.approx(float(entropy), rel=1e-5)
    errors = np.asarray(steps.targets)[counted] - np.asarray(policy.step(observations, {}, jnp.zeros(21, bool))[1])
    assert metrics[0]["train/value_loss"] == pytest.approx(0.5 * np.mean(errors**2), rel=1e-4)


def test_more_minibatches_than_fragments_are_each_an_optimiser_step(policy):
    config = SMALL.model_copy(update={"epochs": 1, "minibatches": 5})
    metrics = ControlLearner(policy, config, 9).update(make_batch(make_fragments(policy, 2, 6)), 0)
    assert metrics["train/optimizer_steps"] == 5 and metrics["train/empty_minibatches"] == 0
    metrics = ControlLearner(make_policy("gru"), config, 9).update(
        make_batch(make_fragments(make_policy("gru"), 2, 6)), 0
    )
    assert metrics["train/optimizer_steps"] == 2
