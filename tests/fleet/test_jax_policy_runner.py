import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.fleet.jax_policy import JaxPolicyRunner, bucket_of, padded_sizes, slot_keys
from penstock.fleet.policy import Pending, PolicyRunner
from penstock.fleet.steps import aligned_zeros
from penstock.model.control import ControlModelConfig, make_control_policy, named_arrays
from penstock.types import ConfigError, LeafSpace, Spaces, WeightsError, WeightVersion

SPACES = Spaces(
    (LeafSpace("", "box", (3,), "float32"),),
    (LeafSpace("turn", "discrete", (), "int64", (4,)), LeafSpace("push", "box", (2,), "float32")),
)
SLOTS = 6


def make_policy(memory="gru", seed=0):
    config = ControlModelConfig(hidden_sizes=(8,), memory=memory, memory_size=8, memory_window=4, policy_gain=1.0)
    return make_control_policy(config, SPACES, seed)


def observed(n, seed=0):
    return {"": np.random.default_rng(seed).standard_normal((n, 3)).astype(np.float32)}


def decide(runner, slots, seed=0, first=None):
    slots = np.asarray(slots)
    begins = np.zeros(len(slots), bool) if first is None else np.asarray(first)
    return runner.decide(slots, observed(len(slots), seed), begins).result()


@pytest.fixture(scope="module")
def policy():
    return make_policy()


def test_batches_are_padded_to_few_sizes():
    assert padded_sizes(64) == (1, 8, 16, 32, 64)
    assert padded_sizes(24) == (1, 6, 12, 24) and padded_sizes(5) == (1, 5) and padded_sizes(1) == (1,)


def test_it_is_a_policy_runner(policy):
    runner = JaxPolicyRunner(policy, SLOTS, 2, seed=0)
    assert isinstance(runner, PolicyRunner) and runner.version == WeightVersion(0, 0)
    pending = runner.decide(np.array([0]), observed(1), np.array([True]))
    assert isinstance(pending, Pending)
    decision = pending.result()
    assert pending.done()
    assert decision.version == WeightVersion(0, 0) and list(decision.states) == ["hidden"]
    assert decision.actions["turn"].dtype == np.int64 and decision.actions["push"].shape == (1, 2)


@pytest.mark.parametrize("memory", ["none", "gru", "transformer"])
def test_decisions_are_the_policys_whatever_the_order_and_size_of_batches(memory):
    policy = make_policy(memory)
    runner = JaxPolicyRunner(policy, SLOTS, 4, seed=1)
    states = [policy.initial_state(1) for _ in range(SLOTS)]
    step = jax.jit(lambda policy, *args: policy.step(*args))
    batches = [([3, 0, 5], [True, True, True]), ([5, 3], [False, False]), ([0, 3, 1, 5], [False, True, True, False])]
    for number, (slots, first) in enumerate(batches):
        decision = decide(runner, slots, number, first)
        for row, slot in enumerate(slots):
            one = jax.tree.map(lambda a, row=row: jnp.asarray(a[row : row + 1]), observed(len(slots), number))
            if first[row]:
                states[slot] = policy.initial_state(1)
            for name, array in states[slot].items():
                np.testing.assert_allclose(decision.states[name][row], array[0], atol=1e-6)
            distribution, value, states[slot] = step(policy, one, states[slot], jnp.zeros(1, bool))
            actions = {name: jnp.asarray(array[row : row + 1]) for name, array in decision.actions.items()}
            np.testing.assert_allclose(decision.logprobs[row], distribution.log_prob(actions)[0], atol=1e-5)
            np.testing.assert_allclose(decision.values[row], value[0], atol=1e-5)
    assert set(decision.states) == set(policy.initial_state(1))


def test_padding_touches_no_slot(policy):
    runner = JaxPolicyRunner(policy, SLOTS, 5, seed=1)
    decide(runner, range(5), first=[True] * 5)
    before = decide(runner, [4, 0]).states["hidden"]  # padded to five rows
    decide(runner, [1, 2, 3])
    again = JaxPolicyRunner(policy, SLOTS, 5, seed=1)
    decide(again, range(5), first=[True] * 5)
    np.testing.assert_allclose(decide(again, [4, 0]).states["hidden"], before, atol=1e-6)
    np.testing.assert_array_equal(decide(runner, [5], first=[False]).states["hidden"], np.zeros((1, 8)))


def test_a_rerun_reproduces_and_another_seed_does_not(policy):
    def played(seed, batches):
        runner = JaxPolicyRunner(policy, SLOTS, 4, seed)
        decisions = {}
        for slots in batches:
            result = decide(runner, slots)
            for row, slot in enumerate(slots):
                decisions.setdefault(slot, []).append(result.actions["push"][row].tolist())
        return decisions

    batches = [[0, 1], [1, 0], [0, 1], [0, 1]]
    assert played(1, batches) == played(1, batches)
    assert played(1, batches) != played(2, batches)


