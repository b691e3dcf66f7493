import jax
import numpy as np
import pytest

from penstock.fleet.jax_policy import JaxPolicyRunner
from penstock.fleet.policy import Pending, PolicyRunner
from penstock.fleet.user_policy import UserPolicyRunner
from penstock.model.control import ControlModelConfig, make_control_policy
from penstock.types import ConfigError, LeafSpace, Spaces, WeightsError, WeightVersion

SPACES = Spaces((LeafSpace("", "box", (2,), "float32"),), (LeafSpace("", "discrete", (), "int64", (50,)),))
ALL = np.ones(2, bool)
NONE = np.zeros(2, bool)


def observed(n):
    return {"": np.arange(2 * n, dtype=np.float32).reshape(n, 2)}


class Counter:
    """Acts with the number of its steps in the episode, which begins at 10; changes its state in place."""

    def __init__(self):
        self.gain, self.keys = 1, []

    def initial_state(self, batch):
        return {"steps": np.full(batch, 10)}

    def act(self, observations, state, key):
        self.keys.append(jax.random.key_data(key).tolist())
        state["steps"] += self.gain
        n = len(state["steps"])
        return state["steps"].copy(), np.full(n, -0.5), np.full(n, 2.0), state

    def set_arrays(self, arrays):
        self.gain = int(arrays["gain"])


class Returns:
    """Without memory; acts as told."""

    def __init__(self, acted):
        self.acted = acted

    def initial_state(self, batch):
        return None

    def act(self, observations, state, key):
        assert state == {}
        return self.acted


def run(runner, slots, first):
    return runner.decide(np.asarray(slots), observed(len(slots)), np.asarray(first)).result()


def test_state_is_kept_by_slot_and_reset_where_an_episode_begins():
    runner = UserPolicyRunner(Counter(), SPACES, 4, seed=0)
    assert isinstance(runner, PolicyRunner)
    assert run(runner, [2, 0], ALL).actions[""].tolist() == [11, 11]
    decision = run(runner, [0, 2], [False, True])
    assert decision.actions[""].tolist() == [12, 11]
    assert decision.states["steps"].tolist() == [11, 10]  # before the decision, after the reset
    assert run(runner, [2, 3], NONE).actions[""].tolist() == [12, 11]
    assert decision.logprobs.tolist() == [-0.5, -0.5] and decision.values.dtype == np.float32


def test_a_decision_is_there_at_once_with_the_spaces_dtypes():
    pending = UserPolicyRunner(Counter(), SPACES, 2, seed=0).decide(np.arange(2), observed(2), ALL)
    assert isinstance(pending, Pending) and pending.done()
    assert pending.result().actions[""].dtype == np.int64


def test_every_call_has_a_new_key_and_a_rerun_the_same_ones():
    one, again, other = Counter(), Counter(), Counter()
    for policy, seed in ((one, 1), (again, 1), (other, 2)):
        runner = UserPolicyRunner(policy, SPACES, 2, seed)
        for _ in range(3):
            run(runner, [0, 1], NONE)
    assert one.keys == again.keys and one.keys != other.keys and one.keys[0] != one.keys[1]


def test_weights_are_taken_before_the_next_decision_and_the_last_counts():
    policy = Counter()
    runner = UserPolicyRunner(policy, SPACES, 2, seed=0)
    runner.set_weights(WeightVersion(0, 1), {"gain": 3})
    runner.set_weights(WeightVersion(0, 2), {"gain": 5})
    assert policy.gain == 1 and runner.version == WeightVersion(0, 2)
    decision = run(runner, [0, 1], ALL)
    assert decision.version == WeightVersion(0, 2) and decision.actions[""].tolist() == [15, 15]


class Refusing(Counter):
    """Its weights must be positive; while it takes them, `meanwhile` is called."""

    def __init__(self, meanwhile=lambda: None):
        super().__init__()
        self.meanwhile = meanwhile

    def set_arrays(self, arrays):
        self.meanwhile()
        if arrays["gain"] < 0:
            raise ValueError("a negative gain")
        super().set_arrays(arrays)


def test_weights_that_the_object_refuses_leave_the_old_version():
    runner = UserPolicyRunner(Refusing(), SPACES, 2, seed=0)
    runner.set_weights(WeightVersion(1, 4), {"gain": 3})
    assert run(runner, [0, 1], ALL).version == WeightVersion(1, 4)
    runner.set_weights(WeightVersion(1, 7), {"gain": -1})
    message = (
        r"Refusing.set_arrays raised ValueError at .* version 7 \(lineage 1\), so version 4 stays: a negative gain"
    )
    with pytest.raises(WeightsError, match=message):
        run(runner, [0, 1], NONE)
    assert runner.version == WeightVersion(1, 4)
    decision = run(runner, [0, 1], ALL)
    assert decision.version == WeightVersion(1, 4) and decision.actions[""].tolist() == [13, 13]
    runner.set_weights(WeightVersion(1, 8), {"gain": 2})
    assert run(runner, [0, 1], ALL).version == runner.version == WeightVersion(1, 8)


