import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.learner.control_losses import StepChain, VTraceClips, gae, vtrace


def make_chain(rewards, values, next_values=None, terminated=(), truncated=(), uncounted=()) -> StepChain:
    """A chain whose next values are those of the following step, or the given."""
    length = len(rewards)
    if next_values is None:
        next_values = [*values[1:], 0.0]

    def flags(steps) -> jax.Array:
        return jnp.asarray(np.isin(np.arange(length), list(steps)))

    numbers = [jnp.asarray(np.asarray(each, np.float32)) for each in (rewards, values, next_values)]
    return StepChain(*numbers, flags(terminated), flags(truncated), ~flags(uncounted))


UNCLIPPED = VTraceClips(1e9, 1e9, 1e9)


def slow_estimates(chain: StepChain, discount: float, gae_lambda: float, ratios=None, clips=UNCLIPPED):
    """Both estimators from their definitions as explicit sums, forwards in time, in float64."""
    rewards, values, following = (np.asarray(each, np.float64) for each in chain[:3])
    terminated, truncated, counted = (np.asarray(each) for each in chain[3:])
    ratios = np.ones(len(rewards)) if ratios is None else np.asarray(ratios, np.float64)
    advantages, targets = np.zeros(len(rewards)), np.zeros(len(rewards))

    def delta(t: int) -> float:
        return rewards[t] + (0.0 if terminated[t] else discount * following[t]) - values[t]

    def error_from(t: int) -> float:
        total, factor = 0.0, 1.0
        for k in range(t, len(rewards)):
            if not counted[k]:
                break
            total += factor * min(ratios[k], clips.rho) * delta(k)
            factor *= discount * gae_lambda * min(ratios[k], clips.c)
            if terminated[k] or truncated[k]:
                break
        return total

    for t in np.flatnonzero(counted):
        targets[t] = values[t] + error_from(t)
        ended = terminated[t] or truncated[t] or t + 1 == len(rewards)
        rest = 0.0 if ended else discount * gae_lambda * error_from(t + 1)
        advantages[t] = min(ratios[t], clips.policy) * (delta(t) + rest)
    return advantages, targets


def test_three_steps_by_hand():
    """γ = .5, λ = .5: δ = (1 + 1 − 1, 0 + 1 − 2, 2 + 2 − 2) = (1, −1, 2), A₂ = 2, A₁ = −.5, A₀ = .875."""
    chain = make_chain([1.0, 0.0, 2.0], [1.0, 2.0, 2.0], [2.0, 2.0, 4.0])
    advantages, targets = gae(chain, 0.5, 0.5)
    np.testing.assert_allclose(advantages, [0.875, -0.5, 2.0])
    np.testing.assert_allclose(targets, [1.875, 1.5, 4.0])


def test_termination_has_no_future_and_truncation_has_one_that_it_does_not_share():
    """V(s') = 10 after each step, γ = λ = 1, V = 0: an end at 1 cuts what follows, and only termination its value."""
    rewards, values, following = [1.0, 1.0, 1.0], [0.0] * 3, [10.0] * 3
    running = gae(make_chain(rewards, values, following), 1.0, 1.0).advantages
    np.testing.assert_allclose(running, [33.0, 22.0, 11.0])
    terminated = gae(make_chain(rewards, values, following, terminated=[1]), 1.0, 1.0).advantages
    np.testing.assert_allclose(terminated, [12.0, 1.0, 11.0])
    truncated = gae(make_chain(rewards, values, following, truncated=[1]), 1.0, 1.0).advantages
    np.testing.assert_allclose(truncated, [22.0, 11.0, 11.0])
    both = gae(make_chain(rewards, values, following, terminated=[1], truncated=[1]), 1.0, 1.0).advantages
    np.testing.assert_allclose(both, terminated)


def test_a_fault_is_left_out_and_the_step_before_it_bootstraps_from_its_observation():
    """At the fault everything that it led to is NaN; the value of what it was seen from, 7, is good."""
    chain = make_chain([1.0, 1.0, np.nan, 1.0], [0.0, 0.0, 7.0, 0.0], [0.0, 7.0, np.nan, 5.0], uncounted=[2])
    for advantages, targets in (gae(chain, 1.0, 1.0), vtrace(chain, chain.rewards, 1.0, 1.0, VTraceClips())):
        np.testing.assert_allclose(advantages, [9.0, 8.0, 0.0, 6.0])
        np.testing.assert_allclose(targets, [9.0, 8.0, 0.0, 6.0])


def test_the_value_after_a_termination_may_be_anything():
    advantages, _ = gae(make_chain([1.0, 1.0], [0.0, 0.0], [0.0, np.nan], terminated=[1]), 0.9, 1.0)
    np.testing.assert_allclose(advantages, [1.9, 1.0])