def test_no_slot_and_no_decision_has_the_stream_of_another():
    runner = JaxPolicyRunner(make_policy("none"), SLOTS, 4, seed=0)
    same = {"": np.ones((4, 3), np.float32)}
    pushes = [runner.decide(np.arange(4), same, np.zeros(4, bool)).result().actions["push"] for _ in range(5)]
    assert len({tuple(push) for push in np.concatenate(pushes).tolist()}) == 20


def test_sampling_does_not_depend_on_how_slots_are_batched():
    policy = make_policy("none")
    together, apart = (JaxPolicyRunner(policy, SLOTS, 4, seed=3) for _ in range(2))
    same = {"": np.ones((1, 3), np.float32)}
    whole = together.decide(np.arange(4), {"": np.ones((4, 3), np.float32)}, np.ones(4, bool)).result()
    for slot in (2, 0, 3, 1):
        alone = apart.decide(np.array([slot]), same, np.ones(1, bool)).result()
        np.testing.assert_allclose(alone.actions["push"][0], whole.actions["push"][slot], atol=1e-6)
        assert alone.actions["turn"][0] == whole.actions["turn"][slot]


def test_slots_have_different_keys():
    keys = slot_keys(0, 100)
    assert keys.dtype == np.uint32 and len({tuple(row) for row in keys.tolist()}) == 100
    assert (slot_keys(0, 3) == keys[:3]).all() and (slot_keys(1, 3) != keys[:3]).all()


def test_samples_follow_the_distribution():
    policy = make_policy("none")
    runner = JaxPolicyRunner(policy, 64, 64, seed=0)
    turns = np.concatenate([
        runner.decide(np.arange(64), {"": np.ones((64, 3), np.float32)}, np.ones(64, bool)).result().actions["turn"]
        for _ in range(40)
    ])  # fmt: skip
    distribution, _, _ = policy.step({"": jnp.ones((1, 3))}, {}, jnp.ones(1, bool))
    expected = np.exp(np.asarray(distribution.leaves[0].logprobs[0]))
    np.testing.assert_allclose(np.bincount(turns, minlength=4) / len(turns), expected, atol=0.04)


def test_a_deterministic_runner_takes_the_mode(policy):
    runner = JaxPolicyRunner(policy, SLOTS, 4, seed=0, deterministic=True)
    decision = decide(runner, [0, 1, 2], first=[True] * 3)
    distribution, _, _ = policy.step(
        {"": jnp.asarray(observed(3)[""])}, policy.initial_state(3), jnp.ones(3, bool)
    )  # fmt: skip
    np.testing.assert_array_equal(decision.actions["turn"], distribution.mode()["turn"])
    np.testing.assert_allclose(decision.actions["push"], distribution.mode()["push"], atol=1e-6)
    np.testing.assert_allclose(decision.logprobs, distribution.log_prob(distribution.mode()), atol=1e-5)


def test_nothing_compiles_after_compile(policy):
    runner = JaxPolicyRunner(policy, 10, 10, seed=0)
    assert runner.batch_sizes == (1, 5, 10)
    runner.compile()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        for n in range(1, 11):
            decision = decide(runner, range(n))
            assert len(decision.values) == n
            assert all(len(array) == n for array in decision.states.values())
        runner.set_weights(WeightVersion(0, 1), named_arrays(make_policy(seed=1)))
        decide(runner, range(10))
    finally:
        jax.monitoring.clear_event_listeners()
    assert [name for name in compiled if "compile" in name] == []


def test_runners_of_the_same_form_share_what_is_compiled(policy):
    assert bucket_of(policy, SLOTS, 4, False) is bucket_of(make_policy(seed=9), SLOTS, 4, False)
    others = [bucket_of(policy, SLOTS, 1, False), bucket_of(policy, SLOTS, 4, True), bucket_of(policy, 5, 4, False)]
    assert bucket_of(policy, SLOTS, 4, False) not in others


def test_compiling_moves_no_slots_stream(policy):
    ahead, lazy = (JaxPolicyRunner(policy, SLOTS, 4, seed=0) for _ in range(2))
    ahead.compile()
    np.testing.assert_array_equal(decide(ahead, [1, 2]).actions["push"], decide(lazy, [1, 2]).actions["push"])


def test_new_weights_are_taken_between_decisions_and_the_last_counts(policy):
    runner = JaxPolicyRunner(policy, SLOTS, 4, seed=0, version=WeightVersion(1, 5))
    pending = runner.decide(np.arange(2), observed(2), np.ones(2, bool))
    runner.set_weights(WeightVersion(1, 6), named_arrays(make_policy(seed=6)))
    runner.set_weights(WeightVersion(1, 7), named_arrays(make_policy(seed=7)))
    old = pending.result()
    assert old.version == WeightVersion(1, 5) and runner.version == WeightVersion(1, 7)
    new = decide(runner, [0, 1], first=[True] * 2)
    assert new.version == WeightVersion(1, 7)
    fresh = JaxPolicyRunner(make_policy(seed=7), SLOTS, 4, seed=0)
    np.testing.assert_allclose(new.values, decide(fresh, [0, 1], first=[True] * 2).values, atol=1e-6)
    assert np.abs(new.values - old.values).max() > 1e-3