def test_weights_that_come_while_others_are_refused_are_the_next():
    policy = Refusing()
    runner = UserPolicyRunner(policy, SPACES, 2, seed=0)
    policy.meanwhile = lambda: runner.set_weights(WeightVersion(0, 2), {"gain": 2})
    runner.set_weights(WeightVersion(0, 1), {"gain": -1})
    with pytest.raises(WeightsError, match="version 1"):
        run(runner, [0, 1], ALL)
    policy.meanwhile = lambda: None
    assert runner.version == WeightVersion(0, 2)
    assert run(runner, [0, 1], ALL).version == WeightVersion(0, 2)


def test_an_object_that_takes_no_weights_says_so():
    with pytest.raises(WeightsError, match=r"Returns has no set_arrays\(arrays\)"):
        UserPolicyRunner(Returns(None), SPACES, 2, seed=0).set_weights(WeightVersion(0, 1), {})


@pytest.mark.parametrize(
    "acted",
    [np.array([3, 4]), {"": [3, 4]}, ([3, 4], None), ([3, 4], [-1, -2], [0, 1]), ({"": [3, 4]}, [-1, -2], [0, 1], {})],
)
def test_every_form_of_an_answer_is_understood(acted):
    decision = run(UserPolicyRunner(Returns(acted), SPACES, 2, seed=0), [0, 1], ALL)
    assert decision.actions[""].tolist() == [3, 4] and dict(decision.states) == {}
    known = isinstance(acted, tuple) and len(acted) > 2
    assert decision.logprobs.tolist() == [-1, -2] if known else np.isnan(decision.logprobs).all()
    assert decision.values.tolist() == [0, 1] if known else np.isnan(decision.values).all()


@pytest.mark.parametrize(
    ("acted", "message"),
    [
        ((1, 2, 3, 4, 5), "a tuple of 5: return actions"),
        ({"x": [1, 2]}, r"act's actions are \['x'\]: they must be \[''\]"),
        ([[1, 2]], r"act's action '' has shape \[1, 2\]: it must be \[2\]"),
        (([1, 2], [0.0], [0, 0]), r"act's logprobs have shape \[1\]"),
        (([1, 2], {"a": np.zeros(2)}), r"act's state has \['a'\], but initial_state has \[\]"),
        (([1, 2], {"a": np.zeros(3)}), r"act's state\['a'\] has shape \[3\]: its first axis must be 2"),
        (([1, 2], [1]), "act's state is a list: it must be a mapping"),
    ],
)
def test_an_answer_of_a_wrong_form_is_named(acted, message):
    with pytest.raises(ConfigError, match=message):
        run(UserPolicyRunner(Returns(acted), SPACES, 2, seed=0), [0, 1], ALL)


def test_a_control_policy_fits_as_it_is():
    class Adapted:  # the tests check types: a JAX policy is given JAX arrays
        def __init__(self, policy):
            self.initial_state = policy.initial_state
            self.act = lambda o, s, k: policy.act(*jax.tree.map(jax.numpy.asarray, (o, dict(s))), k)

    config = ControlModelConfig(hidden_sizes=(8,), memory="gru", memory_size=4)
    policy = make_control_policy(config, SPACES, 0)
    user, jitted = UserPolicyRunner(Adapted(policy), SPACES, 2, 0), JaxPolicyRunner(policy, 2, 2, 0)
    for first in (ALL, NONE, np.array([False, True])):
        one, other = run(user, [0, 1], first), run(jitted, [0, 1], first)
        np.testing.assert_allclose(one.values, other.values, atol=1e-6)
        np.testing.assert_allclose(one.states["hidden"], other.states["hidden"], atol=1e-6)


def test_it_sees_its_slots_alone_however_much_room_the_observations_have():
    seen = []

    class Looks(Returns):
        def act(self, observations, state, key):
            seen.append(observations[""].tolist())
            return super().act(observations, state, key)

    nothing = np.zeros(2)
    runner = UserPolicyRunner(Looks((np.array([1, 2]), nothing, nothing, None)), SPACES, 4, seed=0)
    assert runner.decide(np.array([3, 1]), observed(4), NONE).result().actions[""].tolist() == [1, 2]
    assert seen == [observed(2)[""].tolist()]