REWARDS = [[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]]
DISCOUNTS = [[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]]
VALUES = [[2.1, 1.1, -3.1, 0.0], [3.1, 0.1, -1.1, 7.4]]
BOOTSTRAP = [8.4, -1.2]
BEHAVIOUR = [[[8.9, 0.7], [5.0, 1.0], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5.0], [1.0, -8.0], [0.3, 1.7], [4.7, 3.3]]]
TARGET = [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1.0, 0.9], [1.0, -1.0], [-4.3, 8.7], [0.8, 0.3]]]
ACTIONS = [[0, 1, 0, 0], [1, 0, 0, 1]]
ERRORS = [[-1.6155143, -3.4973226, 1.8670533, 50.316002], [1.4662437, 3.6116405, -8.3327293e-5, -13.54]]
"""Case and results that rlax (Apache-2.0) publishes for its V-trace, `rlax/_src/vtrace_test.py`."""


@pytest.mark.parametrize("case", [0, 1])
def test_vtrace_gives_what_rlax_publishes(case):
    """Discounts differ by step there; here they are folded into rewards and values: x_t → Γ_t x_t makes all γ = 1."""
    gammas = np.array(DISCOUNTS[case])
    ended = np.flatnonzero(gammas == 0)
    scale = np.concatenate([[1.0], np.cumprod(np.where(gammas == 0, 1.0, gammas))])
    values = np.array([*VALUES[case], BOOTSTRAP[case]]) * scale
    chain = make_chain(np.array(REWARDS[case]) * scale[:-1], values[:-1], values[1:], terminated=ended)
    logprobs = [jax.nn.log_softmax(jnp.array(logits[case]))[np.arange(4), np.array(ACTIONS[case])] for logits in
                (TARGET, BEHAVIOUR)]  # fmt: skip
    advantages, targets = vtrace(chain, jnp.exp(logprobs[0] - logprobs[1]), 1.0, 1.0, VTraceClips())
    np.testing.assert_allclose((np.asarray(targets) - values[:-1]) / scale[:-1], ERRORS[case], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.asarray(advantages) / scale[:-1], ERRORS[case], rtol=1e-3, atol=1e-5)


chains = st.sampled_from([1, 6]).flatmap(
    lambda length: st.builds(
        make_chain,
        *[st.lists(st.floats(-5, 5, width=32), min_size=length, max_size=length) for _ in range(3)],
        *[st.sets(st.integers(0, length - 1)) for _ in range(3)],
    )
)


@settings(max_examples=60, deadline=None)
@given(chains, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_its_sum(chain, discount, gae_lambda):
    advantages, targets = slow_estimates(chain, discount, gae_lambda)
    fast = gae(chain, discount, gae_lambda)
    np.testing.assert_allclose(fast.advantages, advantages, atol=1e-3)
    np.testing.assert_allclose(fast.targets, targets, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(chains, st.data(), st.floats(0, 1), st.floats(0, 1))
def test_vtrace_equals_its_sum(chain, data, discount, gae_lambda):
    length = len(chain.rewards)
    ratios = np.array(data.draw(st.lists(st.floats(0, 4, width=32), min_size=length, max_size=length)), np.float32)
    clips = VTraceClips(1.5, 1.25, 2.0)
    advantages, targets = slow_estimates(chain, discount, gae_lambda, ratios, clips)
    fast = vtrace(chain, jnp.asarray(ratios), discount, gae_lambda, clips)
    np.testing.assert_allclose(fast.advantages, advantages, atol=2e-3)
    np.testing.assert_allclose(fast.targets, targets, atol=2e-3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6), st.floats(0, 1), st.data())
def test_gae_of_lambda_one_is_discounted_returns_less_values(rewards, discount, data):
    values = data.draw(st.lists(st.floats(-5, 5, width=32), min_size=len(rewards) + 1, max_size=len(rewards) + 1))
    chain = make_chain(rewards, values[:-1], values[1:])
    returns = values[-1]
    expected = []
    for reward, value in zip(reversed(rewards), reversed(values[:-1]), strict=True):
        returns = reward + discount * returns
        expected.append(returns - value)
    np.testing.assert_allclose(gae(chain, discount, 1.0).advantages, expected[::-1], atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(chains, st.floats(0, 1), st.floats(0, 1))
def test_vtrace_of_the_policys_own_steps_is_gae(chain, discount, gae_lambda):
    """With λ = 1 the value's target is then the n-step return, bootstrapped at the end."""
    ours = vtrace(chain, jnp.ones_like(chain.rewards), discount, gae_lambda, VTraceClips())
    for mine, its in zip(ours, gae(chain, discount, gae_lambda), strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-4)