def test_what_stands_in_the_room_behind_a_batch_changes_nothing(policy):
    exact, roomy = (JaxPolicyRunner(policy, SLOTS, 4, seed=0) for _ in range(2))
    room = {name: np.concatenate([array, array[:1] + 5]) for name, array in observed(3).items()}
    for first in (True, False):
        begins = np.full(3, first)
        expected = exact.decide(np.arange(3), observed(3), begins).result()
        found = roomy.decide(np.arange(3), room, begins).result()
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_weights_of_the_caller_may_be_overwritten(policy):
    arrays = {}
    for name, array in named_arrays(policy).items():
        arrays[name] = aligned_zeros(array.shape, array.dtype)  # which the device would use in place
        arrays[name][:] = array
    runner = JaxPolicyRunner(policy, SLOTS, 4, seed=0)
    expected = decide(runner, [0], first=[True]).values
    runner.set_weights(WeightVersion(0, 1), arrays)
    for array in arrays.values():
        array[...] = np.nan
    np.testing.assert_array_equal(decide(runner, [0], first=[True]).values, expected)


def test_weights_that_do_not_fit_change_nothing(policy):
    runner = JaxPolicyRunner(policy, SLOTS, 4, seed=0)
    before = decide(runner, [0], first=[True])
    arrays = named_arrays(make_policy(seed=1))
    arrays.pop("value_head.bias")
    with pytest.raises(WeightsError, match="value_head.bias is missing"):
        runner.set_weights(WeightVersion(0, 1), arrays)
    after = decide(runner, [0], first=[True])
    assert after.version == WeightVersion(0, 0)
    np.testing.assert_array_equal(after.values, before.values)


def test_a_version_belongs_to_its_weights_while_another_thread_replaces_them():
    policy = make_policy("none")
    runner = JaxPolicyRunner(policy, SLOTS, 1, seed=0)
    versions = {step: jax.tree.map(lambda a, step=step: a * 0 + step, named_arrays(policy)) for step in (1, 2)}
    runner.set_weights(WeightVersion(0, 1), versions[1])
    runner.compile()
    expected = {}
    for step in (1, 2):
        runner.set_weights(WeightVersion(0, step), versions[step])
        expected[step] = decide(runner, [0]).values[0]
    stop = threading.Event()

    def replace():
        while not stop.is_set():
            for step, arrays in versions.items():
                runner.set_weights(WeightVersion(0, step), arrays)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        seen = [(decision.version.step, decision.values[0]) for decision in (decide(runner, [0]) for _ in range(200))]
    finally:
        stop.set()
        thread.join(timeout=280)
    assert all(value == expected[step] for step, value in seen)
    assert expected[1] != expected[2]


def test_small_observations_may_be_overwritten_at_once_and_results_are_the_callers(policy):
    runner, untouched = (JaxPolicyRunner(policy, SLOTS, 4, seed=0) for _ in range(2))
    observations, first = observed(4), np.ones(4, bool)
    pending = runner.decide(np.arange(4), observations, first)
    observations[""][:] = np.nan
    first[:] = False
    decision = pending.result()
    expected = untouched.decide(np.arange(4), observed(4), np.ones(4, bool)).result()
    np.testing.assert_array_equal(decision.values, expected.values)
    decision.actions["turn"][:] = 0  # writable


def test_images_of_any_batch_size_reach_the_policy():
    spaces = Spaces((LeafSpace("image", "box", (32, 32, 3), "uint8"),), SPACES.actions)
    policy = make_control_policy(ControlModelConfig(hidden_sizes=(8,)), spaces, 0)
    runner = JaxPolicyRunner(policy, 16, 16, seed=0)
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3)).astype(np.uint8)
    _, expected, _ = policy.step({"image": jnp.asarray(images)}, {}, jnp.ones(16, bool))
    for n in (16, 11, 1):
        decision = runner.decide(np.arange(n), {"image": images[:n]}, np.ones(n, bool)).result()
        np.testing.assert_allclose(decision.values, expected[:n], atol=1e-5)
        assert len(decision.states) == 0


@pytest.mark.parametrize(("slots", "most"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(policy, slots, most):
    with pytest.raises(ConfigError, match="both must be at least 1"):
        JaxPolicyRunner(policy, slots, most, seed=0)


@pytest.mark.parametrize("n", [0, 5])
def test_a_batch_of_another_size_is_refused(policy, n):
    with pytest.raises(ConfigError, match=f"a decision for {n} slots: this runner takes 1 to 4"):
        decide(JaxPolicyRunner(policy, SLOTS, 4, seed=0), range(n))
